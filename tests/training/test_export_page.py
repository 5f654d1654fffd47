"""The commands and the program of the page on export, as they stand there, in one folder."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

import data_files
from exported import invoke
from places import ROOT

pytest.importorskip("transformers")

PAGE = (ROOT / "docs" / "how-to" / "export.rst").read_text(encoding="utf-8")
BLOCK = re.compile(r"\.\. code-block:: (console|python|toml)\n\n((?:   .*\n|\n)+)")


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MXREF_BACKEND", "reference")
    data_files.write(tmp_path / "text.jsonl", data_files.make_texts(1200))
    said = []
    for kind, text in BLOCK.findall(PAGE):
        text = textwrap.dedent(text).strip()
        if kind == "toml":
            (tmp_path / "mine.toml").write_text(text)
        elif kind == "python":
            exec(compile(text, "the page", "exec"), {})  # the program of the page
            said.append(capsys.readouterr().out)
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line.removeprefix("$ "))
                assert program == "mxref"
                result = invoke(*arguments)
                assert result.exit_code == 0, (line, result.output)
                said.append(result.stdout)
    assert len(said) == 8
    assert said[3].startswith("the quick brown")
    assert said[4].startswith("packed: ")
    assert "14 linear layers packed for compressed-tensors" in said[4]
    for folder in ("model", "narrow", "packed", "packed-amd", "packed-8"):
        for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
            assert (tmp_path / folder / name).is_file()
    # The second run goes on from the first: its validation loss is lower.
    losses = [float(re.search(r"validation loss ([\d.]+)", said[i])[1]) for i in (0, -1)]  # type: ignore[index]
    assert losses[1] < losses[0]
