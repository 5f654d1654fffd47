"""The profile `ordered`: acc = RN32(acc + dot * 2^(ea + eb)), block after block in ascending order.

Three kernels give the same bits. One reads packed codes of any format, under any scale. It multiplies in float16, which
holds every element, with sums in float32. A block's dot is exact there for elements of 4 and 6 bits and of INT8: of two
E3M2 it has 23 bits, of any other pair fewer. With scales of UE4M3 and both their significands a dot of NVFP4 has 20.
With an element of E4M3 or E5M2 a dot has up to 69 bits; see `mxref_triton.products.wide`.

The others read folded operands of MXFP4 and E1M2: FP8 matrix units sum 13 bits exactly, so both elements must have 4
bits. Each 32-block dot is exact in a matrix unit, and enters the accumulator in one float32 addition, on Hopper inside
the tensor core, on gfx950 by the vector ALU. Powers of two taken out of a row move no rounding as long as nothing
leaves the normal numbers, which `fold` guarantees for rows that fit. Outputs that touch a row that does not fit are
then recomputed from the codes.

One undocumented property of gfx950's matrix cores is assumed: a dot of 32 products with an addend of 0 is exact if it
and its parts are small multiples of one power of two, here below 2^13. `mxref conform` tests it.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mxref.formats import CANONICAL_NAN, BlockFormat, ElementFormat
from mxref.mxarray import MXArray
from mxref_triton.lane.quads import byte_of_pair, half_element, load_codes
from mxref_triton.lane.scale import value_of_scale
from mxref_triton.launch import INTERPRETED, launch, power_of_two_from, tiles_of
from mxref_triton.memory import empty
from mxref_triton.operands import rows_of, unprescale
from mxref_triton.products.fold import Folded
from mxref_triton.products.tiling import MATRIX_SIDE, Tile, largest_busy
from mxref_triton.products.wide import add_wide

_BLOCK = 32
"""Elements of a block of the formats that are folded."""
_FLOAT32_BITS = 24
"""Bits of a float32's significand."""
_FP8_BITS = 13
"""Bits that FP8 matrix units keep of a sum, those of its largest term and below."""
_DEPTH = _BLOCK if INTERPRETED else 128
"""Elements that the folded kernel loads at a time; one block under the interpreter, which sums all of them at once."""
_MISFIT_TILE = 256 if INTERPRETED else 64
_MISFIT_PROGRAMS = 1 if INTERPRETED else 528
_ANY_LENGTH = ["rows", "blocks"]
"""Arguments of which gfx950 and Hopper have the same instructions whatever they are divisible by."""
_GROUP = 8
"""Tiles along M that share their columns of B in the second-level cache."""

# Counted for gfx950 with Triton 3.7.1, vector instructions per matrix instruction in the loop, additions among them:
# 128x128 takes 2.8 at two waves per SIMD, of two programs, so that one may wait for memory while the other multiplies;
# 64x64 takes 3.4 at five, and reads each operand from LDS twice as often.
TILES = (Tile(128, 128, 64, 4, waves=2), Tile(64, 64, 128, 4))
"""Tiles of the kernel for gfx950 by size; the first that gives every compute unit work is taken."""


@triton.jit
def place_tile(program, rows, columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of a program's tile; programs run down groups of rows of tiles."""
    down, across = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    return (first + within % height) * BM, within // height * BN


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent in float32, -149 to 127."""
    normal = (exponent + 127) << 23
    subnormal = 1 << tl.maximum(exponent + 149, 0)
    return tl.where(exponent < -126, subnormal, normal).to(tl.float32, bitcast=True)


@triton.jit
def wide_power(exponent):
    """Return 2^exponent in float64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _element(code, E: tl.constexpr, EMULATED: tl.constexpr):
    """Return elements as `half_element` scales them, float16; float32 for the interpreter, which multiplies that."""
    value = half_element(code, E)
    return value.to(tl.float32) if EMULATED else value


@triton.jit
def finished(acc, factor, SCALED: tl.constexpr, a_tensor=None, b_tensor=None):
    """Undo the prescale and apply the scales of tensors, to which `a_tensor` and `b_tensor` point if there are some."""
    if SCALED:
        acc = acc * factor
    if a_tensor is not None:
        acc = acc * tl.load(a_tensor)
    if b_tensor is not None:
        acc = acc * tl.load(b_tensor)
    return acc


@triton.jit
def store_bits(acc, bits, at, here, NAN: tl.constexpr, HALF: tl.constexpr):
    """Store float32 bits, narrowed to bfloat16 if HALF; `acc` are the same numbers, before NaN was made canonical."""
    if HALF:
        wide = bits.to(tl.uint32, bitcast=True)
        narrow = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.uint16)
        narrow = tl.where(acc != acc, NAN >> 16, narrow)
        tl.store(at, narrow.to(tl.int16, bitcast=True), here)
    else:
        tl.store(at, bits, here)


@triton.jit
def store_tile(
    acc, out, row, column, rows, columns, factor, NAN: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr,
    a_tensor=None, b_tensor=None, ONTO: tl.constexpr = False,
):  # fmt: skip
    """Finish a tile, make every NaN the canonical one, narrow if asked, and store it; ONTO adds it to what is there."""
    acc = finished(acc, factor, SCALED, a_tensor, b_tensor)
    if ONTO:
        held = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        held = tl.load(held, (row < rows)[:, None] & (column < columns)[None, :], 0)
        acc = acc + held.to(tl.float32, bitcast=True)
    bits = tl.where(acc != acc, NAN, acc.to(tl.int32, bitcast=True))
    at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    here = (row < rows)[:, None] & (column < columns)[None, :]
    store_bits(acc, bits, at, here, NAN, HALF)


@triton.jit
def ordered_sum(
    a_codes, a_scales, b_codes, b_scales, row, column, rows, columns, first, last, blocks,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr,
    EMULATED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Return the sum over blocks `first` to `last` of packed rows `row` of A times rows `column` of B, float32 SHAPE.

    Rows from `rows` and `columns` on do not exist. A and B are the element formats, S that of the scales, K the
    elements of a block; `formats` has the rest.
    """
    A_BYTES: tl.constexpr = K * A.bits // 8
    B_BYTES: tl.constexpr = K * B.bits // 8
    UNDO: tl.constexpr = 30 - A.bias - B.bias  # exponent of what `half_element` takes out of both
    PAIRS: tl.constexpr = max(16, K // 2)  # matrix units take no fewer than 16 products
    here_a, here_b = row < rows, column < columns
    pair = tl.arange(0, PAIRS)
    a_line = a_codes + row.to(tl.int64)[:, None] * (blocks * A_BYTES) + byte_of_pair(pair, A)[None, :]
    b_line = b_codes + column.to(tl.int64)[None, :] * (blocks * B_BYTES) + byte_of_pair(pair, B)[:, None]
    a_scale, b_scale = a_scales + row.to(tl.int64) * blocks, b_scales + column.to(tl.int64) * blocks
    a_here, b_here = here_a[:, None], here_b[None, :]
    if K < 2 * PAIRS:
        a_here, b_here = a_here & (pair < K // 2)[None, :], b_here & (pair < K // 2)[:, None]
    acc = tl.zeros(SHAPE, tl.float32)
    for block in range(first, last):
        a_even, a_odd = load_codes(a_line + block * A_BYTES, pair[None, :], a_here, A)
        b_even, b_odd = load_codes(b_line + block * B_BYTES, pair[:, None], b_here, B)
        code_a = tl.load(a_scale + block, here_a, S.one_code).to(tl.int32)
        code_b = tl.load(b_scale + block, here_b, S.one_code).to(tl.int32)
        # Two dots: elements with even and with odd index. Their sum is exact, as is any part of it.
        dot = tl.dot(_element(a_even, A, EMULATED), _element(b_even, B, EMULATED), out_dtype=tl.float32)
        dot = tl.dot(_element(a_odd, A, EMULATED), _element(b_odd, B, EMULATED), dot, out_dtype=tl.float32)
        if not S.powers:
            # Both products are exact.
            power = value_of_scale(code_a, S)[:, None] * value_of_scale(code_b, S)[None, :]
            acc = tl.fma(dot * (2.0**UNDO), power, acc)
        else:
            nan_a, nan_b = code_a == S.nan_code, code_b == S.nan_code
            if WIDE:
                power_a, power_b = wide_power(code_a - S.bias + UNDO), wide_power(code_b - S.bias)
                dot = tl.where(nan_a[:, None] | nan_b[None, :], float("nan"), dot)
                acc = add_wide(
                    acc, dot, half_element(a_even, A), half_element(a_odd, A), half_element(b_even, B),
                    half_element(b_odd, B), power_a[:, None] * power_b[None, :], A, B,
                )  # fmt: skip
            elif (
                EMULATED
            ):  # the interpreter's fma may round twice; a float64 sum is wide enough to be rounded once
                power_a = tl.where(nan_a, float("nan"), wide_power(code_a - S.bias + UNDO))
                term = dot.to(tl.float64) * power_a[:, None] * wide_power(code_b - S.bias)[None, :]
                acc = (acc.to(tl.float64) + tl.where(nan_b[None, :], float("nan"), term)).to(tl.float32)
            else:
                # dot * 2^UNDO is below 2^LARGEST and a multiple of 2^-12 or more, so its product with a power from
                # 2^-127 to 2^(128 - LARGEST), 2^117 for two of MXFP4, is exact. The rest of ea is multiplied into B's
                # power. If that overflows, every nonzero term overflows too, even at 2^127.
                near = tl.minimum(code_a, 255 - LARGEST)
                power_a = tl.where(nan_a, float("nan"), power_of_two(near - S.bias))
                far_a = power_of_two(code_a - near)
                power_b = tl.where(nan_b, float("nan"), power_of_two(code_b - S.bias))
                power_ab = tl.minimum(
                    far_a[:, None] * power_b[None, :], 1.7014118346046923e38, tl.PropagateNan.ALL
                )
                acc = tl.fma((dot * (2.0**UNDO)) * power_a[:, None], power_ab, acc)
    return acc


@triton.jit
def _ordered_tile(
    a_codes, a_scales, b_codes, b_scales, out, row, column, rows, columns, blocks, factor,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr, SHAPE: tl.constexpr,
    a_tensor=None, b_tensor=None,
):  # fmt: skip
    """Multiply packed rows `row` of A with rows `column` of B and store them."""
    acc = ordered_sum(
        a_codes, a_scales, b_codes, b_scales, row, column, rows, columns, 0, blocks, blocks,
        A, B, S, K, LARGEST, WIDE, EMULATED, SHAPE,
    )  # fmt: skip
    store_tile(acc, out, row, column, rows, columns, factor, NAN, SCALED, HALF, a_tensor, b_tensor)


@triton.jit
def _ordered(
    a_codes, a_scales, b_codes, b_scales, out, rows, columns, blocks, factor, a_tensor, b_tensor,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    top, left = place_tile(tl.program_id(0), rows, columns, BM, BN, GROUP)
    _ordered_tile(
        a_codes, a_scales, b_codes, b_scales, out, top + tl.arange(0, BM), left + tl.arange(0, BN),
        rows, columns, blocks, factor, A, B, S, K, LARGEST, WIDE, SCALED, HALF, EMULATED, NAN, (BM, BN),
        a_tensor, b_tensor,
    )  # fmt: skip


@triton.jit
def misfit_tile(
    task, a_tasks, a_count, b_count, a_misfits, b_misfits, rows, columns, BM: tl.constexpr, BN: tl.constexpr
):
    """Return the rows of A and of B whose product a task is: first come the tasks with listed rows of A."""
    across, down = tl.cdiv(columns, BN), tl.cdiv(rows, BM)
    of_a = task < a_tasks
    other = task - a_tasks
    row = tl.where(of_a, task // across, other % down) * BM + tl.arange(0, BM)
    column = tl.where(of_a, task % across, other // down) * BN + tl.arange(0, BN)
    # The limit of a list that is not read is 0: Triton's interpreter makes `of_a & (row < a_count)` an integer.
    listed_row = tl.load(a_misfits + 1 + row, row < tl.where(of_a, a_count, 0), rows)
    listed_column = tl.load(b_misfits + 1 + column, column < tl.where(of_a, 0, b_count), columns)
    return tl.where(of_a, listed_row, row), tl.where(of_a, column, listed_column)


@triton.jit(do_not_specialize=_ANY_LENGTH)
def _ordered_misfits(
    a_codes, a_scales, b_codes, b_scales, a_misfits, b_misfits, out, rows, columns, blocks, factor,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Recompute from codes every output that touches a listed row of A or of B that does not fit E4M3."""
    a_count, b_count = tl.load(a_misfits), tl.load(b_misfits)
    a_tasks = tl.cdiv(a_count, BM) * tl.cdiv(columns, BN)
    tasks = a_tasks + tl.cdiv(b_count, BN) * tl.cdiv(rows, BM)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row, column = misfit_tile(
            task, a_tasks, a_count, b_count, a_misfits, b_misfits, rows, columns, BM, BN
        )
        _ordered_tile(
            a_codes, a_scales, b_codes, b_scales, out, row, column, rows, columns, blocks, factor,
            A, B, S, K, LARGEST, WIDE, SCALED, HALF, EMULATED, NAN, (BM, BN),
        )  # fmt: skip


@triton.jit
def _store_folded(
    acc, a_scale, b_scale, out, row, column, rows, columns, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """Multiply a tile by its rows' and its columns' powers of two, and store it."""
    power_a = tl.load(a_scale + row, row < rows, 1.0)
    power_b = tl.load(b_scale + column, column < columns, 1.0)
    acc = acc * power_a[:, None] * power_b[None, :]
    store_tile(acc, out, row, column, rows, columns, factor, NAN, SCALED, HALF)


@triton.jit
def _ordered_folded(
    a_scale, b_scale, a, b, out, rows, columns, length, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply folded operands, given as descriptors that read zeros beyond their edges."""
    top, left = place_tile(tl.program_id(0), rows, columns, BM, BN, GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, length, BK):
        # Each 32 elements, and no more, are summed in the tensor core and then added to acc in float32.
        acc = tl.dot(a.load([top, start]), b.load([left, start]).T, acc, max_num_imprecise_acc=32)
    _store_folded(
        acc, a_scale, b_scale, out, top + tl.arange(0, BM), left + tl.arange(0, BN), rows, columns, factor,
        SCALED, HALF, NAN,
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_LENGTH)
def _ordered_by_block(
    a_scale, b_scale, a, b, out, rows, columns, blocks, factor,
    SCALED: tl.constexpr, HALF: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, AT_ONCE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply operands folded by block, AT_ONCE blocks, a divisor of their number, in each turn of the loop."""
    top, left = place_tile(tl.program_id(0), rows, columns, BM, BN, GROUP)
    row, column, element = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 32)
    # Past the edge the last row is read again: nothing of it is stored.
    a_at = (tl.minimum(row, rows - 1 - top) * 32)[:, None] + element[None, :]
    b_at = (tl.minimum(column, columns - 1 - left) * 32)[None, :] + element[:, None]
    a += top * 32
    b += left * 32
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, blocks, AT_ONCE):
        for _ in tl.static_range(AT_ONCE):
            # The limit of 32 keeps the compiler from making acc the addend of the matrix instruction, whose
            # rounding is not documented.
            acc += tl.dot(tl.load(a + a_at), tl.load(b + b_at), max_num_imprecise_acc=32)
            a += rows * 32
            b += columns * 32
    _store_folded(
        acc, a_scale, b_scale, out, top + row, left + column, rows, columns, factor, SCALED, HALF, NAN
    )


@cache
def _formats(a: BlockFormat, b: BlockFormat) -> dict[str, Any]:
    first, second, k = a.element, b.element, a.k
    largest = k * _largest(first) * _largest(second)
    significands = math.prod(1 if f.scale.powers else 2 << f.scale.mantissa_bits for f in (a, b))
    unit = first.unit_exponent + second.unit_exponent
    return {
        "A": first, "B": second, "S": a.scale, "K": k, "LARGEST": math.frexp(largest)[1],
        "WIDE": largest * significands >= math.ldexp(1.0, unit + _FLOAT32_BITS),
    }  # fmt: skip


def _largest(element: ElementFormat) -> float:
    return max(abs(value) for value in element.values if math.isfinite(value))


def formats(a: MXArray, b: MXArray) -> dict[str, Any]:
    """Return the constants of kernels that read packed codes of both operands.

    A and B are their elements, S their scales, K is the length of their blocks. A dot is below 2^LARGEST; WIDE says
    that float32 does not hold every dot with the significands of both scales.
    """
    return _formats(a.format, b.format)


def multiplies(a: BlockFormat, b: BlockFormat) -> bool:
    """Return whether there are products of two formats of one block length.

    Their scales are of one format. Where float32 does not hold a dot, they are powers of two, for blocks of 32.
    """
    if a.k not in (16, 32) or a.scale != b.scale:
        return False
    return not _formats(a, b)["WIDE"] or (a.k == _BLOCK and a.scale.powers)


def sums_in_float32(a: MXArray, b: MXArray) -> bool:
    """Return whether float32 holds every sum of products of a block, so that `ordered` is as fast as any product."""
    return not formats(a, b)["WIDE"]


def sums_in_fp8(a: MXArray, b: MXArray) -> bool:
    """Return whether an FP8 matrix unit sums a block of these formats without loss."""
    first, second = a.format.element, b.format.element
    largest = a.format.k * first.max_value * second.max_value
    return largest < math.ldexp(1.0, first.unit_exponent + second.unit_exponent + _FP8_BITS)


def store_options(a: MXArray, b: MXArray, dtype: torch.dtype) -> tuple[dict[str, Any], float]:
    """Return the constants of `store_tile`, and the factor that undoes prescaled operands."""
    factor = unprescale(a, b)
    constants = {"SCALED": factor != 1, "HALF": dtype == torch.bfloat16, "NAN": CANONICAL_NAN}
    return constants, factor


def bits_of(out: torch.Tensor) -> torch.Tensor:
    """Return a result as the integers that `store_tile` writes."""
    return out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.int32)


def ordered(
    a: MXArray, b: MXArray, out_dtype: str, folded: tuple[Folded, Folded] | None = None
) -> torch.Tensor:
    """Return A B^T of A [M, K] and B [N, K], checked operands, with the bits that `ordered` defines.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: `float32` or `bfloat16`.
        folded: both operands folded, by row for a Hopper GPU, by block for a gfx950.
    """
    (a_codes, a_scales), (b_codes, b_scales) = rows_of(a), rows_of(b)
    m, n, blocks = a_scales.shape[0], b_scales.shape[0], a_scales.shape[1]
    out = empty((m, n), getattr(torch, out_dtype), a_codes.device)
    if not out.numel():
        return out
    treatment, factor = store_options(a, b, out.dtype)
    size = m, n, blocks, factor
    if folded is None:
        wide = not sums_in_float32(a, b)  # float64 takes twice the registers
        tile = (_tile(m, 32), _tile(n, 32)) if wide else (_tile(m, 64), _tile(n, 128))
        launch(
            _ordered, (tiles_of(m, tile[0]) * tiles_of(n, tile[1]),),
            a_codes, a_scales, b_codes, b_scales, bits_of(out), *size, a.tensor_scale, b.tensor_scale,
            **formats(a, b), EMULATED=INTERPRETED, BM=tile[0], BN=tile[1], GROUP=_GROUP,
            num_warps=8 if wide else 4, num_stages=2, **treatment,
        )  # fmt: skip
        return out
    left, right = folded
    if left.by_block:
        _multiply_by_block(left, right, bits_of(out), size, treatment)
    else:
        _multiply_by_row(left, right, bits_of(out), (m, n, a.length, factor), treatment)
    _multiply_misfits(a, b, left, right, out)
    return out


def _multiply_misfits(a: MXArray, b: MXArray, left: Folded, right: Folded, out: torch.Tensor) -> None:
    """Overwrite the outputs of rows that do not fit E4M3; arguments as in `misfits.multiply_misfits`."""
    (a_codes, a_scales), (b_codes, b_scales) = rows_of(a), rows_of(b)
    treatment, factor = store_options(a, b, out.dtype)
    # Fewer warps spill scalar registers on gfx950.
    options: dict[str, Any] = {"num_warps": 4, "num_stages": 4}
    if left.by_block:
        options = {"num_warps": 8, "num_stages": 2} | MATRIX_SIDE
    launch(
        _ordered_misfits, (_MISFIT_PROGRAMS,),
        a_codes, a_scales, b_codes, b_scales, left.misfits, right.misfits, bits_of(out), *out.shape,
        a_scales.shape[1], factor,
        **formats(a, b), EMULATED=INTERPRETED, BM=_MISFIT_TILE, BN=_MISFIT_TILE, **treatment, **options,
    )  # fmt: skip


def _multiply_by_row(
    left: Folded, right: Folded, bits: torch.Tensor, size: tuple[Any, ...], treatment: dict[str, Any]
) -> None:
    """Multiply on a Hopper GPU; `size` is M, N, K and the factor."""
    tile = 128, 64
    readers = (
        TensorDescriptor.from_tensor(f.values, [height, _DEPTH])
        for f, height in zip((left, right), tile, strict=True)
    )
    launch(
        _ordered_folded, (tiles_of(size[0], tile[0]) * tiles_of(size[1], tile[1]),),
        left.scale, right.scale, *readers, bits, *size,
        BM=tile[0], BN=tile[1], BK=_DEPTH, GROUP=_GROUP, num_warps=4, num_stages=3, **treatment,
    )  # fmt: skip


def _multiply_by_block(
    left: Folded, right: Folded, bits: torch.Tensor, size: tuple[Any, ...], treatment: dict[str, Any]
) -> None:
    """Multiply on a gfx950; `size` is M, N, the number of blocks and the factor."""
    m, n, blocks, _ = size
    tile = largest_busy(TILES, m, n)
    launch(
        _ordered_by_block, (tiles_of(m, tile.rows) * tiles_of(n, tile.columns),),
        left.scale, right.scale, left.values, right.values, bits, *size,
        BM=tile.rows, BN=tile.columns, AT_ONCE=math.gcd(blocks, tile.depth // _BLOCK), GROUP=_GROUP,
        **treatment, **tile.options,
    )  # fmt: skip


def _tile(length: int, largest: int) -> int:
    return max(16, power_of_two_from(length, 512 if INTERPRETED else largest))
