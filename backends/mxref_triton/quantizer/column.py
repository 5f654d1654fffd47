"""Quantization along an axis that is not contiguous: each thread owns one or two lines and reads them step by step.

Thread t of a program owns unit t, whose elements lie `step` apart; its neighbours own the neighbouring lines, so that
each of the loads of a warp is one piece of memory. Elements of 16 bits that lie side by side across lines are read
as words, and a thread owns the units of both lines. A program covers several units of every line: their codes are
side by side in the transposed output, and turn around in shared memory only when they are packed, a quarter of
the bytes that came in.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.random import first_call, given
from mxref_triton.lane.registers import (
    UNITS_LAST,
    bits_alone,
    floats_alone,
    join_last,
    load_integers,
    split_last,
    store_largest,
    tile_index,
)
from mxref_triton.lane.treatment import Output
from mxref_triton.lane.unit import encode_two_lines, encode_unit

_AMAX = tl.constexpr(Output.AMAX.value)
_NEAR = tl.constexpr(16)
"""Elements of a unit whose addresses are sums of a common one and of a multiple of `step` that units share."""


@triton.jit
def _of_units(t):
    return t[None, None, :] if UNITS_LAST else t[:, None, None]


@triton.jit
def _of_elements(t):
    return t[:, :, None] if UNITS_LAST else t[None, :, :]


@triton.jit
def _load_lines(
    x, offsets, step, element, length, mask,
    UNIT: tl.constexpr, STEP: tl.constexpr, VECTOR: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return what lies at `offsets` and UNIT - 1 times `step` further, as uint32; from `length` on zeros.

    All of it is one load, because compile time grows with the square of the number of loads.
    """
    NEAR: tl.constexpr = min(UNIT, _NEAR)
    far = _of_elements((tl.arange(0, UNIT // NEAR) * NEAR)[:, None])
    near = _of_elements(tl.arange(0, NEAR)[None, :])
    exists = mask
    if mask is not None:
        exists = _of_units(mask)
        if PADDED:
            exists = (_of_units(element) + (far + near) < length) & exists
    apart = STEP if STEP else step  # a constant becomes part of the load instruction
    pointers = _of_units(x + offsets) + far.to(tl.int64) * apart + near.to(tl.int64) * apart
    # More neighbours in one thread than it owns would leave it with a part of each unit.
    pointers = tl.max_contiguous(pointers, [1, 1, VECTOR] if UNITS_LAST else [VECTOR, 1, 1])
    loaded = load_integers(pointers, exists)
    if UNITS_LAST:
        loaded = tl.permute(loaded, (2, 0, 1))
    # Converted to words only now: one widening of the whole would get other layouts, and its users twice the code.
    return bits_alone(split_last(tl.reshape(loaded, [offsets.shape[0], UNIT]), UNIT))


@triton.jit
def _store_lines(
    pointer, tensors, lines, across, mask,
    OUT: tl.constexpr, UNITS: tl.constexpr, LINES: tl.constexpr, TOGETHER: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Store OUT tensors per unit, transposed: lines are `across` apart, and their units APART, side by side if OUT.

    TOGETHER neighbouring lines are one after the other in the tuple of tensors.
    """
    joined = tl.reshape(join_last(tensors), [UNITS, LINES // TOGETHER, TOGETHER, OUT])
    turned = tl.reshape(tl.permute(joined, (1, 2, 0, 3)), [LINES, UNITS * OUT])
    own = tl.arange(0, UNITS * OUT)[None, :]
    place = own
    if APART != OUT:
        place = own // OUT * APART + own % OUT
    target = pointer + (lines[:, None] * across + place)
    if mask is None:
        tl.store(target, turned)
    else:
        tl.store(target, turned, mask=mask[0][:, None] & (own < mask[1] * OUT))


@triton.jit
def _part(words, FIRST: tl.constexpr, COUNT: tl.constexpr, OUT: tl.constexpr, TOGETHER: tl.constexpr):
    """Return COUNT words from FIRST on of each of TOGETHER units of OUT words."""
    part = ()
    for line in tl.static_range(TOGETHER):
        part = part + words[line * OUT + FIRST : line * OUT + FIRST + COUNT]
    return part


@triton.jit
def column_units(
    x, codes, scales,
    line, unit, lines, units, length, stride, step, group, groups, shared,
    P: tl.constexpr, LINES: tl.constexpr, UNITS: tl.constexpr, STEP: tl.constexpr,
    TOGETHER: tl.constexpr, VECTOR: tl.constexpr,
    MASKED: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantize UNITS units of each of LINES lines.

    Args:
        x: pointer to the elements, 16-bit ones as int16: `stride` apart between lines, `step` along the block axis.
            With TOGETHER = 2 it is to words, which `step` counts too, and `stride` is 1.
        codes: int32 pointer to packed codes, or to bfloat16 values, [lines, units]; or to the one word of amax.
        scales: uint8 pointer to scale codes, [lines, units].
        line: first line, an int64 scalar.
        unit: first unit of each line, an int64 scalar.
        lines: number of lines of the whole.
        units: units per line of the whole.
        length: elements of a line; the rest of the last unit is padding.
        stride: see x.
        step: see x.
        group: number of the first Philox call of line 0.
        groups: calls per line.
        shared: from `given`.
        P: the treatment.
        LINES: see above.
        UNITS: see above.
        STEP: `step` as a constant, or 0.
        TOGETHER: lines of a thread, 1 or 2.
        VECTOR: lines side by side that a thread may read at once; 1 unless `stride` is.
        MASKED: whether lines or units may end within these.
        PADDED: whether a unit may end after `length`; MASKED has to be set then.
        WIDE: whether offsets between the units need 64 bits.
    """
    BLOCKS: tl.constexpr = P.blocks
    OUT: tl.constexpr = P.words_out
    KIND: tl.constexpr = P.kind
    ACROSS: tl.constexpr = LINES // TOGETHER
    i = tl.arange(0, ACROSS * UNITS)
    c = i % ACROSS
    u = i // ACROSS
    own = tl.arange(0, LINES)
    mask = None
    store_mask = None
    if MASKED:
        mask = (line + c * TOGETHER < lines) & (unit + u < units)
        store_mask = (line + own < lines, units - unit)
    if WIDE:
        c = c.to(tl.int64)
        u = u.to(tl.int64)
        own = own.to(tl.int64)
    base = x + (line // TOGETHER * stride + unit * P.unit * step)
    element = (unit + u) * P.unit
    loaded = _load_lines(
        base, c * stride + u * P.unit * step, step, element, length, mask, P.unit, STEP, VECTOR, PADDED
    )
    if TOGETHER == 2:
        out, stored = encode_two_lines(loaded, shared, P)
    else:
        first = None
        if P.random_bits:
            first = first_call(line + c, unit + u, group, groups, P)
        values = floats_alone(loaded, P.unit, KIND)
        out, stored = encode_unit(values, first, shared, P, UNITS * LINES, 1)
    target = codes + (line * units + unit) * OUT
    words = ()
    for k in tl.static_range(TOGETHER * OUT):
        words = words + (out[k].to(tl.int32, bitcast=True),)
    if P.output == _AMAX:
        store_largest(codes, words)
    elif OUT % 3 == 0:  # no power of two, so in two parts that are
        TAIL: tl.constexpr = OUT // 3
        head = _part(words, 0, 2 * TAIL, OUT, TOGETHER)
        tail = _part(words, 2 * TAIL, TAIL, OUT, TOGETHER)
        _store_lines(target, head, own, units * OUT, store_mask, 2 * TAIL, UNITS, LINES, TOGETHER, OUT)
        _store_lines(target + 2 * TAIL, tail, own, units * OUT, store_mask, TAIL, UNITS, LINES, TOGETHER, OUT)
    else:
        _store_lines(target, words, own, units * OUT, store_mask, OUT, UNITS, LINES, TOGETHER, OUT)
    if BLOCKS:
        target = scales + (line * units + unit) * BLOCKS
        _store_lines(target, stored, own, units * BLOCKS, store_mask, BLOCKS, UNITS, LINES, TOGETHER, BLOCKS)


@triton.jit(
    do_not_specialize=[
        "lines", "length",
        "signs_low", "signs_high", "group", "seed_low", "seed_high", "stream_low", "stream_high",
    ]
)  # fmt: skip
def quantize_columns(
    x, codes, scales, tensor,
    lines, units, length, stride, step,
    signs_low, signs_high, group, groups, seed_low, seed_high, stream_low, stream_high,
    P: tl.constexpr, LINES: tl.constexpr, UNITS: tl.constexpr, BAND: tl.constexpr, STEP: tl.constexpr,
    TOGETHER: tl.constexpr, VECTOR: tl.constexpr,
    MASKED: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantize lines of any strides, LINES x UNITS units per program; arguments as in `column_units` and `given`."""
    down, across = tile_index(BAND)
    line = across * LINES
    unit = down * UNITS
    shared = given(signs_low, signs_high, seed_low, seed_high, stream_low, stream_high, tensor, P)
    x = x.to(tl.pointer_type(tl.int32 if P.kind == "float32" or TOGETHER == 2 else tl.int16))
    column_units(
        x, codes, scales, line, unit, lines, units, length, stride, step, group, groups, shared,
        P, LINES, UNITS, STEP, TOGETHER, VECTOR, MASKED, PADDED, WIDE,
    )  # fmt: skip
