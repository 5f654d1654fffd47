"""Scaled conversions and matrix instructions."""

import itertools

import numpy as np
import pytest

from gfx950.bench import OLD, f16, f32, machine, vector
from gfx950.errors import Gfx950Error
from gfx950.machine import Machine
from gfx950.registers import Choices

pytestmark = pytest.mark.study

HIGH = OLD << 32
ONE = f32(1)
NAN, INF = 0x7FC00000, 0x7F800000

# Quotients on and beside every tie of E2M1, and their codes.
NEAREST = {
    0.0: 0, 0.2499: 0, 0.25: 0, 0.2501: 1, 0.5: 1, 0.75: 2, 0.7499: 1, 1.0: 2, 1.25: 2, 1.2501: 3, 1.5: 3, 1.75: 4,
    2.0: 4, 2.5: 4, 2.5001: 5, 3.0: 5, 3.5: 6, 3.4999: 5, 4.0: 6, 5.0: 6, 5.0001: 7, 6.0: 7, 7.0: 7, 1e30: 7,
}  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_conversion_to_e2m1(sign: int, exponent: int) -> None:
    quotients = list(NEAREST)
    cases = [
        (f32(sign * q * 2.0**exponent), f32(-sign * q * 2.0**exponent), f32(1.75 * 2.0**exponent))
        for q in quotients
    ]
    got = vector("v_cvt_scalef32_pk_fp4_f32 {d}, {a}, {b}, {c}", cases)
    low, high = (0, 8) if sign > 0 else (8, 0)
    want = [HIGH | (OLD & ~0xFF) | (NEAREST[q] | low) | (NEAREST[q] | high) << 4 for q in quotients]
    assert got == want, "only the exponent of the scale counts"


@pytest.mark.parametrize(
    ("select", "shift"), [("0,0,0,0", 0), ("0,0,1,0", 8), ("0,0,0,1", 16), ("0,0,1,1", 24)]
)
def test_conversion_writes_one_byte(select: str, shift: int) -> None:
    line = f"v_cvt_scalef32_pk_fp4_f32 {{d}}, {{a}}, {{b}}, {{c}} op_sel:[{select}]"
    want = OLD & ~(0xFF << shift) & 0xFFFFFFFF | 0xC2 << shift
    assert vector(line, [(ONE, f32(-2), ONE)]) == [HIGH | want]


@pytest.mark.parametrize(
    ("line", "case", "byte"),
    [
        (
            "v_cvt_scalef32_pk_fp4_f32 {d}, {a}, {b}, {c}",
            (f32(2.0**-127), f32(-(2.0**-126)), 0x007FFFFF),
            0xC2,
        ),
        ("v_cvt_scalef32_pk_fp4_f32 {d}, {a}, {b}, {c}", (INF, f32(-(2.0**-149)), ONE), 0x87),
        ("v_cvt_scalef32_pk_fp4_bf16 {d}, {a}, {b}", (0x40C0BF80, ONE), 0x7A),
        ("v_cvt_scalef32_pk_fp4_f16 {d}, {a}, {b}", (f16(6) << 16 | f16(-1), ONE), 0x7A),
    ],
)
def test_conversion_at_the_edges(line: str, case: tuple[int, ...], byte: int) -> None:
    assert vector(line, [case]) == [HIGH | OLD & ~0xFF | byte]


def test_conversion_refuses_a_nan_scale() -> None:
    with pytest.raises(Gfx950Error, match="which is NaN"):
        vector("v_cvt_scalef32_pk_fp4_f32 {d}, {a}, {b}, {c}", [(ONE, ONE, INF)])


def test_conversion_from_e2m1() -> None:
    got = vector(
        "v_cvt_scalef32_pk_f32_fp4 {D}, {a}, {b} op_sel:[0,1,0]",
        [(0x00F10000, f32(4)), (0x00980000, f32(0.5))],
    )
    assert got == [f32(2) | f32(-24) << 32, f32(-0.0) | f32(-0.25) << 32]
    assert vector("v_cvt_scalef32_pk_bf16_fp4 {d}, {a}, {b}", [(0xF1, f32(2))]) == [HIGH | 0xC1403F80]
    assert vector("v_cvt_scalef32_pk_f16_fp4 {d}, {a}, {b}", [(0xF1, f32(2))]) == [
        HIGH | f16(-12) << 16 | f16(1)
    ]
    with pytest.raises(Gfx950Error, match="outside the range"):
        vector("v_cvt_scalef32_pk_f16_fp4 {d}, {a}, {b}", [(0x7, f32(2.0**20))])


def product(
    line: str, a: dict[tuple[int, int], int], b: dict[tuple[int, int], int], c: dict[tuple[int, int], int]
) -> Machine:
    """Execute with {(register, lane): pattern}: A from v8, B from v24, C from v40, which is also the result."""
    m = machine([line])
    m.state.vgpr[8:62] = 0
    for first, values in ((8, a), (24, b), (40, c)):
        for (register, lane), value in values.items():
            m.state.vgpr[first + register, 0, lane] = value
    m.run(10)
    return m


def nonzero(m: Machine, count: int) -> dict[tuple[int, int], float]:
    """Return {(register, lane): value} of the result."""
    result = m.state.vgpr[40 : 40 + count, 0].view(np.float32)
    return {(int(r), int(lane)): float(result[r, lane]) for r, lane in np.argwhere(result != 0)}


def f8(value: int) -> int:
    """Return the E4M3 code of a power of two, or of 3: bias 7, three bits of mantissa."""
    return {1: 0x38, 2: 0x40, 3: 0x44}[value]


# Element (row 5, k) of A is 2 and (k, column 9) of B is 3, placed by hand; element (5, 9) of C is 1.
PLACED = {
    # k = 6: lanes 16..31 hold k = 4..7, two to a register.
    "v_mfma_f32_16x16x16_f16 v[40:43], v[8:9], v[24:25], v[40:43]": (f16, (1, 21, 0), (1, 25, 0), (1, 25), 4),
    "v_mfma_f32_16x16x16_bf16 v[40:43], v[8:9], v[24:25], v[40:43]": (
        None,
        (1, 21, 0),
        (1, 25, 0),
        (1, 25),
        4,
    ),
    # k = 27: lanes 48..63 hold k = 24..31.
    "v_mfma_f32_16x16x32_f16 v[40:43], v[8:11], v[24:27], v[40:43]": (
        f16,
        (1, 53, 16),
        (1, 57, 16),
        (1, 25),
        4,
    ),
    "v_mfma_f32_16x16x32_bf16 v[40:43], v[8:11], v[24:27], v[40:43]": (
        None,
        (1, 53, 16),
        (1, 57, 16),
        (1, 25),
        4,
    ),
    # k = 6: lanes 32..63 hold k = 4..7. Row 5 is in register 1 of the lanes from 32 on.
    "v_mfma_f32_32x32x8_f16 v[40:55], v[8:9], v[24:25], v[40:55]": (f16, (1, 37, 0), (1, 41, 0), (1, 41), 16),
    "v_mfma_f32_32x32x8_bf16 v[40:55], v[8:9], v[24:25], v[40:55]": (
        None,
        (1, 37, 0),
        (1, 41, 0),
        (1, 41),
        16,
    ),
    "v_mfma_f32_32x32x16_f16 v[40:55], v[8:11], v[24:27], v[40:55]": (
        f16,
        (1, 37, 0),
        (1, 41, 0),
        (1, 41),
        16,
    ),
    "v_mfma_f32_32x32x16_bf16 v[40:55], v[8:11], v[24:27], v[40:55]": (
        None,
        (1, 37, 0),
        (1, 41, 0),
        (1, 41),
        16,
    ),
    # k = 29: lanes 48..63 hold k = 24..31, four to a register.
    "v_mfma_f32_16x16x32_fp8_fp8 v[40:43], v[8:9], v[24:25], v[40:43]": (
        f8,
        (1, 53, 8),
        (1, 57, 8),
        (1, 25),
        4,
    ),
    # k = 14: lanes 32..63 hold k = 8..15.
    "v_mfma_f32_32x32x16_fp8_fp8 v[40:55], v[8:9], v[24:25], v[40:55]": (
        f8,
        (1, 37, 16),
        (1, 41, 16),
        (1, 41),
        16,
    ),
    # k = 2 and k = 1: one element a lane.
    "v_mfma_f32_16x16x4_f32 v[40:43], v8, v24, v[40:43]": (f32, (0, 37, 0), (0, 41, 0), (1, 25), 4),
    "v_mfma_f32_32x32x2_f32 v[40:55], v8, v24, v[40:55]": (f32, (0, 37, 0), (0, 41, 0), (1, 41), 16),
}


@pytest.mark.parametrize("line", PLACED)
def test_matrix_layouts(line: str) -> None:
    code, (a_reg, a_lane, a_shift), (b_reg, b_lane, b_shift), result, count = PLACED[line]
    encode = code or (lambda x: f32(x) >> 16)
    a, b = {(a_reg, a_lane): encode(2) << a_shift}, {(b_reg, b_lane): encode(3) << b_shift}
    assert nonzero(product(line, a, b, {result: ONE}), count) == {result: 7.0}
    # A neighbour along K finds no partner.
    assert nonzero(product(line, a, {(b_reg, (b_lane + 32) % 64): encode(3)}, {}), count) == {}


FP4 = "cbsz:4 blgp:4"
SCALED = f"v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[8:11], v[24:27], v[40:43], v60, v61 op_sel_hi:[{{}}] {FP4}"
WIDE = f"v_mfma_scale_f32_32x32x64_f8f6f4 v[40:55], v[8:11], v[24:27], v[40:55], v60, v61 op_sel_hi:[0,0,0] {FP4}"


def scaled(
    line: str, a: dict[tuple[int, int], int], b: dict[tuple[int, int], int], scales: tuple[int, int]
) -> Machine:
    """Execute with the scale registers v60 and v61 full of a word each."""
    m = machine([line])
    m.state.vgpr[8:56] = 0
    for first, values in ((8, a), (24, b)):
        for (register, lane), value in values.items():
            m.state.vgpr[first + register, 0, lane] = value
    m.state.vgpr[60], m.state.vgpr[61] = scales
    m.run(10)
    return m


def test_scaled_matrix() -> None:
    # Row 5, k = 77 = 64 + 13: lane 37, register 1, nibble 5; the codes are 1.5 and -4.
    a, b = {(1, 37): 3 << 20}, {(1, 41): 14 << 20}
    m = scaled(SCALED.format("0,0,0"), a, b, (0xFFFFFF80, 0xFFFFFF7E))
    assert nonzero(m, 4) == {(1, 25): -6.0}
    m = scaled(SCALED.format("1,0,0"), a, b, (0xFF81FFFF, 0xFFFFFF7E))
    assert nonzero(m, 4) == {(1, 25): -12.0}
    m = scaled(SCALED.format("0,0,0"), a, b, (0xFF, 127))
    assert np.isnan(m.state.vgpr[41, 0, 25].view(np.float32))
    assert nonzero(scaled(WIDE, a, b, (127, 127)), 16) == {(1, 41): -6.0}


def test_scale_byte_255_is_a_power_of_two_if_asked_for() -> None:
    m = machine([SCALED.format("0,0,0")])
    m.state.vgpr[8:56] = 0
    m.state.choices = Choices(nan_scales=False)
    m.state.vgpr[9, 0, 37], m.state.vgpr[25, 0, 41] = 3 << 20, 14 << 20
    m.state.vgpr[60], m.state.vgpr[61] = 255, 0
    m.run(10)
    # 1.5 * 2^128 times -4 * 2^-127
    assert nonzero(m, 4) == {(1, 25): -12.0}


# By format code, E4M3, E5M2, E2M3, E3M2 and E2M1: registers of an operand, and the codes of 1.5 and -4.
OPERANDS = {
    0: (8, 0x3C, 0xC8), 1: (8, 0x3E, 0xC4), 2: (6, 0b001100, 0b111000), 3: (6, 0b001110, 0b110100), 4: (4, 3, 14),
}  # fmt: skip


def placed_pair(shape: str, formats: tuple[int, int], a: int, b: int, scales: np.ndarray) -> Machine:
    """Execute with code `a` in row 5 of A and `b` in column 9 of B at k = 77 of 128, or 45 of 64; and A's scales.

    Of 8 bits that is byte 16 + 13 of the first group of lanes, whose second run of 16 begins at half of K; of 4 and
    6 bits it is element 13 of the third group of lanes, or of the second.
    """
    counts = [OPERANDS[f][0] for f in formats]
    result = "v[40:43]" if shape == "16x16x128" else "v[40:55]"
    sources = ", ".join(f"v[{first}:{first + n - 1}]" for first, n in zip((8, 24), counts, strict=True))
    m = machine(
        [
            f"v_mfma_scale_f32_{shape}_f8f6f4 {result}, {sources}, {result}, v60, v61 op_sel_hi:[0,0,0]"
            f" cbsz:{formats[0]} blgp:{formats[1]}"
        ]
    )
    m.state.vgpr[8:56] = 0
    for first, fmt, code, lane in ((8, formats[0], a, 5), (24, formats[1], b, 9)):
        register, at, shift = {4: (1, lane + 32, 20), 2: (2, lane + 32, 14), 3: (2, lane + 32, 14)}.get(
            fmt, (7, lane, 8)
        )
        m.state.vgpr[first + register, 0, at] = code << shift
    m.state.vgpr[60, 0], m.state.vgpr[61] = scales, 127
    m.run(10)
    return m


@pytest.mark.parametrize("formats", list(itertools.product(OPERANDS, repeat=2)))
def test_scaled_matrix_of_every_pair_of_formats(formats: tuple[int, int]) -> None:
    a, b = OPERANDS[formats[0]][1], OPERANDS[formats[1]][2]
    lane = np.arange(64)
    # Block 2 of four, whose scale is in lanes 32 to 47; block 1 of two, in lanes 32 to 63.
    m = placed_pair("16x16x128", formats, a, b, 127 + lane // 16)
    assert nonzero(m, 4) == {(1, 25): -24.0}
    m = placed_pair("32x32x64", formats, a, b, 127 + lane // 32)
    assert nonzero(m, 16) == {(1, 41): -12.0}


def test_scaled_matrix_of_nan_and_inf() -> None:
    """A meets +0 or 1 of B: Inf of E5M2 times either, NaN of E4M3."""
    scales = np.full(64, 127)
    got = placed_pair("16x16x128", (1, 0), 0x7C, 0x38, scales).state.vgpr[41, 0].view(np.float32)
    assert got[25] == np.inf
    assert np.isnan(np.delete(got[16:32], 9)).all(), "Inf times 0"
    got = placed_pair("16x16x128", (0, 1), 0x7F, 0x3C, scales).state.vgpr[41, 0].view(np.float32)
    assert np.isnan(got[16:32]).all()


FP8 = "v_mfma_f32_16x16x32_fp8_fp8 v[40:43], v[8:9], v[24:25], v[40:43]"


def e4m3(code: int) -> float:
    """The value of an OCP E4M3 code, by its definition."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_every_e4m3_code() -> None:
    """In rows of A and in columns of B, times 1, all at k = 0."""
    one = {(0, 0): 0x38}
    for first in range(0, 256, 16):
        codes = {(0, lane): first + lane for lane in range(16)}
        want = np.array([e4m3(first + i) for i in range(16)], np.float32)
        rows = product(FP8, codes, one, {}).state.vgpr[40:44, 0, ::16].view(np.float32)
        columns = product(FP8, one, codes, {}).state.vgpr[40, 0, :16].view(np.float32)
        np.testing.assert_array_equal(rows.T.reshape(16), want)
        np.testing.assert_array_equal(columns, want)


def test_fp8_sums_that_depend_on_the_width_are_refused() -> None:
    """The products are 2^-18, of E4M3's smallest number, and 1 or 448^2."""
    near, far = ({(0, 0): 0x01 | code << 8} for code in (0x38, 0x7E))
    assert nonzero(product(FP8, near, near, {}), 4) == {(0, 0): 1 + 2.0**-18}
    for pair, addend in ((far, {}), (near, {(0, 0): f32(2.0**10)})):
        with pytest.raises(Gfx950Error, match="order or width"):
            product(FP8, pair, pair, addend)


LINE = "v_mfma_f32_16x16x16_f16 v[40:43], v[8:9], v[24:25], v[40:43]"
PAIR = {(0, 0): f16(1) | f16(2.0**-14) << 16}


def test_sums_that_depend_on_the_order_are_refused() -> None:
    ones = {(0, 0): f16(1) | f16(1) << 16}
    assert nonzero(product(LINE, PAIR, ones, {}), 4) == {(0, 0): 1 + 2.0**-14}
    product(LINE, {(0, 0): f16(2.0**10) | f16(2.0**-13) << 16}, ones, {})
    for a, c in (({(0, 0): f16(2.0**11) | f16(2.0**-14) << 16}, {}), (PAIR, {(0, 0): f32(2.0**20)})):
        with pytest.raises(Gfx950Error, match="order or width"):
            product(LINE, a, ones, c)


def test_sums_that_depend_on_the_order_are_nan_if_asked_for() -> None:
    m = machine([LINE])
    m.state.vgpr[8:56] = 0
    m.state.choices = Choices(unknown_sums=np.nan)
    # Row 0 times column 0 is 2^11 + 2^-14, row 1 times column 0 is 1.
    m.state.vgpr[8, 0, 0] = f16(2.0**11) | f16(2.0**-14) << 16
    m.state.vgpr[8, 0, 1] = f16(1)
    m.state.vgpr[24, 0, 0] = f16(1) | f16(1) << 16
    m.run(10)
    assert np.isnan(m.state.vgpr[40, 0, 0].view(np.float32))
    assert m.state.vgpr[41, 0, 0].view(np.float32) == 1


def test_what_matrices_do_not_have() -> None:
    with pytest.raises(Gfx950Error, match="disabled lanes"):
        machine(["s_mov_b64 exec, 1", LINE]).run(10)
    with pytest.raises(Gfx950Error, match="no element format"):
        scaled(SCALED.format("0,0,0").replace("cbsz:4", "cbsz:5"), {}, {}, (127, 127))
    with pytest.raises(Gfx950Error, match="an operand of 4 registers, and its format takes 8"):
        scaled(SCALED.format("0,0,0").replace("cbsz:4", "cbsz:0"), {}, {}, (127, 127))
    with pytest.raises(Gfx950Error, match="takes 4 registers"):
        machine([LINE.replace("v[40:43], v[8:9]", "v[40:41], v[8:9]")]).run(10)


def test_a_constant_addend_and_accumulation_registers() -> None:
    m = machine(["v_mfma_f32_16x16x16_f16 a[0:3], v[8:9], v[24:25], 1.0", "v_accvgpr_read_b32 {d}, a3"])
    m.state.vgpr[8:32] = 0
    m.run(10)
    assert (m.state.vgpr[0] == ONE).all()


def test_subnormal_sources_and_negative_zero_count() -> None:
    m = product(LINE, {(0, 0): 1}, {(0, 0): f16(2)}, {})
    assert nonzero(m, 4) == {(0, 0): 2.0**-23}
    m = product(LINE, {}, {}, {(0, 0): 0x80000000})
    assert int(m.state.vgpr[40, 0, 0]) == 0, "-0 plus sixteen products of +0"
