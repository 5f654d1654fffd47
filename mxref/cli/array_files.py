"""Arrays that `mxref explain` and `mxref compare` read from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.array_file import explained
from mxref.errors import FileFormatError

SUFFIXES = (".npy", ".npz", ".safetensors")
_TORCH = (".pt", ".pth")


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
    return np.asarray(_read(path, lambda names: _only(path, names, key), False))


def read_dumped(path: Path, name: str, exact: bool) -> Any:
    """Return the array or tensor of a name, also of a .pt file, and of types that only PyTorch reads.

    Unless `exact`, the only one that the file holds may have another name; the one of a .npy file has none.

    Raises:
        FileFormatError: as `read_array`; or PyTorch is needed and not installed.
    """
    if path.suffix not in (*SUFFIXES, *_TORCH):
        raise FileFormatError(f"cannot read {path}: the suffix must be .npy, .npz, .safetensors or .pt")

    def chosen(names: list[str]) -> str:
        if name in names:
            return name
        if len(names) == 1 and not exact:
            return names[0]
        raise FileFormatError(
            f"{path} has no array {name!r}, but {', '.join(sorted(names))}: name x, codes and scales by --key NAME, "
            "three times"
        )

    return _read(path, chosen, True)


def _read(path: Path, chosen: Callable[[list[str]], str], torch_too: bool) -> Any:
    """Return the array whose name `chosen` returns for the names of a file's arrays."""
    with explained(path):
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as f:
                return f[chosen(list(f.files))]
        if path.suffix in _TORCH:
            return _tensor(path, chosen)
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as f:
            name = chosen(list(f.keys()))
            try:
                return f.get_tensor(name)
            except Exception:  # a type that NumPy does not have, such as float8_e8m0fnu
                if not torch_too:
                    raise
        _torch(path)
        with safe_open(path, framework="pt") as f:
            return f.get_tensor(name)


def _tensor(path: Path, chosen: Callable[[list[str]], str]) -> Any:
    """Return a tensor of a file of `torch.save`: of a dict, or the only one; files that hold code are refused."""
    torch = _torch(path)
    held = torch.load(path, map_location="cpu", weights_only=True)
    named = held if isinstance(held, dict) else {"a tensor without a name": held}
    found = {str(key): value for key, value in named.items()}[chosen([str(key) for key in named])]
    if not isinstance(found, torch.Tensor):
        raise FileFormatError(f"{path} holds no tensor: save a tensor, or a dict of x, codes and scales")
    return found


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise FileFormatError(
            f"cannot read {path}: PyTorch is not installed; store a .npy file, and codes and scales as uint8"
        ) from None
    return torch


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
