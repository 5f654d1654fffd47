"""What a conformance report shows of names with control codes, of hanging checks, and of a backend lost meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mxref.cli.conform_text import show
from mxref.conformance import check
from mxref.conformance.report import to_junit

ROOT = Path(__file__).parent.parent
PLANTED = f"{ROOT}/docs/examples/planted_fault_backend.py:backend"
CODES = "x\x1b[31m\x00\ufffe<b>"
SPELLED = r"x\x1b[31m\x00\ufffe<b>"


@pytest.fixture(scope="module")
def failing_report():
    return check(PLANTED, level="quick", clauses=["rounding.rne"], shrink=False)


def test_control_codes_are_spelled_out_in_junit(failing_report):
    failure = replace(failing_report.failures[0], message=CODES)
    clause = replace(failing_report.clauses[0], failures=[failure])
    root = ElementTree.fromstring(to_junit(replace(failing_report, backend=CODES, clauses=(clause,))))
    assert root[0].get("name") == f"mxref conform {SPELLED}"
    assert root[0][0].get("classname") == f"mxref.{SPELLED}"
    assert root[0][0][0].get("message") == SPELLED


def test_a_name_with_control_codes_cuts_nothing_off_the_summary(failing_report, capsys):
    expected = f"{failing_report.total('failed')} failed, {failing_report.total('skipped')} skipped as"
    for width in range(40):  # so that lines break at every place
        show(replace(failing_report, backend="n" * width + CODES), verbose=False)
        assert expected in " ".join(capsys.readouterr().out.split())
