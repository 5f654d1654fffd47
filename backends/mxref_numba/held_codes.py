"""Codes as they are stored, and as tables look them up: codes of 6 bits, four in three bytes, with a byte for each."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.mxarray import MXArray
from mxref_numba import buffers
from mxref_numba.grids import held_bits
from mxref_numba.kernels import Native, address_of, bytes_at, fields_at
from mxref_numba.threads import run


class _Unpacking(NamedTuple):
    packed: int
    codes: int


@Native
def _unpack(address, first, end, room):
    """Unpack groups of four codes of 6 bits."""
    job = fields_at(address, _Unpacking)
    codes, packed = carray(bytes_at(job.codes), (4 * end,)), carray(bytes_at(job.packed), (3 * end,))
    for g in range(np.uint64(first), np.uint64(end)):
        start, target = np.uint64(3) * g, np.uint64(4) * g
        word = np.uint32(0)
        for i in range(np.uint64(3)):
            word = np.uint32(
                word | np.uint32(np.uint32(packed[start + i]) << np.uint32(np.uint32(8) * np.uint32(i)))
            )
        for i in range(np.uint64(4)):
            codes[target + i] = np.uint8(
                np.uint32(word >> np.uint32(np.uint32(6) * np.uint32(i))) & np.uint32(63)
            )


def stored_rows(q: MXArray) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes [rows, K * bits / 8] and scale codes [rows, K / k] as they are stored, contiguous."""
    return _rows(q, q.codes), _rows(q, q.scales)


def code_rows(q: MXArray) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the same with the codes as `held_bits` says."""
    codes, scales = stored_rows(q)
    if q.format.element.bits != held_bits(q.format.element):
        packed, codes = codes, buffers.empty((len(codes), q.length), np.uint8)
        job = _Unpacking(packed=address_of(packed), codes=address_of(codes))
        run(_unpack, job, codes.size // 4, codes.size)
    return codes, scales


def _rows(q: MXArray, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(math.prod(q.rows_shape), array.shape[-1])
