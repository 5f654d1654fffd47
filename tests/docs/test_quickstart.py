"""The first tutorial: what it shows of a block in another dialect. tests/docs/test_commands.py runs its commands."""

from __future__ import annotations

import re
import shlex
import textwrap

from click.testing import CliRunner

from mxref.cli import main
from places import ROOT

PAGE = (ROOT / "docs" / "tutorials" / "quickstart.rst").read_text(encoding="utf-8")


def test_the_other_dialect_stores_and_reads_back_what_the_page_says():
    command = "mxref explain 1 -2 0.3 1.25 7 --dialect amd"
    assert f"   $ {command}\n" in PAGE
    (end,) = re.findall(r"\.\. code-block:: text\n\n((?:   .*\n)+)", PAGE)
    printed = CliRunner().invoke(main, shlex.split(command)[1:], env={"COLUMNS": "80"}).stdout
    assert textwrap.dedent(end) in printed
    values = re.findall(r"^ +\d .* (-?[\d.]+) +[\d.]+  ?\w+ *$", printed, re.MULTILINE)
    assert (values[2], values[4]) == ("0", "8")
    assert "7 is read back as 8 instead of 6, and 0.3 as 0 instead of 0.5." in PAGE
