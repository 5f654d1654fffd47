"""The pages "which bits does X store?": their bytes are what mxref gives, and their commands and links show them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner

from bench.records import newest, read
from mxref.cli import main
from mxref.formats import E2M1
from mxref.layouts.foreign import LAYOUTS
from mxref.layouts.packed import unpack
from peers import cases
from peers.pages import FOLDER, pages, sources

pytestmark = pytest.mark.study

PAGES = sorted(FOLDER.glob("*.rst"))
COLUMNS = {"ggml": "gguf", "modelopt": "nvidia-modelopt", "quark": "amd-quark"}
"""Names that a column of the matrix has, and its page has not."""
INDEX = (FOLDER / "index.rst").read_text(encoding="utf-8")
LINK = re.compile(r"`in the explorer <\.\./\.\./explorer/index\.html#x=(\w+)&a=([^&>]+)(?:&b=([^>]+))?>`__")

ROW = re.compile(r'^   .+,``(\w\w)``,``(\w+)``,"?.*\bmxref (``[^"\n]+)', re.M)


@cache
def stored(command: str) -> tuple[str, str]:
    """Return the scale byte and the codes that a command prints, in hexadecimal."""
    result = CliRunner().invoke(main, shlex.split(command)[1:], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    ((byte, packed),) = re.findall(r"^ +scale (\w\w)  codes ((?: ?\w\w)+)", result.stdout, re.MULTILINE)
    codes = unpack(np.frombuffer(bytes.fromhex(packed), np.uint8), E2M1)
    return byte.upper(), "".join(f"{code:X}" for code in codes)


def commands(text: str) -> list[str]:
    return re.findall(r"^   \$ (mxref .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_of_a_page_print_the_bytes_of_its_tables(path):
    text = path.read_text(encoding="utf-8")
    shown = commands(text)
    for section in text.split("\n~~~")[1:]:
        rows = ROW.findall(section)
        assert len(rows) == section.count("mxref ``")
        for byte, codes, options in rows:
            (command,) = (c for c in commands(section) if c.endswith(options.replace("``", "").strip()))
            shown.remove(command)
            printed_byte, printed_codes = stored(command)
            assert (printed_byte, printed_codes[: len(codes)]) == (byte, codes)
            assert not printed_codes[len(codes) :].strip("0")
    # What remains shows the nearest treatment beside two other implementations, or a link.
    for command in shown:
        assert CliRunner().invoke(main, shlex.split(command)[1:]).exit_code == 0


def test_explain_takes_the_options_of_every_setting():
    table = tomllib.loads((FOLDER / "peers.toml").read_text(encoding="utf-8"))
    settings = [same["args"] for peer in table["peer"] for same in peer.get("same", ())]
    assert len(settings) > 20
    for options in settings:
        result = CliRunner().invoke(main, ["explain", "1", *shlex.split(options)])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_of_a_page_hold_the_block_and_the_treatments_of_its_commands(path):
    text = path.read_text(encoding="utf-8")
    links = LINK.findall(text)
    assert len(links) == text.count("explorer/index.html")
    sections = [s for s in text.split("\n~~~")[1:] if "explorer/index.html" in s]
    for (words, *treatments), section in zip(links, sections, strict=True):
        found = [
            CliRunner().invoke(main, [*shlex.split(command)[1:], "--link"]).stdout.strip().partition("#x=")[2]
            for command in commands(section)
        ]
        assert found == [f"{words}&a={treatment}" for treatment in treatments if treatment]


def test_every_layout_that_a_page_names_exists():
    named = re.findall(r"layouts? ((?:``\w+``(?:, | and )?)+)", "".join(pages().values()))
    assert len(named) >= 6
    assert set(re.findall(r"\w+", " ".join(named))) - {"and"} <= set(LAYOUTS)


def test_every_page_separates_its_implementation_by_whole_blocks_or_values():
    for peer in sources():
        blocks = [case["block"] for case in peer.get("separates", ())]
        assert len(blocks) >= 2 or peer.get("casts") or peer.get("decodes"), peer["page"]
        assert set(blocks) <= set(cases.BLOCKS)


@pytest.mark.parametrize(
    "peer", [peer for peer in sources() if "same" in peer], ids=lambda peer: peer["page"]
)
def test_a_page_and_the_matrix_blame_the_same_clauses(peer):
    column = read(newest("matrix"))["columns"].get(COLUMNS.get(peer["page"], peer["page"]))
    if column is None:
        pytest.skip("the matrix does not run it")
    own = {
        (setting["format"], setting["setting"])
        for setting in column["settings"]
        if "arithmetic" in setting.get("treatment", {})
    }
    outcomes = defaultdict(set)
    for setting in column["settings"]:
        # The page says which dialect has the bits, so the verdicts by the real quotient say nothing of it.
        if "arithmetic" in setting.get("treatment", {}) or (setting["format"], setting["setting"]) not in own:
            for clause, found in setting["clauses"].items():
                outcomes[clause].add(found["outcome"])
    named = {clause for same in peer["same"] for clause in same["differs"]}
    assert {clause for clause, found in outcomes.items() if "differs" in found} <= named
    assert not {clause for clause, found in outcomes.items() if found == {"passes"}} & named
