"""Quantization in plain Numba, element by element, in one pass over panels: read, transform, amax, scale, round.

This is the path of any CPU and, where a format joins, the first that has it: k, the element and the scale rule are
fields of a `Job` here. Its operations are those of the reference: change their order, never what they give.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.plan import QuantPlan
from mxref_numba.grids import Grid
from mxref_numba.kernels import (
    Native,
    bytes_at,
    doubles_at,
    fields_at,
    float_of,
    floats_at,
    kernel,
    numbers_at,
    unsigned_at,
    unsigned_numbers_at,
    words_at,
)
from mxref_numba.quantize_job import CONSTANT, EVEN, WIDTH, Job, Result, amax_jobs
from mxref_numba.scalar.four_over_six import LIMBS, four_errs_less
from mxref_numba.scalar.panels import HEIGHT, PANEL_BYTES, load_panel, panel_count, transform_row
from mxref_numba.scalar.rounding import quotient, round_by, round_even, round_quotient_by, rounded_to_odd
from mxref_numba.scale import INFINITY, code_of_amax, inverse_scale
from mxref_numba.threads import run

_SMALLEST_K = 16
"""For whose blocks a panel has room for amax."""
_BLOCKS = WIDTH // _SMALLEST_K
_MAGNITUDE = np.int32(0x7FFFFFFF)

_SIZES = {
    "panel": PANEL_BYTES,
    "amax": 4 * HEIGHT * _BLOCKS,
    "codes": WIDTH,
    "random": 4 * WIDTH,
    "words": 4 * WIDTH,
    "scales": HEIGHT * _BLOCKS,
    "limbs": 8 * LIMBS,
}
_PANEL, _AMAX, _CODES, _RANDOM, _WORDS, _SCALES, _LIMBS, _SCRATCH = accumulate(_SIZES.values(), initial=0)
"""Where a worker's scratch has elements; largest magnitudes of blocks; codes, random integers and words of a row; scale
codes of blocks; a sum."""


# ---- the largest magnitude ----


@kernel
def _block_amax(bits, start, k):
    """Return the largest magnitude bits of bits[start : start + k], int32; NaN is above Inf."""
    top = np.int32(0)
    base = np.uint64(start)
    for j in range(np.uint64(k)):
        top = max(top, np.int32(bits[base + j] & _MAGNITUDE))
    return top


@kernel
def _panel_amax(bits, height, width, k, tile, amax):
    for r in range(height):
        row = bits[r]
        for b in range(width // k):
            amax[r, b] = _block_amax(row, b * k, k)
    if tile:
        for first in range(0, height, tile):
            for b in range(width // k):
                top = np.int32(0)
                for r in range(first, first + tile):
                    top = max(top, amax[r, b])
                for r in range(first, first + tile):
                    amax[r, b] = top


@kernel
def _scale_code(top, largest, job):
    """Return the code of a scale with a mantissa, whose block has amax `top` and becomes `largest` at most."""
    scales = fields_at(job.quotient.grid, Grid)
    v = quotient(float_of(top), np.float64(largest) * np.float64(job.quotient.tensor), scales.top)
    return round_even(rounded_to_odd(v), scales)


@kernel
def _panel_scales(panel, height, width, amax, job, grid, limbs, codes):
    """Set the codes of such scales, uint8 [HEIGHT, blocks]; those of NaN blocks are any."""
    k, numbers, group = job.k, job.quotient, max(job.tile, 1)
    values, scales = carray(floats_at(numbers.elements), (16,)), carray(doubles_at(numbers.values), (256,))
    for first in range(0, height, group):
        for b in range(width // k):
            top = amax[first, b]
            code = _scale_code(top, numbers.most, job)
            if job.four_over_six and top < INFINITY:
                other, t = _scale_code(top, numbers.lower, job), np.float64(numbers.tensor)
                block = panel[first : first + group, b * k : (b + 1) * k]
                if other != code and four_errs_less(
                    block, scales[code] * t, scales[other] * t, grid, values, job.four_over_six, limbs
                ):
                    code = other
            for r in range(first, first + group):
                codes[r, b] = code


# ---- random integers ----


_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW, _HIGH_SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel
def _philox_groups(first_group, groups, table, words):
    """Fill words[4, :groups], uint32, with the four words of each group from `first_group`, uint64, on."""
    c2_of_all, c3_of_all = np.uint32(table[0]), np.uint32(table[1])
    first_k0, first_k1 = np.uint32(table[2]), np.uint32(table[3])
    for i in range(groups):
        group = np.uint64(first_group + np.uint64(i))
        c0, c1 = np.uint32(group & _LOW), np.uint32(group >> _HIGH_SHIFT)
        c2, c3, k0, k1 = c2_of_all, c3_of_all, first_k0, first_k1
        for _ in range(10):
            p0, p1 = np.uint64(np.uint64(c0) * _M0), np.uint64(np.uint64(c2) * _M1)
            c0, c2 = (
                np.uint32(np.uint32(p1 >> _HIGH_SHIFT) ^ np.uint32(c1 ^ k0)),
                np.uint32(np.uint32(p0 >> _HIGH_SHIFT) ^ np.uint32(c3 ^ k1)),
            )
            c1, c3 = np.uint32(p1 & _LOW), np.uint32(p0 & _LOW)
            k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
        words[0, i], words[1, i], words[2, i], words[3, i] = c0, c1, c2, c3


@kernel
def _random_integers(first, groups, per_call, table, mask, words, out):
    """Fill out[: groups * per_call], int32, with what `round_by` adds to the elements of groups from `first` on.

    `mask` has the bits of a fraction that are random, and `words` is scratch, uint32 [4, >= groups].
    """
    _philox_groups(first, groups, table, words)
    if per_call == 8:
        for g in range(groups):
            for w in range(4):
                word = words[w, g]
                low, high = np.int32(word & np.uint32(0xFFFF)), np.int32(word >> np.uint32(16))
                out[8 * g + 2 * w] = np.int32(np.int32(low << np.int32(6)) & mask)
                out[8 * g + 2 * w + 1] = np.int32(np.int32(high << np.int32(6)) & mask)
    else:
        for g in range(groups):
            for w in range(4):
                out[4 * g + w] = np.int32(np.int32(words[w, g] >> np.uint32(10)) & mask)


# ---- codes ----


@kernel
def _sign(bits, width):
    """Return the sign of a float32 at the top of a code."""
    return np.int32(np.int32(bits >> np.int32(32 - width)) & np.int32(np.int32(1) << np.int32(width - 1)))


@kernel(inline="always")
def _encode_even(row, bits, start, k, factor, job, grid, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        code = round_even(abs(row[j]) * factor * job.prescale, grid)
        codes[j] = np.uint8(code | _sign(bits[j], job.bits))


@kernel(inline="always")
def _encode_by(row, bits, start, k, factor, job, random, grid, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        code = round_by(abs(row[j]) * factor * job.prescale, random[j], grid)
        codes[j] = np.uint8(code | _sign(bits[j], job.bits))


@kernel(inline="always")
def _encode_quotients(row, bits, start, k, divisor, job, random, grid, codes):
    base = np.uint64(start)
    for i in range(np.uint64(k)):
        j = base + i
        v = quotient(abs(row[j]), divisor, grid.top)
        if job.rounding == EVEN:
            code = round_even(rounded_to_odd(v), grid)
        else:
            code = round_quotient_by(v, random[j], grid)
        codes[j] = np.uint8(code | _sign(bits[j], job.bits))


# ---- the pass ----


@kernel(inline="always")
def _pack(codes, width, bits, packed):
    """Store codes without gaps."""
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    if bits == 8:
        for i in range(np.uint64(width)):
            packed[i] = codes[i]
    elif bits == 4:
        for i in range(np.uint64(width // 2)):
            packed[i] = np.uint8(codes[two * i] | np.uint8(codes[two * i + one] << np.uint8(4)))
    else:  # four codes of 6 bits in three bytes
        for i in range(np.uint64(width // 4)):
            a, b, c, d = (
                codes[four * i],
                codes[four * i + one],
                codes[four * i + two],
                codes[four * i + three],
            )
            packed[three * i] = np.uint8(a | np.uint8(b << np.uint8(6)))
            packed[three * i + one] = np.uint8(np.uint8(b >> np.uint8(2)) | np.uint8(c << np.uint8(4)))
            packed[three * i + two] = np.uint8(np.uint8(c >> np.uint8(4)) | np.uint8(d << np.uint8(2)))


@kernel(inline="always")  # a call would pass every field of the job, for each row
def _encode_row(row, bits, width, amax, chosen, job, grid, random, codes, packed, scales):
    k = job.k
    for b in range(width // k):
        top = amax[b]
        if top >= INFINITY:
            scales[b] = np.uint8(job.nan_code)
            codes[b * k : (b + 1) * k] = 0
            continue
        if job.quotient.grid:
            code = chosen[b]
            scales[b] = np.uint8(job.scale.zero_scale) if top == 0 else code
            divisor = carray(doubles_at(job.quotient.values), (256,))[code] * np.float64(job.quotient.tensor)
            _encode_quotients(row, bits, b * k, k, divisor, job, random, grid, codes)
            continue
        code = code_of_amax(top, job.scale)
        scales[b] = np.uint8(job.scale.zero_scale) if top == 0 else np.uint8(code)
        factor = inverse_scale(code)
        if job.rounding == EVEN:
            _encode_even(row, bits, b * k, k, factor, job, grid, codes)
        else:
            _encode_by(row, bits, b * k, k, factor, job, random, grid, codes)
    _pack(codes, width, job.bits, packed)


@Native
def _encode_panels(address, begin, end, room):
    job = fields_at(address, Job)
    rows, length, k, element_bits, (n, signs_at, norm) = job.rows, job.length, job.k, job.bits, job.transform
    signs, table, grid = (
        carray(floats_at(signs_at), (WIDTH,)),
        carray(unsigned_numbers_at(job.key), (4,)),
        fields_at(job.grid, Grid),
    )
    row_indices = carray(numbers_at(job.row_indices), (rows,))
    packed = carray(bytes_at(job.codes), (rows, length * element_bits // 8))
    scales = carray(bytes_at(job.scales), (rows, length // k))
    panel_at = room + _PANEL
    panel, bits = carray(floats_at(panel_at), (HEIGHT, WIDTH)), carray(words_at(panel_at), (HEIGHT, WIDTH))
    amax = carray(words_at(room + _AMAX), (HEIGHT, _BLOCKS))
    codes = carray(bytes_at(room + _CODES), (WIDTH,))
    random = carray(words_at(room + _RANDOM), (WIDTH,))
    words = carray(unsigned_at(room + _WORDS), (4, WIDTH // 4))
    chosen = carray(bytes_at(room + _SCALES), (HEIGHT, _BLOCKS))
    limbs = carray(numbers_at(room + _LIMBS), (LIMBS,))
    random[:] = job.integer
    across = -(-length // WIDTH)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(job.layout, row, column, height, width, carray(unsigned_at(panel_at), (HEIGHT, WIDTH)))
        if n > 1:
            for r in range(height):
                transform_row(panel[r], width, n, signs, norm)
        _panel_amax(bits, height, width, k, job.tile, amax)
        if job.quotient.grid:
            _panel_scales(panel, height, width, amax, job, grid, limbs, chosen)
        for r in range(height):
            if job.rounding > CONSTANT:
                index = row_indices[row + r] if job.row_indices else job.first_row + row + r
                group = index * job.row_groups + (job.first_column + column) // job.per_call
                groups = width // job.per_call
                _random_integers(np.uint64(group), groups, job.per_call, table, job.integer, words, random)
            _encode_row(
                panel[r], bits[r], width, amax[r], chosen[r], job, grid, random, codes,
                packed[row + r, column * element_bits // 8 : (column + width) * element_bits // 8],
                scales[row + r, column // k : (column + width) // k],
            )  # fmt: skip


def quantize_planned(x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / k] of a planned quantization."""
    result = Result(plan)
    for job in result.jobs(x):
        run(_encode_panels, job, panel_count(job.rows, job.length), job.rows * job.length, room=_SCRATCH)
    return result.arrays()


@Native
def _amax_panels(address, begin, end, room):
    job = fields_at(address, Job)
    rows, length, (n, signs_at, norm) = job.rows, job.length, job.transform
    signs, found = carray(floats_at(signs_at), (WIDTH,)), carray(words_at(job.scales), (end,))
    panel, bits = carray(floats_at(room), (HEIGHT, WIDTH)), carray(words_at(room), (HEIGHT, WIDTH))
    across = -(-length // WIDTH)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(job.layout, row, column, height, width, carray(unsigned_at(room), (HEIGHT, WIDTH)))
        top = np.int32(0)
        for r in range(height):
            if n > 1:
                transform_row(panel[r], width, n, signs, norm)
            for c in range(np.uint64(width)):
                magnitude = np.int32(bits[r, c] & _MAGNITUDE)
                top = max(top, magnitude if magnitude < INFINITY else np.int32(0))
        found[task] = top


def finite_amax(x: NDArray[Any], plan: QuantPlan) -> np.float32:
    """Return the largest finite magnitude of an input after its transform."""
    found = np.zeros(panel_count(plan.rows, plan.length), np.int32)
    top = np.int32(0)
    for job in amax_jobs(x, plan, found):
        tasks = panel_count(job.rows, job.length)
        run(_amax_panels, job, tasks, job.rows * job.length, room=PANEL_BYTES)
        top = max(top, found[:tasks].max(initial=0))
    return np.float32(top.view(np.float32))
