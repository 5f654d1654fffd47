"""The oracle against independent results: published vectors, ml_dtypes, NumPy's IEEE arithmetic, hand calculation."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import oracle
import strategies
from oracle import RULES, Rounding, Rule

NAN = oracle.NAN32


def f32(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def same(a: int, b: int) -> bool:
    """Equal bits, or both NaN."""
    return a == b or (a & 0x7FFFFFFF > oracle.INF32 and b & 0x7FFFFFFF > oracle.INF32)


def float32_patterns(seed: int, n: int) -> NDArray[np.uint32]:
    """Patterns over all exponents, a third of them near the bottom or the top; special values come first."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32)
    bits[::6] &= 0x80FFFFFF
    bits[1::6] |= 0x7E800000
    special = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, strategies.FLT_MAX, oracle.INF32, NAN, 0x7F800001]
    pairs = [(x ^ s) for x in special for s in (0, oracle.SIGN32)]
    bits[: len(pairs)] = pairs
    return bits


def test_float32_values_are_numpys() -> None:
    for bits in float32_patterns(1, 5000).tolist():
        number = float(np.uint32(bits).view(np.float32))
        assert oracle.is_nonfinite(bits) == (not np.isfinite(number))
        if np.isfinite(number):
            assert oracle.f32_value(bits) == Fraction(number)


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_float32_arithmetic_is_ieee(name: str) -> None:
    a = float32_patterns(2, 20_000)
    b = np.concatenate([np.roll(a[:18], 5), float32_patterns(3, 20_000)[18:]])
    b[18::4] = a[18::4] ^ np.random.default_rng(4).integers(0, 2**27, b[18::4].size, dtype=np.uint32)
    pairs = [(x, y) for x in a[:18].tolist() for y in a[:18].tolist()]  # every pair of special values
    pairs += list(zip(a.tolist(), b.tolist(), strict=True))
    x, y = np.array(pairs, np.uint32).T.copy().view(np.float32)
    numpy_op = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    scalar_op = {"add": oracle.f32_add, "sub": oracle.f32_sub, "mul": oracle.f32_mul}[name]
    with np.errstate(all="ignore"):
        expected = numpy_op(x, y).view(np.uint32).tolist()
    for (p, q), bits in zip(pairs, expected, strict=True):
        result = scalar_op(p, q)
        assert same(result, bits), f"{name}({p:#010x}, {q:#010x}) = {result:#010x}, IEEE {bits:#010x}"
        assert not (result & 0x7FFFFFFF > oracle.INF32) or result == NAN


def test_rounding_to_float32_is_the_float64_cast() -> None:
    rng = np.random.default_rng(5)
    half = float32_patterns(6, 6000).view(np.float32)
    half = half[np.isfinite(half)].astype(np.float64)
    ulp_exponent = np.maximum(np.frexp(half)[1] - 1, -126) - 23
    halfway = half + np.copysign(np.ldexp(0.5, ulp_exponent), half)
    wide = rng.standard_normal(6000) * 2.0 ** rng.integers(-160, 135, 6000)
    values = np.concatenate([half, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, np.inf), wide])
    values = values[values != 0]
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32).view(np.uint32).tolist()
    for value, bits in zip(values.tolist(), expected, strict=True):
        assert oracle.round_f32(Fraction(value)) == bits, value.hex()


def test_rounding_edges() -> None:
    tiny = Fraction(1, 2**149)
    overflow = Fraction(2**25 - 1) * 2**103  # halfway between FLT_MAX and 2^128
    assert oracle.round_f32(Fraction(0)) == 0
    assert oracle.round_f32(tiny / 2) == 0
    assert oracle.round_f32(-tiny / 2) == oracle.SIGN32
    assert oracle.round_f32(tiny * 3 / 2) == 2
    assert oracle.round_f32(overflow) == oracle.INF32
    assert oracle.round_f32(overflow - 1) == strategies.FLT_MAX
    assert oracle.round_bf16(-Fraction(1, 2**134)) == oracle.SIGN16
    assert oracle.round_bf16(Fraction(511) * 2**119) == oracle.INF16
    assert oracle.round_bf16(Fraction(511) * 2**119 - 1) == 0x7F7F
    # Rounding to float32 on the way would land on a bfloat16 tie and then go down to 1.
    assert oracle.round_bf16(1 + Fraction(1, 2**8) + Fraction(1, 2**30)) == 0x3F81
    with pytest.raises(ValueError, match="no real number"):
        oracle.f32_value(NAN)


def test_bfloat16_is_ml_dtypes() -> None:
    bits = float32_patterns(7, 6000)
    bits[20:3000] &= 0xFFFF8000  # exact values and ties
    with np.errstate(all="ignore"):
        expected = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).tolist()
    for b, half in zip(bits.tolist(), expected, strict=True):
        result = oracle.f32_bits_to_bf16_bits(b)
        if b & 0x7FFFFFFF > oracle.INF32:
            assert result == oracle.NAN16
            continue
        assert result == half, hex(b)
        if not oracle.is_nonfinite(b) and b & 0x7FFFFFFF:
            assert oracle.round_bf16(oracle.f32_value(b)) == half


def test_all_sixteen_elements() -> None:
    decoded = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert [float(oracle.element_value(c)) for c in range(16)] == decoded.tolist()
    assert [float(oracle.element_value(c)) for c in range(8)] == list(strategies.GRID)


def test_all_256_scales() -> None:
    decoded = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert oracle.scale_value(255) is None
    assert np.isnan(decoded[255])
    for byte in range(255):
        value = oracle.scale_value(byte)
        assert value is not None
        assert float(value) == decoded[byte]


def test_every_dequantized_value() -> None:
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    real = scales[:, None] * elements
    with np.errstate(over="ignore"):
        as_f32 = real.astype(np.float32)
        as_bf16 = as_f32.astype(ml_dtypes.bfloat16)
    for byte in range(256):
        for code in range(16):
            f32_bits, bf16_bits = oracle.dequantize_f32(byte, code), oracle.dequantize_bf16(byte, code)
            if byte == 255:
                assert (f32_bits, bf16_bits) == (NAN, oracle.NAN16)
            else:
                assert f32_bits == as_f32[byte, code].view(np.uint32)
                assert bf16_bits == as_bf16[byte, code].view(np.uint16)
    assert oracle.dequantize_f32(253, 5) != oracle.INF32 == oracle.dequantize_f32(253, 6)
    assert oracle.dequantize_f32(254, 3) != oracle.INF32 == oracle.dequantize_f32(254, 4)


def test_nearest_even_is_the_ml_dtypes_cast() -> None:
    rng = np.random.default_rng(8)
    near = np.array(strategies.TIES, np.float32)
    values = np.concatenate(
        [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(9)), rng.uniform(0, 8, 4000)]
    ).astype(np.float32)
    expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist()
    assert [oracle.round_element(Fraction(float(v)), "rne") for v in values] == expected


@pytest.mark.parametrize(
    ("tie", "rne", "rna", "rtz"),
    [
        (0.25, 0, 0.5, 0),
        (0.75, 1, 1, 0.5),
        (1.25, 1, 1.5, 1),
        (1.75, 2, 2, 1.5),
        (2.5, 2, 3, 2),
        (3.5, 4, 4, 3),
        (5, 4, 6, 4),
    ],
)
def test_ties(tie: float, rne: float, rna: float, rtz: float) -> None:
    modes: tuple[tuple[Rounding, float], ...] = (("rne", rne), ("rna", rna), ("rtz", rtz))
    ulp = Fraction(1, 2**23)
    for mode, value in modes:
        assert oracle.element_value(oracle.round_element(Fraction(tie), mode)) == value
        lower = oracle.element_value(oracle.round_element(Fraction(tie) - ulp, mode))
        upper = oracle.element_value(oracle.round_element(Fraction(tie) + ulp, mode))
        assert lower < tie
        assert upper < tie if mode == "rtz" else upper > tie


@pytest.mark.parametrize("mode", ["rne", "rna", "rtz", "sr"])
def test_grid_points_are_kept_and_the_top_saturates(mode: Rounding) -> None:
    for code in range(8):
        for r in (0, 0xFFFF):
            assert oracle.round_element(oracle.element_value(code), mode, r) == code
    assert oracle.round_element(Fraction(10**9), mode, 0) == 7


def test_stochastic_rounding_goes_up_for_exactly_floor_f_2R_integers() -> None:
    R = 5
    for numerator in range(6 * 97):
        v = Fraction(numerator, 97)
        low = max(c for c in range(8) if oracle.element_value(c) <= v)
        below, above = oracle.element_value(low), oracle.element_value(low + 1)
        codes = [oracle.round_element(v, "sr", r, R) for r in range(2**R)]
        assert codes == sorted(codes)  # the largest integers go up
        assert codes.count(low + 1) == ((v - below) / (above - below) * 2**R).__floor__()
        assert codes.count(low) == 2**R - codes.count(low + 1)


def test_stochastic_rounding_needs_its_integer() -> None:
    for r, R in ((None, 16), (-1, 16), (1 << 16, 16), (0, 0), (0, 23)):
        with pytest.raises(ValueError, match="stochastic rounding needs"):
            oracle.round_element(Fraction(1, 3), "sr", r, R)


@pytest.mark.parametrize(
    ("amax", "floor", "ceil", "rceil", "even"),
    [
        # 1.0 / 4 = 2^-2 is byte 125; each rule leaves it at its own turn.
        (1.0, 125, 125, 125, 125),
        (1.0 + 2.0**-23, 125, 126, 125, 125),
        (1.5, 125, 126, 125, 125),
        (1.5 + 2.0**-23, 125, 126, 126, 125),
        (1.75 - 2.0**-23, 125, 126, 126, 125),
        (1.75, 125, 126, 126, 126),
        (2.0 - 2.0**-23, 125, 126, 126, 126),
        (2.0, 126, 126, 126, 126),
        (6.0, 127, 128, 127, 127),
        (float(np.finfo(np.float32).max), 252, 253, 253, 253),
        (2.0**127, 252, 252, 252, 252),
        (2.0**-125, 0, 0, 0, 0),
        (2.0**-125 * 1.75, 0, 1, 1, 1),
        (2.0**-126 * 1.75, 0, 0, 0, 0),
        (2.0**-149, 0, 0, 0, 0),
    ],
)
def test_scale_rules_at_known_magnitudes(amax: float, floor: int, ceil: int, rceil: int, even: int) -> None:
    assert [oracle.shared_scale(f32(amax), rule) for rule in RULES] == [floor, ceil, rceil, even]


def test_scale_rules_by_meaning_are_the_rules_by_bit_fields() -> None:
    for E in range(255):
        for m in (*strategies.AMAX_MANTISSAS, 0x5FFFFE, 0x600001, 0x7FFFFE):
            if E == m == 0:
                continue
            bumps = {"floor": 0, "ceil": m != 0, "rceil": m > 0x400000, "even": m >= 0x600000}
            for rule in RULES:
                expected = 0 if E <= 1 else max(E - 2 + bumps[rule], 0)
                assert oracle.shared_scale(E << 23 | m, rule) == expected <= 253


@pytest.mark.parametrize("bits", [0, oracle.INF32, NAN, oracle.SIGN32 | 0x3F800000])
def test_a_scale_needs_a_finite_positive_magnitude(bits: int) -> None:
    with pytest.raises(ValueError, match="finite positive amax"):
        oracle.shared_scale(bits, "floor")


def test_blocks_worked_by_hand() -> None:
    def quantize(values: list[float], rule: Rule = "floor") -> tuple[int, list[int]]:
        return oracle.quantize_block([f32(v) for v in values], rule, "rne")

    # X = 4 / 4 = 1: values meet the grid as they are; -0 and negative underflow keep their sign.
    assert quantize([4, -0.25, 0.75, -1.25, 2.5, -3.5, 0.0, -0.0]) == (127, [6, 8, 2, 10, 4, 14, 0, 8])
    # amax 7.5: floor saturates it to 6 at X = 1; the other rules double X and round 3.75 to 4.
    assert quantize([7.5, 1.0]) == (127, [7, 2])
    assert [quantize([7.5, 1.0], rule) for rule in RULES[1:]] == [(128, [6, 1])] * 3
    # FLT_MAX is nearly 2^128: 8 at X = 2^125, 4 at X = 2^126, which decodes to infinity.
    largest = float(np.finfo(np.float32).max)
    assert quantize([largest, -largest]) == (252, [7, 15])
    assert quantize([largest, -largest], "ceil") == (253, [6, 14])
    # The smallest scale is 2^-127: 2^-127 is 1, 2^-128 is 0.5, 2^-129 ties to 0, a subnormal.
    assert quantize([2.0**-127, -(2.0**-128), 2.0**-129, -(2.0**-149)]) == (0, [2, 9, 0, 8])
    # A tile is one long block.
    assert quantize([4.0] + [0.5] * 1023) == (127, [6] + [1] * 1023)


def test_zero_blocks_keep_signs_and_take_the_policys_byte() -> None:
    zeros = [0, oracle.SIGN32] * 16
    for byte in (0, 127):
        assert oracle.quantize_block(zeros, "even", "rne", zero_scale=byte) == (byte, [0, 8] * 16)


@pytest.mark.parametrize("value", [*strategies.NAN_PAYLOADS, *strategies.INFINITIES])
def test_nonfinite_blocks(value: int) -> None:
    for position in (0, 17, 31):
        bits = [0xBF800000] * 32
        bits[position] = value
        assert oracle.quantize_block(bits, "rceil", "rna") == (255, [0] * 32)


def test_prescale_rounds_to_float32_before_it_rounds_to_the_grid() -> None:
    # fl32(5/3) is below 5/3, so 3/4 of it is below the tie 1.25; in float32 it is the tie.
    x = f32(5 / 3)
    assert oracle.f32_value(x) * Fraction(3, 4) < Fraction(5, 4)
    bits = [f32(4.0), x, oracle.SIGN32 | f32(1.0), f32(2 / 3)]
    assert oracle.quantize_block(bits, "floor", "rna", prescale=True) == (127, [5, 3, 10, 1])
    assert oracle.quantize_block(bits, "floor", "rtz", prescale=True) == (127, [5, 2, 9, 1])
    assert oracle.quantize_block(bits, "floor", "rna") == (127, [6, 3, 10, 1])


def test_every_element_rounds_by_its_own_integer() -> None:
    bits = [
        f32(v) for v in (4.0, 5.0, -5.0, 0.25, -0.25)
    ]  # all but the first lie half way: up from r = 2^(R-1)
    for r, codes in (([0, 8, 7, 7, 8], [6, 7, 14, 0, 9]), ([15, 7, 8, 8, 7], [6, 6, 15, 1, 8])):
        assert oracle.quantize_block(bits, "floor", "sr", r=r, R=4) == (127, codes)


def test_the_prescale_keeps_floors_blocks_from_saturating() -> None:
    top = f32(8.0) - 1  # 8 - 2^-21; 3/4 of it in float32 is 6 - 2^-21, so f = 1 - 2^-22
    cases = [(0, 16, 6), (1, 16, 7), (0, 22, 6), (1, 22, 7), (2**22 - 1, 22, 7)]
    for r, R, code in cases:
        assert oracle.quantize_block([top], "floor", "sr", prescale=True, r=[r], R=R) == (127, [code])
    for r in (0, 1, 65535):
        assert oracle.quantize_block([top], "floor", "sr", r=[r]) == (127, [7])
        assert oracle.quantize_block([f32(4.0)], "floor", "sr", prescale=True, r=[r]) == (127, [5])


@settings(max_examples=60, deadline=None)
@given(block=strategies.finite_blocks())
def test_nearest_means_no_element_is_nearer(block: NDArray[np.float32]) -> None:
    bits = block.view(np.uint32).tolist()
    for rule in RULES:
        byte, codes = oracle.quantize_block(bits, rule, "rne")
        scale = oracle.scale_value(byte)
        assert scale is not None
        for b, code in zip(bits, codes, strict=True):
            x = oracle.f32_value(b)
            errors = [abs(x - oracle.element_value(c) * scale) for c in range(16)]
            assert errors[code] == min(errors)
            assert code >> 3 == b >> 31


def test_crafted_blocks_reach_every_scale_and_every_code() -> None:
    blocks, names = strategies.crafted_blocks(), strategies.crafted_names()
    assert blocks.dtype == np.float32
    assert blocks.shape == (len(names), 32)
    assert len(set(names)) == len(names)
    rows = blocks.view(np.uint32).tolist()
    for rule, top in (("floor", 252), ("ceil", 253)):
        quantized = [oracle.quantize_block(row, rule, "rne") for row in rows]  # type: ignore[arg-type]
        assert {byte for byte, _ in quantized} == {*range(top + 1), 255}
        seen = {code for _, codes in quantized for code in codes}
        assert seen == (set(range(16)) - ({7, 15} if rule == "ceil" else set()))


def test_crafted_blocks_hit_every_tie_from_both_sides() -> None:
    seen = set()
    for row in strategies.crafted_blocks().view(np.uint32).tolist():
        if any(map(oracle.is_nonfinite, row)):
            continue
        byte, _ = oracle.quantize_block(row, "floor", "rne")
        for tie in strategies.TIES:
            at = oracle.round_f32(Fraction(tie) * Fraction(2) ** (byte - 127))
            seen |= {(byte, tie, d) for d in (-1, 0, 1) if {at + d, (at + d) | oracle.SIGN32} & set(row)}
    assert seen == {(byte, tie, d) for byte in range(253) for tie in strategies.TIES for d in (-1, 0, 1)}
