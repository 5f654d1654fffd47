"""Products of every pair of formats but two of MXFP4, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numba_checks import bits
from numpy.typing import NDArray

from mxref import GemmProfile, MXArray, OperandSpec, UnsupportedError, get_backend
from mxref.conformance.checks.gemms import spanning
from mxref.formats import BLOCK_FORMATS, CANONICAL_NAN, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mxref.layouts.packed import pack

pytest.importorskip("numba")

from mxref_numba import path
from mxref_numba.backend import NumbaBackend

REFERENCE = get_backend("reference")
BACKENDS = [NumbaBackend(p) for p in dict.fromkeys((path.available()[0], path.KernelPath.PORTABLE))]
"""All paths multiply these formats by the same kernels."""
FORMATS = [each for each in BLOCK_FORMATS.values() if each in NumbaBackend.capabilities.formats]
SHORT = [each for each in FORMATS if each.element.bits < 8 and each.scale.powers]
PAIRS = [(a, b) for a, b in itertools.product(FORMATS, repeat=2) if (a, b) != (MXFP4, MXFP4) and a.k == b.k]
K = 32


@pytest.fixture(params=BACKENDS, ids=lambda b: b.path.value)
def kernels(request: pytest.FixtureRequest) -> NumbaBackend:
    chosen: NumbaBackend = request.param
    return chosen


def operand(
    made: BlockFormat,
    rows: int,
    length: int,
    scales: tuple[int, int],
    seed: int,
    *,
    special: bool = False,
    **fields: Any,
) -> MXArray:
    """Any finite codes, or NaN and Inf too, one block in ten all zeros, under scale codes drawn from a range."""
    rng = np.random.default_rng(seed)
    element, k = made.element, made.k
    codes = rng.integers(0, 2 * element.sign, (rows, length // k, k), np.uint8)
    beyond = (codes & (element.sign - 1)) > element.max_code
    keep = rng.random(codes.shape) < (0.05 if special else 0)
    codes[beyond & ~keep] &= 0x83
    codes[rng.random(codes.shape[:2]) < 0.1] &= element.sign
    drawn = rng.integers(scales[0], scales[1] + 1, codes.shape[:2]).astype(np.uint8)
    packed = pack(codes.reshape(rows, length), element)
    if made.tensor_scale:
        drawn = np.where(drawn > made.scale.nan_code, drawn // 2, drawn).astype(np.uint8)
        fields["tensor_scale"] = np.exp2(np.float32([rng.uniform(-126, 126)]))
    return MXArray(packed, drawn, (rows, length), 1, format=made, **fields)


def of(made: BlockFormat, elements: list[list[int]], scales: list[list[int]]) -> MXArray:
    """Rows of blocks, each given by its first codes of eight bits, and their scale codes."""
    blocks = len(scales[0])
    codes = np.zeros((len(scales), blocks, K), np.uint8)
    for i, first in enumerate(elements):
        codes[i // blocks, i % blocks, : len(first)] = first
    length = blocks * K
    return MXArray(
        codes.reshape(len(scales), length), np.uint8(scales), (len(scales), length), 1, format=made
    )


def check(kernels: NumbaBackend, a: MXArray, b: MXArray) -> NDArray[Any]:
    for dtype in ("float32", "bfloat16"):
        got, want = (one.scaled_gemm(a, b, out_dtype=dtype) for one in (kernels, REFERENCE))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want))
    return kernels.scaled_gemm(a, b)


@pytest.mark.clause("gemm.ordered", "gemm.output", "gemm.block_dot")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_every_pair(kernels: NumbaBackend, pair: tuple[BlockFormat, BlockFormat]) -> None:
    for (m, n, length), scales in (
        ((1, 1, K), (127, 127)),
        ((5, 7, 2 * K), (0, 254)),
        ((70, 133, 3 * K), (120, 134)),
        ((9, 260, K), (100, 255)),
        ((66, 3, 8 * K), (0, 3)),
        ((6, 40, 8 * K), (185, 200)),
    ):
        a, b = (operand(each, rows, length, scales, rows) for each, rows in zip(pair, (m, n), strict=True))
        check(kernels, a, b)


@pytest.mark.clause("gemm.nan", "conventions.nan")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_codes_of_nan_and_infinity(kernels: NumbaBackend, pair: tuple[BlockFormat, BlockFormat]) -> None:
    for scales in ((120, 134), (180, 255)):
        a, b = (operand(each, 30, 3 * K, scales, i, special=True) for i, each in enumerate(pair))
        out = check(kernels, a, b)
        assert (bits(out)[np.isnan(out)] == CANONICAL_NAN).all()
    assert np.isnan(out).any()


def test_infinities_add_as_ieee_has_it(kernels: NumbaBackend) -> None:
    one, infinity, minus, zero = [0x3C], [0x7C], [0xFC], [0x00]
    rows = [[infinity, one], [infinity, minus], [one, minus], [zero, infinity], [infinity, infinity]]
    a = of(MXFP8_E5M2, [block for row in rows for block in row], [[127, 127]] * len(rows))
    b = of(MXFP8_E5M2, [one, one, one, zero], [[127, 127]] * 2)
    out = check(kernels, a, b)
    np.testing.assert_array_equal(out[:, 0], np.float32([np.inf, np.nan, -np.inf, np.inf, np.inf]))
    np.testing.assert_array_equal(out[:, 1], np.float32([np.inf, np.nan, np.nan, np.nan, np.nan]))


def rounded(value: Fraction) -> np.float32:
    """The float32 nearest to a finite value of moderate size, ties to even."""
    near = np.float32(float(value))
    found = [np.nextafter(near, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)] + [near]
    return min(found, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1))


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("made", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
def test_one_rounding_and_not_two(kernels: NumbaBackend, made: BlockFormat, sign: int) -> None:
    """A sum lies beside a tie of float32 by less than float64 can tell: half a last place and the smallest product."""
    element = made.element
    smallest, power = 1, element.max_code & ~((1 << element.mantissa_bits) - 1)  # 2^emax
    one = element.bias << element.mantissa_bits
    exponent = 2 * element.max_exponent + 24  # of an accumulator whose half last place is 2^(2 emax)
    half = exponent // 2
    for last, tiny in itertools.product((0, 1), (smallest, smallest | 0x80)):
        # The accumulator is 2^exponent, or one last place above: its second block is 2 times 2^emax * 2^emax.
        a = of(
            made,
            [[one | sign], [power | sign] * (2 * last), [power | sign, tiny ^ sign]],
            [[127 + half, 127, 127]],
        )
        b = of(made, [[one], [power] * (2 * last), [power, smallest]], [[127 + exponent - half, 127, 127]])
        unit = Fraction(2) ** (2 * element.unit_exponent)
        total = Fraction(2) ** exponent + (2 * last + 1) * Fraction(2) ** (2 * element.max_exponent)
        total += unit if tiny == smallest else -unit
        want = rounded(-total if sign else total)
        assert check(kernels, a, b)[0, 0] == want
        assert (np.float32(float(total)) != abs(want)) == ((last == 0) == (tiny == smallest)), (
            "float64 would do"
        )


@pytest.mark.clause("gemm.block_dot")
def test_dots_that_float64_does_not_hold(kernels: NumbaBackend) -> None:
    """The largest products of E5M2, cancelled but for the smallest: all bits of 69 matter."""
    top, smallest = 0x7B, 0x01
    for tiny in (0x01, 0x81):
        a = of(MXFP8_E5M2, [[top, top | 0x80, tiny]], [[127]])
        b = of(MXFP8_E5M2, [[top, top, smallest]], [[127]])
        assert check(kernels, a, b)[0, 0] == np.float32(2.0**-32 if tiny == 1 else -(2.0**-32))
    a = of(MXFP8_E5M2, [[top] * 16 + [top | 0x80] * 15 + [0x01]], [[127]])
    b = of(MXFP8_E5M2, [[top] * 31 + [smallest]], [[127]])
    assert check(kernels, a, b)[0, 0] == np.float32(57344.0**2)


@pytest.mark.clause("gemm.block_dot")
@pytest.mark.parametrize("span", [48, 49, 50])
@pytest.mark.parametrize(
    "pair", [(MXFP8_E5M2, MXFP8_E5M2), (MXFP8_E4M3, MXFP8_E5M2)], ids=lambda p: str(p[0])
)
def test_dots_at_the_limit_of_float64(
    kernels: NumbaBackend, pair: tuple[BlockFormat, ...], span: int
) -> None:
    """Products of blocks that span 48 bits together may be added in float64, and those that span 49 may not."""
    ((a, b),) = spanning(span, *pair)
    assert check(kernels, a, b)[0, 0] == 2.0 ** sum(f.element.unit_exponent for f in pair)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize(
    "pair", list(itertools.combinations_with_replacement(SHORT, 2)), ids=lambda pair: "-".join(map(str, pair))
)
def test_scales_at_the_limits_of_float32(
    kernels: NumbaBackend, pair: tuple[BlockFormat, BlockFormat]
) -> None:
    """The largest dots and the smallest ones, where their products with both scales leave float32."""
    operands = []
    for made in pair:
        largest, smallest, negative = made.element.max_code, 1, made.element.sign | 1
        rows = [[largest] * K, [largest] * K, [smallest] + [0] * (K - 1), [negative] + [0] * (K - 1)]
        operands.append(
            pack(np.uint8([[*rows[i], *rows[j]] for i, j in ((0, 3), (1, 2), (2, 3))]), made.element)
        )
    for total in (*range(98, 124, 5), *range(355, 380, 3)):
        for code in (max(0, total - 254), total // 2, min(254, total)):
            a, b = (
                MXArray(codes, np.full((3, 2), scale, np.uint8), (3, 2 * K), 1, format=made)
                for codes, scale, made in zip(operands, (code, total - code), pair, strict=True)
            )
            check(kernels, a, b)


def test_of_quantized_arrays_of_any_strides(kernels: NumbaBackend) -> None:
    rng = np.random.default_rng(14)
    x, w = (rng.standard_t(1, shape).astype(np.float32) for shape in ((96, 64), (96, 130)))
    for made in (MXFP8_E4M3, MXFP8_E5M2):
        spec = OperandSpec(format=made, hadamard=32)
        a, b = kernels.quantize(x, spec, axis=0), kernels.quantize(w, spec, axis=0)
        check(kernels, a, b)
        every_other = MXArray(a.codes[::-2], a.scales[::-2], (96, 32), 0, rotation=a.rotation, format=made)
        check(kernels, every_other, b)


def test_bounded_gives_the_bits_of_ordered(kernels: NumbaBackend) -> None:
    a, b = operand(MXFP8_E4M3, 4, K, (120, 130), 1), operand(MXFP4, 5, K, (120, 130), 2)
    for left, right in ((a, a), (a, b), (b, a)):
        bounded, ordered = (
            kernels.scaled_gemm(left, right, profile=profile)
            for profile in (GemmProfile.BOUNDED, GemmProfile.ORDERED)
        )
        assert bounded.tobytes() == ordered.tobytes()
    high = operand(MXFP8_E4M3, 4, K, (253, 253), 3)
    with pytest.raises(UnsupportedError, match="bounded_max_scale = 252"):
        kernels.scaled_gemm(high, a, profile=GemmProfile.BOUNDED)


@pytest.mark.clause("gemm.tensor_scale")
def test_scales_of_tensors_are_multiplied_one_after_the_other(kernels: NumbaBackend) -> None:
    """That of A first: between the two, a result may overflow or underflow, and each multiplication rounds."""
    a, b = (operand(NVFP4, rows, 4 * K, (0, 126), rows) for rows in (5, 7))
    seen = []
    for t in itertools.product((1.0, 1 / 3, 1.5e-45, 2e38, 3e-20), repeat=2):
        left, right = (replace(q, tensor_scale=np.float32([one])) for q, one in zip((a, b), t, strict=True))
        seen.append(check(kernels, left, kernels.prepare(right)))
    assert np.isinf(seen).any()
    assert (np.array(seen) == 0).any()
