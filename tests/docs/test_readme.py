"""The README's example prints what the README says, on any machine, and its links lead somewhere."""

import os
import re
import subprocess
import sys

import pytest

import older_cpu
from places import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("settings", [{}, older_cpu.environment()], ids=["this CPU", "older CPU"])
def test_the_example_prints_what_is_written(settings):
    """Its numbers are portable: what mxref computes is exact or rounded in one stated order, and the inputs of
    NumPy's own product are multiples of 1/8 below 5, of which float32 holds every partial sum.
    """
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (printed,) = re.findall(r"prints\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_relative_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
