"""Codes of fewer than eight bits as kernels hold them, a byte each, and as they are stored, without gaps.

Kernels know two kinds of codes: those of E2M1, packed, and bytes with the sign on top and the magnitude code below. The
second kind serves every other element, so that one that joins needs no kernel of its own. Two's complement is made of
it at the end; kernels that read codes look them up in a table and take them as they are stored.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import ElementFormat, Negatives
from mxref.mxarray import MXArray
from mxref_numba import buffers
from mxref_numba.grids import held_bits
from mxref_numba.kernels import Native, address_of, bytes_at, fields_at
from mxref_numba.threads import run

_TOGETHER = 4
"""Codes that fill whole bytes, whatever their bits: four of 4 bits in two bytes, of 6 bits in three."""


class _Repacking(NamedTuple):
    codes: int
    packed: int
    bits: int


@Native
def _pack(address, first, end, room):
    """Pack groups of four held codes."""
    job = fields_at(address, _Repacking)
    bits, low, size = np.uint32(job.bits), np.uint32(job.bits - 1), job.bits // 2
    codes, packed = carray(bytes_at(job.codes), (4 * end,)), carray(bytes_at(job.packed), (size * end,))
    for g in range(np.uint64(first), np.uint64(end)):
        word, start, target = np.uint32(0), np.uint64(_TOGETHER) * g, np.uint64(size) * g
        for i in range(np.uint64(_TOGETHER)):
            code = np.uint32(codes[start + i])
            stored = np.uint32((code & np.uint32(0x7F)) | np.uint32((code >> np.uint32(7)) << low))
            word = np.uint32(word | np.uint32(stored << np.uint32(np.uint32(i) * bits)))
        packed[target], packed[target + np.uint64(1)] = np.uint8(word), np.uint8(word >> np.uint32(8))
        if size == 3:
            packed[target + np.uint64(2)] = np.uint8(word >> np.uint32(16))


@Native
def _unpack(address, first, end, room):
    job = fields_at(address, _Repacking)
    bits, low, size = np.uint32(job.bits), np.uint32(job.bits - 1), job.bits // 2
    codes, packed = carray(bytes_at(job.codes), (4 * end,)), carray(bytes_at(job.packed), (size * end,))
    for g in range(np.uint64(first), np.uint64(end)):
        start, target = np.uint64(size) * g, np.uint64(_TOGETHER) * g
        word = np.uint32(packed[start] | np.uint32(np.uint32(packed[start + np.uint64(1)]) << np.uint32(8)))
        if size == 3:
            word = np.uint32(word | np.uint32(np.uint32(packed[start + np.uint64(2)]) << np.uint32(16)))
        for i in range(np.uint64(_TOGETHER)):
            stored = np.uint32(word >> np.uint32(np.uint32(i) * bits))
            magnitude = np.uint32(stored & np.uint32((np.uint32(1) << low) - np.uint32(1)))
            sign = np.uint32(np.uint32(stored >> low) & np.uint32(1))
            codes[target + i] = np.uint8(magnitude | np.uint32(sign << np.uint32(7)))


def stored(codes: NDArray[np.uint8], element: ElementFormat) -> NDArray[np.uint8]:
    """Return held codes [..., K * held bits / 8] as they are stored, [..., K * bits / 8]; K is a multiple of 4."""
    if element.negatives is Negatives.TWOS_COMPLEMENT:
        return np.where(codes & element.sign, element.sign - codes, codes)
    if element.bits == held_bits(element):
        return codes
    packed = buffers.empty((*codes.shape[:-1], codes.shape[-1] * element.bits // 8), np.uint8)
    _repack(_pack, codes, packed, element.bits)
    return packed


def held(packed: NDArray[np.uint8], element: ElementFormat) -> NDArray[np.uint8]:
    """Return stored codes, contiguous, as kernels hold them; the inverse of `stored`."""
    if element.bits == held_bits(element):
        return packed
    codes = buffers.empty((*packed.shape[:-1], packed.shape[-1] * 8 // element.bits), np.uint8)
    _repack(_unpack, codes, packed, element.bits)
    return codes


def _repack(native: Native, codes: NDArray[np.uint8], packed: NDArray[np.uint8], bits: int) -> None:
    job = _Repacking(codes=address_of(codes), packed=address_of(packed), bits=bits)
    run(native, job, codes.size // _TOGETHER, codes.size)


def code_rows(q: MXArray) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return held codes [rows, K * held bits / 8] and scale codes [rows, K / k], contiguous and read-only."""
    rows = []
    for array in (held(np.ascontiguousarray(q.codes), q.format.element), q.scales):
        lines = np.ascontiguousarray(array).reshape(math.prod(q.rows_shape), array.shape[-1]).view()
        lines.flags.writeable = False  # one compiled kernel for writable and read-only codes
        rows.append(lines)
    return rows[0], rows[1]
