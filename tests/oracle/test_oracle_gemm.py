"""The oracle's scaled GEMM against hand calculation and float64."""

from fractions import Fraction

import ml_dtypes
import numpy as np
from hypothesis import given, settings

import oracle
import strategies
from oracle import Block

NAN = oracle.NAN32
ONE = [2] + [0] * 31
MINUS_ONE = [10] + [0] * 31


def f32(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def block(exponent: int, codes: list[int] = ONE) -> Block:
    return exponent + 127, codes


def test_dots_are_multiples_of_a_quarter_up_to_1152() -> None:
    assert oracle.block_dot([7] * 32, [7] * 32) == 1152
    assert oracle.block_dot([7] * 32, [15] * 32) == -1152
    assert oracle.block_dot([1] + [0] * 31, [1] + [8] * 31) == Fraction(1, 4)
    codes = np.random.default_rng(10).integers(0, 16, (2, 500, 32)).astype(np.uint8)
    a, b = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = (a * b).sum(axis=1).tolist()  # exact in float64
    got = [float(oracle.block_dot(p, q)) for p, q in zip(*codes.tolist(), strict=True)]
    assert got == expected


def test_gemm_edges() -> None:
    assert oracle.gemm_exact([], []) == oracle.gemm_ordered([], []) == 0
    # Scales that overflow float32 alone but whose product is 1.
    assert oracle.gemm_exact([block(127)], [block(-127)]) == f32(1.0)
    assert oracle.gemm_ordered([block(127)], [block(-127)]) == f32(1.0)
    # Negative underflow is -0; adding an exact zero to it gives +0.
    under, zero = block(-127, MINUS_ONE), block(0, [0, 8] * 16)
    assert oracle.gemm_exact([under], [block(-127)]) == oracle.SIGN32
    assert oracle.gemm_exact([under], [block(-127)], "bfloat16") == oracle.SIGN16
    assert oracle.gemm_ordered([under], [block(-127)]) == oracle.SIGN32
    assert oracle.gemm_ordered([under, zero], [block(-127), block(0)]) == 0
    # A sum of zeros of either sign is +0, and so is a sum that cancels.
    assert oracle.gemm_ordered([zero], [block(0, [15] * 32)]) == 0
    assert oracle.gemm_exact([block(0), block(0, MINUS_ONE)], [block(0), block(0)]) == 0


def test_ordered_infinity_stays_where_the_exact_sum_returns() -> None:
    a, b = [block(127), block(127, MINUS_ONE), block(0)], [block(127), block(127), block(0)]
    assert oracle.gemm_exact(a, b) == f32(1.0)
    assert oracle.gemm_ordered(a, b) == oracle.INF32
    assert oracle.gemm_ordered(a, b, prescaled=2) == oracle.INF32


def test_nan_blocks_give_nan_whatever_else_happened() -> None:
    a, b = [block(127), (255, [0] * 32)], [block(127), (0, [0] * 32)]
    for left, right in ((a, b), (b, a)):
        assert oracle.gemm_exact(left, right) == oracle.gemm_ordered(left, right) == NAN
        assert oracle.gemm_exact(left, right, "bfloat16") == oracle.NAN16


def test_exact_rounds_once() -> None:
    # 1 + 2^-8 + 2^-30 lies above a bfloat16 tie that float32 would fall back to.
    a, b = [block(0), block(-8), block(-30)], [block(0)] * 3
    assert oracle.gemm_exact(a, b, "bfloat16") == 0x3F81
    assert oracle.f32_bits_to_bf16_bits(oracle.gemm_exact(a, b)) == 0x3F80


def test_order_matters_to_ordered_only() -> None:
    forth, back = [block(24), block(0), block(24, MINUS_ONE)], [block(24), block(24, MINUS_ONE), block(0)]
    ones = [block(0)] * 3
    assert oracle.gemm_exact(forth, ones) == oracle.gemm_exact(back, ones) == f32(1.0)
    assert oracle.gemm_ordered(forth, ones) == 0  # 2^24 + 1 ties back to 2^24
    assert oracle.gemm_ordered(back, ones) == f32(1.0)


def test_prescale_is_undone_after_the_sum() -> None:
    a, b = [block(0, [5] + [0] * 31)], [block(0)]  # 3
    assert oracle.gemm_exact(a, b, prescaled=1) == f32(4.0)
    assert oracle.gemm_exact(a, b, prescaled=2) == f32(16 / 3)
    for count, factor in ((1, np.float32(4 / 3)), (2, np.float32(16 / 9))):
        assert oracle.gemm_ordered(a, b, prescaled=count) == int((np.float32(3) * factor).view(np.uint32))


@settings(max_examples=300, deadline=None)
@given(operands=strategies.gemm_operands(nan=False))
def test_ordered_is_float64_addition_then_float32(operands: tuple[list[Block], list[Block]]) -> None:
    acc = np.float32(0)
    with np.errstate(all="ignore"):
        for (byte_a, codes_a), (byte_b, codes_b) in zip(*operands, strict=True):
            pair = np.array([codes_a, codes_b], np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
            acc = np.float32(np.float64(acc) + np.ldexp(pair.prod(axis=0).sum(), byte_a + byte_b - 254))
    assert oracle.gemm_ordered(*operands) == int(acc.view(np.uint32))


@settings(max_examples=150, deadline=None)
@given(operands=strategies.gemm_operands())
def test_one_block_is_the_same_exact_or_ordered(operands: tuple[list[Block], list[Block]]) -> None:
    a, b = operands[0][:1], operands[1][:1]
    assert oracle.gemm_exact(a, b) == oracle.gemm_ordered(a, b)
