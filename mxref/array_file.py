"""The files of MXArrays: codes, scale codes and a table of facts in a `.npz` or a `.safetensors` file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import FileFormatError


def checked_path(path: Any) -> Path:
    """Return a path; FileFormatError for anything else."""
    try:
        return Path(path)
    except TypeError:
        raise FileFormatError(
            f"expected a path that ends in .npz or .safetensors, got {type(path).__name__}"
        ) from None


def write(path: Path, meta: Mapping[str, Any], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> None:
    """Write a file; an existing one is replaced only when all is written.

    Raises:
        FileFormatError: another suffix than .npz and .safetensors.
    """
    arrays = {"codes": np.ascontiguousarray(codes), "scales": np.ascontiguousarray(scales)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".npz":
            with open(temporary, "wb") as f:
                np.savez(f, meta=np.array(json.dumps(meta)), codes=arrays["codes"], scales=arrays["scales"])
        elif path.suffix == ".safetensors":
            from safetensors.numpy import save

            # `save_file` makes a file that nobody else may read, whatever the umask.
            temporary.write_bytes(save(arrays, metadata={"mxref": json.dumps(meta)}))
        else:
            raise FileFormatError(f"cannot save to {path}: the suffix must be .npz or .safetensors")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Any], NDArray[Any], NDArray[Any]]:
    """Return the table, the codes and the scale codes of a file; a damaged file raises its reader's own errors."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as f:
            return json.loads((f.metadata() or {})["mxref"]), f.get_tensor("codes"), f.get_tensor("scales")
    with np.load(path, allow_pickle=False) as f:
        return json.loads(str(f["meta"])), f["codes"], f["scales"]
