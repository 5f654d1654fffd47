"""Golden vectors whose files were damaged: each fault is one clear line, and names the record."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from vector_files import VECTORS, cli, edit

from mxref.errors import FileFormatError
from mxref.vectors import (
    CHAPTERS,
    load_vectors,
)
from mxref.vectors.data import parse_digits
from mxref.vectors.run import verify_vectors

SCALES = len(load_vectors("scale"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VECTORS, tmp_path / "vectors"))


@pytest.mark.parametrize("chapter", ["quantize", "mxfp8_e5m2"])
def test_verify_names_the_record_that_was_edited(chapter, copy):
    record = [r for r in load_vectors(chapter) if r.inputs.get("profile") != "bounded" and r.expected][-1]
    name, text = list(record.expected.items())[-1]
    changed = f"{text[:-1]}{int(text[-1], 16) ^ 1:x}"
    edit(
        copy / f"{chapter}.json",
        record.line(),
        replace(record, expected={**record.expected, name: changed}).line(),
    )
    code, out, err = cli("verify", "--dir", copy)
    assert code == 1
    assert record.id in out
    assert re.search(rf"^{chapter} +1 of \d+ differ$", out, re.MULTILINE)
    assert len(re.findall(r"^\w+ +\d+ agree$", out, re.MULTILINE)) == len(CHAPTERS) - 1
    assert err == ""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.unlink(), r"cannot read golden vectors .*scale\.json: No such file"),
        (lambda f: f.write_text(f.read_text()[:5000]), r"scale\.json is not valid JSON: .*line \d+ column"),
        (lambda f: f.write_bytes(b"\xff\xfe{}"), r"scale\.json is not valid JSON"),
        (lambda f: f.write_text("[]"), r"does not hold the vectors of chapter 'scale'"),
        (lambda f: f.write_text((VECTORS / "gemm.json").read_text()), r"does not hold the vectors of chapter 'scale'"),
        (lambda f: edit(f, "mxref.vectors.1", "mxref.vectors.9"), r"format is 'mxref.vectors.9'"),
        (lambda f: edit(f, f'"count":{SCALES}', '"count":7'), f"announces 7 records and holds {SCALES}"),
        (lambda f: edit(f, "scale.ceil.000", "scale.floor.000"), r"'scale.floor.000' is used twice"),
        (lambda f: edit(f, '"op":"scale"', '"op":"scales"'), r"record 1 \(.*\): 'scales' is not a valid RecordOp"),
        (lambda f: edit(f, '"amax"', '"amx"'), r"no key 'amx' \(did you mean 'amax'\?\)"),
        (lambda f: edit(f, '"rule":"floor",', ""), r"record 1 .* needs exactly one of rule"),
        (lambda f: edit(f, '"rule":"floor"', '"rule":"flor"'), r"scale.floor.000: damaged inputs: .*'flor'"),
        (lambda f: edit(f, '"note":"exponent', '"not":"exponent'), r"record 1 .* has no 'note'"),
        (lambda f: edit(f, '"amax":"0', '"amax":"x'), r"scale.floor.000: amax: not hex words"),
        (lambda f: edit(f, '"x":"', '"x":"00000000 '), r"scale.place.floor: x has 1025 words, not a multiple of 32"),
        (lambda f: edit(f, '"scales":"', '"scales":["'), r"scale.json is not valid JSON"),
        (lambda f: edit(f, '"scales":', '"scales":7,"note":'), r"record 1 .* no result, or one that is not text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "damage",
)  # fmt: skip
def test_damaged_files_are_one_clear_line(copy, damage, message):
    damage(copy / "scale.json")
    code, _, err = cli("verify", "--dir", copy)
    assert code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", err), err


def test_operands_that_do_not_fit_are_named(copy):
    edit(copy / "gemm.json", '"m":16', '"m":15')
    edit(copy / "packing.json", '"packed":"00', '"packed":"0')
    with pytest.raises(FileFormatError, match=r"packed: not hex digits: invalid literal .*'\\ud800'"):
        parse_digits("\ud800", 1, None, "packed")
    with pytest.raises(
        FileFormatError, match=r"gemm.products.exact.float32: a_codes: 512 hex digits, expected 480"
    ):
        verify_vectors("gemm", copy)
    with pytest.raises(FileFormatError, match=r"packing.unpack: 511 hex digits"):
        verify_vectors("packing", copy)
    with pytest.raises(FileFormatError, match=r"chapter 'gem' \(did you mean 'gemm'\?\)"):
        load_vectors("gem")
