"""The profile `ordered`: acc = RN32(acc + dot * 2^(ea + eb)), block after block in ascending order.

Two kernels give the same bits. One reads packed codes and takes any scale. The other reads folded operands and
multiplies at FP8 rate on Hopper: each 32-block dot is exact in its tensor cores, and enters the accumulator in
one float32 addition; powers of two taken out of a row move no rounding as long as nothing leaves the normal
numbers, which `fold` guarantees for rows that fit. What rows that do not fit take part in is then done again
from their codes.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mxref.formats import CANONICAL_NAN
from mxref.mxarray import MXArray
from mxref_triton.fold import Folded
from mxref_triton.launch import INTERPRETED, launch, power_of_two_from
from mxref_triton.memory import empty
from mxref_triton.rows import rows_of

UNPRESCALE = (1.0, 4 / 3, 16 / 9)
"""Factor that undoes no, one or two prescaled operands; rounded to float32 where it is used."""

_DEPTH = 32 if INTERPRETED else 128
"""Elements that the folded kernel loads at a time; the interpreter sums all of them at once, so only one block."""
_MISFIT_TILE = 256 if INTERPRETED else 64
_MISFIT_PROGRAMS = 1 if INTERPRETED else 528
_GROUP = 8
"""Tiles along M that share their columns of B in the second-level cache."""


@triton.jit
def place_tile(rows, columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of this program's tile; programs run down groups of rows of tiles."""
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    return (first + within % height) * BM, within // height * BN


@triton.jit
def _power(exponent):
    """Return 2^exponent in float32, -149 to 127."""
    normal = (exponent + 127) << 23
    subnormal = 1 << tl.maximum(exponent + 149, 0)
    return tl.where(exponent < -126, subnormal, normal).to(tl.float32, bitcast=True)


@triton.jit
def wide_power(exponent):
    """Return 2^exponent in float64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def element(nibble, EMULATED: tl.constexpr):
    """Return P * 2^-14 in float16: an E2M1 code is the top of a float16 with a small exponent."""
    bits = ((nibble & 7).to(tl.int16) << 9) | ((nibble & 8).to(tl.int16) << 12)
    value = bits.to(tl.float16, bitcast=True)
    return value.to(tl.float32) if EMULATED else value


@triton.jit
def store_tile(
    acc, out, row, column, rows, columns, factor, NAN: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr
):
    """Undo the prescale, make every NaN the canonical one, narrow if asked, and store a tile."""
    if SCALED:
        acc = acc * factor
    bits = tl.where(acc != acc, NAN, acc.to(tl.int32, bitcast=True))
    at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    here = (row < rows)[:, None] & (column < columns)[None, :]
    if HALF:
        wide = bits.to(tl.uint32, bitcast=True)
        narrow = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.uint16)
        narrow = tl.where(acc != acc, NAN >> 16, narrow)
        tl.store(at, narrow.to(tl.int16, bitcast=True), here)
    else:
        tl.store(at, bits, here)


@triton.jit
def _ordered_tile(
    a_codes, a_scales, b_codes, b_scales, out, row, column, rows, columns, blocks, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Multiply packed rows `row` of A with rows `column` of B; those from `rows` or `columns` on do not exist."""
    here_a, here_b = row < rows, column < columns
    byte = tl.arange(0, 16)
    a_line = a_codes + row.to(tl.int64)[:, None] * (blocks * 16) + byte[None, :]
    b_line = b_codes + column.to(tl.int64)[None, :] * (blocks * 16) + byte[:, None]
    a_scale, b_scale = a_scales + row.to(tl.int64) * blocks, b_scales + column.to(tl.int64) * blocks
    acc = tl.zeros(SHAPE, tl.float32)
    for block in range(0, blocks):
        a = tl.load(a_line + block * 16, here_a[:, None], 0)
        b = tl.load(b_line + block * 16, here_b[None, :], 0)
        code_a = tl.load(a_scale + block, here_a, 127).to(tl.int32)
        code_b = tl.load(b_scale + block, here_b, 127).to(tl.int32)
        # Two dots of 16: elements with even and with odd index. Their sum is exact, as is any part of it.
        dot = tl.dot(element(a & 15, EMULATED), element(b & 15, EMULATED), out_dtype=tl.float32)
        dot = tl.dot(element(a >> 4, EMULATED), element(b >> 4, EMULATED), dot, out_dtype=tl.float32)
        nan_a, nan_b = code_a == 255, code_b == 255
        if (
            EMULATED
        ):  # the interpreter's fma may round twice; float64 holds enough of the sum to round it once
            power_a = tl.where(nan_a, float("nan"), wide_power(code_a - 127 + 28))
            term = dot.to(tl.float64) * power_a[:, None] * wide_power(code_b - 127)[None, :]
            acc = (acc.to(tl.float64) + tl.where(nan_b[None, :], float("nan"), term)).to(tl.float32)
        else:
            # dot * 2^28 is below 2^10.2 and a multiple of 1/4, so its product with 2^-127 .. 2^117 is exact. What
            # is left of ea goes to B's power; where that overflows so does every term but zero, at 2^127 too.
            near = tl.minimum(code_a, 244)
            power_a = tl.where(nan_a, float("nan"), _power(near - 127))
            far_a = _power(code_a - near)
            power_b = tl.where(nan_b, float("nan"), _power(code_b - 127))
            power_ab = tl.minimum(
                far_a[:, None] * power_b[None, :], 1.7014118346046923e38, tl.PropagateNan.ALL
            )
            acc = tl.fma((dot * 268435456.0) * power_a[:, None], power_ab, acc)
    store_tile(acc, out, row, column, rows, columns, factor, NAN, SCALED, HALF)


@triton.jit
def _ordered(
    a_codes, a_scales, b_codes, b_scales, out, rows, columns, blocks, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    top, left = place_tile(rows, columns, BM, BN, GROUP)
    _ordered_tile(
        a_codes, a_scales, b_codes, b_scales, out, top + tl.arange(0, BM), left + tl.arange(0, BN),
        rows, columns, blocks, factor, SCALED, HALF, EMULATED, NAN, (BM, BN),
    )  # fmt: skip


@triton.jit
def _ordered_misfits(
    a_codes, a_scales, b_codes, b_scales, a_misfits, b_misfits, out, rows, columns, blocks, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Do again what a row of A or of B that does not fit E4M3 takes part in: how much, the lists of them say."""
    a_count, b_count = tl.load(a_misfits), tl.load(b_misfits)
    across, down = tl.cdiv(columns, BN), tl.cdiv(rows, BM)
    a_tasks = tl.cdiv(a_count, BM) * across
    tasks = a_tasks + tl.cdiv(b_count, BN) * down
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        of_a = task < a_tasks
        other = task - a_tasks
        row = tl.where(of_a, task // across, other % down) * BM + tl.arange(0, BM)
        column = tl.where(of_a, task % across, other // down) * BN + tl.arange(0, BN)
        listed_row = tl.load(a_misfits + 1 + row, of_a & (row < a_count), rows)
        listed_column = tl.load(b_misfits + 1 + column, (task >= a_tasks) & (column < b_count), columns)
        row, column = tl.where(of_a, listed_row, row), tl.where(of_a, column, listed_column)
        _ordered_tile(
            a_codes, a_scales, b_codes, b_scales, out, row, column, rows, columns, blocks, factor,
            SCALED, HALF, EMULATED, NAN, (BM, BN),
        )  # fmt: skip


@triton.jit
def _ordered_folded(
    a_scale, b_scale, a, b, out, rows, columns, length, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply folded operands, given as descriptors that read zeros beyond their edges."""
    top, left = place_tile(rows, columns, BM, BN, GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, length, BK):
        # Each 32 elements, and no more, are summed in the tensor core and then added to acc in float32.
        acc = tl.dot(a.load([top, start]), b.load([left, start]).T, acc, max_num_imprecise_acc=32)
    row, column = top + tl.arange(0, BM), left + tl.arange(0, BN)
    power_a = tl.load(a_scale + row, row < rows, 1.0)
    power_b = tl.load(b_scale + column, column < columns, 1.0)
    acc = acc * power_a[:, None] * power_b[None, :]
    store_tile(acc, out, row, column, rows, columns, factor, NAN, SCALED, HALF)


def _output(m: int, n: int, out_dtype: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output tensor and its bits."""
    half = out_dtype == "bfloat16"
    out = empty((m, n), torch.bfloat16 if half else torch.float32, device)
    return out, out.view(torch.int16 if half else torch.int32)


def ordered(
    a: MXArray, b: MXArray, out_dtype: str, folded: tuple[Folded, Folded] | None = None
) -> torch.Tensor:
    """Return A B^T of A [M, K] and B [N, K], checked operands, bit for bit as `ordered` wants it.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: `float32` or `bfloat16`.
        folded: both operands folded, on a Hopper GPU.
    """
    (a_codes, a_scales), (b_codes, b_scales) = rows_of(a), rows_of(b)
    m, n, blocks = a_scales.shape[0], b_scales.shape[0], a_scales.shape[1]
    out, bits = _output(m, n, out_dtype, a_codes.device)
    if not out.numel():
        return out
    prescaled = int(a.prescale) + int(b.prescale)
    treatment: dict[str, Any] = {
        "SCALED": prescaled > 0, "HALF": out_dtype == "bfloat16", "NAN": CANONICAL_NAN, "num_warps": 4,
    }  # fmt: skip
    packed, size = (a_codes, a_scales, b_codes, b_scales), (m, n, blocks, UNPRESCALE[prescaled])
    if folded is None:
        tile = _tile(m, 64), _tile(n, 128)
        launch(
            _ordered, (triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]),), *packed, bits, *size,
            EMULATED=INTERPRETED, BM=tile[0], BN=tile[1], GROUP=_GROUP, num_stages=2, **treatment,
        )  # fmt: skip
        return out
    left, right = folded
    tile = 128, 64
    readers = (
        TensorDescriptor.from_tensor(f.values, [height, _DEPTH])
        for f, height in zip(folded, tile, strict=True)
    )
    launch(
        _ordered_folded, (triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]),),
        left.scale, right.scale, *readers, bits, m, n, a.length, UNPRESCALE[prescaled],
        BM=tile[0], BN=tile[1], BK=_DEPTH, GROUP=_GROUP, num_stages=3, **treatment,
    )  # fmt: skip
    launch(
        _ordered_misfits, (_MISFIT_PROGRAMS,), *packed, left.misfits, right.misfits, bits, *size,
        EMULATED=INTERPRETED, BM=_MISFIT_TILE, BN=_MISFIT_TILE, num_stages=2, **treatment,
    )  # fmt: skip
    return out


def _tile(length: int, largest: int) -> int:
    return max(16, power_of_two_from(length, 512 if INTERPRETED else largest))
