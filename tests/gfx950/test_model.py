"""What the model refuses, that no instruction lacks a test, and that the assembler knows every tested line."""

import itertools
import re
from pathlib import Path

import pytest

from gfx950 import test_opcodes_float, test_opcodes_integer, test_opcodes_matrix, test_opcodes_scalar
from gfx950.bench import NAMES, machine
from gfx950.errors import Gfx950Error
from gfx950.machine import ARITHMETIC, CONTROL, MEMORY, NOTHING, parse
from gfx950.salu import LOGIC
from gfx950.test_opcodes_memory import DS_LOADS, DS_STORES, LOADS, STORES, forms

FOLDER = Path(__file__).parent
LINES = [
    line.format(**NAMES)
    for line in (*test_opcodes_integer.CASES, *test_opcodes_float.CASES, *test_opcodes_scalar.CASES)
]
LINES += [*test_opcodes_matrix.PLACED, test_opcodes_matrix.SCALED.format("0,0,0"), test_opcodes_matrix.WIDE]
LINES += [
    line
    for table, action, store in ((LOADS, "load", False), (STORES, "store", True))
    for name, (size, _) in table.items()
    for line, _, _ in forms(f"{action}_{name}", size, store=store)
]


def test_every_instruction_has_a_test() -> None:
    """By name: in the text of an opcode test, or in one of the names that they build."""
    text = "".join(path.read_text() for path in FOLDER.glob("test_opcodes_*.py")) + " ".join(
        [
            *test_opcodes_float.COMPARISONS, *test_opcodes_scalar.SCALAR_COMPARISONS,
            *(f"v_{form}_class_f32" for form in ("cmp", "cmpx")),
            *(f"s_{name}_saveexec_b64" for name in (*LOGIC, "andn1", "orn1")),
            *(f"{space}_load_{name}" for space in ("global", "flat", "buffer") for name in LOADS),
            *(f"{space}_store_{name}" for space in ("global", "flat", "buffer") for name in STORES),
            *(f"ds_read_{name}" for name in DS_LOADS), *(f"ds_write_{name}" for name in DS_STORES),
            *(f"ds_{rw}2{st}_b{n}" for rw in ("read", "write") for st in ("", "st64") for n in (32, 64)),
            *(f"s_load_dword{n}" for n in ("", "x2", "x4", "x8", "x16")),
        ]
    )  # fmt: skip
    tested = set(re.findall(r"[a-z]+_\w+", text))
    tested |= {re.sub(r"_(e32|e64|sdwa|dpp)$", "", name) for name in tested}
    assert not {*ARITHMETIC, *MEMORY, *CONTROL} - tested
    assert len(ARITHMETIC) + len(MEMORY) + len(CONTROL) + len(NOTHING) > 400


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
