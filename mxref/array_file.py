"""The files of MXArrays, `.npz` or `.safetensors`: codes, scale codes, a tensor's scale, and a table of facts."""

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


def write(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a file; an existing one is replaced only when all is written.

    Raises:
        FileFormatError: another suffix than .npz and .safetensors.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".npz":
            with open(temporary, "wb") as f:
                np.savez(f, **arrays, meta=np.array(json.dumps(meta)))  # type: ignore[arg-type]
        elif path.suffix == ".safetensors":
            from safetensors.numpy import save

            # `save_file` makes a file that nobody else may read, whatever the umask.
            temporary.write_bytes(save(arrays, metadata={"mxref": json.dumps(meta)}))
        else:
            raise FileFormatError(f"cannot save to {path}: the suffix must be .npz or .safetensors")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the table and the arrays of a file by name; a damaged file raises its reader's own errors."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as f:
            meta = (f.metadata() or {})["mxref"]
            return json.loads(meta), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    with np.load(path, allow_pickle=False) as f:
        return json.loads(str(f["meta"])), {name: f[name] for name in f.files if name != "meta"}
