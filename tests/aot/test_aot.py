"""Kernels compiled for machines that are not here, counted, and held to their budgets; nothing is run."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("triton")

from aot import amdgcn, sass
from aot.__main__ import main
from aot.absent import MACHINES
from aot.budgets import KernelBudget, check, read_budgets
from aot.counts import loop_of
from aot.table import cases
from bench import render_aot
from bench.records import RECORDS
from mxref.errors import RecipeError
from places import TESTS


def whole_table(test):
    """Leave a test to `make test-aot`: the first of these tests compiles the table, which takes minutes of CPU time."""
    return pytest.mark.study(pytest.mark.timeout(1200)(test))


@dataclass(frozen=True)
class Compiled:
    """The table compiled for all machines, once for all tests."""

    folder: Path
    """Of the machine code."""
    done: subprocess.CompletedProcess[str]
    document: dict[str, Any]
    """What --json wrote."""

    def records(self, target):
        return [r for r in self.document["records"] if r["target"] == target]

    def text(self, kernel, kind="amdgcn"):
        return (self.folder / f"{kernel}.gfx950.{kind}").read_text()


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("aot")
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    environment.pop("TRITON_INTERPRET", None)
    # Triton's cache knows what a kernel was compiled from. The model's tests keep theirs in the same folder.
    if request.config.pluginmanager.hasplugin("cacheprovider"):
        environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton-gfx950"))
    else:
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", "aot", "--check", "--jobs", "2"]
    command += ["--json", folder / "counts.json", "--keep", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "counts.json").exists(), done.stdout + done.stderr
    return Compiled(folder, done, json.loads((folder / "counts.json").read_text()))


@whole_table
def test_every_kernel_is_within_its_goals_and_budgets(compiled):
    assert compiled.done.returncode == 0, compiled.done.stdout + compiled.done.stderr
    assert compiled.done.stdout.count("never run there") == 2


@whole_table
@pytest.mark.parametrize("target", ["gfx950", "sm_90"])
def test_every_case_is_compiled_and_nothing_spills(compiled, target):
    records = compiled.records(target)
    assert {r["case"] for r in records} == {name for name, case in cases().items() if target in case.targets}
    assert {(r["spills"], r["scratch"]) for r in records} == {(0, 0)}
    assert target == "gfx950" or all(r["pipes"]["alu"] for r in records)


@whole_table
@pytest.mark.parametrize("target", ["gfx950", "sm_90"])
def test_recorded_counts_are_those_of_the_code(compiled, target):
    release = read_budgets().counted_with
    if compiled.document["triton"] != release:
        pytest.skip(f"Triton {compiled.document['triton']}: counts are renewed with {release} only")
    (old,) = (d["records"] for d in render_aot.documents(target) if d["triton"] == release)
    fresh = compiled.records(target)
    stale = [f"{r['case']} {r['kernel']}" for r in fresh if r not in old]
    stale += [f"{r['case']} {r['kernel']}" for r in old if r not in fresh]
    assert not stale, "renew them: make aot RECORD=1"


@whole_table
def test_conversions_wait_between_bytes_of_a_register(compiled):
    for name, per_thread in (("native.row.rne.quantize_rows", 64), ("native.row.sr16.h16.quantize_rows", 32)):
        lines = amdgcn.lines_of(compiled.text(name))
        found = [i for i, (m, _) in enumerate(lines) if m.startswith("v_cvt_scalef32")]
        assert len(found) == per_thread / 2  # an instruction converts two elements
        for i, j in itertools.pairwise(found):
            before, after = (lines[k][1].split(",")[0] for k in (i, j))
            assert before != after or "s_nop" in {m for m, _ in lines[i + 1 : j]}
        selects = [re.search(r"op_sel:\[0,0,(\d),(\d)\]", lines[i][1]).groups() for i in found]
        assert selects == [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")] * (len(found) // 4)


@whole_table
def test_scales_lie_where_the_matrix_cores_read_them(compiled):
    """Lane l of 16x16x128 holds the scale of row l % 16 and block l // 16, for the right operand as for the left."""
    text = compiled.text("gemm.bounded.bfloat16._multiply", "ttgir")
    layouts = dict(re.findall(r"^(#linear\d*) = #ttg\.linear<\{(.*)\}>", text, re.MULTILINE))
    dots = [line for line in text.splitlines() if "tt.dot_scaled" in line]
    assert dots
    for line in dots:
        scales = re.findall(r"tensor<\d+x4xi8, (#linear\d*)>", line)
        assert len(scales) == 2
        for name in scales:
            assert "lane = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1], [0, 2]]" in layouts[name]
    assembly = amdgcn.lines_of(compiled.text("gemm.bounded.bfloat16._multiply"))
    matrix = [o for m, o in assembly if m.startswith("v_mfma_scale")]
    # Both operands are E2M1: format 4.
    assert matrix
    assert all("cbsz:4" in o and "blgp:4" in o for o in matrix)


@whole_table
@pytest.mark.parametrize(
    ("case", "formats"),
    [("e4m3", (0, 0)), ("e5m2.e4m3", (1, 0)), ("e4m3.mxfp4", (0, 4)), ("e4m3.onto", (0, 0))],
)
def test_matrix_instructions_of_mxfp8_name_the_formats_of_both_operands(compiled, case, formats):
    """The compiler multiplies the transposed product, so its first operand is the right one."""
    text = compiled.text(f"gemm.mxfp8.{case}._multiply")
    matrix = [o for m, o in amdgcn.lines_of(text) if m == "v_mfma_scale_f32_16x16x128_f8f6f4"]
    assert matrix
    for operands in matrix:
        found = (int((re.search(rf"{name}:(\d)", operands) or [0, 0])[1]) for name in ("blgp", "cbsz"))
        assert tuple(found) == formats


@whole_table
@pytest.mark.parametrize("case", ["gemm.ordered.float32", "gemm.ordered.odd"])
def test_ordered_blocks_are_added_by_the_vector_alu(compiled, case):
    """A matrix instruction multiplies one block onto 0; four additions follow, and little else is in the loop."""
    records = compiled.records("gfx950")
    (record,) = (r for r in records if (r["case"], r["kernel"]) == (case, "_ordered_by_block"))
    loop = loop_of(amdgcn.lines_of(compiled.text(f"{case}._ordered_by_block")), ("s_cbranch", "s_branch"))
    matrix = [o for m, o in loop if m == "v_mfma_f32_16x16x32_fp8_fp8"]
    assert len(matrix) == record["loop_matrix"] >= 16
    assert all(o.rpartition(", ")[2] == "0" for o in matrix)
    added = sum(1 + m.startswith("v_pk") for m, _ in loop if m.startswith(("v_add_f32", "v_pk_add_f32")))
    assert added == 4 * len(matrix)
    others = sum(amdgcn.is_valu(m) and not m.startswith(("v_add_f32", "v_pk_add_f32")) for m, _ in loop)
    assert others <= len(matrix) / 2
    assert record["occupancy"] >= 2


def test_table_is_of_a_reviewable_size():
    """A case is one operation in one configuration; that some launch several kernels does not count."""
    amd, nvidia = (sum(target in case.targets for case in cases().values()) for target in MACHINES)
    assert 0 < nvidia <= amd <= 100
    words = " ".join((RECORDS.parent / "explanation" / "gfx950.rst").read_text().split())
    assert f"{amd} of them for gfx950, of which {nvidia} are compiled for sm_90 too" in words


RECORD = {
    "case": "row.rne", "kernel": "quantize_rows", "target": "gfx950", "elements_per_thread": 32.0,
    "registers": {"vgpr": 60, "agpr": 4, "sgpr": 20}, "shared": 512, "spills": 0, "scratch": 0, "occupancy": 5,
    "alu": 320, "loop_alu": 0, "loop_matrix": 0, "chained": 3, "mnemonics": {"v_add_f32": 320}, "loop_mnemonics": {},
    "notable": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "excess"),
    [
        ({"max_alu": 10.0, "max_chained": 3, "required": ("v_add",)}, None),
        ({"max_alu": 9.9}, "alu 10 > 9.9"),
        ({"max_vgpr": 63}, "vgpr 64 > 63"),
        ({"min_occupancy": 6}, "occupancy 5 < 6"),
        ({"required": ("v_mfma",)}, "no v_mfma in the code"),
        ({"forbidden": ("v_add",)}, "v_add_f32 is there"),
    ],
)
def test_what_exceeds_a_budget_is_named(limits, excess):
    found = check([RECORD], [KernelBudget("row.*", **limits)])
    assert found == ([f"gfx950 row.rne quantize_rows: {excess}"] if excess else [])


def test_budgets_are_those_of_the_pinned_and_recorded_release():
    release = read_budgets().counted_with
    assert f"triton=={release}" in (RECORDS.parents[1] / "constraints.txt").read_text().splitlines()
    for target in MACHINES:
        assert release in [d["triton"] for d in render_aot.documents(target)]


def checked(monkeypatch, tmp_path, release, **counts):
    """Return what `--check` says of one kernel that costs something, under a release of Triton."""
    result = {"case": "row.rne", "target": "gfx950", "records": [RECORD | counts]}
    monkeypatch.setattr("aot.__main__.compile_cases", lambda *_: iter([result]))
    monkeypatch.setattr("triton.__version__", release)
    path = tmp_path / "counts.json"
    command = ["--target", "gfx950", "--only", "row.rne", "--check", "--json", str(path)]
    done = CliRunner().invoke(main, command)
    assert json.loads(path.read_text())["triton"] == release
    return done


def test_budgets_are_enforced_under_their_release_only(monkeypatch, tmp_path):
    dear = {"alu": 15 * 32}  # above the budget, within the goal
    release = read_budgets().counted_with
    done = checked(monkeypatch, tmp_path, release, **dear)
    assert done.exit_code == 1
    assert "✗ gfx950 row.rne quantize_rows: alu 15 > 10\n" in done.stdout
    assert "not enforced" not in done.stdout
    done = checked(monkeypatch, tmp_path, "3.6.0", **dear)
    assert done.exit_code == 0, done.output
    assert "- gfx950 row.rne quantize_rows: alu 15 > 10 (not enforced)\n" in done.stdout
    assert f"not enforced: counted with Triton {release}, this is 3.6.0\n" in done.stdout
    assert "✓ 1 kernels are within their goals\n" in done.stdout
    assert checked(monkeypatch, tmp_path, "3.6.0", alu=17 * 32).exit_code == 1
    done = checked(monkeypatch, tmp_path, release)
    assert done.exit_code == 0, done.output
    assert "✓ 1 kernels are within their goals and budgets\n" in done.stdout


def test_a_budget_for_nothing_is_an_error():
    with pytest.raises(RecipeError, match="no kernel matches case 'colum"):
        check([RECORD], [KernelBudget("colum.*", max_alu=1.0)])


def test_the_longest_innermost_loop_is_found():
    lines = amdgcn.lines_of(
        "k:\n.LBB0_1:\n\tv_a v0\n.LBB0_2:\n\tv_b v0\n\tv_c v1\n\ts_cbranch_scc1 .LBB0_2\n\tv_d v0\n"
        "\ts_cbranch_scc0 .LBB0_1\n.LBB0_3:\nv_e v0\n\ts_branch .LBB0_4\n.LBB0_4:\n\ts_endpgm\n.Lfunc_end0:\n\tv_f v0\n"
    )
    assert [m for m, _ in loop_of(lines, ("s_cbranch", "s_branch")) if m] == ["v_b", "v_c", "s_cbranch_scc1"]
    # Inline assembly may begin a line without space; what follows the end is no code.
    assert [m for m, _ in lines if m.startswith("v_")] == ["v_a", "v_b", "v_c", "v_d", "v_e"]


def test_branches_of_nvidia_code_lead_to_labels():
    text = "  /*0010*/  IADD3 R0, R1, 0x20 ;\n  /*0020*/  FADD R0, R1, R2 ;\n  /*0030*/  @!P0 BRA 0x10 ;\n"
    lines = sass.labelled(sass.lines_of(text))
    assert lines == [("", "0x10"), ("IADD3", "R0, R1, 0x20 "), ("FADD", "R0, R1, R2 "), ("BRA", "0x10 ")]
    assert [m for m, _ in loop_of(lines, ("BRA",))] == ["", "IADD3", "FADD", "BRA"]


def test_a_compiler_that_dies_takes_only_its_case_along(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, torch\n"
        "torch.version.hip = 'ahead of time'\n"
        "from aot import absent, table, worker\n"
        "absent.become(absent.MACHINES['gfx950'])\n"
        "bad = table.CompiledCase('bad', lambda backend: os.abort(), 1)\n"
        "wrong = table.CompiledCase('wrong', lambda backend: 1 / 0, 1)\n"
        "todo = [bad, wrong, table.cases()['dequantize.bfloat16']]\n"
        "for r in worker.results(todo, absent.MACHINES['gfx950'], 1, None):\n"
        "    print(r['case'], r.get('error', len(r.get('records', ()))))\n"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    bad, wrong, good = done.stdout.splitlines()
    assert bad.startswith("bad the compiler ended with exit code -6")
    assert wrong == "wrong ZeroDivisionError: division by zero"
    assert good == "dequantize.bfloat16 1"


@pytest.mark.parametrize("target", ["gfx950", "sm_90"])
def test_the_recorded_counts_are_of_the_whole_table(target):
    recorded = render_aot.documents(target)
    assert [d["triton"] for d in recorded] == ["3.6.0", "3.7.1", "3.9.0"]
    for document in recorded:
        found = document["records"]
        assert {r["case"] for r in found} == {n for n, case in cases().items() if target in case.targets}
        spilling = {r["case"] for r in found if r["spills"] or r["scratch"]}
        # The page names the two.
        newest = {"gfx950": {"gemm.mxint8"}, "sm_90": {"nvfp4.row.rne.values"}}
        assert spilling == (newest[target] if document["triton"] == "3.9.0" else set())


def test_the_page_has_the_recorded_counts():
    assert render_aot.parts()["gfx950.inc"] == render_aot.render(render_aot.documents("gfx950"))


def test_recording_replaces_the_counts_of_a_release(tmp_path):
    short = RECORD | {"alu_per_element": 10.04, "notable": ["v_mfma"]}
    for alu in (10.04, 8.0):
        document = {"triton": "3.10.0", "date": "2026-01-02", "records": [short | {"alu_per_element": alu}]}
        document["records"].append(short | {"target": "sm_90"})
        (tmp_path / "counts.json").write_text(json.dumps(document))
        render_aot.keep(tmp_path / "counts.json", tmp_path)
    assert [d["records"][0]["target"] for d in render_aot.documents("sm_90", tmp_path)] == ["sm_90"]
    text = render_aot.parts(tmp_path)["gfx950.inc"]
    assert text.startswith("1 cases, 1 kernels, counted with Triton 3.10.0 on 2026-01-02.")
    assert text.count("`row.rne`") == 1
    assert "`row.rne`,`quantize_rows`,8.0,64,5," in text
    assert ",10.0," not in text
