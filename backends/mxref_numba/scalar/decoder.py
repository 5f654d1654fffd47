"""Values from packed codes, in plain Numba: MXFP4 by arithmetic, any other format from tables."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import CANONICAL_NAN, MXFP4
from mxref.mxarray import MXArray
from mxref_numba.grids import decoded, held_bits
from mxref_numba.held_codes import code_rows
from mxref_numba.kernels import (
    Native,
    address_of,
    bits_of,
    bytes_at,
    doubles_at,
    fields_at,
    float_of,
    floats_at,
    halves_at,
    kernel,
    unsigned_at,
)
from mxref_numba.scale import NAN_CODE, scale_values
from mxref_numba.threads import run

_NAN_BITS = np.uint32(CANONICAL_NAN)


@kernel
def _twice_magnitude(code):
    """Return 2P of the magnitude of an element code, int32: 0, 1, 2, 3, 4, 6, 8 or 12."""
    m = np.int32(code & np.int32(7))
    half_exponent = max(np.int32(np.int32(m >> np.int32(1)) - np.int32(1)), np.int32(0))
    return np.int32(min(m, np.int32(2 | np.int32(m & np.int32(1)))) << half_exponent)


@kernel
def _value_bits(code, half_scale):
    # The sign is put back as a bit, so that code 8 is -0.
    magnitude = np.float32(_twice_magnitude(code)) * half_scale
    return np.uint32(
        np.uint32(bits_of(magnitude)) | np.uint32(np.uint32(code & np.int32(8)) << np.uint32(28))
    )


@kernel
def _half_scale(scale):
    """Return half of the scale of an E8M0 code of at most 254, float32, exact: at code 0 and 1 it is subnormal."""
    if scale < 2:
        return float_of(1 << (21 + scale))
    return float_of((scale - 1) << 23)


@kernel
def _decode_row(packed, scales, k, length, drop, values, out):
    shift = np.uint32(drop)
    two, one = np.uint64(2), np.uint64(1)
    for b in range(-(-length // k)):
        start = b * k
        if scales[b] == NAN_CODE:
            values[:k] = _NAN_BITS
        else:
            half_scale = _half_scale(np.int64(scales[b]))
            half = np.uint64(start // 2)
            for i in range(np.uint64(k // 2)):
                byte = np.int32(packed[half + i])
                values[two * i] = _value_bits(byte, half_scale)
                values[two * i + one] = _value_bits(np.int32(byte >> np.int32(4)), half_scale)
        base = np.uint64(start)
        for j in range(np.uint64(min(k, length - start))):
            out[base + j] = np.uint32(values[j] >> shift)


@kernel
def _decode_from_tables(codes, bits_each, scales, k, length, drop, table, powers, tensor, out):
    shift, one = np.uint32(drop), np.uint64(1)
    half = np.uint32(np.uint32(np.uint32(1) << shift) >> np.uint32(1))
    for b in range(-(-length // k)):
        start = np.uint64(b * k)
        # A product of element, scale and scale of the tensor has at most 35 bits.
        scale = powers[scales[b]] * tensor
        for j in range(np.uint64(min(k, length - b * k))):
            i = start + j
            if bits_each == 8:
                code = codes[i]
            else:
                code = np.uint8(
                    np.uint8(codes[i >> one] >> np.uint8(4) if i & one else codes[i >> one]) & np.uint8(15)
                )
            value = np.float32(np.float64(table[code]) * scale)
            bits = np.uint32(bits_of(value))
            # To nearest, ties to even; a float32 is itself.
            odd = np.uint32(np.uint32(bits >> shift) & np.uint32(1)) if drop else np.uint32(1)
            rounded = np.uint32(bits + half + odd - np.uint32(1)) if drop else bits
            spoiled = value != value
            out[start + j] = np.uint32(np.uint32(_NAN_BITS if spoiled else rounded) >> shift)


class _Decoding(NamedTuple):
    columns: int
    blocks: int
    k: int
    bits: int
    drop: int
    """Low bits of a float32 that the result has not: 0, or 16 for bfloat16."""
    packed: int
    scales: int
    table: int
    powers: int
    """Values of the scales, float64; 0 for MXFP4, which needs no tables."""
    tensor: np.float32
    """The scale of the tensor."""
    out: int


@Native
def _decode_rows(address, begin, end, room):
    job = fields_at(address, _Decoding)
    columns, blocks, k, bits, drop = job.columns, job.blocks, job.k, job.bits, job.drop
    packed = carray(bytes_at(job.packed), (end, blocks * k * bits // 8))
    scales, table = carray(bytes_at(job.scales), (end, blocks)), carray(floats_at(job.table), (256,))
    powers, tensor = carray(doubles_at(job.powers), (256,)), np.float64(job.tensor)
    values = carray(unsigned_at(room), (k,))
    wide, narrow = carray(unsigned_at(job.out), (end, columns)), carray(halves_at(job.out), (end, columns))
    for r in range(begin, end):
        if job.powers and drop:
            _decode_from_tables(
                packed[r], bits, scales[r], k, columns, drop, table, powers, tensor, narrow[r]
            )
        elif job.powers:
            _decode_from_tables(packed[r], bits, scales[r], k, columns, drop, table, powers, tensor, wide[r])
        elif drop:
            _decode_row(packed[r], scales[r], k, columns, drop, values, narrow[r])
        else:
            _decode_row(packed[r], scales[r], k, columns, drop, values, wide[r])


def dequantize(q: MXArray, dtype: str) -> NDArray[Any]:
    """Return the values of an MXArray, in its own shape.

    Args:
        q: codes and scales of any strides.
        dtype: `float32` or `bfloat16`, to which values beyond its range are rounded.

    Returns:
        `dtype`, in the shape `q.shape`; in memory the block axis is the last.
    """
    out = np.empty((*q.rows_shape, q.shape[q.axis]), np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    if out.size:
        packed, scales = code_rows(q)
        rows, blocks, k, table = *scales.shape, q.format.k, decoded(q.format.element)
        powers = None if q.format is MXFP4 else scale_values(q.format.scale, np.float64)
        job = _Decoding(
            columns=out.shape[-1], blocks=blocks, k=k, bits=held_bits(q.format.element),
            drop=0 if dtype == "float32" else 16, packed=address_of(packed), scales=address_of(scales),
            table=address_of(table), powers=0 if powers is None else address_of(powers),
            tensor=np.float32(1 if q.tensor_scale is None else q.tensor_scale[0]), out=address_of(out),
        )  # fmt: skip
        run(_decode_rows, job, rows, out.size, room=4 * k)
    return np.moveaxis(out, -1, q.axis)
