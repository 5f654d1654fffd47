"""Quantization in one pass over panels: read, transform, amax, scale, round, pack, while in cache."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref.steps.hadamard import norm_factor
from mxref.steps.rounding import Rounding
from mxref.steps.scale import bump_above
from mxref_numba.compiled import kernel, parallel_kernel, share, team
from mxref_numba.elements import FRACTION_BITS, rounding_numbers
from mxref_numba.scalar.hadamard import panel_signs, transform_row
from mxref_numba.scalar.panels import HEIGHT, WIDTH, load_panel, matrices
from mxref_numba.scalar.philox import random_integers, stream_key
from mxref_numba.scalar.rounding import CONSTANTS, round_by, round_byte_by, round_even, round_even_byte
from mxref_numba.scalar.scale import INFINITY, NAN_CODE, block_amax, code_of_amax, inverse_scale

_K = 32
_BLOCKS = WIDTH // _K


@kernel
def _panel_amax(panel, height, width, k, tile, amax):
    bits = panel.view(np.int32)
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
def _encode_row(row, width, k, amax, policy, prescale, random, grid, codes, packed, scales):
    # `policy`: bump bound of the scale rule, zero_scale, random bits (0 for RNE), exponent of the largest binade,
    # bits of an element.
    bits = row.view(np.int32)
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
        if policy[4] == 8:
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
    two, one = np.uint64(2), np.uint64(1)
    for i in range(np.uint64(width // 2)):
        packed[i] = np.uint8(codes[two * i] | np.uint8(codes[two * i + one] << np.uint8(4)))


@kernel
def _quantize_share(
    layout,
    k, tile, policy, prescale, constant, grid,
    n, signs, norm,
    key, global_rows, first, global_length,
    packed, scales, worker, workers,
):  # fmt: skip
    rows, length = scales.shape[0], scales.shape[1] * k
    across = -(-length // WIDTH)
    panel = np.empty((HEIGHT, WIDTH), np.float32)
    amax = np.empty((HEIGHT, _BLOCKS), np.int32)
    codes = np.empty(WIDTH, np.uint8)
    random = np.full(WIDTH, constant, np.int32)
    words = np.empty((4, WIDTH // 4), np.uint32)
    begin, end = share(-(-rows // HEIGHT) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(layout, row, column, height, width, panel)
        if n:
            for r in range(height):
                transform_row(panel[r], width, n, signs, norm)
        _panel_amax(panel, height, width, k, tile, amax)
        for r in range(height):
            if global_rows.size:
                random_integers(
                    global_rows[row + r], first + column, width, global_length, key, policy[2], words, random
                )
            _encode_row(
                panel[r], width, k, amax[r], policy, prescale, random, grid, codes,
                packed[row + r, column * policy[4] // 8 : (column + width) * policy[4] // 8],
                scales[row + r, column // k : (column + width) // k],
            )  # fmt: skip


@parallel_kernel
def _quantize(
    layout,
    k, tile, policy, prescale, constant, grid,
    n, signs, norm,
    key, global_rows, first, global_length,
    packed, scales, workers,
):  # fmt: skip
    for worker in numba.prange(workers):
        _quantize_share(
            layout, k, tile, policy, prescale, constant, grid, n, signs, norm,
            key, global_rows, first, global_length, packed, scales, np.int64(worker), workers,
        )  # fmt: skip


def quantize_planned(x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / 32] of a planned quantization."""
    spec, element = plan.spec, plan.format.element
    packed = np.empty((*plan.rows_shape, plan.format.code_bytes(plan.length)), np.uint8)
    scales = np.empty((*plan.rows_shape, plan.length // plan.format.k), np.uint8)
    if not scales.size:
        return packed, scales
    packed_rows, scale_rows = (a.reshape(-1, a.shape[-1]) for a in (packed, scales))

    random_bits = 0 if spec.rounding is Rounding.RNE else FRACTION_BITS
    if spec.rounding is Rounding.SR:
        random_bits = spec.sr_bits
    bound = bump_above(spec.scale_rule, element)
    policy = np.array([bound, spec.zero_scale, random_bits, element.max_exponent, element.bits], np.int64)
    global_rows = plan.global_rows() if plan.stream else np.empty(0, np.int64)
    prescale, constant = np.float32(element.prescale if spec.prescale else 1), CONSTANTS.get(spec.rounding, 0)
    grid = rounding_numbers(element)
    n = plan.rotation.n if plan.rotation else 0
    signs, norm = panel_signs(plan.rotation), norm_factor(n) if n else np.float32(1.0)
    key = stream_key(plan.stream)
    for m in matrices(x, plan.axis):
        rows = slice(m.first_row, m.first_row + m.rows)
        with team(m.rows * plan.length) as workers:
            _quantize(
                m.layout,
                plan.format.k, spec.block is BlockShape.TILE, policy, prescale, constant, grid,
                n, signs, norm,
                key, global_rows[rows], plan.first, plan.global_length,
                packed_rows[rows], scale_rows[rows], workers,
            )  # fmt: skip
    return packed, scales
