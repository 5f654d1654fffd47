"""The first tutorial: its commands run in a folder of their own, in order, and print what the page shows."""

from __future__ import annotations

import re
import shlex

from click.testing import CliRunner

from mxref.cli import main
from places import ROOT

PAGE = (ROOT / "docs" / "tutorials" / "quickstart.rst").read_text(encoding="utf-8")
INSTALLING = ("python3 -m venv", ". .venv", "pip install")


def test_every_command_runs_and_the_shown_ends_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = {}
    for line in re.findall(r"^   \$ (.+)$", PAGE, re.MULTILINE):
        program, *words = shlex.split(line)
        if line.startswith(INSTALLING):
            continue
        if program == "python":
            option, code = words
            assert option == "-c"
            exec(code, {})
            continue
        assert program == "mxref", line
        result = CliRunner().invoke(main, words, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        printed[line] = result.stdout
    assert len(printed) >= 6
    (end,) = re.findall(r"\.\. code-block:: text\n\n((?:   .*\n)+)", PAGE)
    amd = printed["mxref explain 1 -2 0.3 1.25 7 --dialect amd"]
    assert re.sub(r"^   ", "", end, flags=re.MULTILINE) in amd
    values = re.findall(r"^ +\d .* (-?[\d.]+) +[\d.]+  ?\w+ *$", amd, re.MULTILINE)
    assert (values[2], values[4]) == ("0", "8")
