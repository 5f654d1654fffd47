"""Writes Megatron's token files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.megatron.index import DTYPES, HEADER, MAGIC, VERSION, beside
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def write_indexed(prefix: Path, documents: Sequence[Sequence[int] | NDArray[Any]], dtype: Any) -> None:
    """Write documents as a pair of files in Megatron's format, one sequence each.

    Args:
        prefix: path of both files without `.bin` and `.idx`.
        documents: token ids of every document.
        dtype: integer dtype of the token file, one of the format's.

    Raises:
        DataError: the format has no such dtype, or a token does not fit it.
        OSError: the files cannot be written.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    code = next(
        (code for code, name in DTYPES.items() if np.dtype(name) == stored and stored.kind in "iu"), None
    )
    if code is None:
        raise DataError(f"the format has no tokens of dtype {stored.name}: choose int32 or uint16")
    lengths = np.array([len(document) for document in documents], "<i4")
    with beside(prefix, ".bin").open("wb") as file:
        for document in documents:
            ids = np.asarray(document, np.int64)
            if (ids.astype(stored) != ids).any():
                raise DataError(
                    f"a token of {ids.max()} or {ids.min()} does not fit {stored.name}: use int32"
                )
            file.write(ids.astype(stored).tobytes())
    places = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], out=places[1:])
    with beside(prefix, ".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        for part in (lengths, places * stored.itemsize, np.arange(len(lengths) + 1, dtype="<i8")):
            file.write(part.tobytes())
