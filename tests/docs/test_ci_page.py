"""The page about CI: the composite action holds a stranger's kernel, and the page shows what its summary says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from places import ROOT

FOLDER = ROOT / "docs" / "examples" / "check-action"
PAGE = (ROOT / "docs" / "how-to" / "ci.rst").read_text(encoding="utf-8")
KERNEL = """
import numpy as np

MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


@np.errstate(all="ignore")
def quantize(x):
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    exponent = np.clip(np.frexp(amax)[1] - 3, -127, 127)
    exponent[amax == 0] = -127
    scaled = np.abs(blocks) / np.exp2(exponent)
    codes = np.searchsorted(MIDPOINTS, scaled{ties})
    {even}
    codes |= np.signbit(blocks) << 3
    scales = exponent + 127
    lost = ~np.isfinite(amax)
    codes, scales = np.where(lost, 0, codes).astype(np.uint8), np.where(lost, 255, scales).astype(np.uint8)
    codes = codes.reshape(len(x), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales[:, :, 0]
"""
RIGHT = KERNEL.format(ties="", even="codes += np.isin(scaled, MIDPOINTS) & (codes % 2 == 1)")
WRONG = KERNEL.format(ties=', side="right"', even="")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def check(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the last step of the action as GitHub's runner does: its inputs are environment variables of bash."""
    action = read("action.yml")
    given = {name: entry.get("default", "") for name, entry in action["inputs"].items()} | inputs
    step = action["runs"]["steps"][-1]
    assert step["shell"] == "bash"
    own = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], value)
        for name, value in step["env"].items()
    }
    environment = {
        **os.environ, **own, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "MXREF_BACKEND": "",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def cases(folder: Path) -> dict[str, ElementTree.Element]:
    return {case.get("name", ""): case for case in ElementTree.parse(folder / "mxref.xml").iter("testcase")}


def arguments() -> str:
    steps = read("workflow.yml")["jobs"]["check"]["steps"]
    (used,) = [step["with"] for step in steps if step["uses"] == "./.github/actions/mxref"]
    assert set(used) <= set(read("action.yml")["inputs"])
    return used["arguments"]


def test_a_right_kernel_passes(tmp_path):
    (tmp_path / "kernel.py").write_text(RIGHT)
    done = check(tmp_path, arguments=arguments())
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(cases(tmp_path)["kernel.py:quantize"]) == []
    assert (tmp_path / "summary.md").read_text() == "### mxref: 1 passed, 0 failed, 0 skipped\n\n"


def test_a_planted_fault_is_named_with_its_smallest_block_as_the_page_shows(tmp_path):
    (tmp_path / "kernel.py").write_text(WRONG)
    done = check(tmp_path, arguments=arguments())
    assert done.returncode == 1, done.stdout + done.stderr
    failure = cases(tmp_path)["kernel.py:quantize"].find("failure")
    assert failure is not None
    assert "[10] = 0xc0200000 = -2.5" in failure.text
    assert "Traceback" not in done.stdout
    (shown,) = re.findall(r"\.\. code-block:: text\n\n((?:   .*\n|\n)+)", PAGE)
    summary = re.sub(r"```(text)?\n", "", (tmp_path / "summary.md").read_text())
    assert untimed(summary) == untimed(textwrap.dedent(shown))


def untimed(text: str) -> str:
    return re.sub(r"in [\d.]+ s\n", "", text).strip()


def test_a_backend_has_a_test_for_each_clause_and_the_summary_shows_the_first(tmp_path):
    planted = ROOT / "docs" / "examples" / "planted_fault_backend.py"
    done = check(tmp_path, arguments=f"--mxref-backend {planted}:backend -k rounding")
    assert done.returncode == 1, done.stdout + done.stderr
    assert cases(tmp_path)["rounding.rne"].find("failure") is not None
    assert "**mxref::rounding.rne**\n\n```text\nrounding.rne: " in (tmp_path / "summary.md").read_text()


def test_the_summary_has_the_failures_of_test_files_and_names_those_beyond_the_fifth(tmp_path):
    (tmp_path / "kernel.py").write_text(WRONG)
    (page,) = re.findall(r"   :caption: test_kernel.py\n\n((?:   .*\n|\n)+)", PAGE)
    (tmp_path / "test_kernel.py").write_text(
        textwrap.dedent(page).replace('layout="high_first"', 'level="quick"')
    )
    (tmp_path / "test_more.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('i', range(6))\ndef test_more(i):\n    assert not i\n"
    )
    assert check(tmp_path, arguments=".").returncode == 1
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### mxref: 1 passed, 6 failed, 0 skipped\n")
    assert "**test_kernel.py::test_every_bit**\n\n```text\nquantize does not conform" in summary
    assert "assert not 1" in summary
    assert summary.endswith("Failed too: test_more.py::test_more[5]\n\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kernel.py", "names no function; write module:function"),
        ("absent.py:quantize", "cannot load absent.py:quantize"),
        ("kernel.py:quantise", "has no 'quantise' (did you mean 'quantize'?)"),
        ("kernel.py:MIDPOINTS", "takes a function of a matrix"),
    ],
)
def test_a_function_that_is_not_there_is_one_line(name, message, tmp_path):
    (tmp_path / "kernel.py").write_text(RIGHT)
    done = check(tmp_path, arguments=f"--mxref-quantizer {name}")
    assert done.returncode == 1
    assert message in (tmp_path / "summary.md").read_text()
    assert "Traceback" not in done.stdout
