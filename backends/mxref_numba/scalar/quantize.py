"""Quantization in one pass over panels: read, transform, amax, scale, round, pack, while in cache."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref.steps.hadamard import norm_factor
from mxref.steps.rounding import Rounding
from mxref.steps.scale import bump_above
from mxref_numba import compiled, memory
from mxref_numba.compiled import float_of, kernel, share
from mxref_numba.elements import FRACTION_BITS, held_bits, rounding_numbers
from mxref_numba.native import (
    Native,
    address_of,
    bytes_at,
    floats_at,
    numbers_at,
    run_native,
    words_at,
)
from mxref_numba.scalar.hadamard import panel_signs, transform_row
from mxref_numba.scalar.packing import pack_codes
from mxref_numba.scalar.panels import HEIGHT, WIDTH, load_panel, matrices, unsigned_at
from mxref_numba.scalar.philox import random_integers, stream_key
from mxref_numba.scalar.rounding import CONSTANTS, round_by, round_byte_by, round_even, round_even_byte
from mxref_numba.scalar.scale import INFINITY, NAN_CODE, block_amax, code_of_amax, inverse_scale

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


@kernel
def _encode_even(row, bits, start, k, factor, prescale, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        code = round_even(abs(row[j]) * factor * prescale)
        codes[j] = np.uint8(code | np.int32(np.int32(bits[j] >> np.int32(28)) & np.int32(8)))


@kernel
def _encode_by(row, bits, start, k, factor, prescale, random, random_bits, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        code = round_by(abs(row[j]) * factor * prescale, random[j], random_bits)
        codes[j] = np.uint8(code | np.int32(np.int32(bits[j] >> np.int32(28)) & np.int32(8)))


@kernel
def _encode_bytes_even(row, bits, start, k, factor, prescale, grid, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        code = round_even_byte(abs(row[j]) * factor * prescale, grid)
        codes[j] = np.uint8(code | np.int32(np.int32(bits[j] >> np.int32(24)) & np.int32(0x80)))


@kernel
def _encode_bytes_by(row, bits, start, k, factor, prescale, random, random_bits, grid, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        code = round_byte_by(abs(row[j]) * factor * prescale, random[j], random_bits, grid)
        codes[j] = np.uint8(code | np.int32(np.int32(bits[j] >> np.int32(24)) & np.int32(0x80)))


@kernel
def _encode_row(row, bits, width, k, amax, policy, prescale, random, grid, codes, packed, scales):
    # `policy`: bump bound of the scale rule, zero_scale, random bits (0 for RNE), exponent of the largest binade,
    # bits of a code, whether the element is E2M1.
    random_bits = np.int32(policy[2])
    for b in range(width // k):
        top = amax[b]
        if top >= INFINITY:
            scales[b] = NAN_CODE
            codes[b * k : (b + 1) * k] = 0
            continue
        code = code_of_amax(top, policy[0], policy[3])
        scales[b] = np.uint8(policy[1]) if top == 0 else np.uint8(code)
        factor = inverse_scale(code)
        if not policy[5]:
            if random_bits == 0:
                _encode_bytes_even(row, bits, b * k, k, factor, prescale, grid, codes)
            else:
                _encode_bytes_by(row, bits, b * k, k, factor, prescale, random, random_bits, grid, codes)
        elif random_bits == 0:
            _encode_even(row, bits, b * k, k, factor, prescale, codes)
        else:
            _encode_by(row, bits, b * k, k, factor, prescale, random, random_bits, codes)
    if policy[4] == 8:
        for i in range(np.uint64(width)):
            packed[i] = codes[i]
        return
    if not policy[5]:
        pack_codes(codes, packed, 0, width // 4, policy[4])
        return
    two, one = np.uint64(2), np.uint64(1)
    for i in range(np.uint64(width // 2)):
        packed[i] = np.uint8(codes[two * i] | np.uint8(codes[two * i + one] << np.uint8(4)))


@Native
def _quantize_share(arguments, worker, workers):
    j = carray(numbers_at(arguments), (28,))
    layout, policy = (j[0], j[1], j[2], j[3], j[4]), carray(numbers_at(arguments + 8 * 5), (6,))
    element_bits, k, tile = policy[4], j[11], j[12]
    prescale, constant, grid = float_of(j[13]), np.int32(j[14]), carray(words_at(j[15]), (6,))
    n, signs, norm = j[16], carray(floats_at(j[17]), (WIDTH,)), float_of(j[18])
    key, global_rows, first, global_length = carray(unsigned_at(j[19]), (4,)), j[20], j[21], j[22]
    rows, length = j[23], j[24]
    row_index = carray(numbers_at(global_rows), (rows,))
    packed = carray(bytes_at(j[25]), (rows, length * element_bits // 8))
    scales = carray(bytes_at(j[26]), (rows, length // k))
    scratch = j[27] + worker * _SCRATCH
    panel_at = scratch + _PANEL
    panel, bits = carray(floats_at(panel_at), (HEIGHT, WIDTH)), carray(words_at(panel_at), (HEIGHT, WIDTH))
    amax = carray(words_at(scratch + _AMAX), (HEIGHT, _BLOCKS))
    codes = carray(bytes_at(scratch + _CODES), (WIDTH,))
    random = carray(words_at(scratch + _RANDOM), (WIDTH,))
    words = carray(unsigned_at(scratch + _WORDS), (4, WIDTH // 4))
    random[:] = constant
    across = -(-length // WIDTH)
    begin, end = share(-(-rows // HEIGHT) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(layout, row, column, height, width, carray(unsigned_at(panel_at), (HEIGHT, WIDTH)))
        if n:
            for r in range(height):
                transform_row(panel[r], width, n, signs, norm)
        _panel_amax(bits, height, width, k, tile, amax)
        for r in range(height):
            if global_rows:
                random_integers(
                    row_index[row + r], first + column, width, global_length, key, policy[2], words, random
                )
            _encode_row(
                panel[r], bits[r], width, k, amax[r], policy, prescale, random, grid, codes,
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
    bound = bump_above(spec.scale_rule, element)
    policy = bound, spec.zero_scale, random_bits, element.max_exponent, element.bits, held_bits(element) == 4
    global_rows = plan.global_rows() if plan.stream else np.empty(0, np.int64)
    prescale, constant = np.float32(element.prescale if spec.prescale else 1), CONSTANTS.get(spec.rounding, 0)
    grid = rounding_numbers(element)
    n = plan.rotation.n if plan.rotation else 0
    signs, norm = panel_signs(plan.rotation), norm_factor(n) if n else np.float32(1.0)
    key = stream_key(plan.stream)
    for m in matrices(x, plan.axis):
        elements = m.rows * plan.length
        scratch = np.empty(compiled.worker_count(elements) * _SCRATCH + memory.LINE, np.uint8)
        numbers = (
            *m.layout, *policy, plan.format.k, spec.block is BlockShape.TILE,
            _bits(prescale), constant, address_of(grid), n, address_of(signs), _bits(norm), address_of(key),
            address_of(global_rows) + global_rows.itemsize * m.first_row if global_rows.size else 0,
            plan.first, plan.global_length, m.rows, plan.length,
            address_of(packed) + plan.format.code_bytes(m.first_row * plan.length),
            address_of(scales) + m.first_row * plan.length // plan.format.k, memory.aligned(scratch),
        )  # fmt: skip
        run_native(_quantize_share, np.array(numbers, np.int64), elements)
    return packed, scales


def _bits(value: np.float32) -> int:
    return int(value.view(np.int32))
