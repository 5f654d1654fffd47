"""Quantization in one pass over panels: read, transform, amax, scale, round, pack, while in cache."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref.steps.hadamard import norm_factor
from mxref.steps.rounding import Rounding
from mxref.steps.scale import bump_above
from mxref_numba import compiled, memory
from mxref_numba.compiled import kernel, share
from mxref_numba.elements import FRACTION_BITS, Grid, grid_of, held_bits
from mxref_numba.native import (
    Native,
    address_of,
    bytes_at,
    fields_at,
    floats_at,
    numbers_at,
    run_native,
    words_at,
)
from mxref_numba.scalar.packing import pack_codes
from mxref_numba.scalar.panels import HEIGHT, WIDTH, Strides, load_panel, matrices, unsigned_at
from mxref_numba.scalar.philox import random_integers, stream_key
from mxref_numba.scalar.rounding import CONSTANTS, round_by, round_byte_by, round_even, round_even_byte
from mxref_numba.scalar.scale import INFINITY, NAN_CODE, block_amax, code_of_amax, inverse_scale
from mxref_numba.scalar.transform import panel_signs, transform_row

_K = 32
_BLOCKS = WIDTH // _K

_SIZES = {
    "panel": 4 * HEIGHT * WIDTH, "amax": 4 * HEIGHT * _BLOCKS, "codes": WIDTH, "random": 4 * WIDTH,
    "words": 4 * WIDTH,
}  # fmt: skip
_PANEL, _AMAX, _CODES, _RANDOM, _WORDS, _SCRATCH = accumulate(_SIZES.values(), initial=0)
"""Where a worker's scratch has elements; largest magnitudes of blocks; codes, random integers and words of a row."""


@kernel
def _panel_amax(bits, height, width, k, tile, amax):
    for r in range(height):
        row = bits[r]
        for b in range(width // k):
            amax[r, b] = block_amax(row, b * k, k)
    if tile:
        for b in range(width // k):
            top = np.int32(0)
            for r in range(height):
                top = max(top, amax[r, b])
            for r in range(height):
                amax[r, b] = top


def _even_encoder(rounded: Any, sign: int) -> Any:
    """Return a kernel that encodes a block under RNE, with the sign at a bit of the code."""
    from_top, mask = np.int32(31 - sign), np.int32(1 << sign)

    @kernel(inline="always")
    def encode(row, bits, start, k, factor, prescale, grid, codes):
        base = np.uint64(start)
        for i in range(np.uint64(k)):
            j = base + i
            code = rounded(abs(row[j]) * factor * prescale, grid)
            codes[j] = np.uint8(code | np.int32(np.int32(bits[j] >> from_top) & mask))

    return encode


def _encoder(rounded: Any, sign: int) -> Any:
    """Return the same for a rounding that adds integers."""
    from_top, mask = np.int32(31 - sign), np.int32(1 << sign)

    @kernel(inline="always")
    def encode(row, bits, start, k, factor, prescale, random, random_bits, grid, codes):
        base = np.uint64(start)
        for i in range(np.uint64(k)):
            j = base + i
            code = rounded(abs(row[j]) * factor * prescale, random[j], random_bits, grid)
            codes[j] = np.uint8(code | np.int32(np.int32(bits[j] >> from_top) & mask))

    return encode


_encode_even, _encode_bytes_even = _even_encoder(round_even, 3), _even_encoder(round_even_byte, 7)
_encode_by, _encode_bytes_by = _encoder(round_by, 3), _encoder(round_byte_by, 7)


class _Job(NamedTuple):
    """The quantization of a matrix; what has no type of its own elsewhere is an address."""

    layout: Strides
    rows: int
    length: int
    k: int
    tile: int
    """Whether the rows of a panel share their scales."""
    bound: int
    """`bump_above` of the scale rule."""
    zero_scale: int
    max_exponent: int
    """Of the element's largest binade."""
    prescale: np.float32
    random_bits: np.int32
    """0 for RNE."""
    constant: np.int32
    """The random integer of every element, where they are not drawn."""
    bits: int
    """Of a code."""
    is_e2m1: int
    grid: Grid
    n: int
    """Hadamard size, 0 for no transform."""
    signs: int
    norm: np.float32
    key: int
    global_rows: int
    """Indices of the rows in the global tensor; 0 if no integers are drawn."""
    first: int
    global_length: int
    packed: int
    scales: int
    scratch: int


_job_at = fields_at(_Job)


@kernel(inline="always")  # a call would pass every field of the job, for each row
def _encode_row(row, bits, width, amax, job, random, codes, packed, scales):
    k, random_bits, prescale, grid = job.k, job.random_bits, job.prescale, job.grid
    for b in range(width // k):
        top = amax[b]
        if top >= INFINITY:
            scales[b] = NAN_CODE
            codes[b * k : (b + 1) * k] = 0
            continue
        code = code_of_amax(top, job.bound, job.max_exponent)
        scales[b] = np.uint8(job.zero_scale) if top == 0 else np.uint8(code)
        factor = inverse_scale(code)
        if random_bits == 0 and job.is_e2m1:
            _encode_even(row, bits, b * k, k, factor, prescale, grid, codes)
        elif job.is_e2m1:
            _encode_by(row, bits, b * k, k, factor, prescale, random, random_bits, grid, codes)
        elif random_bits == 0:
            _encode_bytes_even(row, bits, b * k, k, factor, prescale, grid, codes)
        else:
            _encode_bytes_by(row, bits, b * k, k, factor, prescale, random, random_bits, grid, codes)
    if job.bits == 8:
        for i in range(np.uint64(width)):
            packed[i] = codes[i]
        return
    if not job.is_e2m1:
        pack_codes(codes, packed, 0, width // 4, job.bits)
        return
    two, one = np.uint64(2), np.uint64(1)
    for i in range(np.uint64(width // 2)):
        packed[i] = np.uint8(codes[two * i] | np.uint8(codes[two * i + one] << np.uint8(4)))


@Native
def _quantize_share(arguments, worker, workers):
    job = _job_at(arguments)
    rows, length, k, element_bits = job.rows, job.length, job.k, job.bits
    signs, key = carray(floats_at(job.signs), (WIDTH,)), carray(unsigned_at(job.key), (4,))
    row_index = carray(numbers_at(job.global_rows), (rows,))
    packed = carray(bytes_at(job.packed), (rows, length * element_bits // 8))
    scales = carray(bytes_at(job.scales), (rows, length // k))
    scratch = job.scratch + worker * _SCRATCH
    panel_at = scratch + _PANEL
    panel, bits = carray(floats_at(panel_at), (HEIGHT, WIDTH)), carray(words_at(panel_at), (HEIGHT, WIDTH))
    amax = carray(words_at(scratch + _AMAX), (HEIGHT, _BLOCKS))
    codes = carray(bytes_at(scratch + _CODES), (WIDTH,))
    random = carray(words_at(scratch + _RANDOM), (WIDTH,))
    words = carray(unsigned_at(scratch + _WORDS), (4, WIDTH // 4))
    random[:] = job.constant
    across = -(-length // WIDTH)
    begin, end = share(-(-rows // HEIGHT) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(job.layout, row, column, height, width, carray(unsigned_at(panel_at), (HEIGHT, WIDTH)))
        if job.n:
            for r in range(height):
                transform_row(panel[r], width, job.n, signs, job.norm)
        _panel_amax(bits, height, width, k, job.tile, amax)
        for r in range(height):
            if job.global_rows:
                random_integers(
                    row_index[row + r], job.first + column, width, job.global_length, key, job.random_bits,
                    words, random,
                )  # fmt: skip
            _encode_row(
                panel[r], bits[r], width, amax[r], job, random, codes,
                packed[row + r, column * element_bits // 8 : (column + width) * element_bits // 8],
                scales[row + r, column // k : (column + width) // k],
            )  # fmt: skip


def quantize_planned(x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / 32] of a planned quantization."""
    spec, element = plan.spec, plan.format.element
    packed = np.empty((*plan.rows_shape, plan.format.code_bytes(plan.length)), np.uint8)
    scales = np.empty((*plan.rows_shape, plan.length // plan.format.k), np.uint8)
    if not scales.size:
        return packed, scales

    random_bits = 0 if spec.rounding is Rounding.RNE else FRACTION_BITS
    if spec.rounding is Rounding.SR:
        random_bits = spec.sr_bits
    global_rows = plan.global_rows() if plan.stream else np.empty(0, np.int64)
    n = plan.rotation.n if plan.rotation else 0
    signs, key = panel_signs(plan.rotation), stream_key(plan.stream)
    for m in matrices(x, plan.axis):
        elements = m.rows * plan.length
        scratch = np.empty(compiled.worker_count(elements) * _SCRATCH + memory.LINE, np.uint8)
        job = _Job(
            layout=m.layout,
            rows=m.rows,
            length=plan.length,
            k=plan.format.k,
            tile=spec.block is BlockShape.TILE,
            bound=bump_above(spec.scale_rule, element),
            zero_scale=spec.zero_scale,
            max_exponent=element.max_exponent,
            prescale=np.float32(element.prescale if spec.prescale else 1),
            random_bits=np.int32(random_bits),
            constant=np.int32(CONSTANTS.get(spec.rounding, 0)),
            bits=element.bits,
            is_e2m1=held_bits(element) == 4,
            grid=grid_of(element),
            n=n,
            signs=address_of(signs),
            norm=norm_factor(n) if n else np.float32(1.0),
            key=address_of(key),
            global_rows=address_of(global_rows) + 8 * m.first_row if global_rows.size else 0,
            first=plan.first,
            global_length=plan.global_length,
            packed=address_of(packed) + plan.format.code_bytes(m.first_row * plan.length),
            scales=address_of(scales) + m.first_row * plan.length // plan.format.k,
            scratch=memory.aligned(scratch),
        )
        run_native(_quantize_share, job, elements)
    return packed, scales
