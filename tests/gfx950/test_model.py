"""What the model refuses, that unit tests execute every instruction, and that the assembler knows their lines."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gfx950 import (
    test_opcodes_float,
    test_opcodes_integer,
    test_opcodes_matrix,
    test_opcodes_overlap,
    test_opcodes_scalar,
)
from gfx950.bench import NAMES, machine
from gfx950.errors import Gfx950Error
from gfx950.machine import ARITHMETIC, CONTROL, MEMORY, NOTHING, parse
from gfx950.test_opcodes_memory import LOADS, STORES, forms

pytestmark = pytest.mark.study

FOLDER = Path(__file__).parent
LINES = [
    line.format(**NAMES)
    for line in (*test_opcodes_integer.CASES, *test_opcodes_float.CASES, *test_opcodes_scalar.CASES)
]
LINES += [*test_opcodes_matrix.PLACED, test_opcodes_matrix.SCALED.format("0,0,0"), test_opcodes_matrix.WIDE]
LINES += [*test_opcodes_scalar.NOTHING, *test_opcodes_overlap.ADDENDS, *test_opcodes_overlap.OVERLAPS]
LINES += [*test_opcodes_overlap.LOADS, *test_opcodes_overlap.SCALAR_LOADS, *test_opcodes_overlap.ATOMICS]
LINES += [
    line
    for table, action, store in ((LOADS, "load", False), (STORES, "store", True))
    for name, (size, _) in table.items()
    for line, _, _ in forms(f"{action}_{name}", size, store=store)
]


def test_every_instruction_is_executed_by_a_unit_test(tmp_path: Path) -> None:
    """In a process of its own, so that it does not matter which tests this run selects, or where they run."""
    names = tmp_path / "names"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gfx950.executed", "-p", "no:cacheprovider"]
    command += [
        "-p",
        "no:randomly",
        "--basetemp",
        str(tmp_path / "unit"),
        *map(str, sorted(FOLDER.glob("test_opcodes_*.py"))),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path]), "MXREF_EXECUTED": str(names)
    }  # fmt: skip
    environment.pop("PYTEST_ADDOPTS", None)
    process = subprocess.run(
        command, env=environment, cwd=FOLDER, timeout=200, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-1000:]
    known = {*ARITHMETIC, *MEMORY, *CONTROL, *NOTHING}
    executed = set(names.read_text().split())
    assert known - executed == set(), "no unit test executes these"
    assert executed <= known
    assert len(known) > 500


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
