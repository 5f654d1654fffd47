"""The matrix of clauses and implementations: a planted fault gives one red cell, whose block is true."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.records import newest, read
from mxref import OperandSpec, check_quantizer, quantize
from mxref._version import SPECIFICATION
from mxref.cli import main
from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS
from mxref.layouts.packed import pack, unpack
from peers import matrix, matrix_page
from peers.blocks import Case, Stored
from peers.peer import Decoder
from peers.verdicts import decoded

RECORD = read(newest("matrix"))
OURS = OperandSpec(scale_rule="even")
RED = [
    (name, setting, clause, found)
    for name, column in (RECORD["columns"] | RECORD["machines"]).items()
    for setting in column["settings"]
    for clause, found in setting["clauses"].items()
    if found["outcome"] == "differs"
]


def stored(x: np.ndarray, **changes: object) -> Stored:
    q = quantize(x, replace(OURS, **changes))
    return Stored(q.scales, unpack(q.codes, OURS.format.element))


def no_signs_of_zeros(x: np.ndarray) -> Stored:
    q = stored(x)
    return replace(q, codes=np.where(q.codes == 8, np.uint8(0), q.codes))


def tiny_is_zero(x: np.ndarray) -> Stored:
    q = stored(x)
    return replace(q, codes=np.where(q.scales.repeat(32, axis=1) == 0, q.codes & 8, q.codes))


def nan_as_zero(x: np.ndarray) -> Stored:
    return stored(np.where(np.isfinite(x), x, np.float32(0)))


def outcomes(run, spec: OperandSpec = OURS) -> dict[str, dict]:
    (found,) = matrix.entries(Case("mine", "planted", run, spec))
    return found["clauses"]


def test_a_right_implementation_passes_every_clause():
    found = outcomes(stored)
    assert {each["outcome"] for each in found.values()} == {"passes"}
    assert {"scale.rule.even", "scale.zero", "scale.clamp", "scale.nonfinite", "rounding.rne"} <= {*found}


@pytest.mark.parametrize(
    ("run", "clause", "under"),
    [
        (partial(stored, rounding="rna"), "rounding.rne", "rounding = rna"),
        (partial(stored, scale_rule="rceil"), "scale.rule.even", "the dialect nvidia"),
        (partial(stored, zero_scale=127), "scale.zero", "the dialect amd"),
        (no_signs_of_zeros, "rounding.sign", ""),
        (tiny_is_zero, "rounding.scaled", ""),
        (nan_as_zero, "scale.nonfinite", ""),
    ],
)  # fmt: skip
def test_a_planted_fault_is_the_one_red_cell_and_its_block_is_true(run, clause, under):
    found = outcomes(run)
    assert [name for name, each in found.items() if each["outcome"] == "differs"][:1] == [clause], found
    breach = found[clause]
    assert breach["under"] == under
    assert breach["zeros"] == (clause == "rounding.sign")
    assert sum(word != "0x00000000" for word in breach["inputs"]) <= 2
    x = np.array([int(word, 16) for word in breach["inputs"]], np.uint32).view(np.float32)[None]
    for answer, text in ((stored(x), breach["expected"]), (run(x), breach["got"])):
        packed = bytes(answer.codes[0, ::2] | answer.codes[0, 1::2] << 4).hex(" ")
        assert text == f"scale {answer.scales[0, 0]:02x}  codes {packed}"


def test_a_mask_hides_what_another_wrong_bit_decides():
    def other_scales(x: np.ndarray) -> Stored:
        q = stored(x)
        return replace(q, scales=q.scales ^ 1)

    found = outcomes(other_scales)
    assert found["scale.rule.even"]["outcome"] == "differs"
    assert found["rounding.rne"] == {"outcome": "masked"}


def test_a_refusal_of_nan_is_no_breach_and_one_of_numbers_is():
    def refuses_nan(x: np.ndarray) -> Stored:
        if not np.isfinite(x).all():
            raise ValueError("NaN")
        return stored(x)

    found = outcomes(refuses_nan)
    assert found["scale.nonfinite"] == {"outcome": "refuses", "message": "ValueError"}
    assert {each["outcome"] for clause, each in found.items() if clause != "scale.nonfinite"} == {"passes"}

    def refuses_large(x: np.ndarray) -> Stored:
        if np.nanmax(np.abs(x), initial=0) > 1e30:
            raise OverflowError("too large")
        return stored(x)

    found = outcomes(refuses_large)["conformance.protocol"]
    assert found["outcome"] == "differs"
    assert "raised OverflowError: too large" in found["message"]


def test_a_decoder_that_reads_ff_as_a_number_breaks_the_clause_of_nan():
    def run(scales: np.ndarray) -> np.ndarray:
        return np.ldexp(6.0, scales.astype(int) - 127)

    found = decoded(Decoder("float64", run))
    assert found["dequantize.value"]["outcome"] == "passes"
    assert found["dequantize.nan"]["got"] == f"{6.0 * 2.0**128:.9g}"
    assert found["dequantize.nan"]["expected"] == "nan"
    assert found["dequantize.nan"]["link"].startswith("x=7fc00000&a=")


def test_a_package_that_is_missing_is_a_grey_column_with_its_reason(monkeypatch):
    def needs_a_gpu(x: np.ndarray) -> Stored:
        raise RuntimeError("no GPU was found")

    made = [Case("no-such-package", "default", stored, OURS), Case("numpy", "default", needs_a_gpu, OURS)]
    monkeypatch.setattr(matrix, "cases", lambda *checkouts: made)
    monkeypatch.setattr(matrix, "MODULES", ("no_such_module",))
    record = matrix.measure({})
    assert record["columns"] == {}
    assert record["absent"]["no-such-package"] == "not installed"
    assert record["absent"]["no-such-module"] == "not installed"
    assert record["absent"]["numpy"] == "RuntimeError: no GPU was found"
    text = matrix_page.render(RECORD | {"absent": record["absent"]})
    assert "numpy,RuntimeError: no GPU was found" in text
    assert ":absent:`not run`" in text


# ---- files of other machines ----


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """What somebody sends: a kernel for another device that rounds ties away, recorded there."""

    def kernel(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = quantize(x, replace(OURS, rounding="rna"))
        return q.codes, q.scales

    path = tmp_path / "accelerator.npz"
    report = check_quantizer(kernel, OURS, recording=path, facts={"device": "Accelerator 7", "kernel": "1.2"})
    assert report.failing == ("rounding.rne",)
    return path


def test_a_file_of_another_machine_gives_a_column_that_is_judged_from_its_bytes(sent):
    column = matrix.machines(sent.parent)["accelerator"]
    assert column["facts"]["device"] == "Accelerator 7"
    (setting,) = column["settings"]
    asked, there = setting["crafted"]
    assert asked == there > 100
    assert setting["setting"] == "kernel, ocp,scale_rule=even", "a reader knows what it was held to"
    breach = setting["clauses"]["rounding.rne"]
    assert breach["outcome"] == "differs"
    assert breach["under"] == "rounding = rna"
    assert sum(word != "0x00000000" for word in breach["inputs"]) == 1, "the shrunk block is in the file"
    assert {each["outcome"] for clause, each in setting["clauses"].items() if clause != "rounding.rne"} == {
        "passes"
    }
    text = matrix_page.render(RECORD | {"machines": {"accelerator": column}})
    assert ":ref:`differs <matrix-accelerator-rounding-rne>`" in text
    assert f"explorer/index.html#{breach['link']}" in text
    assert "device Accelerator 7" in text
    text = matrix_page.render(RECORD | {"machines": {"aiter": column}})
    assert ":ref:`differs <matrix-aiter-rounding-rne>`" in text
    assert RECORD["absent"]["aiter"] not in text, "it was run elsewhere"


def damaged(path: Path, kind: str) -> None:
    """Damage a recording as a transfer, or a sender with another version, might."""
    whole = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "another file":
        path.write_text("x,codes,scales")
    elif kind == "a flipped byte":
        path.write_bytes(whole[:3000] + bytes([whole[3000] ^ 0x40]) + whole[3001:])
    else:
        with np.load(path) as found:
            arrays = dict(found)
        meta = json.loads(str(arrays["meta"]))
        if kind == "another specification":
            meta["specification"] = "0.9.0"
        elif kind == "of no specification":
            del meta["specification"]
        elif kind == "fewer codes":
            arrays["0.codes"] = arrays["0.codes"][1:]
        elif kind == "codes as floats":
            arrays["0.codes"] = arrays["0.codes"].astype(np.float32)
        elif kind == "no scales":
            del arrays["0.scales"]
        elif kind == "no calls":
            meta["calls"] = []
        np.savez_compressed(path, **arrays | {"meta": np.array(json.dumps(meta))})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("truncated", "it is no .npz archive, or a part of one"),
        ("another file", "it is no .npz archive, or a part of one"),
        ("a flipped byte", "cannot read a recording from"),
        ("another specification", f"answers are to specification 0.9.0, and this is {SPECIFICATION}"),
        ("of no specification", f"answers are to specification unknown, and this is {SPECIFICATION}"),
        ("fewer codes", "cannot read a recording from"), ("codes as floats", "cannot read a recording from"),
        ("no scales", "cannot read a recording from"), ("no calls", "holds no answers"),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_of_another_specification_is_refused(sent, kind, says):
    damaged(sent, kind)
    with pytest.raises(FileFormatError, match=says) as caught:
        matrix.machines(sent.parent)
    assert "accelerator.npz" in str(caught.value)


def test_adding_a_file_keeps_it_and_writes_its_column(sent, tmp_path, monkeypatch):
    records = tmp_path / "records"
    records.mkdir()
    (records / "matrix_2026-01-01.json").write_text(json.dumps(RECORD))
    monkeypatch.setattr(matrix, "RECORDS", records)
    monkeypatch.setattr(matrix, "MACHINES", records / "machines")
    matrix.main(["--add", str(sent)])
    assert (records / "machines" / sent.name).read_bytes() == sent.read_bytes()
    written = read(records / "matrix_2026-01-01.json")
    assert [*written["machines"]] == ["accelerator"]
    assert written["columns"] == RECORD["columns"]
    damaged(sent, "truncated")
    with pytest.raises(FileFormatError):
        matrix.main(["--add", str(sent)])
    assert matrix.machines(records / "machines")


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("accelerator.npz", "no calls", "holds no answers"),
        ("accelerator.npy", "", "must end in .npz"),
        ("torchao.npz", "", "torchao is a column already; rename the file"),
    ],
)
def test_a_file_that_gives_no_column_is_refused_before_anything_is_written(
    name, kind, says, sent, tmp_path, monkeypatch
):
    records = tmp_path / "records"
    records.mkdir()
    (records / "matrix_2026-01-01.json").write_text(json.dumps(RECORD))
    monkeypatch.setattr(matrix, "RECORDS", records)
    monkeypatch.setattr(matrix, "MACHINES", records / "machines")
    damaged(sent, kind)
    with pytest.raises(FileFormatError, match=says):
        matrix.main(["--add", str(sent.rename(tmp_path / name))])
    assert not (records / "machines").exists()
    assert read(records / "matrix_2026-01-01.json") == RECORD


# ---- the record ----


def test_every_red_cell_of_the_record_has_a_block_that_explain_shows():
    """The command of a cell prints the bytes that the cell says mxref stores."""
    compared = 0
    for name, setting, clause, found in RED:
        assert found.get("message") or found["expected"] != found["got"], (name, setting["setting"], clause)
        if command := found.get("command"):
            result = CliRunner().invoke(main, [*shlex.split(command)[1:], "--json"])
            assert result.exit_code == 0, (command, result.output)
            (block,) = json.loads(result.output)["blocks"]
            assert found["expected"].endswith(told(block)), (name, setting["setting"], clause)
            compared += 1
    assert compared > 200


def told(block: dict) -> str:
    """Return the scale byte and the packed codes of an explained block, as a cell tells them."""
    made = BLOCK_FORMATS[block["spec"]["format"]]
    codes = np.zeros(made.k, np.uint8)  # zeros at the end of a block may be left out
    for element in block["elements"]:
        codes[element["position"]] = element["code"]
    return f"scale {block['scale']['byte']:02x}  codes {pack(codes, made.element).tobytes().hex(' ')}"


def test_every_red_cell_of_the_page_leads_to_its_block():
    text = matrix_page.parts()[matrix_page.PART]
    for name, _, clause, _ in RED:
        label = f"matrix-{name}-{clause}".lower().replace(".", "-").replace("_", "-")
        assert f"<{label}>`" in text
        assert f".. _{label}:" in text
    assert not re.search(r',"?; ', text), "a word is missing before a semicolon"
