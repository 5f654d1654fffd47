"""The command `mxref conform`, and the files that it writes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from conform_command import PLANTED, explained, run
from mxref.cli.conform_text import show
from mxref.conformance import CLAUSES, check
from mxref.conformance.outcome import ClauseResult, Failure, Level, Report, to_json, to_junit
from mxref.discovery import get_backend
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from places import ROOT


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
            "clause", "outcome", "passed", "failed", "skipped", "compared", "reasons", "failures",
        }  # fmt: skip
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


def test_control_codes_are_spelled_out_in_junit(failing_report):
    codes, spelled = "x\x1b[31m\x00\ufffe<b>", r"x\x1b[31m\x00\ufffe<b>"
    clause = next(c for c in failing_report.clauses if c.failures)
    clause = replace(clause, failures=[replace(clause.failures[0], message=codes)])
    root = ElementTree.fromstring(to_junit(replace(failing_report, backend=codes, clauses=(clause,))))
    assert root[0].get("name") == f"mxref conform {spelled}"
    assert root[0][0].get("classname") == f"mxref.{spelled}"
    assert root[0][0][0].get("message") == spelled


def test_command_passes_fails_and_refuses(tmp_path):
    junit, table = tmp_path / "c.xml", tmp_path / "c.json"
    files = ("--junit", str(junit), "--json", str(table))
    good = run("conform", "--backend", "reference", "--quick", "--op", "dequantize", "-v", *files)
    assert good.exit_code == 0, good.output
    assert "dequantize.overflow" in good.output  # a line per clause, as -v asks for
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


def test_the_first_failure_is_printed_and_verbose_has_every_clause(failing_report, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    show(failing_report, verbose=False)
    few, errors = capsys.readouterr()
    show(failing_report, verbose=True)
    every = capsys.readouterr().out
    assert errors == ""
    assert few.splitlines()[-1] == "and 2 more failures: --all prints them, --json FILE writes them"
    clauses = [line.split()[0] for line in every.splitlines() if re.search(r"(passed|FAILED|skipped) ", line)]
    assert set(CLAUSES) <= set(clauses)
    assert few.count("\n  expected ") == 1
    assert every.count("\n  expected ") == 3


@pytest.mark.parametrize("numbers", [0, 1, 32, 256])
def test_a_long_failure_is_cut_and_printed_whole_on_demand(numbers, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = f"mxref explain --block 0{' 0xc0200000' * numbers}"
    failure = Failure(
        "scale.amax", "it differs", {"shape": "(1, 32)"}, {"x": ("0xc0200000",) * numbers},
        "scale 7e", "scale 7f", (1,), command, check="a check",
    )  # fmt: skip
    results = (ClauseResult("scale.amax", 10, 7, 3, failures=[failure]),)
    report = Report("mine", Level.QUICK, 0, ("quantize",), results, 1.5)
    for verbose in (False, True):
        show(report, verbose)
        printed = capsys.readouterr().out
        assert len(printed) < 1800 or verbose
        assert (command in printed) == (verbose or numbers < 256)
        assert ("--all prints" in printed) == (numbers == 256 and not verbose)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--backend", "numbr"), "unknown backend 'numbr'"),
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


def test_output_of_the_documentation_is_what_the_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "how-to" / "conformance.rst").read_text(encoding="utf-8")
    shown = re.search(r"   \$ (mxref conform .*--clause rounding.rne)\n((?:   .*\n|\n)+?)\nThe block", page)
    words = shlex.split(shown[1])[1:]
    printed = [line.rstrip() for line in run(*words, width=80).stdout.rstrip().splitlines()]
    written = [line.removeprefix("   ") for line in shown[2].rstrip().splitlines()]

    def steady(lines: list[str]) -> list[str]:
        """Without the counts and the time, which grow with the vectors."""
        at = next(i for i, line in enumerate(lines) if line.startswith("planted does not"))
        return lines[:at] + lines[-1:]

    assert steady(written) == steady(printed)
    command = re.search(r"explain   (mxref .*)", shown[2])[1]
    (expected,) = re.findall(r"expected  (scale .*)", shown[2])
    assert explained(command) == expected


def test_codes_of_every_failure_are_readable(failing_report):
    for failure in failing_report.failures:
        assert re.fullmatch(r"scale [0-9a-f]{2}  codes( [0-9a-f]{2}){16}", failure.expected), failure
        want, got = (
            np.frombuffer(bytes.fromhex(t.split("codes ")[1]), np.uint8)
            for t in (failure.expected, failure.got)
        )
        assert tuple(np.flatnonzero(unpack(want, E2M1) != unpack(got, E2M1)).tolist()) == failure.differing
