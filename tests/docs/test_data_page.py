"""The page on data: its commands run, in the order of the page, on small files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("mxref_training")

import data_files
from data_files import make_texts, write
from megatron_oracle import write_indexed
from mxref.cli import main
from mxref_training.config_files import load_config
from mxref_training.data import train_tokenizer
from mxref_training.data.documents import survey
from places import ROOT

own_cache = data_files.own_cache

PAGE = (ROOT / "docs" / "how-to" / "data.rst").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    shown = re.findall(r"^   \$ mxref ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    return [shlex.split(command.replace("\\\n", " ")) for command in shown]


def test_commands_that_need_no_download_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = make_texts(700, 1)
    write(tmp_path / "train.jsonl", texts)
    write(tmp_path / "val.jsonl", make_texts(60, 2))
    tokenizer = train_tokenizer(survey("texts", lambda: texts), 400)
    for side, source in (("corpus", texts), ("held_out", make_texts(60, 2))):
        ids = [[*tokens, tokenizer.eot] for tokens in tokenizer.encode_batch(source)]
        write_indexed(tmp_path / side, ids, "int32")
    on_text, _, on_tokens, _ = commands()
    cheap = ["--recipe", "bf16", "--set", "run.eval_tokens=256", "--set", "run.seq_len=16"]
    for words, name in ((on_text, "text"), (on_tokens, "tokens")):
        result = CliRunner().invoke(main, [*words, *cheap], env={"MXREF_BACKEND": "reference"})
        assert result.exit_code == 0, result.output
        assert (tmp_path / "runs" / name / "metrics.jsonl").read_text().count("\n") >= 4


def test_the_benchmark_takes_the_order_of_the_whole_schedule() -> None:
    words = commands()[3]
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    config = load_config(words[1], overrides)
    assert words[1] == "llama31_8b"
    assert config.data.order_samples == config.optim.decay_steps * config.run.batch == 38_400_000
    assert config.run.eval_tokens == 1024 * config.run.seq_len
    assert config.run.order_seed == 1234
