"""The commands `mxref conform` and `mxref explain`, as the tests of conformance call them."""

from __future__ import annotations

import json
import shlex

from click.testing import CliRunner, Result

from mxref.cli import main
from places import ROOT

TOY = f"{ROOT}/docs/examples/toy_backend.py:backend"
PLANTED = f"{ROOT}/docs/examples/planted_fault_backend.py:backend"


def run(*args: str, width: int = 100) -> Result:
    """Return what a command gives, without a backend of the environment."""
    return CliRunner().invoke(main, args, env={"COLUMNS": str(width), "MXREF_BACKEND": ""})


def explained(command: str) -> str:
    """Return what a command that explains a block prints, in the form of a failure's expected side."""
    words = shlex.split(command)
    assert words[:2] == ["mxref", "explain"]
    index = int(words[words.index("--block") + 1])
    (block,) = json.loads(run(*words[1:], "--json").stdout)["blocks"]
    assert block["index"] == index
    packed = bytes.fromhex(block["packed"])
    return f"scale {block['scale']['byte']:02x}  codes {packed.hex(' ')}"
