"""Scalar instructions: result and SCC, worked out by hand from the ISA's definitions."""

import pytest

from gfx950.bench import OLD, f32, machine, scalar
from gfx950.errors import Gfx950Error

pytestmark = pytest.mark.study

M, MM = 0xFFFFFFFF, (1 << 64) - 1
TOP, TOP64 = 1 << 31, 1 << 63
HIGH = OLD << 32
KEPT = None
"""SCC is as it was: each such case runs with both values."""

# line: (sources..., result, SCC)
CASES = {
    "s_mov_b32 {s}, {t}": [(5, 5, KEPT)],
    "s_mov_b32 {s}, 0.15915494": [(0, 0x3E22F983, KEPT)],
    "s_mov_b32 {s}, -1": [(0, M, KEPT)],
    "s_mov_b64 {S}, {T}": [(TOP64 | 5, TOP64 | 5, KEPT)],
    "s_mov_b64 {S}, -1": [(0, MM, KEPT)],
    "s_movk_i32 {s}, 0x8000": [(0, 0xFFFF8000, KEPT)],
    "s_movk_i32 {s}, 0x7fff": [(0, 0x7FFF, KEPT)],
    "s_addk_i32 {s}, 0xffff": [(0, OLD - 1, 0)],
    "s_mulk_i32 {s}, 0x2": [(0, OLD * 2 & M, KEPT)],
    "s_not_b32 {s}, {t}": [(M, 0, 0), (0, M, 1)],
    "s_not_b64 {S}, {T}": [(MM, 0, 0), (M, M << 32, 1)],
    "s_brev_b32 {s}, {t}": [(1, TOP, KEPT), (0x12345678, 0x1E6A2C48, KEPT)],
    "s_bcnt1_i32_b32 {s}, {t}": [(0, 0, 0), (0xCCCCCCCC, 16, 1)],
    "s_bcnt1_i32_b64 {s}, {T}": [(0, 0, 0), (MM, 64, 1)],
    "s_ff1_i32_b32 {s}, {t}": [(0, M, KEPT), (0xAAAAAAAA, 1, KEPT), (0x10000, 16, KEPT)],
    "s_flbit_i32_b32 {s}, {t}": [(0, M, KEPT), (0xCCCC, 16, KEPT), (TOP, 0, KEPT)],
    "s_abs_i32 {s}, {t}": [(M, 1, 1), (TOP, TOP, 1), (0, 0, 0), (0x80000001, 0x7FFFFFFF, 1)],
    "s_sext_i32_i8 {s}, {t}": [(0x80, 0xFFFFFF80, KEPT), (0x17F, 0x7F, KEPT)],
    "s_sext_i32_i16 {s}, {t}": [(0x8000, 0xFFFF8000, KEPT), (0x17FFF, 0x7FFF, KEPT)],
    "s_and_b32 {s}, {t}, {u}": [(12, 10, 8, 1), (1, 2, 0, 0)],
    "s_or_b32 {s}, {t}, {u}": [(12, 10, 14, 1), (0, 0, 0, 0)],
    "s_xor_b32 {s}, {t}, {u}": [(12, 10, 6, 1), (5, 5, 0, 0)],
    "s_andn2_b32 {s}, {t}, {u}": [(12, 10, 4, 1), (5, M, 0, 0)],
    "s_orn2_b32 {s}, {t}, {u}": [(12, M, 12, 1), (0, M, 0, 0)],
    "s_nand_b32 {s}, {t}, {u}": [(12, 10, 0xFFFFFFF7, 1), (M, M, 0, 0)],
    "s_nor_b32 {s}, {t}, {u}": [(12, 10, 0xFFFFFFF1, 1), (M, 0, 0, 0)],
    "s_xnor_b32 {s}, {t}, {u}": [(12, 10, 0xFFFFFFF9, 1), (M, 0, 0, 0)],
    "s_and_b64 {S}, {T}, {U}": [(TOP64 | 1, TOP64, TOP64, 1), (M, M << 32, 0, 0)],
    "s_or_b64 {S}, {T}, {U}": [(TOP64, 1, TOP64 | 1, 1), (0, 0, 0, 0)],
    "s_xor_b64 {S}, {T}, {U}": [(TOP64, 1, TOP64 | 1, 1), (MM, MM, 0, 0)],
    "s_andn2_b64 {S}, {T}, {U}": [(MM, M, M << 32, 1), (1, MM, 0, 0)],
    "s_orn2_b64 {S}, {T}, {U}": [(0, M, M << 32, 1), (0, MM, 0, 0)],
    "s_nand_b64 {S}, {T}, {U}": [(M, MM, M << 32, 1), (MM, MM, 0, 0)],
    "s_nor_b64 {S}, {T}, {U}": [(M, 0, M << 32, 1), (MM, 0, 0, 0)],
    "s_xnor_b64 {S}, {T}, {U}": [(M, 0, M << 32, 1), (MM, 0, 0, 0)],
    "s_lshl_b32 {s}, {t}, {u}": [(1, 31, TOP, 1), (2, 31, 0, 0), (1, 32, 1, 1)],
    "s_lshr_b32 {s}, {t}, {u}": [(TOP, 31, 1, 1), (1, 1, 0, 0), (7, 32, 7, 1)],
    "s_ashr_i32 {s}, {t}, {u}": [(TOP, 31, M, 1), (1, 1, 0, 0), (TOP, 33, 0xC0000000, 1)],
    "s_lshl_b64 {S}, {T}, {u}": [(1, 63, TOP64, 1), (1, 64, 1, 1), (2, 63, 0, 0)],
    "s_lshr_b64 {S}, {T}, {u}": [(TOP64, 63, 1, 1), (7, 64, 7, 1)],
    "s_ashr_i64 {S}, {T}, {u}": [(TOP64, 63, MM, 1), (1, 1, 0, 0)],
    # The offset is in bits 4:0 (5:0), the width in bits 22:16.
    "s_bfe_u32 {s}, {t}, {u}": [(0x12345678, 0x80008, 0x56, 1), (M, 0, 0, 0), (M, 0x200000, M, 1),
        (0xF0, 0x40004, 15, 1)],
    "s_bfe_i32 {s}, {t}, {u}": [(0x80, 0x40004, 0xFFFFFFF8, 1), (0x70, 0x40004, 7, 1), (M, 5, 0, 0),
        (TOP, 0x200000, TOP, 1)],
    "s_bfe_u64 {S}, {T}, {u}": [(TOP64, 0x4003C, 8, 1), (MM, 0x400000, MM, 1), (MM, 3, 0, 0)],
    "s_bfe_i64 {S}, {T}, {u}": [(TOP64, 0x4003C, MM - 7, 1), (5, 0x400000, 5, 1), (TOP, 0x200000, MM - TOP + 1, 1)],
    "s_bfm_b32 {s}, {t}, {u}": [(4, 8, 0xF00, KEPT), (32, 1, 0, KEPT)],
    "s_bfm_b64 {S}, {t}, {u}": [(4, 40, 0xF << 40, KEPT), (63, 0, MM >> 1, KEPT)],
    "s_add_u32 {s}, {t}, {u}": [(M, 1, 0, 1), (M - 1, 1, M, 0)],
    "s_sub_u32 {s}, {t}, {u}": [(0, 1, M, 1), (1, 1, 0, 0)],
    "s_add_i32 {s}, {t}, {u}": [(0x7FFFFFFF, 1, TOP, 1), (M, 1, 0, 0), (TOP, TOP, 0, 1)],
    "s_sub_i32 {s}, {t}, {u}": [(TOP, 1, 0x7FFFFFFF, 1), (0, 1, M, 0), (0, TOP, TOP, 1)],
    "s_min_i32 {s}, {t}, {u}": [(M, 1, M, 1), (1, M, M, 0), (1, 1, 1, 0)],
    "s_max_i32 {s}, {t}, {u}": [(M, 1, 1, 0), (1, M, 1, 1), (1, 1, 1, 1)],
    "s_min_u32 {s}, {t}, {u}": [(M, 1, 1, 0), (1, M, 1, 1)],
    "s_max_u32 {s}, {t}, {u}": [(M, 1, M, 1), (1, M, M, 0), (1, 1, 1, 1)],
    "s_mul_i32 {s}, {t}, {u}": [(M, M, 1, KEPT), (0x10001, 0x10001, 0x20001, KEPT)],
    "s_mul_hi_u32 {s}, {t}, {u}": [(M, M, M - 1, KEPT)],
    "s_mul_hi_i32 {s}, {t}, {u}": [(M, M, 0, KEPT), (M, 2, M, KEPT)],
    "s_lshl1_add_u32 {s}, {t}, {u}": [(3, 4, 10, 0), (TOP, 1, 1, 1)],
    "s_lshl2_add_u32 {s}, {t}, {u}": [(3, 4, 16, 0), (0x3FFFFFFF, 4, 0, 1)],
    "s_lshl3_add_u32 {s}, {t}, {u}": [(3, 4, 28, 0)],
    "s_lshl4_add_u32 {s}, {t}, {u}": [(3, 4, 52, 0), (0x10000000, 1, 1, 1)],
    "s_pack_ll_b32_b16 {s}, {t}, {u}": [(0xAAAA1111, 0xBBBB2222, 0x22221111, KEPT)],
    "s_pack_lh_b32_b16 {s}, {t}, {u}": [(0xAAAA1111, 0xBBBB2222, 0xBBBB1111, KEPT)],
    "s_pack_hh_b32_b16 {s}, {t}, {u}": [(0xAAAA1111, 0xBBBB2222, 0xBBBBAAAA, KEPT)],
}  # fmt: skip


@pytest.mark.parametrize("line", CASES)
def test_scalar_instruction(line: str) -> None:
    for *sources, result, scc in CASES[line]:
        for before in (0, 1):
            got = scalar(line, sources, scc=before)
            want = result if "{S}" in line else result | HIGH
            assert (hex(got["s"]), got["scc"]) == (hex(want), before if scc is KEPT else scc), sources


@pytest.mark.parametrize(
    ("line", "sources", "carry", "result", "scc"),
    [
        ("s_addc_u32 {s}, {t}, {u}", (M, 0), 1, 0, 1),
        ("s_addc_u32 {s}, {t}, {u}", (M, M), 1, M, 1),
        ("s_addc_u32 {s}, {t}, {u}", (1, 2), 0, 3, 0),
        ("s_subb_u32 {s}, {t}, {u}", (0, 0), 1, M, 1),
        ("s_subb_u32 {s}, {t}, {u}", (5, 4), 1, 0, 0),
        ("s_subb_u32 {s}, {t}, {u}", (0, M), 1, 0, 1),
        ("s_cselect_b32 {s}, {t}, {u}", (1, 2), 1, 1, 1),
        ("s_cselect_b32 {s}, {t}, {u}", (1, 2), 0, 2, 0),
    ],
)
def test_instructions_that_read_scc(
    line: str, sources: tuple[int, ...], carry: int, result: int, scc: int
) -> None:
    got = scalar(line, sources, scc=carry)
    assert (got["s"], got["scc"]) == (result | HIGH, scc)


def test_select_of_pairs() -> None:
    assert scalar("s_cselect_b64 {S}, {T}, -1", (TOP64,), scc=1)["s"] == TOP64
    assert scalar("s_cselect_b64 {S}, {T}, -1", (TOP64,), scc=0)["s"] == MM


TRUTH = {"eq": "010", "lg": "101", "lt": "100", "le": "110", "gt": "001", "ge": "011"}
SCALAR_COMPARISONS = [f"s_{form}_{t}_{k}" for form in ("cmp", "cmpk") for t in TRUTH for k in ("i32", "u32")]


@pytest.mark.parametrize("name", [*SCALAR_COMPARISONS, "s_cmp_eq_u64", "s_cmp_lg_u64"])
def test_scalar_comparison(name: str) -> None:
    _, form, test, kind = name.split("_")
    # The constant of s_cmpk is 0x8000: -32768 signed, 32768 unsigned.
    k = (
        (0xFFFF8000 if kind == "i32" else 0x8000)
        if form == "cmpk"
        else {"i32": M, "u32": TOP, "u64": TOP64}[kind]
    )
    order = [(k - 1) & MM, k, k + 1] if kind != "i32" or form == "cmpk" else [TOP, k, 1]
    line = f"{name} {{t}}, 0x8000" if form == "cmpk" else f"{name} {{t}}, {{u}}"
    if kind == "u64":
        line = f"{name} {{T}}, {{U}}"
    got = [scalar(line, (value, k))["scc"] for value in order]
    assert got == [int(c) for c in TRUTH[test]]


def test_single_bits() -> None:
    assert scalar("s_bitcmp1_b32 {t}, {u}", (4, 34))["scc"] == 1
    assert scalar("s_bitcmp1_b32 {t}, {u}", (4, 1))["scc"] == 0
    assert scalar("s_bitcmp0_b32 {t}, {u}", (4, 1))["scc"] == 1
    assert scalar("s_bitcmp0_b32 {t}, {u}", (4, 2))["scc"] == 0


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("and", 0b1000), ("or", 0b1110), ("xor", 0b0110), ("andn2", 0b0100), ("andn1", 0b0010),
        ("orn2", MM - 0b0010), ("orn1", MM - 0b0100), ("nand", MM - 0b1000), ("nor", MM - 0b1110),
            ("xnor", MM - 0b0110),
    ],
)  # fmt: skip
def test_saveexec(name: str, result: int) -> None:
    got = scalar(f"s_{name}_saveexec_b64 {{S}}, {{T}}", (0b1100,), exec_mask=0b1010)
    assert (got["s"], got["exec"], got["scc"]) == (0b1010, result, 1)


def test_saveexec_of_nothing_clears_scc() -> None:
    got = scalar("s_and_saveexec_b64 {S}, {T}", (0b0101,), exec_mask=0b1010, scc=1)
    assert (got["s"], got["exec"], got["scc"]) == (0b1010, 0, 0)


def test_a_destination_may_be_vcc_or_exec() -> None:
    assert scalar("s_mov_b64 vcc, {T}", (TOP64 | 3,))["vcc"] == TOP64 | 3
    assert scalar("s_mov_b64 exec, {T}", (5,))["exec"] == 5
    assert scalar("s_mov_b32 exec_hi, {t}", (5,))["exec"] == 5 << 32 | M


@pytest.mark.parametrize(
    ("branch", "setup", "taken"),
    [
        ("s_branch", [], True),
        ("s_cbranch_scc1", ["s_cmp_eq_u32 {t}, {t}"], True),
        ("s_cbranch_scc1", ["s_cmp_lg_u32 {t}, {t}"], False),
        ("s_cbranch_scc0", ["s_cmp_lg_u32 {t}, {t}"], True),
        ("s_cbranch_vccz", ["s_mov_b64 vcc, 0"], True),
        ("s_cbranch_vccz", ["s_mov_b32 vcc_lo, 0", "s_mov_b32 vcc_hi, 1"], False),
        ("s_cbranch_vccnz", ["s_mov_b64 vcc, 1"], True),
        ("s_cbranch_execz", ["s_mov_b64 exec, 0"], True),
        ("s_cbranch_execz", [], False),
        ("s_cbranch_execnz", [], True),
    ],
)
def test_branches(branch: str, setup: list[str], taken: bool) -> None:
    m = machine([*setup, "s_mov_b32 {s}, 1", f"{branch} .Lend", "s_mov_b32 {s}, 2", ".Lend:"])
    m.run(20)
    assert int(m.state.sgpr[20, 0]) == (1 if taken else 2)


def test_waves_part_at_a_branch_and_meet_again() -> None:
    # Wave w adds 1 w times, and all waves then write the same register.
    m = machine(
        [
            "v_readfirstlane_b32 {t}, {a}", "s_mov_b32 {s}, 0", "s_mov_b32 s30, 0", ".Lloop:",
            "s_cmp_ge_u32 {s}, {t}", "s_cbranch_scc1 .Lend", "s_add_u32 {s}, {s}, 1", "s_branch .Lloop",
            ".Lend:", "s_mov_b32 s30, 7",
        ],
        waves=4,
    )  # fmt: skip
    m.state.vgpr[2] = [[0] * 64, [3] * 64, [1] * 64, [2] * 64]
    m.run(1000)
    assert m.state.sgpr[20].tolist() == [0, 3, 1, 2]
    assert m.state.sgpr[30].tolist() == [7] * 4


def test_an_endless_loop_is_found() -> None:
    with pytest.raises(Gfx950Error, match="endless"):
        machine([".Lloop:", "s_branch .Lloop"]).run(100)


def test_a_barrier_waits_for_the_workgroup() -> None:
    # Wave 0 goes a longer way before it writes; wave 1 reads behind the barrier.
    m = machine(
        [
            "s_cmp_eq_u32 {t}, 0", "s_cbranch_scc1 .Lfirst", "s_barrier", "ds_read_b32 {d}, {a}", "s_endpgm",
            ".Lfirst:", "v_mov_b32_e32 {b}, 0x1234", "ds_write_b32 {a}, {b}", "s_barrier",
        ],
        waves=2, lds=256,
    )  # fmt: skip
    m.state.sgpr[22] = [0, 1]
    m.state.vgpr[2] = 0
    m.run(100)
    assert m.state.vgpr[0, 1].tolist() == [0x1234] * 64


def test_the_subnormal_mode_can_be_set() -> None:
    m = machine(["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "v_add_f32_e32 {d}, {a}, {b}"])
    m.state.vgpr[2], m.state.vgpr[4] = 1, f32(0)
    m.run(10)
    assert m.state.vgpr[0, 0].tolist() == [0] * 64


NOTHING = [
    *("s_nop 0", "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_sleep 1", "s_setprio 1"),
    *("buffer_inv sc1", "buffer_wbl2 sc1", "s_icache_inv", "s_dcache_wb"),
]


@pytest.mark.parametrize("line", NOTHING)
def test_instructions_that_change_nothing(line: str) -> None:
    m = machine([line])
    before = m.state.vgpr.copy(), m.state.sgpr.copy()
    m.run(10)
    assert (m.state.vgpr == before[0]).all()
    assert (m.state.sgpr == before[1]).all()
