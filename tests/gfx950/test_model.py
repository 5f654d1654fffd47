"""What the model refuses, how waves part and wait, and that the assembler knows the lines of the tests.

What most instructions compute is held by the compiled kernels and programs, whose results are compared bit for bit:
one that the model gets wrong shows there. Integers, matrices, conversions and accesses to memory have tests of their
own: their ISA's text has cases that these results do not tell apart.
"""

import itertools

import pytest

from gfx950 import test_opcodes_integer, test_opcodes_matrix
from gfx950.bench import NAMES, f32, machine, vector
from gfx950.errors import Gfx950Error
from gfx950.machine import parse
from gfx950.registers import Choices
from gfx950.test_opcodes_memory import LOADS, STORES, forms

pytestmark = pytest.mark.study

LINES = [line.format(**NAMES) for line in test_opcodes_integer.CASES]
LINES += [*test_opcodes_matrix.PLACED, test_opcodes_matrix.SCALED.format("0,0,0"), test_opcodes_matrix.WIDE]
LINES += [
    line
    for table, action, store in ((LOADS, "load", False), (STORES, "store", True))
    for name, (size, _) in table.items()
    for line, _, _ in forms(f"{action}_{name}", size, store=store)
]


def test_the_assembler_accepts_every_tested_line(capfd: pytest.CaptureFixture[str]) -> None:
    """So no test is written in a syntax, or with an operand, that gfx950 does not have."""
    library = pytest.importorskip("triton._C.libtriton")
    library.llvm.init_targets()
    binary = library.amd.assemble_amdgcn("\t.text\n" + "".join(f"\t{line}\n" for line in LINES), "gfx950", "")
    assert capfd.readouterr().err == ""
    assert len(binary) > 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("v_frobnicate_b32 {d}, {a}", "v_frobnicate_b32 is not modelled"),
        ("v_log_f32_e32 {d}, {a}", "not modelled"),
        ("v_add_f32_e64 {d}, {a}, {b} mul:2", "output multipliers"),
        ("v_mul_lo_u32 {d}, {a}, {b} clamp", "clamp on a result of type u32"),
        ("v_and_b32_e32 {d}, -{a}, {b}", "operand of type u32"),
        ("v_add_f32_e32 {d}, {a}, v70", "v70 is not allocated"),
        ("v_add_f32_e32 {d}, {a}", "1 sources, not 2"),
        ("v_lshlrev_b64 {D}, {a}, {b}", "no pair"),
        ("v_add_u32_e32 {d}, {a}, {b} offset:4", "modifier offset"),
        ("global_load_dword {d}, {A}, off lds", "modifier lds"),
        ("s_mov_b64 {S}, {t}", "single register for a 64-bit"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1", "only the subnormal bits"),
        (
            "v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[8:11], v[24:27], v[40:43], v60, v61 cbsz:4 blgp:4",
            "op_sel_hi",
        ),
        ("v_mov_b32_dpp {d}, {a} row_share:1 row_mask:0xf bank_mask:0xf", "row_share"),
    ],
)
def test_what_is_not_modelled_raises_with_the_line(line: str, reason: str) -> None:
    with pytest.raises(Gfx950Error, match=rf"line 1: .*({reason})"):
        machine([line]).run(10)


PRODUCERS = {
    "v_or_b32_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD": True,
    "v_or_b32_sdwa v1, v2, v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD": False,
    "v_mad_u16 v1, v2, v3, v4 op_sel:[0,0,0,1]": True,
    "v_mad_u16 v1, v2, v3, v4 op_sel:[1,0,0,0]": False,
    "v_rcp_f32_e32 v1, v2": True,
    "v_add_f32_e32 v1, v2, v3": False,
}
CONSUMERS = {
    "v_add_u32_e32 v5, v1, v6": True,
    "v_lshl_add_u64 v[6:7], v[0:1], 0, 0": True,
    "v_mad_u16 v1, v2, v3, v4 op_sel:[0,0,0,1]": True,
    "v_add_u32_e32 v1, v5, v6": False,
    "v_add_u32_e32 v5, v2, v6": False,
}


@pytest.mark.parametrize(("first", "second"), [*itertools.product(PRODUCERS, CONSUMERS)])
def test_missing_wait_states_are_found(first: str, second: str) -> None:
    machine([first, "s_nop 0", second])
    if PRODUCERS[first] and CONSUMERS[second]:
        with pytest.raises(Gfx950Error, match="s_nop 0 is missing"):
            machine([first, second])
    else:
        machine([first, second])


def test_a_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(Gfx950Error, match="no kernel"):
        parse("\t.text\n")


# ---- waves ----


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


# ---- what the hardware may choose ----


MINUS = 0x80000000


@pytest.mark.parametrize(
    "line",
    ["v_exp_f32_e32 {d}, {a}", "v_sqrt_f32_e32 {d}, {a}", "v_rsq_f32_e32 {d}, {a}"],
)
@pytest.mark.parametrize("value", [f32(0.3), 0x3F800001, f32(1e-30) + 1])
def test_inexact_functions_are_refused(line: str, value: int) -> None:
    with pytest.raises(Gfx950Error, match="only exact results"):
        vector(line, [(value,)])


def test_a_reciprocal_lies_on_the_side_asked_for_and_within_an_ulp() -> None:
    above, below = f32(1 / 3), f32(1 / 25)  # the nearest float32, on either side of the exact result
    for side, down, up in ((-1, -1, 0), (0, 0, 0), (1, 0, 1)):
        m = machine(["v_rcp_f32_e32 {d}, {a}"])
        m.state.choices = Choices(rcp_side=side)
        m.state.vgpr[2] = f32(1)
        for lane, value in enumerate((3, 25, 2, -25)):
            m.state.vgpr[2, 0, lane] = f32(value)
        m.run(10)
        got = [int(m.state.vgpr[0, 0, lane]) for lane in range(4)]
        assert got == [above + down, below + up, f32(0.5), (below + up) | MINUS]


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
