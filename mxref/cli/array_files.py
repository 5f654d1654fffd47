"""Arrays that `mxref explain` and `mxref compare` read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import FileFormatError

SUFFIXES = (".npy", ".npz", ".safetensors")


def read_array(path: Path, key: str | None = None) -> NDArray[Any]:
    """Return an array of a .npy, .npz or .safetensors file.

    Args:
        path: the file; a .npy file is mapped, not read.
        key: name of the array, required if a .npz or .safetensors file has several arrays.

    Raises:
        FileFormatError: the file is missing, damaged or of another kind, or has no such array.
    """
    if key is not None and path.suffix == ".npy":
        refuse_key(path)
    if path.suffix not in SUFFIXES:
        raise FileFormatError(f"cannot read {path}: the suffix must be .npy, .npz or .safetensors")
    try:
        if path.suffix == ".npy":
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as f:
                return np.asarray(f[_only(path, list(f.files), key)])
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as f:
            return np.asarray(f.get_tensor(_only(path, list(f.keys()), key)))
    except FileFormatError:
        raise
    except OSError as err:
        raise FileFormatError(f"cannot read {path}: {err.strerror or err}") from err
    except Exception as err:  # each reader raises its own exceptions on a damaged file
        text = str(err).partition("\n")[0]
        raise FileFormatError(f"cannot read {path}: {type(err).__name__}: {text}") from err


def refuse_key(path: Path) -> None:
    """Raise FileFormatError for a .npy file, whose one array has no name."""
    raise FileFormatError(f"{path} holds one array, which has no name: leave out --key")


def _only(path: Path, names: list[str], key: str | None) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key in names and key is not None:
        return key
    asked = f"has no array {key!r}" if key else f"has {len(names)} arrays, choose one with --key"
    raise FileFormatError(
        f"{path} {asked}: {', '.join(names[:8]) or 'none'}{', ...' if len(names) > 8 else ''}"
    )
