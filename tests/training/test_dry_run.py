"""The dry run refuses data, tokenizer and weights that the run would refuse, and writes nothing."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from click.testing import CliRunner, Result

from megatron_oracle import write_indexed
from mxref.cli import main

TEXT = [json.dumps({"text": f"{number} " + "block scale round " * 20}) for number in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.jsonl").write_text("\n".join(TEXT[:6]) + "\n")
    (tmp_path / "val.jsonl").write_text("\n".join(TEXT[6:]) + "\n")
    (tmp_path / "broken.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress("\n".join(TEXT).encode())[:40])
    (tmp_path / "secret.jsonl").mkdir(mode=0o700)
    for name, first in (("ids", 0), ("other", 100), ("short", 200)):
        write_indexed(tmp_path / name, [range(first, first + 50)], np.uint16)
    with (tmp_path / "short.bin").open("r+b") as file:
        file.truncate(60)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def train(*arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["train", "tiny", "--backend", "reference", "--set", "data.max_documents=0", *arguments]
    )


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("real", [False, True], ids=["dry", "real"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data missing.jsonl", "no such data file: missing.jsonl"),
        ("--data train.jsonl --set data.val=missing.jsonl", "no such data file: missing.jsonl"),
        ("--data none*.jsonl", "no file matches none*.jsonl"),
        ("--data secret.jsonl", "no JSONL file in the folder secret.jsonl"),
        ("--data broken.jsonl", "broken.jsonl, line 1: every line must be an object with a string 'text'"),
        ("--data cut.jsonl.xz", "cannot read cut.jsonl.xz"),
        ("--data train.jsonl --set data.tokenizer=missing.json", "cannot read the tokenizer missing.json"),
        ("--data train.jsonl --set data.tokenizer=tokenizer.json", "tokenizer.json is not a tokenizer.json"),
        ("--data train.jsonl --set model.vocab=200", "a vocabulary of 200 cannot hold all bytes"),
        ("--data ids", "data.train names token files, but data.val is not set"),
        ("--data ids --set data.val=short", "short.bin is cut short: expected 100 bytes, found 60"),
        ("--data ids --set data.val=gone.bin", "cannot read gone.idx"),
        ("--data hf: --set data.val=train.jsonl", "'hf:' is not of the form hf:NAME"),
        ("--data train.jsonl --set run.init_from=nowhere", "nowhere"),
    ],
)
def test_it_refuses_as_the_run_does(folder: Path, arguments: str, message: str, real: bool) -> None:
    before = listing(folder)
    found = train(*arguments.split(), *([] if real else ["--dry-run"]))
    assert found.exit_code == 2, found.output
    assert message in found.stderr.splitlines()[-1]
    if not real:
        assert listing(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--data train.jsonl",
        "--data train.jsonl --set data.val=val.jsonl",
        "--data ids --set data.val=other",
    ],
)
def test_it_takes_what_can_be_read_and_writes_nothing(folder: Path, arguments: str) -> None:
    before = listing(folder)
    found = train(*arguments.split(), "--dry-run")
    assert found.exit_code == 0, found.output
    assert listing(folder) == before


def test_a_data_set_of_the_hub_is_not_fetched(folder: Path) -> None:
    found = CliRunner().invoke(main, ["train", "tiny", "--data", "c4", "--dry-run"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert "c4, validated on its own validation side" in found.output
