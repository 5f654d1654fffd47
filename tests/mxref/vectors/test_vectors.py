"""Golden vectors: valid, true by reference and oracle, and reproducible to the byte."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result
from vector_files import VECTORS, cli, edit

from golden.__main__ import main as write_golden
from golden.answers import answer
from golden.make import MAX_LINE, Answer, generate, write_vectors
from mxref import UnsupportedError
from mxref.capabilities import Capabilities
from mxref.discovery import get_backend
from mxref.errors import FileFormatError
from mxref.gemm import bounded_tolerance
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference
from mxref.vectors import (
    BACKEND_OPS,
    CHAPTERS,
    FORMAT_CHAPTERS,
    KEYS,
    Record,
    RecordOp,
    Source,
    load_vectors,
    vectors_directory,
)
from mxref.vectors.data import code_digits, record_format
from mxref.vectors.run import run_record, verify_vectors
from places import ROOT
from usual import usual

LARGEST, LARGEST_FORMAT = (
    1_500_000,
    500_000,
)  # bytes, of the files by chapter together, and of each other format


@pytest.fixture(scope="module")
def oracle() -> Answer:
    """The oracle, asked once for each record, however many tests want its answer."""
    answers: dict[str, dict[str, str]] = {}

    def remembered(record: Record) -> dict[str, str]:
        question = replace(record, expected={}).line()
        if question not in answers:
            answers[question] = answer(record)
        return answers[question]

    return remembered


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    table = json.loads((VECTORS / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(table)
    return jsonschema.Draft202012Validator(table)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VECTORS, tmp_path / "vectors"))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_files_match_the_schema(chapter, schema):
    schema.validate(json.loads((VECTORS / f"{chapter}.json").read_text()))


def test_schema_refuses_what_is_wrong(schema):
    good = json.loads((VECTORS / "packing.json").read_text())
    record = json.loads(next(r for r in load_vectors("quantize") if "x" in r.inputs).line())
    for change in (
        {"rule": "flor"},
        {"codes": "0G"},
        {"x_seed": "0" * 16, "x_rule": "raw", "shape": [1, 32]},
        {"signs": "fixed"},
        {"clauses": []},
        {"extra": 1},
        {"source": "guess"},
        {"x": record["x"].replace(" ", "  ", 1)},
        {"error": "nonfinite"},
    ):
        assert schema.is_valid({**good, "records": [record]})
        assert not schema.is_valid({**good, "records": [{**record, **change}]}), change


def test_schema_and_loader_know_the_same_keys(schema):
    for op, keys in KEYS.items():
        known = {
            *keys.required,
            *keys.optional,
            *keys.expected,
            *(n for d in keys.data for n in d.split("|")),
        }
        assert known == set(schema.schema["$defs"][op.value]["properties"]) - {
            "id",
            "op",
            "clauses",
            "source",
            "note",
        }


def test_files_are_small_and_one_record_a_line():
    files = sorted(VECTORS.glob("*.json"))
    assert {f.stem for f in files} == {*CHAPTERS, "schema"}
    sizes = {f.stem: f.stat().st_size for f in files}
    assert all(sizes.pop(chapter) < LARGEST_FORMAT for chapter in FORMAT_CHAPTERS)
    assert sum(sizes.values()) < LARGEST
    for chapter in CHAPTERS:
        lines = (VECTORS / f"{chapter}.json").read_text().splitlines()
        start = lines.index('"records":[') + 1
        records = load_vectors(chapter)
        assert [line.rstrip(",") for line in lines[start:-2]] == [record.line() for record in records]
        assert max(map(len, lines)) < MAX_LINE


def test_ids_are_unique_and_results_are_independent():
    records = load_vectors()
    assert max(Counter(record.id for record in records).values()) == 1
    assert {record.source for record in records} == {Source.STANDARD, Source.KNOWN_ANSWER, Source.ORACLE}
    assert {record.op for record in records} == set(RecordOp)


def test_no_two_records_ask_the_same():
    asked = Counter(json.dumps([record.op, record.inputs]) for record in load_vectors())
    twice = [question for question, count in asked.items() if count > 1]
    # The standard's tables repeat what the exhaustive set has; a published answer stands on its own.
    assert all('"out": "float32"' in question for question in twice)


def test_every_flag_is_a_clause():
    chapters = sorted((ROOT / "spec").glob("*.rst"))
    assert chapters
    text = "\n".join(path.read_text() for path in chapters)
    clauses = set(re.findall(r"^ *\.\. clause:: *(\S+)", text, re.MULTILINE))
    used = {clause for record in load_vectors() for clause in record.clauses}
    assert used - clauses == set()
    core = {c for c in clauses if re.match(r"(scale|rounding|hadamard|dequantize|packing|gemm)\.", c)}
    unused = core - used
    # Neither a bit of one result: tolerances, statistics, and operations outside the protocol. Signs that a recipe
    # gives are multiplied as drawn ones are, and vectors name the policy alone; likewise vectors name rules, and a
    # threshold is the bound of one. Orders of float32 operations are those of other implementations.
    assert unused <= {
        "rounding.native_sr", "hadamard.inverse", "hadamard.vector", "scale.rule.threshold", "scale.arithmetic",
    }  # fmt: skip


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_reference_gives_every_result(chapter):
    count, mismatches = verify_vectors(chapter)
    assert count > 0
    assert [str(m) for m in mismatches] == []


@pytest.mark.parametrize(
    "chapter", [*usual(CHAPTERS, *(chapter for chapter in CHAPTERS if chapter != "quantize"))]
)
def test_generating_again_changes_no_byte(chapter, oracle):
    """So the oracle gives every result."""
    assert generate(chapter, oracle).encode() == (VECTORS / f"{chapter}.json").read_bytes()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_record_notices_a_wrong_result(chapter):
    for record in load_vectors(chapter):
        for name, text in record.expected.items():
            if not text or name == "error":
                continue
            place = len(text) * 2 // 3
            place -= text[place] == " "
            wrong = format(int(text[place], 16) ^ 9, "x")
            changed = text[:place] + wrong + text[place + 1 :]
            tampered = replace(record, expected={**record.expected, name: changed})
            mismatch = run_record(tampered, reference)
            if record.inputs.get("profile") != "bounded" or place % 9 < 3:
                assert mismatch is not None, (record.id, name)
                assert mismatch.field == name
                assert record.id in str(mismatch)
                if mismatch.index >= 0:
                    digits = code_digits(record_format(record))
                    width = {"codes": digits, "scales": 2, "packed": 2}.get(name, 9)
                    assert mismatch.index == place // width


def test_refused_input_must_be_refused():
    record = next(r for r in load_vectors("scale") if r.expected.get("error"))
    allowed = replace(record, inputs={k: v for k, v in record.inputs.items() if k != "nonfinite"})
    assert str(run_record(allowed, reference)).startswith(
        f"{record.id} ({record.note}): error is absent, must be nonfinite"
    )


@pytest.fixture
def wrong(oracle) -> Answer:
    """An oracle whose results are read backwards."""
    return lambda record: {name: text[::-1] for name, text in oracle(record).items()}


def test_generator_trusts_neither_side(wrong):
    with pytest.raises(FileFormatError, match="published .* oracle gives"):
        generate("random", wrong)
    with pytest.raises(FileFormatError, match=r"reference and the oracle disagree: packing\.unpack"):
        generate("packing", wrong)


class Narrow(ReferenceBackend):
    """The reference under narrower promises."""

    name = "narrow"
    capabilities = Capabilities(
        scale_rules=frozenset({"floor"}), hadamard_sizes=frozenset(), native_sr=True, bounded_max_scale=100
    )


def test_what_is_not_declared_is_skipped_and_the_rest_runs():
    ran, skipped = Counter(), Counter()
    for record in load_vectors():
        if record.op not in BACKEND_OPS:
            continue
        try:
            assert run_record(record, Narrow()) is None
            ran[record.chapter] += 1
        except UnsupportedError:
            skipped[record.chapter] += 1
    assert not ran["random"]  # native SR is no bits of this specification
    assert not ran["hadamard"]
    for chapter in ("scale", "rounding", "quantize", "gemm"):
        assert ran[chapter] > 10
        assert skipped[chapter] > 10


def test_operations_of_the_reference_are_not_run_by_another_backend():
    class Other(type(get_backend(f"{ROOT}/docs/examples/toy_backend.py:backend"))):
        pass

    record = next(r for r in load_vectors("random") if r.op is RecordOp.PHILOX)
    assert run_record(record, reference) is None
    with pytest.raises(UnsupportedError, match="philox is no operation of a backend"):
        run_record(record, Other())


def test_bounded_results_may_differ_by_their_bound():
    class Off(ReferenceBackend):
        """Results that lie a share of the tolerance away from the ordered ones."""

        def __init__(self, share: float) -> None:
            self.share = share

        def _scaled_gemm(self, a, b, profile, out_dtype):
            out = super()._scaled_gemm(a, b, profile, out_dtype)
            away = out.astype(np.float64) + self.share * bounded_tolerance(a, b, "fp32", out_dtype)
            return away.astype(np.float32).astype(out.dtype)

    bounded = [r for r in load_vectors("gemm") if r.inputs["profile"] == "bounded"]
    assert len(bounded) > 3
    for record in bounded:
        for share in (-0.5, 0.5):
            assert run_record(record, Off(share)) is None
            mismatch = run_record(record, Off(4 * share))
            assert re.search(r"c\[0\] is \S+, must be \S+ within \S+; clauses .*gemm\.bounded", str(mismatch))
            exact = replace(record, inputs={**record.inputs, "profile": "exact"})
            assert run_record(exact, Off(share)) is not None


def test_list_counts_records_by_source():
    code, out, _ = cli("list")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line[:1].isalpha()}
    for chapter in CHAPTERS:
        assert rows[chapter][1] == str(len(load_vectors(chapter)))
    assert rows["random"][2:4] == ["3", str(len(load_vectors("random")) - 3)]
    assert str(VECTORS) in out.replace("\n", "")


def test_the_generator_rewrites_only_what_differs(copy, oracle):
    before = (copy / "scale.json").stat().st_mtime_ns
    edit(copy / "packing.json", '"count":3', '"count":4')
    changed = {path.stem: changed for path, changed in write_vectors(copy, oracle=oracle)}
    assert changed == dict.fromkeys(CHAPTERS, False) | {"packing": True}
    assert (copy / "packing.json").read_bytes() == (VECTORS / "packing.json").read_bytes()
    assert (copy / "scale.json").stat().st_mtime_ns == before
    assert {f.name for f in copy.iterdir()} == {f.name for f in VECTORS.iterdir()}


def run_generator(checkout: Path, answers: Answer, monkeypatch: pytest.MonkeyPatch, made: str) -> Result:
    monkeypatch.setattr("golden.__main__.ROOT", checkout)
    monkeypatch.setattr("golden.__main__.write_vectors", partial(write_vectors, oracle=answers))
    return CliRunner().invoke(write_golden, ["--format", made])


def test_the_generator_writes_the_files_of_a_format(tmp_path, oracle, monkeypatch):
    folder = Path(shutil.copytree(VECTORS, tmp_path / "spec" / "vectors"))
    for name in ("scale.json", "mxfp8_e5m2.json"):
        edit(folder / name, '"count":', '"count":1')
    done = run_generator(tmp_path, oracle, monkeypatch, "mxfp8_e5m2")
    assert (done.exit_code, done.output) == (0, f"{folder / 'mxfp8_e5m2.json'}  written\n")
    different = [
        path.name for path in folder.iterdir() if path.read_bytes() != (VECTORS / path.name).read_bytes()
    ]
    assert different == ["scale.json"]


def test_a_disagreement_leaves_the_files_as_they_were(tmp_path, wrong, monkeypatch):
    folder = Path(shutil.copytree(VECTORS, tmp_path / "spec" / "vectors"))
    done = run_generator(tmp_path, wrong, monkeypatch, "mxfp8_e5m2")
    assert done.exit_code == 1
    assert re.fullmatch(r"Error: the reference and the oracle disagree: mxfp8_e5m2\..*\n", done.output)
    assert {path.name for path in folder.iterdir()} == {path.name for path in VECTORS.iterdir()}
    assert all(path.read_bytes() == (VECTORS / path.name).read_bytes() for path in folder.iterdir())


def test_a_checkout_wins_over_an_installed_copy(tmp_path, monkeypatch):
    assert vectors_directory() == VECTORS
    package = tmp_path / "site-packages" / "mxref"
    monkeypatch.setattr("mxref.vectors.__file__", str(package / "vectors" / "__init__.py"))
    with pytest.raises(
        FileFormatError, match="no golden vectors beside .*: reinstall mxref, or name their folder"
    ):
        vectors_directory()
    shutil.copytree(VECTORS, package / "_vectors")
    assert vectors_directory() == package / "_vectors"
    assert load_vectors() == load_vectors(directory=VECTORS)
    shutil.copytree(VECTORS, package.parent / "spec" / "vectors")
    assert vectors_directory() == package.parent / "spec" / "vectors"
