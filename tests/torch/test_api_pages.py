"""The programs of the pages run as they stand there, and print what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import mxref_torch
import warm
from places import ROOT


@pytest.mark.parametrize("page", ["torch-layer", "transformers", "layers-and-phases"])
def test_the_program_of_a_page_prints_what_is_written(page: str, tmp_path: Path) -> None:
    if page != "torch-layer":
        pytest.importorskip("transformers")
    text = (ROOT / "docs" / "how-to" / f"{page}.rst").read_text(encoding="utf-8")
    found = re.search(
        r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)\nIt prints\n\n\.\. code-block:: text\n\n((?:   .*\n|\n)+)",
        text,
    )
    if file := re.search(r"Save it as `([\w.]+)`:\n\n\.\. code-block:: toml\n\n((?:   .*\n|\n)+)", text):
        (tmp_path / file[1]).write_text(textwrap.dedent(file[2]))
    program, printed = (textwrap.dedent(part).strip() + "\n" for part in found.groups())
    assert len([line for line in program.splitlines() if line.strip()]) <= 40
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with warm.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment, **pipes) as process:
        got, words = process.communicate(timeout=280)
    assert process.returncode == 0, words
    assert got == printed


def test_every_public_name_is_on_the_page_with_an_example() -> None:
    """The examples themselves run with those of all pages."""
    text = (ROOT / "docs" / "reference" / "api-torch.rst").read_text(encoding="utf-8")
    parts = re.split(r"^\.\. auto\w+:: mxref_torch\.(\w+)$", text, flags=re.MULTILINE)[1:]
    described = dict(zip(parts[::2], parts[1::2], strict=True))
    assert sorted(described) == mxref_torch.__all__
    assert [name for name, example in described.items() if ">>>" not in example] == []
