"""The conformance kit: who passes, what a failure shows, and its three ways in."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from mutant_stages import Loose, Staged, staged, with_capabilities
from mutants import MUTANTS
from mxref import GemmProfile, MXArray, OperandSpec, Rounding, Stream, quantize, scaled_gemm
from mxref.backend import Capabilities
from mxref.cli import main
from mxref.conformance import CLAUSES, check, checks_of
from mxref.conformance.crafted import TIES, crafted_blocks, tame
from mxref.conformance.model import Level, Op, Plan, Subject
from mxref.conformance.product import Product
from mxref.conformance.report import to_json, to_junit
from mxref.conformance.request import Request
from mxref.conformance.shrink import explain_command, shrink_quantize
from mxref.discovery import get_backend
from mxref.errors import RecipeError
from mxref.formats import E2M1
from mxref.packing import pack, unpack
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference
from mxref.scale import ScaleRule

ROOT = Path(__file__).parent.parent
TOY = f"{ROOT}/docs/examples/toy_backend.py:backend"
PLANTED = f"{ROOT}/docs/examples/planted_fault_backend.py:backend"
BY_NAME = {m.name: m for m in MUTANTS}


def run(*args: str, width: int = 100) -> Result:
    return CliRunner().invoke(main, args, env={"COLUMNS": str(width), "MXREF_BACKEND": ""})


# ---- who passes ----


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("level", Level)
def test_the_reference_passes_all_that_it_declares(level):
    report = check(reference, level=level)
    assert report.ok, report.failing
    assert {c.clause for c in report.clauses} == set(CLAUSES)
    assert {reason for c in report.clauses for reason in c.reasons} == {"native_sr"}


def test_numba_passes_and_skips_only_what_it_does_not_declare():
    pytest.importorskip("numba")
    report = check(get_backend("numba"))
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    skipped = {c.clause: set(c.reasons) for c in report.clauses if c.reasons}
    undeclared = {
        "native_sr", "gemms: exact of mxfp4 x mxfp4", "dequantize_dtypes: float64", "bounded_max_scale: 254",
        "bounded_max_scale: 253",
    }  # fmt: skip
    assert set.union(*skipped.values()) <= undeclared
    assert [c.clause for c in report.clauses if c.outcome == "skipped"] == [
        "rounding.native_sr",
        "gemm.exact",
    ]


@pytest.mark.clause("conformance.unsupported")
def test_the_toy_backend_passes_what_it_declares():
    report = check(get_backend(TOY))
    assert report.ok, report.failing
    outcomes = {c.clause: c.outcome for c in report.clauses}
    assert outcomes["scale.rule.floor"] == outcomes["rounding.rne"] == outcomes["gemm.ordered"] == "passed"
    assert outcomes["scale.rule.even"] == outcomes["hadamard.order"] == outcomes["random.index"] == "skipped"
    assert outcomes["conformance.unsupported"] == outcomes["quantize.order"] == "passed"
    (drawn,) = [c for c in report.clauses if c.clause == "quantize.order"]
    assert drawn.passed >= 3000


@pytest.mark.parametrize(
    "fields",
    [
        {"in_dtypes": frozenset({"bfloat16"})},
        {"scale_rules": frozenset({ScaleRule.EVEN}), "roundings": frozenset({Rounding.SR})},
        {"max_sr_bits": 16, "hadamard_sizes": frozenset({16, 64}), "gemm_dtypes": frozenset({"bfloat16"})},
        {"gemms": frozenset(), "dequantize_dtypes": frozenset()},
    ],
)
def test_narrow_declarations_are_asked_for_what_they_hold(fields):
    narrow = type("Narrow", (ReferenceBackend,), {"capabilities": with_capabilities(**fields)})()
    report = check(narrow, level="quick")
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    passed = {c.clause for c in report.clauses if c.passed}
    assert {"scale.amax", "rounding.sign", "quantize.axis", "conformance.unsupported"} <= passed
    assert next(c for c in report.clauses if c.clause == "quantize.order").passed >= 60
    if "roundings" in fields:
        assert "random.index" in passed


def _spread(array):
    """Return the same array with a gap after every element in memory, and its rows in reverse."""
    if array.size == 0:
        return array
    wide = np.full((*array.shape, 2), array.reshape(-1)[0])[::-1]
    wide[..., 0] = array
    return wide[..., 0]


class Strided(ReferenceBackend):
    name = "strided"

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        return _spread(codes), _spread(scales)

    def _dequantize(self, q, dtype):
        return _spread(super()._dequantize(q, dtype))

    def _hadamard(self, x, rotation, axis):
        return _spread(super()._hadamard(x, rotation, axis))

    def _scaled_gemm(self, a, b, profile, out_dtype):
        return _spread(super()._scaled_gemm(a, b, profile, out_dtype))


@pytest.mark.clause("conformance.dual")
def test_a_fault_of_one_orientation_says_which_and_where():
    failure = check(
        BY_NAME["dual without padding"].make(), level="quick", clauses={"conformance.dual"}
    ).failures[0]
    assert re.fullmatch(
        r"along axis 0: not what quantize gives in \d+ of \d+ blocks, the first in stored row \d+, block \d+",
        failure.message,
    )
    assert "True" in failure.request["pads"]
    assert failure.request["along axis 0"].startswith("scale_rule=floor, rounding=rne")


@pytest.mark.clause("conformance.dual")
def test_a_fault_of_a_layout_is_not_one_of_the_gemm():
    report = check(BY_NAME["layout loses NaN"].make(), level="quick", ops=["gemm"])
    assert report.failing == ("conformance.dual",)
    assert "B prepared" in report.failures[0].check
    # A GEMM that is wrong by itself is not blamed on the layout as well.
    assert (
        "conformance.dual"
        not in check(BY_NAME["NaN rows dropped"].make(), level="quick", ops=["gemm"]).failing
    )


@pytest.mark.clause("conformance.protocol")
def test_results_may_have_any_strides():
    assert not _spread(np.ones((2, 3))).flags.c_contiguous
    assert check(Strided(), level="quick").failing == ()


class HardwareRandom(Staged):
    capabilities = with_capabilities(native_sr=True)
    bias = 0.0

    def integers(self, plan):
        rng = np.random.default_rng(int(np.random.default_rng().integers(1 << 60)))
        r = rng.random((plan.rows, plan.length)) ** (1 + self.bias)
        return (r * 2**plan.spec.sr_bits).astype(np.uint32)


@pytest.mark.clause("rounding.native_sr")
def test_native_sr_is_asked_for_statistics_only():
    good, biased = HardwareRandom(), HardwareRandom()
    biased.bias = 1.0
    report = check(good, level="quick", ops=["quantize"])
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    outcomes = {c.clause: c.outcome for c in report.clauses}
    assert outcomes["rounding.native_sr"] == "passed"
    assert outcomes["rounding.sr"] == outcomes["random.philox"] == "skipped"
    assert check(biased, level="quick", ops=["quantize"]).failing == ("rounding.native_sr",)


# ---- what is asked ----


def test_crafted_blocks_hold_what_they_promise():
    crafted = crafted_blocks()
    bits = crafted.x.view(np.uint32)
    assert len(set(crafted.names)) == len(crafted.names) == len(crafted.x)
    amax = (bits & 0x7FFFFFFF).max(axis=1)
    finite = amax[amax < 0x7F800000]
    assert set(range(255)) <= set((finite >> 23).tolist())
    values = np.abs(crafted.x[amax < 0x7F800000].astype(np.float64))
    for e in (-127, -126, 0, 100):
        found = set((values / 2.0**e).ravel().tolist())
        assert set(TIES) <= found
    for special in (0x80000000, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001):
        assert (bits == special).any(), hex(special)
    assert np.isin(crafted_blocks(False).x.view(np.uint32), bits).mean() > 0.2
    assert not crafted.x.flags.writeable


@pytest.mark.parametrize("rule", ScaleRule)
def test_tame_values_are_exact_under_every_rounding(rule):
    x = tame(np.random.default_rng(0), (50, 96))
    first, *others = (
        quantize(x, OperandSpec(scale_rule=rule, rounding=r), placement=Placement(Stream(1)))
        for r in Rounding
    )
    assert all(first == other for other in others)


def test_filters():
    caps = Capabilities()
    checks = checks_of(caps, ops=["hadamard"], level="quick")
    assert {c.op for c in checks} == {Op.HADAMARD}
    checks = checks_of(caps, dialects=["nvidia"], ops=["quantize"], level="quick")
    specs = {c.spec for c in checks if c.spec}
    assert {s.scale_rule for s in specs} == {ScaleRule.RCEIL}
    assert {s.rounding for s in specs} == {Rounding.RNE}
    assert len([c for c in checks if c.clause == "quantize.order"]) >= 60
    checks = checks_of(caps, clauses=["gemm.nan"], level="quick")
    assert {c.clause for c in checks} == {"gemm.nan"}
    for bad in (
        {"ops": ["quantise"]},
        {"dialects": ["intel"]},
        {"clauses": ["scale.rul"]},
        {"level": "some"},
    ):
        with pytest.raises(RecipeError, match=next(iter(next(iter(bad.values()))))[:1]):
            checks_of(caps, **bad)
    with pytest.raises(RecipeError, match="seed = -1 is negative"):
        checks_of(caps, seed=-1)


def test_the_seed_changes_the_draws_and_nothing_else():
    first, again, other = (
        [c for c in checks_of(Capabilities(), seed=s, level="quick") if c.title == "drawn combination 3"]
        for s in (0, 0, 1)
    )
    assert first[0].spec == again[0].spec
    assert first[0].describe() == again[0].describe()
    assert first[0].describe() != other[0].describe()
    assert check(reference, seed=7, level="quick").ok


# ---- failures ----


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("ties away", 1), ("EVEN at 1.5", 1), ("underflow to +0", 2), ("negative exponents wrap", 1),
        ("applied scale clamped", 1), ("NaN keeps the rest", 2), ("RTZ to nearest", 2), ("prescale missing", 2),
    ],
)  # fmt: skip
def test_a_failure_is_shrunk_to_few_elements_in_the_plainest_treatment(name, most):
    mutant = BY_NAME[name]
    report = check(mutant.make(), ops=["quantize"], level="quick")
    failure = next(f for f in report.failures if f.clause == mutant.clause)
    live = [w for w in failure.inputs["x"] if int(w, 16)]
    assert len(live) <= most, live
    assert failure.request["shape"] == "(1, 32)"
    assert "hadamard" not in failure.request
    assert failure.differing or failure.expected.split()[1] != failure.got.split()[1]


def explained(command: str) -> str:
    """What the command prints, in the form of a failure's expected side."""
    words = shlex.split(command)
    assert words[:2] == ["mxref", "explain"]
    index = int(words[words.index("--block") + 1])
    (block,) = json.loads(run(*words[1:], "--json").stdout)["blocks"]
    assert block["index"] == index
    packed = bytes.fromhex(block["packed"])
    return f"scale {block['scale']['byte']:02x}  codes {packed.hex(' ')}"


@pytest.mark.parametrize(
    "name",
    [
        "ties away", "low bits of the half", "seed cut to 32 bits", "operand ignored", "prescale in bfloat16",
        "transform rounded to bfloat16", "halves swapped", "local columns", "zero byte swapped", "blocks of 64",
        "padding after the transform", "Inf to 6", "unpadded length", "axis guessed",
    ],
)  # fmt: skip
def test_the_command_explains_the_expected_side(name):
    mutant = BY_NAME[name]
    report = check(mutant.make(), ops=["quantize"], level="quick")
    commands = [f for f in report.failures if f.command]
    assert commands
    assert any(f.clause == mutant.clause for f in commands)
    for failure in commands:
        assert explained(failure.command) == failure.expected, failure


@pytest.mark.parametrize("hadamard", [0, 16, 64])
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.SR])
def test_any_block_can_be_explained_where_it_is(hadamard, rounding):
    spec = OperandSpec(
        rounding=rounding, hadamard=hadamard, signs="per_step" if hadamard else "none", zero_scale=127
    )
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    request = Request(x, spec, axis=0, rng=Stream(5, 6, 7, 3))
    subject = Subject(staged(pack=lambda self, codes: pack(codes, E2M1) ^ 1)(), shrink=False)
    for row, block in ((0, 0), (1, 1), (2, 0)):
        failure = shrink_quantize(subject, request, row, block, "c", "t", 1)
        want = request.expected_blocks
        codes = pack(want.codes[row, block], E2M1).tobytes().hex(" ")
        assert failure.expected == f"scale {want.scales[row, block]:02x}  codes {codes}"
        assert explained(failure.command) == failure.expected


def test_a_place_that_words_cannot_reach_has_no_command():
    spec = OperandSpec(rounding=Rounding.SR)
    x = np.ones((1, 32), np.float32)
    far = Request(x, spec, rng=Stream(1), origin=(1 << 30, 0), global_shape=(1 << 31, 32))
    assert explain_command(far, 0, 0) is None
    assert explain_command(replace(far, spec=OperandSpec()), 0, 0) is not None


def test_a_failing_product_is_shrunk_to_one_row_and_few_blocks():
    report = check(BY_NAME["blocks descending"].make(), ops=["gemm"], level="quick")
    failure = next(f for f in report.failures if f.clause == "gemm.ordered")
    assert failure.request["M, N, K"].startswith("1, 1, ")
    assert len(failure.inputs["A"]) == len(failure.inputs["B"]) <= 3
    rows = []
    for name in "AB":
        scales, codes = zip(*(block.split(":") for block in failure.inputs[name]), strict=True)
        packed = np.frombuffer(bytes.fromhex("".join(codes)), np.uint8)[None]
        scale = np.array([[int(s, 16) for s in scales]], np.uint8)
        rows.append(MXArray(packed, scale, (1, 2 * packed.size), 1))
    want = scaled_gemm(*rows, profile=GemmProfile.ORDERED, out_dtype=failure.request["out_dtype"])
    assert f"{float(want[0, 0]):g}" == failure.expected.split()[0]


def test_a_failing_transform_is_shrunk_to_one_group():
    report = check(BY_NAME["stages swapped"].make(), ops=["hadamard"], level="quick")
    failure = report.failures[0]
    assert failure.clause == "hadamard.order"
    assert len(failure.inputs["x"]) == int(failure.request["n"])
    assert failure.expected != failure.got


@pytest.mark.clause("gemm.bounded")
def test_bounded_is_a_tolerance_and_not_a_bit():
    rng = np.random.default_rng(0)
    a, b = (quantize(rng.standard_t(2, (5, 512)).astype(np.float32)) for _ in range(2))
    product = Product(a, b, GemmProfile.BOUNDED)
    assert not product.wrong(Subject(reference))[0].any()
    assert product.wrong(Subject(Loose()))[0].any()


def test_exceptions_and_refusals_are_findings():
    class Raises(ReferenceBackend):
        def _quantize(self, x, plan):
            if plan.axis == 0 and len(plan.shape) == 3:
                raise IndexError("out\nof range")
            return super()._quantize(x, plan)

    report = check(Raises(), ops=["quantize"], level="quick")
    failure = next(f for f in report.failures if f.clause == "quantize.axis")
    assert failure.message == "raised IndexError: out of range"
    assert "(64, 2, 3)" in failure.request["shape"]


def test_wrong_metadata_is_a_finding():
    class Forgets(ReferenceBackend):
        def quantize(self, x, spec, **arguments):
            return replace(super().quantize(x, spec, **arguments), prescale=False)

    report = check(Forgets(), ops=["quantize"], level="quick")
    assert "prescale of the MXArray is False, expected True" in {f.message for f in report.failures}


# ---- reports ----


@pytest.fixture(scope="module")
def failing_report():
    return check(get_backend(PLANTED), level="quick")


def test_json_holds_every_clause_and_the_shrunk_failure(failing_report):
    table = json.loads(to_json(failing_report))
    assert table["format"] == "mxref.conformance.1"
    assert (table["backend"], table["level"], table["seed"], table["ok"]) == ("planted", "quick", 0, False)
    assert set(table["totals"]) == {"passed", "failed", "skipped", "compared"}
    assert table["totals"]["failed"] == sum(c["failed"] for c in table["clauses"])
    assert [c["clause"] for c in table["clauses"]] == [
        c for c in CLAUSES if c in {d["clause"] for d in table["clauses"]}
    ]
    for clause in table["clauses"]:
        assert set(clause) == {
            "clause",
            "outcome",
            "passed",
            "failed",
            "skipped",
            "compared",
            "reasons",
            "failures",
        }
        assert clause["outcome"] in ("passed", "failed", "skipped")
        assert bool(clause["failures"]) == (clause["outcome"] == "failed")
        assert sum(clause["reasons"].values()) == clause["skipped"]
    (rne,) = [c for c in table["clauses"] if c["clause"] == "rounding.rne"]
    failure = rne["failures"][0]
    assert set(failure) == {
        "check", "message", "request", "inputs", "expected", "got", "differing", "command",
    }  # fmt: skip
    assert len(failure["inputs"]["x"]) == 32


def test_junit_has_a_case_per_clause(failing_report):
    root = ElementTree.fromstring(to_junit(failing_report))
    (suite,) = root
    cases = {case.get("name"): case for case in suite}
    assert int(suite.get("tests")) == len(cases) == len(failing_report.clauses)
    assert int(suite.get("failures")) == len(failing_report.failing)
    assert "explain   mxref explain" in cases["rounding.rne"].find("failure").text
    assert "scale_rules" in cases["scale.rule.even"].find("skipped").get("message")
    assert len(cases["scale.rule.floor"]) == 0
    assert suite.get("errors") == "0"


def test_plan_takes_the_plainest_that_is_declared():
    plan = Plan.of(
        Level.QUICK,
        3,
        with_capabilities(scale_rules=frozenset({ScaleRule.EVEN}), in_dtypes=frozenset({"float16"})),
    )
    assert (plan.base.scale_rule, plan.base.rounding, plan.dtype) == (ScaleRule.EVEN, Rounding.RNE, "float16")


# ---- the command ----


def test_command_passes_fails_and_refuses(tmp_path):
    junit, table = tmp_path / "c.xml", tmp_path / "c.json"
    files = ("--junit", str(junit), "--json", str(table))
    good = run("conform", "--backend", "reference", "--quick", "--op", "dequantize", *files)
    assert good.exit_code == 0, good.output
    assert "reference conforms (quick, seed 0)" in good.output
    assert json.loads(table.read_text())["ops"] == ["dequantize"]
    assert ElementTree.parse(junit).getroot().tag == "testsuites"
    bad = run("conform", "--backend", PLANTED, "--quick", "--clause", "rounding.rne", *files)
    assert bad.exit_code == 1
    assert "broken, likely causes first: rounding.rne" in bad.output
    assert json.loads(table.read_text())["ok"] is False
    nothing = run("conform", "--backend", PLANTED, "--op", "gemm", "--clause", "gemm.exact", "--quick")
    assert nothing.exit_code == 1
    assert "declares nothing that was asked for" in " ".join(nothing.output.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "c.xml"]


def test_a_log_is_told_how_far_the_run_is(monkeypatch):
    words = ("conform", "--backend", "reference", "--quick", "--clause", "gemm.nan")
    assert run(*words).stderr == ""
    monkeypatch.setattr("mxref.cli.conform._INTERVAL", 0.0)
    lines = run(*words).stderr.splitlines()
    total = len(lines)
    assert total > 3
    assert lines == [f"{done} of {total} checks" for done in range(1, total + 1)]


def test_a_screen_holds_the_output_and_verbose_has_every_clause():
    few, all_of_it = (
        run("conform", "--backend", PLANTED, "--quick", *more).stdout.splitlines() for more in ((), ("-v",))
    )
    assert len(few) < 36
    assert any(line.startswith("rounding     FAILED") for line in few)
    assert any(line.startswith("-v prints the other 2 failures") for line in few)
    clauses = [line.split()[0] for line in all_of_it if re.search(r"(passed|FAILED|skipped) ", line)]
    assert set(CLAUSES) <= set(clauses)
    assert sum(line.startswith("  expected ") for line in few) == 1
    assert sum(line.startswith("  expected ") for line in all_of_it) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--backend", "numbr"), "unknown backend 'numbr'"),
        (("--backend", "reference", "--dialect", "intel"), "unknown dialect 'intel'"),
        (("--backend", "reference", "--clause", "scale.rule.flor"), "did you mean 'scale.rule.floor'"),
        (("--backend", "reference", "--op", "divide"), "Invalid value for '--op'"),
        (("--backend", "reference", "--seed", "-1"), "Invalid value for '--seed'"),
        (
            ("--backend", "reference", "--json", "/no/such/folder/x.json"),
            "cannot write /no/such/folder/x.json",
        ),
    ],
)
def test_bad_usage_ends_with_two(args, message):
    result = run("conform", "--quick", *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_tiles_are_explained_from_saved_files(tmp_path):
    (tmp_path / "faulty.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from mutants import MUTANTS\n"
        "backend = next(m for m in MUTANTS if m.name == 'tile amax by row').make\n"
    )
    folder = tmp_path / "blocks"
    result = run(
        "conform", "--backend", f"{tmp_path}/faulty.py:backend", "--quick", "--clause", "scale.block.tile",
        "--save", str(folder), "--json", str(tmp_path / "c.json"),
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    (clause,) = json.loads((tmp_path / "c.json").read_text())["clauses"]
    failure = clause["failures"][0]
    assert "--tile --file" in failure["command"]
    assert explained(failure["command"]) == failure["expected"]
    assert [p.name for p in folder.iterdir()] == ["scale.block.tile.npy"]


def test_output_of_the_documentation_is_what_the_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "conformance.rst").read_text(encoding="utf-8")
    shown = re.search(r"   \$ (mxref conform .*--clause rounding.rne)\n((?:   .*\n|\n)+?)\nThe block", page)
    words = shlex.split(shown[1])[1:]
    printed = [line.rstrip() for line in run(*words, width=80).stdout.rstrip().splitlines()]
    written = [line.removeprefix("   ") for line in shown[2].rstrip().splitlines()]

    def steady(lines: list[str]) -> list[str]:
        """Without the counts and the time, which grow with the vectors."""
        at = next(i for i, line in enumerate(lines) if line.startswith("planted does not"))
        return [re.sub(r"[\d,.]+|\s+", " ", line) for line in lines[:4]] + lines[4:at] + lines[-1:]

    assert steady(written) == steady(printed)
    command = re.search(r"explain   (mxref .*)", shown[2])[1]
    assert f"   $ {command}\n" in page
    (expected,) = re.findall(r"expected  (scale .*)", shown[2])
    assert explained(command) == expected


# ---- the pytest plugin ----


def run_pytest(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MXREF_BACKEND": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "mxref.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-rs",
        *args,
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_plugin_makes_a_test_of_every_clause(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    done = run_pytest(tmp_path, "--mxref-backend", PLANTED, "-v")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_own.py::test_own PASSED" in done.stdout
    assert re.search(r"scale\.rule\.floor PASSED", done.stdout)
    assert re.search(r"rounding\.rne FAILED", done.stdout)
    assert re.search(r"scale\.rule\.even SKIPPED", done.stdout)
    assert "explain   mxref explain --block 0" in done.stdout
    assert "Traceback" not in done.stdout
    assert "not declared: scale_rules even" in done.stdout


def test_plugin_leaves_the_choice_of_clauses_to_pytest(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    done = run_pytest(tmp_path, "--mxref-backend", PLANTED, "-k", "scale.rule and not even", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"scale\.rule\.floor PASSED", done.stdout)
    assert re.search(r"1 passed, 2 skipped, \d+ deselected", done.stdout)
    assert "test_own PASSED" not in done.stdout


def test_plugin_survives_a_backend_that_ends_its_process(tmp_path):
    (tmp_path / "faulty.py").write_text("import os\nos._exit(0)\n")
    done = run_pytest(tmp_path, "--mxref-backend", f"{tmp_path}/faulty.py:backend")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "its code raised SystemExit: os._exit(0)" in done.stderr


def test_plugin_passes_a_good_backend_and_refuses_an_unknown_one(tmp_path):
    done = run_pytest(tmp_path, "--mxref-backend", TOY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed, \d+ skipped", done.stdout)
    done = run_pytest(tmp_path, "--mxref-backend", "numbr")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown backend 'numbr'" in done.stderr


def test_plugin_does_nothing_without_its_option(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_own():\n"
        "    assert not [m for m in sys.modules if m.startswith('mxref.conform') or m in ('rich', 'numba', 'torch')]\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_codes_of_every_failure_are_readable(failing_report):
    for failure in failing_report.failures:
        assert re.fullmatch(r"scale [0-9a-f]{2}  codes( [0-9a-f]{2}){16}", failure.expected), failure
        want, got = (
            np.frombuffer(bytes.fromhex(t.split("codes ")[1]), np.uint8)
            for t in (failure.expected, failure.got)
        )
        assert tuple(np.flatnonzero(unpack(want, E2M1) != unpack(got, E2M1)).tolist()) == failure.differing


def test_a_backend_of_torch_tensors_is_asked_with_tensors():
    torch = pytest.importorskip("torch")

    class Tensors(ReferenceBackend):
        capabilities = with_capabilities(arrays="torch")

        def from_numpy(self, array):
            if array.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        def to_numpy(self, array):
            if array.dtype == torch.bfloat16:
                return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return array.numpy()

        def _quantize(self, x, plan):
            assert isinstance(x, torch.Tensor)
            return tuple(map(self.from_numpy, super()._quantize(self.to_numpy(x), plan)))

        def _on(self, q):
            return replace(q, codes=self.to_numpy(q.codes), scales=self.to_numpy(q.scales))

        def _dequantize(self, q, dtype):
            return self.from_numpy(np.ascontiguousarray(super()._dequantize(self._on(q), dtype)))

        def _hadamard(self, x, rotation, axis):
            return self.from_numpy(np.ascontiguousarray(super()._hadamard(self.to_numpy(x), rotation, axis)))

        def _scaled_gemm(self, a, b, profile, out_dtype):
            return self.from_numpy(super()._scaled_gemm(self._on(a), self._on(b), profile, out_dtype))

    report = check(Tensors(), level="quick")
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    (strides,) = [c for c in report.clauses if c.clause == "quantize.strides"]
    assert strides.reasons == {"arrays: numpy": 3}


class Narrow(ReferenceBackend):
    """Gives wrong `bounded` products unless it is widened, and admits it or not."""

    def __init__(self, honest):
        self.honest, self.wide, self.flag = honest, False, False

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        if profile is not GemmProfile.BOUNDED or self.wide:
            return out
        self.flag = self.honest
        return np.where(np.isnan(out), out, 1).astype(out.dtype)

    def range_exceeded(self):
        found, self.flag = self.flag, False
        return found

    @contextmanager
    def widened(self):
        self.wide = True
        yield
        self.wide = False


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("honest", [True, False])
def test_a_result_out_of_range_counts_only_if_the_backend_did_not_say_so(honest):
    report = check(Narrow(honest), ops=["gemm"], clauses=["gemm.bounded"], level="quick")
    assert report.total("passed") + report.total("failed") > 10
    assert report.ok is honest
