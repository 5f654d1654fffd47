"""Files of recorded operations and operands: a NumPy archive of arrays and one JSON text, without pickled objects."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.conformance.outcome import check_writable, write
from mxref.errors import FileFormatError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def check_name(path: str | Path) -> Path:
    """Return the path of a recording; FileFormatError unless it ends in .npz and its folder can be written."""
    path = Path(path)
    if path.suffix != ".npz":
        raise FileFormatError(f"cannot write a recording to {path}: its name must end in .npz")
    check_writable(path)
    return path


def save(path: str | Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a file, which appears only when all of it is on the disk.

    Args:
        path: its name, which ends in .npz.
        meta: what JSON holds; its `format` names what the file is.
        arrays: the arrays by name, as of `plain_array`.

    Raises:
        FileFormatError: another name, or a file that cannot be written.
    """
    path, data = check_name(path), BytesIO()
    np.savez_compressed(data, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
    write(path, data.getvalue())


@contextmanager
def opened(
    path: str | Path, format: str, what: str, way_out: str
) -> Iterator[tuple[dict[str, Any], Mapping[str, NDArray[Any]]]]:
    """Yield the JSON of a file and its arrays, which can be read in the block.

    Args:
        path: what `save` wrote.
        format: the `format` that it must have.
        what: what is read, for the message of an error.
        way_out: ends this message.

    Raises:
        FileFormatError: the file is missing, damaged or of another format, or the block raised an exception.
    """
    try:
        # NumPy does not close a file that is not an archive, and advises to unpickle it.
        with open(path, "rb") as file, np.load(_archive(file), allow_pickle=False) as arrays:
            meta = json.loads(str(arrays["meta"]))
            if meta["format"] != format:
                raise FileFormatError(f"its format is {meta['format']}, this version of mxref reads {format}")
            yield meta, arrays
    except Exception as err:  # a damaged file fails in many ways: zip, JSON, shapes, values
        text = err.strerror if isinstance(err, OSError) and err.strerror else " ".join(str(err).split())
        raise FileFormatError(
            f"cannot read {what} from {path}: {text or type(err).__name__}; {way_out}"
        ) from err


def _archive(file: BinaryIO) -> BinaryIO:
    if not zipfile.is_zipfile(file):
        raise FileFormatError("it is no .npz archive, or a part of one")
    file.seek(0)
    return file


def plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in a type that NumPy's files support: bfloat16 as 16-bit words."""
    return np.ascontiguousarray(array.view(np.uint16) if array.dtype == _BFLOAT16 else array)


def typed_array(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return what `plain_array` was given; ValueError for another type."""
    if dtype == "bfloat16":
        return array.view(_BFLOAT16)
    if str(array.dtype) != dtype:
        raise ValueError(f"an array of {array.dtype} where {dtype} is said")
    return array
