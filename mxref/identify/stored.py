"""The tensors of a checkpoint by their headers: safetensors, GGUF and .npz. Their bytes are mapped, not read."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import FileFormatError

SUFFIXES = (".safetensors", ".gguf", ".npz")
_BYTE = "|u1"
_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "BOOL": _BYTE, "U8": _BYTE, "I8": _BYTE, "F8_E4M3": _BYTE,
    "F8_E5M2": _BYTE, "F8_E8M0": _BYTE,
}  # fmt: skip
"""Types of safetensors; those of one byte are read as bytes."""
_GGUF_NUMBERS = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
_GGUF_BLOCKS = {39: ("GGUF_MXFP4", 32, 17), 40: ("GGUF_NVFP4", 64, 36)}
"""Types whose blocks hold codes and scales: the name, the elements and the bytes of a block."""
_GGUF_VALUES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MOST_HEADER = 1 << 30


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    name: str
    dtype: str
    """The type as safetensors names it; GGUF_MXFP4 and GGUF_NVFP4 for GGUF's blocks, GGUF_n for its other types."""
    shape: tuple[int, ...]
    file: Path
    array: Callable[[], NDArray[Any]] = field(repr=False, compare=False)
    """Returns the tensor; blocks of GGUF as bytes, [..., bytes of a row]."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of files by name, and what the files say about themselves."""

    tensors: dict[str, StoredTensor]
    config: dict[str, Any]
    """`quantization_config` of the config.json beside the files; empty if there is none."""
    meta: dict[str, Any]
    """What mxref wrote into a file of its own about the array in it."""


def read_checkpoint(paths: tuple[Path, ...]) -> Checkpoint:
    """Return the tensors of files and of the files in folders.

    Raises:
        FileFormatError: a file that is missing, damaged or of another kind, a folder without any, or a tensor's name in
            two files.
    """
    tensors: dict[str, StoredTensor] = {}
    meta: dict[str, Any] = {}
    for path in _files(paths):
        found, facts = _read(path)
        meta |= facts
        for one in found:
            if one.name in tensors:
                raise FileFormatError(
                    f"{path} and {tensors[one.name].file} both have a tensor {one.name!r}: identify them one by one"
                )
            tensors[one.name] = one
    return Checkpoint(tensors, _config(paths), meta)


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
            if not found:
                raise FileFormatError(f"{path} has no file that ends in {', '.join(SUFFIXES)}")
            yield from found
        elif not path.exists():
            raise FileFormatError(f"cannot read {path}: no such file or folder")
        elif path.suffix in SUFFIXES:
            yield path
        else:
            raise FileFormatError(
                f"cannot read {path}: the suffix must be one of {', '.join(SUFFIXES)}, or name a folder"
            )


def _config(paths: tuple[Path, ...]) -> dict[str, Any]:
    for folder in dict.fromkeys(path if path.is_dir() else path.parent for path in paths):
        for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
            path = folder / name
            if not path.is_file():
                continue
            try:
                table = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as err:
                raise FileFormatError(f"cannot read {path}: {err}") from err
            found = table.get(key) if isinstance(table, dict) else None
            if isinstance(found, dict):
                return found
    return {}


def _read(path: Path) -> tuple[list[StoredTensor], dict[str, Any]]:
    reader = {".safetensors": _safetensors, ".gguf": _gguf, ".npz": _npz}[path.suffix]
    try:
        return reader(path)
    except FileFormatError:
        raise
    except OSError as err:
        raise FileFormatError(f"cannot read {path}: {err.strerror or err}") from err
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        struct.error,
        zipfile.BadZipFile,
        EOFError,
    ) as err:
        raise FileFormatError(
            f"cannot read {path}: its header is damaged ({type(err).__name__}: {err})"
        ) from err


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...], offset: int) -> Callable[[], NDArray[Any]]:
    """Return what maps an array of a file; FileFormatError if the file ends before it."""
    wanted = np.dtype(dtype)
    end = offset + math.prod(shape) * wanted.itemsize
    if offset < 0 or end > path.stat().st_size:
        raise FileFormatError(
            f"{path} has {path.stat().st_size:,} bytes, and its header puts a tensor at {offset:,} to {end:,}: "
            "the file is cut off; copy it again"
        )
    if not math.prod(shape):
        return lambda: np.empty(shape, wanted)
    return lambda: np.memmap(path, wanted, "r", offset, shape)


# ---- safetensors ----


def _safetensors(path: Path) -> tuple[list[StoredTensor], dict[str, Any]]:
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        if length > min(_MOST_HEADER, path.stat().st_size - 8):
            raise FileFormatError(
                f"{path} is no safetensors file, or is cut off: its first 8 bytes announce a header of {length:,} "
                f"bytes, and the file has {path.stat().st_size:,}"
            )
        header = json.loads(f.read(length))
    facts = json.loads((header.pop("__metadata__", None) or {}).get("mxref", "{}"))
    found = []
    for name, entry in header.items():
        shape, (start, end) = tuple(map(int, entry["shape"])), entry["data_offsets"]
        dtype = _SAFETENSORS.get(entry["dtype"])
        size = shape if dtype else (end - start,)  # of elements that are no whole bytes: the bytes in a row
        array = _mapped(path, dtype or _BYTE, size, 8 + length + start)
        found.append(StoredTensor(name, entry["dtype"], shape, path, array))
    return found, facts


# ---- GGUF ----


def _gguf(path: Path) -> tuple[list[StoredTensor], dict[str, Any]]:
    with open(path, "rb") as f:
        magic, version, count, keys = struct.unpack("<4sIQQ", _exactly(f, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise FileFormatError(
                f"{path} is no GGUF file of version 2 or 3 in little-endian order (it begins with {magic!r}, {version})"
            )
        alignment = 32
        for _ in range(keys):
            key = _string(f)
            (kind,) = struct.unpack("<I", _exactly(f, 4))
            value = _value(f, kind)
            if key == "general.alignment":
                alignment = int.from_bytes(value, "little")
        entries = []
        for _ in range(count):
            name = _string(f)
            (rank,) = struct.unpack("<I", _exactly(f, 4))
            if rank > 8:
                raise ValueError(f"tensor {name!r} has {rank} axes")
            *dims, kind, offset = struct.unpack(f"<{rank}QIQ", _exactly(f, 8 * rank + 12))
            entries.append((name, tuple(reversed(dims)), kind, offset))
        data = -(-f.tell() // alignment) * alignment
    return [
        StoredTensor(name, *_gguf_tensor(path, name, shape, kind, data + offset))
        for name, shape, kind, offset in entries
    ], {}


def _gguf_tensor(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> tuple[str, tuple[int, ...], Path, Callable[[], NDArray[Any]]]:
    """Return the type, the shape, the file and the array of a tensor."""
    if kind in _GGUF_BLOCKS:
        dtype, elements, size = _GGUF_BLOCKS[kind]
        if not shape or shape[-1] % elements:
            raise ValueError(f"a row of {name!r} is no multiple of {elements} elements: shape {shape}")
        stored = (*shape[:-1], shape[-1] // elements * size)
        return dtype, shape, path, _mapped(path, _BYTE, stored, offset)
    if kind in _GGUF_NUMBERS:
        dtype = _GGUF_NUMBERS[kind]
        return dtype, shape, path, _mapped(path, _SAFETENSORS[dtype], shape, offset)
    return f"GGUF_{kind}", shape, path, _no_reader(path, f"GGUF_{kind}")


def _no_reader(path: Path, dtype: str) -> Callable[[], NDArray[Any]]:
    def refuse() -> NDArray[Any]:
        raise FileFormatError(f"{path}: tensors of type {dtype} are not read")

    return refuse


def _exactly(f: BinaryIO, size: int) -> bytes:
    if size > _MOST_HEADER or len(found := f.read(size)) != size:
        raise FileFormatError(f"{f.name} is cut off, or its header is damaged: {size:,} bytes are missing")
    return found


def _string(f: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", _exactly(f, 8))
    return _exactly(f, size).decode("utf-8", "replace")


def _value(f: BinaryIO, kind: int) -> bytes:
    """Read a value of a key and return its bytes; those of arrays are read past."""
    if kind == _GGUF_STRING:
        return _string(f).encode()
    if kind != _GGUF_ARRAY:
        return _exactly(f, _GGUF_VALUES[kind])
    inner, count = struct.unpack("<IQ", _exactly(f, 12))
    if inner in _GGUF_VALUES:
        f.seek(count * _GGUF_VALUES[inner], io.SEEK_CUR)
    else:
        for _ in range(count):
            _value(f, inner)
    return b""


# ---- .npz ----


def _npz(path: Path) -> tuple[list[StoredTensor], dict[str, Any]]:
    found, facts = [], {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as f:
                version = np.lib.format.read_magic(f)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _fortran, dtype = read(f)
                if name == "meta" and dtype.kind == "U":
                    facts = json.loads(str(np.frombuffer(f.read(), dtype)[0]))
                    continue
            found.append(
                StoredTensor(name, _numpy_name(dtype), shape, path, _member(path, name, dtype, shape))
            )
    return found, facts


def _numpy_name(dtype: np.dtype[Any]) -> str:
    names = {
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "bfloat16": "BF16",
    }
    letter = {"f": "F", "i": "I", "u": "U", "V": "V"}.get(dtype.kind, dtype.kind)
    return names.get(dtype.name, f"{letter}{8 * dtype.itemsize}")


def _member(
    path: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Callable[[], NDArray[Any]]:
    def load() -> NDArray[Any]:
        with np.load(path, allow_pickle=False) as arrays:
            array: NDArray[Any] = arrays[name]
        return array.view(np.uint8).reshape(shape) if dtype.itemsize == 1 else array

    return load
