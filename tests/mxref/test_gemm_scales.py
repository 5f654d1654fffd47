"""Scaled GEMM of operands whose scales have a mantissa, or whose tensors have one, against the oracle."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import oracle
from differential import bits_of
from mxref import MXArray, OperandSpec, quantize, scaled_gemm
from mxref.errors import UnsupportedError
from mxref.formats import E2M1, E2M3, E4M3, E5M2, INT8, MXFP4, MXFP8_E5M2, NVFP4, UE4M3, UE5M3, BlockFormat
from mxref.gemm import bounded_tolerance
from mxref.layouts.packed import pack

SIXTEEN = replace(MXFP4, name="mxfp4_k16", k=16)
SINGLE = BlockFormat("e2m1_ue5m3", E2M1, UE5M3, k=16)
WIDE = BlockFormat("e2m3_ue4m3", E2M3, UE4M3, k=16, tensor_scale=True)
BYTES = BlockFormat("int8_ue4m3", INT8, UE4M3, k=16, tensor_scale=True)
FP8 = BlockFormat("e4m3_ue5m3", E4M3, UE5M3, k=16)
FP8_E5M2 = replace(MXFP8_E5M2, name="mxfp8_e5m2_k16", k=16)
PAIRS = [
    (NVFP4, NVFP4), (NVFP4, SIXTEEN), (SIXTEEN, NVFP4), (SINGLE, NVFP4), (SINGLE, SINGLE), (WIDE, NVFP4), (WIDE, WIDE),
    (BYTES, SINGLE), (FP8, NVFP4), (FP8, FP8), (FP8, FP8_E5M2), (BYTES, BYTES),
]  # fmt: skip
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
TENSOR = {"1": 1.0, "1e-30": 1e-30, "1e30": 1e30, "smallest": 2.0**-149, "drawn": 0.0967261940240860}


class Operand:
    """Rows of blocks with drawn codes and scale bytes, for the package and for the oracle alike."""

    def __init__(self, made, rows, blocks, rng, tensor=1.0, prescale=False):
        self.element, self.scale = oracle.ELEMENTS[made.element.name], oracle.SCALES[made.scale.name]
        self.codes = rng.integers(0, 2 * self.element.sign, (rows, blocks, made.k))
        special = self.codes % self.element.sign > self.element.top
        self.codes[special] = 0
        first = self.scale.one
        near = rng.integers(max(first - 12, 0), min(first + 12, self.scale.nan), (rows, blocks))
        ends = rng.choice([0, 1, 7, 8, 9, self.scale.nan - 1], (rows, blocks))
        self.scales = np.where(rng.random((rows, blocks)) < 0.3, ends, near)
        self.tensor = np.float32(tensor) if made.tensor_scale else None
        self.made, self.prescale = made, prescale

    def array(self):
        codes = self.codes.reshape(len(self.codes), -1).astype(np.uint8)
        held = None if self.tensor is None else np.array([self.tensor])
        scales = self.scales.astype(np.uint8)
        how = {"prescale": self.prescale, "format": self.made, "tensor_scale": held}
        return MXArray(pack(codes, self.made.element), scales, codes.shape, 1, **how)

    def rows(self):
        return [
            list(zip(scales, codes, strict=True))
            for scales, codes in zip(self.scales.tolist(), self.codes.tolist(), strict=True)
        ]

    def tensor_bits(self):
        return oracle.ONE if self.tensor is None else int(self.tensor.view(np.uint32))


def assert_same_products(a, b):
    """Both profiles and both output types give the oracle's bits."""
    how = {
        "prescaled": (a.prescale, b.prescale),
        "elements": (a.element, b.element),
        "scales": (a.scale, b.scale),
        "tensor_scales": (a.tensor_bits(), b.tensor_bits()),
    }
    for out in ("float32", "bfloat16"):
        for profile in ("exact", "ordered"):
            with np.errstate(all="ignore"):
                got = bits_of(scaled_gemm(a.array(), b.array(), profile=profile, out_dtype=out)).tolist()
            if profile == "exact":
                want = [
                    [oracle.gemm_exact(row, column, out, **how) for column in b.rows()] for row in a.rows()
                ]
            else:
                want = [[oracle.gemm_ordered(row, column, **how) for column in b.rows()] for row in a.rows()]
                if out == "bfloat16":
                    want = [[oracle.f32_bits_to_bf16_bits(bits) for bits in row] for row in want]
            assert got == want, (profile, out)


@pytest.mark.clause(
    "gemm.operands", "gemm.block_dot", "gemm.exact", "gemm.ordered", "gemm.nan", "gemm.output", "gemm.tensor_scale",
    "formats.scale", "formats.nvfp4",
)  # fmt: skip
@EVERY_PAIR
@pytest.mark.parametrize(
    "tensors", [("1", "1"), ("drawn", "1e-30"), ("1e30", "1e-30"), ("smallest", "drawn"), ("1e30", "1e30")]
)
def test_drawn_operands(pair, tensors):
    if not any(made.tensor_scale for made in pair) and tensors != ("1", "1"):
        return
    rng = np.random.default_rng(7)
    a, b = (
        Operand(made, rows, 4, rng, TENSOR[t]) for made, rows, t in zip(pair, (5, 4), tensors, strict=True)
    )
    a.scales[1, 2], b.scales[2, 0] = a.scale.nan, b.scale.nan
    a.scales[2], b.codes[3] = 0, 0
    assert_same_products(a, b)


@pytest.mark.clause("gemm.nan", "formats.scale", evidence="known answer")
@EVERY_PAIR
@pytest.mark.parametrize("side", [0, 1])
def test_every_scale_byte_is_a_number_or_nan(pair, side):
    """UE4M3 has 129 bytes of NaN, of which one is a code; the product of each byte with 1 is its number."""
    scale = oracle.SCALES[pair[side].scale.name]
    many = Operand(pair[side], 256, 1, np.random.default_rng(0))
    one = Operand(pair[1 - side], 1, 1, np.random.default_rng(0))
    many.scales[:, 0], one.scales[:] = np.arange(256), one.scale.one
    for operand in (many, one):
        operand.codes[:] = 0
        operand.codes[:, :, 3] = operand.element.grid.index(Fraction(1))
    operands = [many.array(), one.array()]
    got = scaled_gemm(*(operands if side == 0 else operands[::-1]), profile="exact").ravel()
    want = [oracle.scale_value(byte, scale) for byte in range(256)]
    assert np.isnan(got).tolist() == [value is None for value in want]
    assert [Fraction(float(v)) for v in got if not np.isnan(v)] == [
        value for value in want if value is not None
    ]


@pytest.mark.clause("gemm.tensor_scale", "gemm.ordered", "gemm.exact", evidence="known answer")
def test_the_scales_of_tensors_come_one_after_the_other():
    """Four blocks of 6 · 6 · 448 · 448, times 1e30, pass the end of float32; times 1e-30 first, they do not."""
    rng = np.random.default_rng(0)
    for first, last, want in ((1e30, 1e-30, np.inf), (1e-30, 1e30, None)):
        a, b = Operand(NVFP4, 1, 4, rng, first), Operand(NVFP4, 1, 4, rng, last)
        for operand in (a, b):
            operand.codes[:], operand.scales[:] = 7, 0x7E
        ordered = scaled_gemm(a.array(), b.array(), profile="ordered")[0, 0]
        exact = scaled_gemm(a.array(), b.array(), profile="exact")[0, 0]
        total = 4 * 16 * 36 * 448**2
        assert exact == np.float32(float(Fraction(float(a.tensor)) * Fraction(float(b.tensor)) * total))
        assert ordered == (want or np.float32(np.float32(total) * a.tensor) * b.tensor)


@pytest.mark.clause("gemm.prescale", "gemm.tensor_scale")
def test_the_prescale_is_undone_before_the_scales_of_tensors():
    rng = np.random.default_rng(8)
    for tensor in (TENSOR["drawn"], 1e-30):
        a, b = Operand(SIXTEEN, 6, 3, rng, prescale=True), Operand(NVFP4, 6, 3, rng, tensor)
        assert_same_products(a, b)
        assert_same_products(b, a)


@pytest.mark.clause("gemm.exact", "gemm.ordered", "gemm.tensor_scale")
def test_products_of_quantized_matrices():
    rng = np.random.default_rng(9)
    x, w = rng.standard_t(3, (6, 64)).astype(np.float32), rng.standard_normal((5, 64)).astype(np.float32)
    operands = []
    for y in (x, w * np.float32(1e-5)):
        q = quantize(y, OperandSpec(NVFP4))
        operand = Operand(NVFP4, len(y), 4, rng, q.tensor_scale[0])
        operand.scales = q.scales.astype(int)
        bits = q.codes.reshape(len(y), -1, 1) >> np.array([0, 4], np.uint8) & 15
        operand.codes = bits.reshape(len(y), 4, 16).astype(int)
        assert operand.array() == q
        operands.append(operand)
    assert_same_products(*operands)


@pytest.mark.clause("gemm.bounded", "gemm.tensor_scale")
@pytest.mark.parametrize("pair", [(NVFP4, NVFP4), (NVFP4, SIXTEEN), (SINGLE, SINGLE), (BYTES, WIDE)], ids=str)
@pytest.mark.parametrize("tensors", [("drawn", "drawn"), ("1e-30", "1e30")])
def test_the_bound_is_times_the_scales_of_tensors(pair, tensors):
    """Kp + 1 units of eps where one tensor has a scale, Kp + 2 where both have; underflow before t is allowed for."""
    rng = np.random.default_rng(10)
    a, b = (Operand(made, 2, 3, rng, TENSOR[t]) for made, t in zip(pair, tensors, strict=True))
    got = bounded_tolerance(a.array(), b.array(), "fp32")
    times, length = sum(made.tensor_scale for made in pair), 48
    for i, row in enumerate(a.rows()):
        for j, column in enumerate(b.rows()):
            total = sum(
                abs(a.element.value(p) * b.element.value(q)) * a.scale.values[byte_a] * b.scale.values[byte_b]
                for (byte_a, codes_a), (byte_b, codes_b) in zip(row, column, strict=True)
                for p, q in zip(codes_a, codes_b, strict=True)
            )
            t_a, t_b = (oracle.f32_value(operand.tensor_bits()) for operand in (a, b))
            beyond = max(total, total * t_a, total * t_a * t_b) >= 2**127
            want = (length + times) * Fraction(1, 2**24) * total * t_a * t_b
            want += length * Fraction(1, 2**149) * max(1, t_a, t_b, t_a * t_b)
            want += Fraction(1, 2**148) * max(1, t_b) if times else 0
            assert got[i, j] == (np.inf if beyond else pytest.approx(float(want), rel=1e-6))


@pytest.mark.clause("gemm.block_dot", "gemm.ordered")
@pytest.mark.parametrize("eighths", [9, 11, 13, 15])
@pytest.mark.parametrize("tiny", [0, 1, 0x81])
def test_a_block_of_many_bits_is_added_with_one_rounding(eighths, tiny):
    """2^44, then a block of an odd number of halves of its last place and a product 2^47 times smaller, or none."""
    rng = np.random.default_rng(0)
    a, b = Operand(FP8, 1, 2, rng), Operand(FP8_E5M2, 1, 2, rng)
    for operand in (a, b):
        operand.codes[:] = 0
        operand.codes[0, 0, 0] = operand.element.grid.index(Fraction(1))
    a.codes[0, 1, :2], b.codes[0, 1, :2] = (
        (a.element.grid.index(Fraction(2**7)), tiny),
        (0x78, 1),
    )  # 2^15, 2^-16
    a.scales[0], b.scales[0] = (a.scale.one, a.scale.values.index(Fraction(eighths, 8))), (127 + 44, 127)
    assert_same_products(a, b)
    assert_same_products(b, a)


@pytest.mark.clause("gemm.special", evidence="known answer")
def test_a_nan_code_under_a_scale_of_zero_is_nan():
    rng = np.random.default_rng(0)
    a, b = Operand(FP8, 2, 1, rng), Operand(NVFP4, 1, 1, rng)
    a.scales[:], a.codes[1, 0, 5] = 0, 0x7F
    for profile in ("exact", "ordered"):
        got = scaled_gemm(a.array(), b.array(), profile=profile)
        np.testing.assert_array_equal(got, [[0], [np.nan]])


@pytest.mark.clause("gemm.block_dot", evidence="known answer")
def test_e5m2_under_scales_with_a_mantissa_is_refused_and_beside_them_exact():
    rng = np.random.default_rng(11)
    both = Operand(BlockFormat("e5m2_ue5m3", E5M2, UE5M3, k=16), 3, 2, rng), Operand(NVFP4, 3, 2, rng)
    for a, b in (both, both[::-1]):
        with pytest.raises(UnsupportedError, match="E5M2"):
            scaled_gemm(a.array(), b.array())
    assert_same_products(Operand(FP8_E5M2, 3, 2, rng), both[1])
