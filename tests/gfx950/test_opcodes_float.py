"""Floating-point vector instructions and comparisons, edge cases first."""

import pytest

from gfx950.bench import OLD, f16, f32, f64, machine, vector
from gfx950.errors import Gfx950Error
from gfx950.registers import Choices

pytestmark = pytest.mark.study

HIGH = OLD << 32
INF, NAN, SNAN = 0x7F800000, 0x7FC00000, 0x7F800001
MINUS = 0x80000000
TINY, LARGEST_SUBNORMAL, SMALLEST_NORMAL = 1, 0x007FFFFF, 0x00800000
LARGEST = 0x7F7FFFFF
ONE, TWO, THREE = f32(1), f32(2), f32(3)
ONE_UP = 0x3F800001
H1, H2 = f16(1), f16(2)


def two(low: int, high: int) -> int:
    """Return a pair of 32-bit numbers."""
    return low | high << 32


def halves(low: float, high: float) -> int:
    """Return two float16 numbers in one register."""
    return f16(low) | f16(high) << 16


CASES = {
    "v_add_f32_e32 {d}, {a}, {b}": [
        (ONE, TWO, THREE), (TINY, TINY, 2), (SMALLEST_NORMAL, MINUS | TINY, LARGEST_SUBNORMAL),
        (f32(2.0**24), ONE, f32(2.0**24)), (f32(2.0**24), ONE_UP, f32(2.0**24 + 2)), (LARGEST, LARGEST, INF),
        (MINUS, MINUS, MINUS), (MINUS, 0, 0), (ONE, f32(-1), 0), (NAN, ONE, NAN), (SNAN, ONE, SNAN | 0x400000),
    ],
    "v_add_f32_e64 {d}, -{a}, |{b}|": [(ONE, f32(-3), TWO)],
    "v_add_f32_e64 {d}, {a}, {b} clamp": [(ONE, TWO, ONE), (f32(-3), ONE, 0),
        (f32(0.25), f32(0.25), f32(0.5)), (NAN, 0, 0)],
    "v_sub_f32_e32 {d}, {a}, {b}": [(ONE, TWO, f32(-1)), (INF, ONE, INF), (ONE, ONE, 0)],
    "v_subrev_f32_e32 {d}, {a}, {b}": [(ONE, TWO, ONE)],
    "v_mul_f32_e32 {d}, {a}, {b}": [
        (f32(1.5), f32(1.5), f32(2.25)), (SMALLEST_NORMAL, f32(0.5), 0x00400000), (TINY, f32(0.5), 0),
        (3, f32(0.5), 2), (MINUS | TINY, f32(0.5), MINUS), (LARGEST, TWO, INF), (ONE_UP, ONE_UP, 0x3F800002),
    ],
    "v_mul_f32_e32 {d}, 4.0, {a}": [(ONE, f32(4))],
    "v_mul_f32_e32 {d}, 0x3e800000, {a}": [(ONE, f32(0.25))],
    # The product's last bits survive to the sum: one rounding, where two would give 0.
    "v_fma_f32 {d}, {a}, {b}, {c}": [
        (ONE_UP, ONE_UP, f32(-(1 + 2.0**-22)), f32(2.0**-46)), (ONE, ONE, ONE, TWO), (TINY, f32(0.5), 0, 0),
        (f32(2.0**-75), f32(2.0**-75), MINUS | TINY, MINUS), (LARGEST, TWO, MINUS | LARGEST, LARGEST),
        # 1 + 2^-24 is a tie, and the far term decides it: a sum rounded to float64 first would lose that.
        (f32(2.0**-60), f32(2.0**-30), f32(1 + 2.0**-23), f32(1 + 2.0**-23)),
        (0x33800001, 0x3F800000, ONE, ONE_UP), (0x33800000, 0x3F800000, ONE, ONE), (0x337FFFFF, ONE, ONE, ONE),
    ],
    "v_fma_f32 {d}, {a}, -{b}, |{c}|": [(TWO, THREE, f32(-7), ONE)],
    "v_fmac_f32_e32 {d}, {a}, {b}": [(0, ONE, OLD), (0, 0, OLD)],
    "v_fmamk_f32 {d}, {a}, 0x40400000, {b}": [(TWO, ONE, f32(7))],
    "v_fmaak_f32 {d}, {a}, {b}, 0x40400000": [(TWO, TWO, f32(7))],
    "v_fma_mix_f32 {d}, {a}, {b}, {c}": [(TWO, THREE, ONE, f32(7)),
        (ONE_UP, ONE_UP, f32(-(1 + 2.0**-22)), f32(2.0**-46))],
    "v_fma_mix_f32 {d}, {a}, {b}, {c} op_sel:[1,0,0] op_sel_hi:[1,1,0]": [(halves(9, 2), halves(3, 9), ONE, f32(7))],
    "v_fma_mix_f32 {d}, -{a}, |{b}|, neg(0) op_sel_hi:[1,0,0]": [(halves(2, 9), f32(-3), f32(-6)), (0, THREE, MINUS)],
    "v_min_f32_e32 {d}, {a}, {b}": [
        (ONE, TWO, ONE), (MINUS, 0, MINUS), (0, MINUS, MINUS), (NAN, ONE, ONE), (ONE, NAN, ONE),
        (SNAN, ONE, SNAN | 0x400000), (ONE, SNAN, SNAN | 0x400000), (NAN, 0x7FC00005, 0x7FC00005),
    ],
    "v_max_f32_e32 {d}, {a}, {b}": [
        (ONE, TWO, TWO), (MINUS, 0, 0), (0, MINUS, 0), (NAN, ONE, ONE), (ONE, NAN, ONE),
            (f32(-1), MINUS | INF, f32(-1)),
        (ONE, SNAN, SNAN | 0x400000), (TINY, 0, TINY),
    ],
    "v_min3_f32 {d}, {a}, {b}, {c}": [(THREE, ONE, TWO, ONE), (NAN, NAN, TWO, TWO)],
    "v_max3_f32 {d}, {a}, {b}, {c}": [(THREE, ONE, TWO, THREE), (NAN, ONE, TWO, TWO)],
    "v_med3_f32 {d}, {a}, {b}, {c}": [(THREE, ONE, TWO, TWO), (ONE, TWO, THREE, TWO), (ONE, NAN, f32(-1), f32(-1))],
    "v_minimum3_f32 {d}, {a}, {b}, {c}": [(THREE, ONE, TWO, ONE), (THREE, NAN, TWO, NAN), (0, MINUS, 0, MINUS)],
    "v_maximum3_f32 {d}, {a}, {b}, {c}": [
        (THREE, ONE, TWO, THREE), (ONE, TWO, 0x7FC00005, 0x7FC00005), (SNAN, ONE, TWO, SNAN | 0x400000),
            (MINUS, 0, MINUS, 0),
    ],
    "v_maximum3_f32 {d}, |{a}|, |{b}|, |{c}|": [(f32(-3), ONE, TWO, THREE)],
    "v_rcp_f32_e32 {d}, {a}": [(MINUS | INF, MINUS), (f32(-2), f32(-0.5)), (MINUS, MINUS | INF), (0, INF), (INF, 0)],
    "v_rcp_iflag_f32_e32 {d}, {a}": [(f32(4), f32(0.25)), (THREE, f32(1 / 3))],
    "v_exp_f32_e32 {d}, {a}": [(MINUS | INF, 0), (MINUS, ONE), (INF, INF), (f32(10), f32(1024)),
        (f32(-126), SMALLEST_NORMAL)],
    "v_sqrt_f32_e32 {d}, {a}": [(MINUS, MINUS), (0, 0), (f32(4), TWO), (INF, INF)],
    "v_rsq_f32_e32 {d}, {a}": [(MINUS, MINUS | INF), (0, INF), (f32(4), f32(0.5)), (INF, 0)],
    "v_rndne_f32_e32 {d}, {a}": [(f32(0.5), 0), (f32(1.5), TWO), (f32(2.5), TWO), (f32(-0.5), MINUS), (INF, INF)],
    "v_floor_f32_e32 {d}, {a}": [(f32(-0.5), f32(-1)), (f32(1.5), ONE), (MINUS, MINUS)],
    "v_ceil_f32_e32 {d}, {a}": [(f32(-0.5), MINUS), (f32(1.5), TWO)],
    "v_trunc_f32_e32 {d}, {a}": [(f32(-1.5), f32(-1)), (f32(1.5), ONE)],
    "v_ldexp_f32 {d}, {a}, {b}": [
        (ONE, 3, f32(8)), (ONE, 0xFFFFFF6B, TINY), (f32(1.5), 0xFFFFFF6B, 2), (ONE, 0xFFFFFF6A, 0), (ONE, 200, INF),
        (LARGEST_SUBNORMAL, 1, 0x00FFFFFE), (MINUS | TINY, 0x7FFFFFFF, MINUS | INF),
    ],
    "v_cvt_f16_f32_e32 {d}, {a}": [
        (ONE, H1), (f32(65519), 0x7BFF), (f32(65520), 0x7C00), (f32(2.0**-25), 0), (f32(3 * 2.0**-25), 2),
            (MINUS, 0x8000),
        (f32(1 + 2.0**-11), H1), (f32(1 + 3 * 2.0**-11), H1 + 2),
    ],
    "v_cvt_f32_f16_e32 {d}, {a}": [(H1, ONE), (1, f32(2.0**-24)), (0xFC00, MINUS | INF), (0xABCD3C00, ONE)],
    "v_cvt_f32_f16_sdwa {d}, {a} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1": [(0x3C00ABCD, ONE)],
    "v_cvt_f64_f32_e32 {D}, {a}": [(ONE, f64(1)), (TINY, f64(2.0**-149))],
    "v_cvt_f32_f64_e32 {d}, {A}": [(f64(1 + 2.0**-24), ONE), (f64(1 + 2.0**-24 + 2.0**-50), ONE_UP), (f64(1e300), INF)],
    "v_cvt_f32_i32_e32 {d}, {a}": [(0xFFFFFFFF, f32(-1)), (0x01000001, f32(2.0**24)), (0x80000000, f32(-(2.0**31)))],
    "v_cvt_f32_u32_e32 {d}, {a}": [(0xFFFFFFFF, f32(2.0**32)), (0x01000003, f32(2.0**24 + 4))],
    "v_cvt_f64_i32_e32 {D}, {a}": [(0xFFFFFFFF, f64(-1))],
    "v_cvt_f64_u32_e32 {D}, {a}": [(0xFFFFFFFF, f64(2.0**32 - 1))],
    "v_cvt_i32_f32_e32 {d}, {a}": [
        (f32(-1.9), 0xFFFFFFFF), (f32(3e9), 0x7FFFFFFF), (f32(-3e9), 0x80000000), (NAN, 0), (INF, 0x7FFFFFFF),
            (TINY, 0),
    ],
    "v_cvt_u32_f32_e32 {d}, {a}": [(f32(1.9), 1), (f32(-5), 0), (f32(3e9), 3000000000),
        (f32(2.0**33), 0xFFFFFFFF), (NAN, 0)],
    "v_cvt_i32_f64_e32 {d}, {A}": [(f64(-1.9), 0xFFFFFFFF), (f64(1e10), 0x7FFFFFFF)],
    "v_cvt_u32_f64_e32 {d}, {A}": [(f64(1.9), 1), (f64(-1), 0)],
    "v_cvt_pk_bf16_f32 {d}, {a}, {b}": [
        (ONE, TWO, 0x40003F80), (0x3F808000, 0x3F818000, 0x3F823F80), (0x3F808001, LARGEST, 0x7F803F81),
        (TINY, MINUS | 0x8001, 0x80010000), (INF, MINUS | INF, 0xFF807F80),
    ],
    "v_cvt_pk_f16_f32 {d}, {a}, {b}": [(ONE, f32(1e9), 0x7C003C00)],
    "v_cvt_pkrtz_f16_f32 {d}, {a}, {b}": [(f32(1.9999), f32(-1e9), 0xFBFF3FFF), (f32(2.0**-25), ONE, 0x3C000000)],
    "v_add_f16_e32 {d}, {a}, {b}": [(H1, H2, f16(3)), (1, 1, 2), (0x7BFF, 0x7BFF, 0x7C00), (f16(2048), H1, f16(2048))],
    "v_sub_f16_e32 {d}, {a}, {b}": [(H1, H2, f16(-1))],
    "v_subrev_f16_e32 {d}, {a}, {b}": [(H1, H2, H1)],
    "v_mul_f16_e32 {d}, {a}, {b}": [(f16(1.5), f16(1.5), f16(2.25)), (1, f16(0.5), 0), (3, f16(0.5), 2)],
    "v_fma_f16 {d}, {a}, {b}, {c}": [(f16(1 + 2**-10), f16(1 + 2**-10), f16(-1 - 2**-9), 0xDEAD0000 | f16(2.0**-20))],
    "v_min_f16_e32 {d}, {a}, {b}": [(H1, 0x7E00, H1), (0x8000, 0, 0x8000)],
    "v_max_f16_e32 {d}, {a}, {b}": [(H1, 0x7E00, H1), (0x8000, 0, 0)],
    "v_min3_f16 {d}, {a}, {b}, {c}": [(H1, H2, f16(-1), 0xDEAD0000 | f16(-1))],
    "v_max3_f16 {d}, {a}, {b}, {c}": [(H1, H2, f16(-1), 0xDEAD0000 | H2)],
    "v_med3_f16 {d}, {a}, {b}, {c}": [(H1, H2, f16(-1), 0xDEAD0000 | H1)],
    "v_pk_add_f32 {D}, {A}, {B}": [(two(ONE, TWO), two(TWO, TWO), two(THREE, f32(4)))],
    "v_pk_add_f32 {D}, {A}, {B} op_sel:[1,0] op_sel_hi:[0,1]": [(two(ONE, TWO), two(TWO, THREE), two(f32(4), f32(4)))],
    "v_pk_add_f32 {D}, {A}, {B} neg_lo:[0,1] neg_hi:[0,1]": [(two(ONE, TWO), two(TWO, TWO), two(f32(-1), 0))],
    "v_pk_mul_f32 {D}, {A}, {B} op_sel_hi:[1,0]": [(two(ONE, TWO), two(TWO, OLD), two(TWO, f32(4)))],
    "v_pk_fma_f32 {D}, {A}, {B}, {C}": [(two(ONE, TWO), two(TWO, TWO), two(ONE, ONE), two(THREE, f32(5)))],
    "v_pk_fma_f32 {D}, {A}, 2.0, {C} op_sel_hi:[1,0,0]": [(two(ONE, TWO), 0, two(ONE, OLD), two(THREE, f32(5)))],
    "v_pk_mov_b32 {D}, {A}, {B} op_sel:[0,1]": [(two(1, 2), two(3, 4), two(1, 4))],
    "v_pk_mov_b32 {D}, {A}, {B} op_sel:[1,0]": [(two(1, 2), two(3, 4), two(2, 3))],
    "v_pk_add_f16 {d}, {a}, {b}": [(halves(1, 2), halves(2, 2), halves(3, 4))],
    "v_pk_mul_f16 {d}, {a}, {b} op_sel_hi:[1,0]": [(halves(1, 2), halves(3, 9), halves(3, 6))],
    "v_pk_fma_f16 {d}, {a}, {b}, {c}": [(halves(1, 2), halves(2, 2), halves(1, 1), halves(3, 5))],
    "v_pk_min_f16 {d}, {a}, {b}": [(halves(1, 2), halves(2, 1), halves(1, 1))],
    "v_pk_max_f16 {d}, {a}, {b}": [(halves(1, 2), halves(2, 1), halves(2, 2))],
}  # fmt: skip


@pytest.mark.parametrize("line", CASES)
def test_float_instruction(line: str) -> None:
    wide = "{D}" in line
    want = [case[-1] if wide else case[-1] | HIGH for case in CASES[line]]
    assert [hex(v) for v in vector(line, [case[:-1] for case in CASES[line]])] == [hex(v) for v in want]


@pytest.mark.parametrize(
    ("line", "case", "by_mode"),
    [
        ("v_add_f32_e32 {d}, {a}, {b}", (TINY, TINY), {0: 0, 1: 0, 2: 0, 3: 2}),
        (
            "v_mul_f32_e32 {d}, {a}, {b}",
            (TINY, f32(2.0**127)),
            {0: 0, 1: f32(2.0**-22), 2: 0, 3: f32(2.0**-22)},
        ),
        (
            "v_mul_f32_e32 {d}, {a}, {b}",
            (MINUS | SMALLEST_NORMAL, f32(0.5)),
            {0: MINUS, 1: MINUS, 2: MINUS | 0x400000},
        ),
        ("v_max_f32_e32 {d}, {a}, {b}", (MINUS | TINY, MINUS | INF), {0: MINUS, 3: MINUS | TINY}),
        ("v_mov_b32_e32 {d}, {a}", (TINY,), {0: TINY, 3: TINY}),
        ("v_pk_add_f32 {D}, {A}, {B}", (two(TINY, ONE), two(0, TINY)), {0: two(0, ONE), 3: two(TINY, ONE)}),
    ],
)
def test_subnormals_follow_the_mode(line: str, case: tuple[int, ...], by_mode: dict[int, int]) -> None:
    for mode, want in by_mode.items():
        got = vector(line, [case], denorm=mode)[0]
        assert got == (want if "{D}" in line else want | HIGH), f"mode {mode}"


@pytest.mark.parametrize(
    "line",
    ["v_exp_f32_e32 {d}, {a}", "v_sqrt_f32_e32 {d}, {a}", "v_rsq_f32_e32 {d}, {a}"],
)
@pytest.mark.parametrize("value", [f32(0.3), ONE_UP, f32(1e-30) + 1])
def test_inexact_functions_are_refused(line: str, value: int) -> None:
    with pytest.raises(Gfx950Error, match="only exact results"):
        vector(line, [(value,)])


def test_reciprocal_errs_by_the_ulps_asked_for() -> None:
    for ulps in (-1, 0, 1):
        m = machine(["v_rcp_f32_e32 {d}, {a}"])
        m.state.choices = Choices(rcp_ulps=ulps)
        m.state.vgpr[2] = THREE
        m.state.vgpr[2, 0, 1] = TWO
        m.run(10)
        assert int(m.state.vgpr[0, 0, 0]) == f32(1 / 3) + ulps
        assert int(m.state.vgpr[0, 0, 1]) == f32(0.5)


@pytest.mark.parametrize(("flushes", "want"), [(False, 1 << 22), (True, 0)])
@pytest.mark.parametrize("sign", [0, MINUS])
def test_subnormal_reciprocals_are_kept_or_flushed(flushes: bool, want: int, sign: int) -> None:
    """1 / 2^127 is subnormal, 1 / 2^126 is not."""
    m = machine(["v_rcp_f32_e32 {d}, {a}"])
    m.state.choices = Choices(rcp_flushes=flushes)
    m.state.vgpr[2] = f32(2.0**127) | sign
    m.state.vgpr[2, 0, 1] = f32(2.0**126) | sign
    m.run(10)
    assert int(m.state.vgpr[0, 0, 0]) == want | sign
    assert int(m.state.vgpr[0, 0, 1]) == f32(2.0**-126) | sign


# A smaller number, a larger one: for every type, such that reading it as another type turns the order around.
ORDERED = {
    "i32": (0xFFFFFFFF, 1), "u32": (1, 0xFFFFFFFF), "i16": (0x1FFFF, 0xFFFF0001), "u16": (0x10001, 0xFFFF),
    "i64": ((1 << 64) - 1, 1), "u64": (1, (1 << 64) - 1),
    "f32": (f32(-2), f32(-1)), "f16": (f16(-2), f16(-1)), "f64": (f64(-2), f64(-1)),
}  # fmt: skip
NANS = {"f32": NAN, "f16": 0x7E00, "f64": 0x7FF8 << 48}
# test: whether it holds for less, equal, greater, unordered
TRUTH = {
    "eq": "0100", "lt": "1000", "le": "1100", "gt": "0010", "ge": "0110", "ne": "1011", "lg": "1010", "o": "1110",
    "u": "0001", "neq": "1011", "nlt": "0111", "nle": "0011", "ngt": "1101", "nge": "1001", "nlg": "0101",
}  # fmt: skip
INTEGER_TESTS = ("eq", "lt", "le", "gt", "ge", "ne")
COMPARISONS = [
    f"v_{form}_{test}_{kind}"
    for form in ("cmp", "cmpx")
    for kind in ORDERED
    for test in (INTEGER_TESTS if kind[0] != "f" else sorted({*TRUTH} - {"ne"}))
]


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison(name: str) -> None:
    _, form, test, kind = name.split("_")
    wide = kind.endswith("64")
    less, more = ORDERED[kind]
    cases = [(less, more), (more, more), (more, less)]
    if kind in NANS:
        cases += [(NANS[kind], more)]
    m = machine([f"{name}_e32 vcc, {{A}}, {{B}}" if wide else f"{name}_e32 vcc, {{a}}, {{b}}"])
    m.state.vgpr[:] = OLD
    for lane, (a, b) in enumerate(cases):
        for first, value in ((2, a), (4, b)):
            m.state.vgpr[first, 0, lane], m.state.vgpr[first + 1, 0, lane] = value & 0xFFFFFFFF, value >> 32
    m.state.lanes[0, len(cases) :] = False
    m.run(10)
    want = sum(1 << i for i, c in enumerate(TRUTH[test][: len(cases)]) if c == "1")
    assert int(m.state.sgpr[106, 0]) == want, "lanes that are disabled give 0"
    assert int(m.state.sgpr[107, 0]) == 0
    assert int(m.state.sgpr[126, 0]) == (want if form == "cmpx" else 0xFFFFFFFF)


def test_class_of_a_number() -> None:
    values = [SNAN, NAN, MINUS | INF, f32(-1), MINUS | TINY, MINUS, 0, TINY, ONE, INF]
    for form in ("cmp", "cmpx"):
        for bit in range(10):
            m = machine([f"v_{form}_class_f32_e64 vcc, {{a}}, {{b}}"])
            m.state.vgpr[4] = 1 << bit
            m.state.vgpr[2, 0] = ONE
            m.state.vgpr[2, 0, : len(values)] = values
            m.state.lanes[0, len(values) :] = False
            m.run(10)
            assert int(m.state.sgpr[106, 0]) == 1 << bit
