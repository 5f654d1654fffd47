"""Slices of the complete sweeps, what they expect, and the command that runs them all."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import mxref
import oracle
from mxref.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.steps.scale import EXPONENT_RULES

pytest.importorskip("numba")

from exhaustive import scales
from exhaustive.__main__ import PACKAGES, PARTS, all_sweeps, code_digest, finished_rows, label, main
from exhaustive.families import FAMILIES, element_of
from exhaustive.steps import code_steps, largest_amax, scale_steps
from exhaustive.sweep import FLT_MAX, Span, run
from exhaustive.table import as_csv

FORMATS = pytest.mark.parametrize("block_format", [MXFP4, MXFP8_E4M3, MXFP8_E5M2], ids=str)


# ---- slices ----


@pytest.mark.clause(
    "scale.rule.floor",
    "scale.rule.ceil",
    "scale.rule.rceil",
    "scale.rule.even",
    "scale.clamp",
    "scale.nonfinite",
    "rounding.scaled",
    "rounding.rne",
    "rounding.rna",
    "rounding.rtz",
    "rounding.sr",
    "rounding.saturate",
    "rounding.sign",
    "dequantize.value",
    "dequantize.overflow",
    "dequantize.nan",
    "gemm.block_dot",
    "gemm.exact",
    "gemm.ordered",
    "gemm.special",
)
@pytest.mark.parametrize(("part", "chunks"), [("a", 6), ("b", 10), ("c", 2), ("d", 1), ("e", 1)])
@pytest.mark.parametrize(
    "family", [name if name == "mxfp4" else pytest.param(name, marks=pytest.mark.study) for name in FAMILIES]
)
def test_a_slice_of_every_sweep_agrees_with_the_oracle(family, part, chunks, short_chunks):
    # MXFP8 has three times the sweeps and many more thresholds, so fewer patterns between them.
    chunks = chunks if family == "mxfp4" else -(-chunks // 4)
    for sweep in PARTS[part].sweeps(family):
        assert sweep.part == part
        result = run(sweep, -(-sweep.chunks // chunks))
        assert result.chunks >= min(chunks, sweep.chunks)
        assert (result.faults, result.first) == (0, ""), sweep.domain


def test_chunks_of_a_span_cover_every_pattern_and_no_other():
    for first, last, size in ((0, 999, 100), (1, 1000, 100), (3, 777, 31), (5, 9, 5)):
        span = Span(first, last, size)
        covered = {span.base(i) + j for i in range(span.chunks) for j in range(size)}
        assert covered == set(range(first, last + 1))
        assert span.cases == len(covered)
        for pattern in (first, last, (first + last) // 2):
            held = {p for i in span.around(pattern) for p in range(span.base(i), span.base(i) + size)}
            assert {max(pattern - 2, first), pattern, min(pattern + 2, last)} <= held


def test_slice_1_is_every_chunk_once():
    sweep = scales.direct("floor")
    assert list(sweep.slice(1)) == list(range(sweep.chunks))
    assert set(sweep.corners) <= set(sweep.slice(1 << 40))


# ---- the expected side ----


@pytest.mark.parametrize("rounding", ["rne", "rna", "rtz"])
@pytest.mark.parametrize("byte", [0, 1, 127, 252, 254])
@FORMATS
def test_code_steps_are_the_oracle_at_and_beside_every_step(block_format, byte, rounding):
    element = element_of(block_format)
    steps, scale = code_steps(byte, rounding, element=element), oracle.scale_value(byte)
    assert list(steps.starts) == sorted(steps.starts)
    rng = np.random.default_rng(byte)
    near = {int(s) + d for s in steps.starts for d in range(-3, 4)}
    patterns = sorted({p for p in near if 0 <= p <= FLT_MAX} | set(rng.integers(0, FLT_MAX, 500).tolist()))
    want = [oracle.round_element(oracle.f32_value(p) / scale, rounding, element=element) for p in patterns]
    assert steps.at(np.array(patterns, np.uint32)).tolist() == want


@pytest.mark.parametrize("rule", EXPONENT_RULES)
@FORMATS
def test_scale_steps_are_the_oracle_at_and_beside_every_step(block_format, rule):
    element = element_of(block_format)
    steps = scale_steps(rule.value, element)
    patterns = sorted({int(s) + d for s in steps.starts for d in range(-2, 3) if 0 < int(s) + d <= FLT_MAX})
    want = [oracle.shared_scale(p, rule.value, element) for p in patterns]
    assert steps.at(np.array(patterns, np.uint32)).tolist() == want
    byte = want[len(want) // 2]
    assert oracle.shared_scale(largest_amax(byte, rule.value, element) + 1, rule.value, element) == byte + 1


# ---- the command and its record ----


def test_the_command_writes_a_table_and_fails_on_a_fault(tmp_path, monkeypatch):
    only = ["--family", "mxfp4", "--only", "d", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, [*only, "--machine", "a test"])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "mxfp4.json").read_text())
    assert [row["faults"] for row in record["rows"]] == [0] * 5
    assert not record["complete"]
    assert (tmp_path / "mxfp4.csv").read_text() == as_csv(record["rows"])
    monkeypatch.setattr(mxref, "dequantize", lambda q, dtype: np.zeros(q.shape, dtype))
    result = CliRunner().invoke(main, only)
    assert result.exit_code == 1
    assert "faults in mxref.dequantize, float64" in " ".join(result.output.split())


def test_a_stopped_run_goes_on_behind_its_last_sweep_and_no_other_run_does(tmp_path):
    sweeps = list(all_sweeps("d"))
    record = {"machine": "m", "threads": 1, "versions": {"numpy": "2"}, "code": "abc", "every": 1}
    rows = [label(sweep) | {"faults": 0, "seconds": 1.0} for sweep in sweeps[:2]]
    path = tmp_path / "results.json"
    assert finished_rows(path, record, sweeps) == []
    path.write_text(json.dumps(record | {"date": "2026-11-20", "complete": False, "rows": rows}))
    assert finished_rows(path, record | {"date": "2026-11-21"}, sweeps) == rows
    assert finished_rows(path, record | {"code": "abd"}, sweeps) == []
    assert finished_rows(path, record | {"versions": {"numpy": "3"}}, sweeps) == []
    assert finished_rows(path, record, sweeps[1:]) == []
    path.write_text(json.dumps(record | {"complete": True, "rows": rows}))
    assert finished_rows(path, record, sweeps) == []
    path.write_text(json.dumps({key: record[key] for key in record if key != "code"} | {"rows": rows}))
    assert finished_rows(path, record, sweeps) == []


def test_the_code_of_a_record_is_that_of_what_is_tested_and_of_what_tests_it(tmp_path):
    for package in PACKAGES:
        copy = tmp_path / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        assert code_digest([copy]) == code_digest([package])
        with next(copy.glob("*.py")).open("a") as file:
            file.write("# changed")
        assert code_digest([copy]) != code_digest([package])
    assert [package.name for package in PACKAGES] == ["mxref", "mxref_numba", "oracle", "exhaustive"]
