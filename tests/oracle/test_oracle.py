"""The oracle against independent results: published vectors, ml_dtypes, NumPy's IEEE arithmetic, hand calculation."""

import ast
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracle
import strategies
from oracle import E2M1, E4M3, E5M2, INT8, RULES, UE4M3, UE5M3, Element, Rounding

NAN = oracle.NAN32
E2M3, E3M2, E1M2 = (oracle.ELEMENTS[name] for name in ("E2M3", "E3M2", "E1M2"))
DTYPES: dict[str, Any] = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
}
ELEMENTS = pytest.mark.parametrize(
    "element", [oracle.ELEMENTS[name] for name in DTYPES], ids=lambda e: e.name
)


def f32(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def test_the_oracle_imports_nothing_but_python() -> None:
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module or ""]
            for name in names:
                assert name.partition(".")[0] in {"oracle", *sys.stdlib_module_names}, (path, name)


# ---- float32 and bfloat16 ----


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


# ---- element formats ----


@ELEMENTS
def test_every_code_decodes_as_ml_dtypes_does(element: Element) -> None:
    codes = np.arange(2 * element.sign, dtype=np.uint8)
    decoded = codes.view(DTYPES[element.name]).astype(np.float64).tolist()
    for code, number in zip(codes.tolist(), decoded, strict=True):
        kind = element.kind(code)
        assert kind == ("nan" if np.isnan(number) else "finite" if np.isfinite(number) else "infinite")
        if kind == "finite":
            assert float(element.value(code)) == number
            assert not element.value(code) or (number < 0) == (code >= element.sign)
        else:
            with pytest.raises(ValueError, match="not a number"):
                element.value(code)
    with pytest.raises(ValueError, match="is outside"):
        element.kind(2 * element.sign)


@pytest.mark.parametrize(
    ("element", "bits", "largest_exponent", "largest", "least_normal", "step", "top", "prescale"),
    [
        (E2M1, 4, 2, 6, 1, Fraction(1, 2), 0x7, Fraction(3, 4)),
        (E4M3, 8, 8, 448, Fraction(1, 2**6), Fraction(1, 2**9), 0x7E, Fraction(7, 8)),
        (E5M2, 8, 15, 57344, Fraction(1, 2**14), Fraction(1, 2**16), 0x7B, Fraction(7, 8)),
        (E2M3, 6, 2, Fraction(15, 2), 1, Fraction(1, 8), 0x1F, Fraction(15, 16)),
        (E3M2, 6, 4, 28, Fraction(1, 4), Fraction(1, 16), 0x1F, Fraction(7, 8)),
        (E1M2, 4, 0, Fraction(7, 4), 1, Fraction(1, 4), 0x7, Fraction(7, 8)),
    ],
)
def test_the_numbers_of_a_grid(
    element: Element,
    bits: int,
    largest_exponent: int,
    largest: Fraction,
    least_normal: Fraction,
    step: Fraction,
    top: int,
    prescale: Fraction,
) -> None:
    """OCP MX v1.0, section 5.3; OCP 8-bit Floating Point v1.0."""
    assert (element.bits, element.sign) == (bits, 1 << (bits - 1))
    assert (element.largest_exponent, element.largest) == (largest_exponent, largest)
    assert element.value(1 << element.mantissa_bits) == least_normal
    assert element.value(1) == step
    assert (element.top, element.prescale) == (top, prescale)


@ELEMENTS
def test_nearest_even_is_the_cast_of_ml_dtypes_inside_the_range(element: Element) -> None:
    rng = np.random.default_rng(8)
    grid = np.array([float(g) for g in element.grid])
    turns = np.concatenate([grid, (grid[:-1] + grid[1:]) / 2]).astype(np.float32)
    near = np.concatenate([np.nextafter(turns, np.float32(d)) for d in (0, 1e9)])
    spread = np.ldexp(rng.uniform(1, 2, 2000), rng.integers(-20, 16, 2000)).astype(np.float32)
    values = np.concatenate([turns, near, spread])
    values = values[values <= float(element.largest)]
    expected = values.astype(DTYPES[element.name]).view(np.uint8).tolist()
    got = [oracle.round_element(Fraction(float(v)), "rne", element=element) for v in values]
    assert got == expected


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
def test_ties_of_e2m1(tie: float, rne: float, rna: float, rtz: float) -> None:
    modes: tuple[tuple[Rounding, float], ...] = (("rne", rne), ("rna", rna), ("rtz", rtz))
    ulp = Fraction(1, 2**23)
    for mode, value in modes:
        assert oracle.element_value(oracle.round_element(Fraction(tie), mode)) == value
        lower = oracle.element_value(oracle.round_element(Fraction(tie) - ulp, mode))
        upper = oracle.element_value(oracle.round_element(Fraction(tie) + ulp, mode))
        assert lower < tie
        assert upper < tie if mode == "rtz" else upper > tie


@pytest.mark.parametrize(
    ("element", "v", "rne", "rna", "rtz"),
    [
        # Above 1 the codes of E4M3 are 1/8 apart, from 0x38 on; those of E5M2 are 1/4 apart, from 0x3C on.
        (E4M3, Fraction(17, 16), 0x38, 0x39, 0x38),
        (E4M3, Fraction(19, 16), 0x3A, 0x3A, 0x39),
        (E5M2, Fraction(9, 8), 0x3C, 0x3D, 0x3C),
        (E5M2, Fraction(11, 8), 0x3E, 0x3E, 0x3D),
        # Half of the smallest subnormal, and between the subnormals and the normal numbers.
        (E4M3, Fraction(1, 2**10), 0, 1, 0),
        (E5M2, Fraction(1, 2**17), 0, 1, 0),
        (E4M3, Fraction(15, 2**10), 8, 8, 7),
        (E5M2, Fraction(7, 2**17), 4, 4, 3),
        # The last two grid points are 416 and 448, 49152 and 57344.
        (E4M3, Fraction(432), 0x7E, 0x7E, 0x7D),
        (E5M2, Fraction(53248), 0x7A, 0x7B, 0x7A),
        # ml_dtypes makes NaN of 465 and infinity of 61440: here both saturate.
        (E4M3, Fraction(465), 0x7E, 0x7E, 0x7E),
        (E5M2, Fraction(61440), 0x7B, 0x7B, 0x7B),
    ],
)
def test_roundings_worked_by_hand(element: Element, v: Fraction, rne: int, rna: int, rtz: int) -> None:
    assert oracle.round_element(v, "rne", element=element) == rne
    assert oracle.round_element(v, "rna", element=element) == rna
    assert oracle.round_element(v, "rtz", element=element) == rtz


@ELEMENTS
@pytest.mark.parametrize("mode", ["rne", "rna", "rtz", "sr"])
def test_grid_points_are_kept_and_the_top_saturates(mode: Rounding, element: Element) -> None:
    for code in range(element.top + 1):
        for r in (0, 0xFFFF):
            assert oracle.round_element(element.value(code), mode, r, element=element) == code
    assert oracle.round_element(Fraction(10**9), mode, 0, element=element) == element.top


@ELEMENTS
def test_stochastic_rounding_goes_up_for_exactly_floor_f_2R_integers(element: Element) -> None:
    R = 4
    for low in {0, 1, element.top // 2, element.top - 1}:
        below, above = element.grid[low], element.grid[low + 1]
        for part in range(11):
            v = below + (above - below) * Fraction(part, 11)
            codes = [oracle.round_element(v, "sr", r, R, element) for r in range(2**R)]
            assert codes == sorted(codes)  # the largest integers go up
            assert codes.count(low + 1) == (Fraction(part, 11) * 2**R).__floor__()
            assert set(codes) <= {low, low + 1}


def test_stochastic_rounding_needs_its_integer() -> None:
    for r, R in ((None, 16), (-1, 16), (1 << 16, 16), (0, 0), (0, 23)):
        with pytest.raises(ValueError, match="stochastic rounding needs"):
            oracle.round_element(Fraction(1, 3), "sr", r, R)


# ---- scales ----


def test_all_256_scales() -> None:
    decoded = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert oracle.scale_value(255) is None
    assert np.isnan(decoded[255])
    for byte in range(255):
        value = oracle.scale_value(byte)
        assert value is not None
        assert float(value) == decoded[byte]


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


@pytest.mark.parametrize(
    ("element", "rceil", "even"),
    [
        (E2M1, 0x400001, 0x600000),
        (E4M3, 0x600001, 0x780000),
        (E5M2, 0x600001, 0x700000),
        (E2M3, 0x700001, 0x780000),
        (E3M2, 0x600001, 0x700000),
        (E1M2, 0x600001, 0x700000),
    ],
)
def test_the_mantissas_at_which_the_rules_turn(element: Element, rceil: int, even: int) -> None:
    turns = {"floor": 1 << 23, "ceil": 1, "rceil": rceil, "even": even}
    near = {m + d for m in (0, *turns.values()) for d in (-2, -1, 0, 1, 2)}
    mantissas = sorted(m for m in near if 0 <= m < 1 << 23)
    for biased in (0, 1, 2, element.largest_exponent, element.largest_exponent + 1, 30, 127, 253, 254):
        for m in mantissas:
            if biased == m == 0:
                continue
            for rule in RULES:
                low = biased - element.largest_exponent + (m >= turns[rule])
                want = min(max(low, 0), 254)
                assert oracle.shared_scale(biased << 23 | m, rule, element) == want


@pytest.mark.parametrize("bits", [0, oracle.INF32, NAN, oracle.SIGN32 | 0x3F800000])
def test_a_scale_needs_a_finite_positive_magnitude(bits: int) -> None:
    with pytest.raises(ValueError, match="finite positive amax"):
        oracle.shared_scale(bits, "floor")


def test_int8_is_twos_complement_over_64() -> None:
    codes = np.arange(256, dtype=np.uint8)
    assert [INT8.value(code) for code in codes.tolist()] == [
        Fraction(n, 64) for n in codes.view(np.int8).tolist()
    ]
    assert (INT8.largest, INT8.top, INT8.largest_exponent) == (Fraction(127, 64), 127, 0)
    assert (INT8.prescale, INT8.fraction_bits) == (Fraction(127, 128), 6)
    assert [INT8.code(m, negative=True) for m in (0, 1, 127)] == [0, 255, 129]
    assert [INT8.negated(code) for code in (0, 1, 255, 128)] == [0, 255, 1, 128]


def test_scales_with_a_mantissa() -> None:
    """UE4M3 is float8_e4m3fn without its sign; UE5M3 has its 256 codes in the range of five exponent bits."""
    decoded = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64).tolist()
    assert [float(value) for value in UE4M3.values] == decoded
    assert (UE4M3.nan, UE4M3.one, UE4M3.largest) == (0x7F, 0x38, 448)
    assert (UE5M3.nan, UE5M3.one, UE5M3.largest) == (0xFF, 0x78, 114688)
    assert (UE4M3.values[:2], UE5M3.values[:2]) == ([0, Fraction(1, 2**9)], [0, Fraction(1, 2**17)])
    assert [oracle.scale_value(byte, UE4M3) for byte in (0x7F, 0x80, 0xFF)] == [None] * 3
    for scale in (UE4M3, UE5M3):
        for code, (low, high) in enumerate(pairwise(scale.values)):
            tie = (low + high) / 2
            assert scale.nearest(tie) == code + code % 2
            assert (scale.nearest(tie - low / 2**24), scale.nearest(tie + low / 2**24)) in (
                (code, code + 1),
                (0, 0),
            )
        assert scale.nearest(scale.largest * 1000) == scale.nan - 1


def test_tensor_scales_worked_by_hand() -> None:
    assert oracle.tensor_scale(f32(2688.0), E2M1, UE4M3) == oracle.ONE == oracle.tensor_scale(0, E2M1, UE4M3)
    assert oracle.tensor_scale(f32(260.0), E2M1, UE4M3) == int(np.float32(260 / 2688).view(np.uint32))
    # Units of 2^-149: 1344 is half of one, which ties to 0 and is held at 1; 4032 is 1.5, 6720 is 2.5.
    assert [oracle.tensor_scale(a, E2M1, UE4M3) for a in (1, 1344, 4032, 6720, 6721)] == [1, 1, 2, 2, 3]
    assert oracle.tensor_amax([f32(-3.0), NAN, oracle.INF32, f32(2.0)]) == f32(3.0)
    assert oracle.tensor_amax([NAN]) == oracle.tensor_amax([]) == 0


def test_blocks_of_nvfp4_worked_by_hand() -> None:
    def quantize(values: list[float], tensor: float = 1.0) -> tuple[int, list[int]]:
        return oracle.quantize_block(
            [f32(v) for v in values], "nearest", "rne", scale=UE4M3, tensor=f32(tensor)
        )

    assert quantize([6.0, -0.25, 2.5, -0.0]) == (0x38, [7, 8, 4, 8])
    # Under t = 1/2 the same block has X = 2. A scale of 1/16 above 1 ties to 1, and 6.375 saturates.
    assert quantize([6.0, -0.25, 2.5, -0.0], 0.5) == (0x40, [7, 8, 4, 8])
    assert quantize([6.375, -6.0]) == (0x38, [7, 15])
    # Half of the smallest scale is 0, and then all is 0; more than that is the smallest.
    assert quantize([6 * 2.0**-10, -(2.0**-10)]) == (0, [0, 8])
    assert quantize([7 * 2.0**-10, -(2.0**-10)]) == (1, [6, 9])
    assert quantize([float("inf"), 1.0]) == (0x7F, [0, 0])


# ---- blocks ----


@ELEMENTS
def test_every_dequantized_value(element: Element) -> None:
    count = 2 * element.sign
    elements = np.arange(count, dtype=np.uint8).view(DTYPES[element.name]).astype(np.float64)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(all="ignore"):
        real = scales[:, None] * elements
        as_f32 = real.astype(np.float32)
        as_bf16 = as_f32.astype(ml_dtypes.bfloat16)
    for byte in (0, 1, 2, 3, 9, 10, 100, 127, 236, 237, 238, 246, 253, 254, 255):
        for code in range(count):
            f32_bits = oracle.dequantize_f32(byte, code, element)
            bf16_bits = oracle.dequantize_bf16(byte, code, element)
            if np.isnan(real[byte, code]):
                assert (f32_bits, bf16_bits) == (NAN, oracle.NAN16)
            else:
                assert f32_bits == as_f32[byte, code].view(np.uint32)
                assert bf16_bits == as_bf16[byte, code].view(np.uint16)


def test_dequantized_to_bfloat16_the_smallest_values_round() -> None:
    # 2^-9 at byte 0 is 2^-136; the smallest bfloat16 is 2^-133, and halves of it tie to even.
    assert [oracle.dequantize_bf16(0, code, E4M3) for code in (1, 4, 5, 8, 12)] == [0, 0, 1, 1, 2]
    assert oracle.dequantize_bf16(3, 1, E4M3) == 1
    assert oracle.dequantize_bf16(0, 0x81, E5M2) == oracle.SIGN16
    assert oracle.dequantize_f32(0, 1, E5M2) == 1 << 6  # 2^-143 in units of 2^-149


def test_blocks_of_e2m1_worked_by_hand() -> None:
    def quantize(values: list[float], rule: oracle.Rule = "floor") -> tuple[int, list[int]]:
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


def test_blocks_of_fp8_worked_by_hand() -> None:
    def quantize(values: list[float], element: Element, **policy: Any) -> list[tuple[int, list[int]]]:
        bits = [f32(v) for v in values]
        return [oracle.quantize_block(bits, rule, "rne", element=element, **policy) for rule in RULES]

    # 480 is 1.875 * 256: FLOOR and EVEN keep X = 1 and saturate to 448; CEIL and RCEIL give 240 at X = 2.
    assert quantize([480, -1.0, -0.0, 1e-9], E4M3) == [
        (127, [0x7E, 0xB8, 0x80, 0]),
        (128, [0x77, 0xB0, 0x80, 0]),
        (128, [0x77, 0xB0, 0x80, 0]),
        (127, [0x7E, 0xB8, 0x80, 0]),
    ]
    # 496 is where EVEN turns; 250 ties between 240 and 256 at no X, so 500 / 2 goes to 256.
    assert [byte for byte, _ in quantize([496], E4M3)] == [127, 128, 128, 128]
    assert quantize([500], E4M3)[3] == (128, [0x78])
    # 61440 is 1.875 * 2^15: EVEN of E5M2 turns there, and 61440 / 2 = 30720 ties to 32768.
    assert quantize([61440, -(2.0**-16), -(2.0**-18)], E5M2) == [
        (127, [0x7B, 0x81, 0x80]),
        (128, [0x78, 0x80, 0x80]),
        (128, [0x78, 0x80, 0x80]),
        (128, [0x78, 0x80, 0x80]),
    ]
    # Under FLOOR the prescale of 7/8 brings the last float32 below 512 X to just below 448.
    top = f32(512.0) - 1
    for r, code in ((0, 0x7D), (1, 0x7E)):
        got = oracle.quantize_block([top], "floor", "sr", r=[r], R=20, prescale=True, element=E4M3)
        assert got == (127, [code])
    # The smallest scale is 2^-127. Zeros keep their sign under either policy, a NaN spoils all codes.
    assert quantize([2.0**-127, -(2.0**-149)], E4M3)[0] == (0, [0x38, 0x80])
    assert quantize([0.0, -0.0], E5M2, zero_scale=127) == [(127, [0, 0x80])] * 4
    assert quantize([1.0, float("nan")], E5M2) == [(255, [0, 0])] * 4


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
@given(element=st.sampled_from(list(oracle.ELEMENTS.values())), data=st.data())
def test_nearest_means_no_element_is_nearer(element: Element, data: st.DataObject) -> None:
    bits = data.draw(strategies.finite_blocks(element=element)).view(np.uint32).tolist()
    values = element.grid
    for rule in RULES:
        byte, codes = oracle.quantize_block(bits, rule, "rne", element=element)
        scale = oracle.scale_value(byte)
        assert scale is not None
        for b, code in zip(bits, codes, strict=True):
            v = abs(oracle.f32_value(b)) / scale
            low = next(i for i in range(element.top + 1) if code == element.code(i, negative=b >> 31 == 1))
            near = values[max(low - 1, 0) : low + 2]
            assert abs(v - values[low]) == min(abs(v - value) for value in near)


@ELEMENTS
def test_crafted_blocks_reach_every_scale_every_code_and_every_tie(element: Element) -> None:
    blocks, names = strategies.crafted_blocks(element), strategies.crafted_names(element)
    assert blocks.shape == (len(names), 32)
    assert len(set(names)) == len(names)
    rows = blocks.view(np.uint32).tolist()
    quantized = [oracle.quantize_block(row, "floor", "rne", element=element) for row in rows]
    highest = 254 - element.largest_exponent
    assert {byte for byte, _ in quantized} == {*range(highest + 1), 255}
    numbers = {code | sign for code in range(element.top + 1) for sign in (0, element.sign)}
    assert {code for _, codes in quantized for code in codes} == numbers
    ties = [(low + high) / 2 for low, high in zip(element.grid, element.grid[1:], strict=False)]
    at_scale_1 = {
        b & 0x7FFFFFFF for row, (byte, _) in zip(rows, quantized, strict=True) if byte == 127 for b in row
    }
    for tie in ties:
        at = oracle.round_f32(tie)
        assert {at - 1, at, at + 1} <= at_scale_1, float(tie)
