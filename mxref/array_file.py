"""The files of quantized tensors, `.npz` or `.safetensors`: codes, scales, a tensor's scale, and a table of facts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import DtypeError, FileFormatError, MxrefError

OTHER_LAYOUT = "mxref.layout.1"
"""The format of files whose codes or scales lie in another layout than mxref's own, which they name."""

_SUFFIXES = (".npz", ".safetensors")
_PAIRS = "F4"
"""The type of safetensors whose shape counts elements, of which a byte holds two."""
_BYTES = (_PAIRS, "F8_E4M3", "F8_E5M2", "F8_E8M0")
"""The types of codes that NumPy does not have."""


def checked_path(path: Any) -> Path:
    """Return a path; FileFormatError for anything else."""
    try:
        return Path(path)
    except TypeError:
        raise FileFormatError(
            f"expected a path that ends in .npz or .safetensors, got {type(path).__name__}"
        ) from None


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise FileFormatError in place of what a reader raises on a missing or damaged file; mxref's own errors pass."""
    try:
        yield
    except MxrefError:
        raise
    except OSError as err:
        raise FileFormatError(f"cannot read {path}: {err.strerror or err}") from err
    except Exception as err:  # each reader raises its own exceptions on a damaged file
        text = str(err).partition("\n")[0]
        raise FileFormatError(f"cannot read {path}: {type(err).__name__}: {text}") from err


def write(
    path: Path,
    meta: Mapping[str, Any] | None,
    arrays: Mapping[str, NDArray[Any]],
    types: Mapping[str, str] | None = None,
) -> None:
    """Write a file; an existing one is replaced only when all is written.

    Args:
        path: the file.
        meta: the table of facts; None writes none.
        arrays: the arrays by name.
        types: types of safetensors that arrays of bytes get, as `float8_e8m0fnu`; by default `uint8`.

    Raises:
        FileFormatError: another suffix than .npz and .safetensors.
        DtypeError: types in a .npz file, or types that the installed safetensors does not have.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if path.suffix not in _SUFFIXES:
        raise FileFormatError(f"cannot save to {path}: the suffix must be .npz or .safetensors")
    if types and path.suffix != ".safetensors":
        raise DtypeError(f"cannot save {path} with types: only .safetensors files have them; leave them out")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".npz":
            with open(temporary, "wb") as f:
                table = {} if meta is None else {"meta": np.array(json.dumps(meta))}
                np.savez(f, **arrays, **table)  # type: ignore[arg-type]
        else:
            # `save_file` makes a file that nobody else may read, whatever the umask.
            metadata = None if meta is None else {"mxref": json.dumps(meta)}
            temporary.write_bytes(_serialized(arrays, metadata, types or {}))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _serialized(
    arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str] | None, types: Mapping[str, str]
) -> bytes:
    if not types:
        from safetensors.numpy import save

        return save(dict(arrays), metadata=metadata)
    try:
        from safetensors import TensorSpec, serialize

        specs = {
            name: TensorSpec(
                dtype=types.get(name, a.dtype.name), shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes
            )
            for name, a in arrays.items()
        }
        return bytes(serialize(specs, metadata=metadata))
    except Exception as err:  # older releases have no TensorSpec, and others raise their own kind for a type
        from safetensors import __version__

        raise DtypeError(
            f"safetensors {__version__} cannot store {', '.join(sorted(set(types.values())))}: install 0.8 or newer, "
            "or store uint8"
        ) from err


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the table and the arrays of a file by name; a damaged file raises its reader's own errors."""
    meta, arrays, _ = chosen(path, lambda names: names)
    if meta is None:
        raise KeyError("meta")
    return meta, arrays


def chosen(
    path: Path, choose: Callable[[list[str]], Iterable[str]]
) -> tuple[dict[str, Any] | None, dict[str, NDArray[Any]], dict[str, str]]:
    """Return the table if there is one, the arrays that `choose` picks by name, and their types in the file.

    Arrays of one-byte types that NumPy does not have are returned as bytes; two elements of 4 bits are one byte.
    """
    if path.suffix == ".safetensors":
        from safetensors import deserialize, safe_open

        arrays, types, foreign = {}, {}, set[str]()
        with safe_open(path, framework="numpy") as f:
            meta = (f.metadata() or {}).get("mxref")
            for name in choose(list(f.keys())):
                types[name] = str(f.get_slice(name).get_dtype())
                if types[name] in _BYTES:
                    foreign.add(name)
                else:
                    arrays[name] = f.get_tensor(name)
        for name, held in deserialize(path.read_bytes()) if foreign else ():  # type: ignore[no-untyped-call]
            if name in foreign:
                *leading, last = held["shape"]
                shape = (*leading, last // 2) if held["dtype"] == _PAIRS else held["shape"]
                arrays[name] = np.frombuffer(held["data"], np.uint8).reshape(shape)
        return json.loads(meta) if meta else None, arrays, types
    with np.load(path, allow_pickle=False) as f:
        names = [name for name in f.files if name != "meta"]
        arrays = {name: f[name] for name in choose(names)}
        meta = json.loads(str(f["meta"])) if "meta" in f.files else None
        return meta, arrays, {name: array.dtype.name for name, array in arrays.items()}
