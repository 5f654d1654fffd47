"""The page of the projection equals what its counts give, and so does its command."""

from __future__ import annotations

import ast
import json
import re

import pytest
from click.testing import CliRunner

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from places import TESTS
from projection import counted, published
from projection.__main__ import main, projection_of, results
from projection.cases import COUNTS, DOCS, DOCUMENT, PROJECTION, RECORDS, arm
from projection.compare import compare
from projection.step import Part, Pass

pytestmark = pytest.mark.study


def test_published_numbers_are_data_alone():
    numbers = {p.value for p in published.PUBLISHED}
    assert {29.90, 35.67, 1.08} <= numbers
    package = [path for path in (TESTS / "projection").glob("*.py") if not path.name.startswith("test_")]
    assert "published.py" in {path.name for path in package}
    for path in package:
        constants = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        found = {c for c in constants if isinstance(c, float) and c in numbers}
        assert path.name == "published.py" or not found, path.name
        names = re.findall(r"\bPUBLISHED\b", path.read_text())
        assert bool(names) == (path.name in ("published.py", "compare.py", "page.py")), path.name
    assert all(p.source for p in published.PUBLISHED)


def test_recorded_results_are_what_the_counts_give():
    assert results(PROJECTION) == DOCUMENT["results"]


def test_the_text_of_the_page_names_no_number_that_is_computed():
    page = (DOCS / "explanation" / "projection.rst").read_text(encoding="utf-8")
    text, tables = re.subn(r"(?ms)^\.\. begin (\S+), made by.*?^\.\. end of \1$", "", page)
    assert tables
    computed = {f"{v:.{n}f}" for v in PROJECTION.quantities().values() for n in (1, 2, 3)}
    assert not computed & set(re.findall(r"\d+\.\d+", text))


def test_counts_are_of_the_target_and_spill_nothing():
    assert {r["target"] for r in DOCUMENT["records"]} == {counted.TARGET}
    assert not any(r["spills"] for r in DOCUMENT["records"])
    wanted = {r["case"] for r in RECORDS}
    assert wanted <= {r["case"] for r in DOCUMENT["records"]}


def test_the_command_writes_what_it_read(tmp_path):
    out = tmp_path / "out.json"
    found = CliRunner().invoke(main, ["--counts", str(COUNTS), "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "Computed, not measured" in found.output
    for title in ("One step", "Beside what was published", "What moves the result", "Kernels", "Assumptions"):
        assert title in found.output
    assert json.loads(out.read_text()) == DOCUMENT


def test_other_numbers_of_cards_share_the_batch():
    one, eight = (projection_of(DOCUMENT, cards) for cards in (1, 8))
    products = [p.times(arm("h16"))[Pass.FORWARD, Part.FPROP] for p in (one, eight)]
    assert products[0] == pytest.approx(8 * products[1])
    assert one.times(arm("h16"))[Pass.FORWARD, Part.COMMUNICATION] == 0
    assert not any(c.published.key.endswith("samples/s") for c in compare(one))
    refused = CliRunner().invoke(main, ["--counts", str(COUNTS), "--cards", "5"])
    assert refused.exit_code == 1
    assert "5 cards with 2 sequences each do not divide a batch of 32" in refused.output
