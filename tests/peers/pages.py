"""The pages of docs/reference/peers: which bits each implementation stores, and the blocks that separate it.

What is known stands in docs/reference/peers/peers.toml. Bytes come from the record of the peers and from mxref itself.
"""

from __future__ import annotations

import json
import re
import shlex
import struct
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from click.testing import CliRunner

from bench.records import newest, read
from mxref.cli import main
from peers import cases
from peers.render import StaleNoteError, raised
from places import ROOT
from rst_table import csv_table

FOLDER = ROOT / "docs" / "reference" / "peers"
SOURCE = FOLDER / "peers.toml"
EXPLORER = "../../explorer/index.html"
FACTS = {
    "scale": "scale rule",
    "ties": "ties and zeros",
    "zero": "block of zeros",
    "nonfinite": "NaN and Inf",
    "tiny": "tiny numbers",
    "decode": "decoding",
    "layout": "in memory",
    "random": "SR and Hadamard",
    "evidence": "evidence",
}
"""The rows of a page's first table, by their keys in the source. `decode` may be missing."""
COMMENT = ".. Made by `make tables` from peers.toml and docs/records.\n"


def sources() -> list[dict[str, Any]]:
    """Return what is known of each peer, in the order of the index."""
    return tomllib.loads(SOURCE.read_text(encoding="utf-8"))["peer"]


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    record = read(newest("peers"))
    return {f"{peer['page']}.rst": page_text(peer, record) for peer in sources()}


def parts() -> dict[str, str]:
    """Return the table of the index page by the name under which the page has it."""
    return {"peer_pages.inc": index_table()}


def index_table() -> str:
    """Return a line for each peer."""
    rows = [
        [f":doc:`{peer['title']} <{peer['page']}>`", _rst(peer["answer"]), _nearest(peer)]
        for peer in sources()
    ]
    return csv_table(["implementation", "which bits", "mxref explain"], rows, "stacked", (20, 58, 22))


def page_text(peer: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return a page; StaleNoteError names bytes that its source states and that do not hold."""
    title = f"Which bits does {peer['title']} store?"
    facts = [[name, _rst(peer[key])] for key, name in FACTS.items() if key in peer]
    sections = [_heading(title, "="), _rst(peer["answer"]) + "\n", csv_table([], facts, widths=(22, 78))]
    if same := peer.get("same"):
        sections += [_heading("The same bits from mxref", "-"), _same_table(same)]
    sections.append(_heading("What separates it", "-"))
    for case in peer.get("separates", ()):
        sections.append(_separation(peer, case, record))
    for case in peer.get("casts", ()):
        inputs = [raised(name) for name in cases.CASTS]
        rows = [
            [name, *(f"``{code:02X}``" for code in column_of(record, "casts", name))]
            for name in case["columns"]
        ]
        sections += [_from(case), "E8M0 bytes of single values:\n", csv_table(["value", *inputs], rows)]
    for case in peer.get("decodes", ()):
        found = {name: column_of(record, "decoders", name) for name in case["columns"]}
        rows = [
            [f"{name}, {d['dtype']}", *(f"``{float(v):.3g}``" for v in d["values"])]
            for name, d in found.items()
        ]
        head = ["scale byte", *(f"``{byte:02X}``" for byte in cases.SCALE_BYTES)]
        sections += [_from(case), "Code 7 (6.0) at the first and last scale bytes:\n", csv_table(head, rows)]
    sections.append(COMMENT)
    return "\n".join(sections)


# ---- what mxref stores ----


@dataclass(frozen=True)
class Stored:
    """A block as stored: the scale byte and 32 element codes."""

    scale: int
    codes: tuple[int, ...]

    @classmethod
    def recorded(cls, text: str) -> Stored:
        byte, _, digits = text.partition(" ")
        return cls(int(byte, 16), tuple(int(digit, 16) for digit in digits))

    def digits(self, count: int) -> str:
        """Return the first codes."""
        return "".join(f"{code:X}" for code in self.codes[:count])


def command(block: str, options: str) -> str:
    """Return the command that explains a block of `cases` under options."""
    return " ".join(["mxref explain", *map(_token, cases.BLOCKS[block].values), options])


def _token(value: float) -> str:
    """Return a float32 as the command line takes it: a short decimal, else its bits."""
    bits = struct.pack(">f", value)
    short = f"{value:.4g}"
    return short if struct.pack(">f", float(short)) == bits else f"0x{bits.hex()}"


@cache
def run(line: str) -> str:
    """Return what a command of mxref prints.

    Raises:
        StaleNoteError: the command fails.
    """
    result = CliRunner().invoke(main, shlex.split(line)[1:])
    if result.exit_code:
        raise StaleNoteError(f"{line}: {result.output}")
    return result.stdout


def mxref_stores(block: str, options: str) -> Stored:
    """Return what mxref stores for a block of `cases`."""
    (shown,) = json.loads(run(f"{command(block, options)} --json"))["blocks"]
    return Stored(shown["scale"]["byte"], tuple(element["code"] for element in shown["elements"]))


def explorer_address(block: str, treatments: Sequence[str]) -> str:
    """Return the address at which the explorer shows a block under one treatment, or compares two."""
    links = [run(f"{command(block, options)} --link --explorer {EXPLORER}").strip() for options in treatments]
    second = "".join(f"&b={link.partition('&a=')[2]}" for link in links[1:])
    return links[0] + second


# ---- the parts of a page ----


def _same_table(same: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in same:
        clauses = ", ".join(f":clause:`{name}`" for name in one["differs"])
        elsewhere = f" Other blocks differ by {clauses}." if clauses else ""
        rows.append([_rst(one["setting"]), _options(one["args"]), f"{_rst(one['where'])}.{elsewhere}"])
    return csv_table(["setting", "mxref explain", "same bits for"], rows, widths=(24, 26, 50))


def _separation(peer: Mapping[str, Any], case: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    block = case["block"]
    sides = [side(block, case[name], record) for name in ("theirs", "other")]
    if sides[0][1:3] == sides[1][1:3]:
        raise StaleNoteError(f"{peer['page']}: the block {block!r} does not separate it from {case['from']}")
    treatments = [t for name in ("theirs", "other") if (t := case[name].get("mxref"))]
    treatments = list(dict.fromkeys(treatments or [_first_same(peer)]))
    link = explorer_address(block, treatments)
    commands = "".join(f"   $ {command(block, options)}\n" for options in treatments)
    sentence = f"{_block_in_words(block)}\n{_rst(case['why'])}\n"
    return "\n".join(
        [
            _from(case),
            sentence,
            csv_table(["stored by", "scale byte", "first codes", "how it is known"], sides),
            f"Step by step `in the explorer <{link}>`__, or:\n",
            f".. code-block:: console\n\n{commands}",
        ]
    )


def _block_in_words(block: str) -> str:
    case = cases.BLOCKS[block]
    if not any(case.values):
        return "The block is 32 zeros."
    words = f"The block is {case.shown}, then {32 - len(case.values)} zeros."
    neighbours = {"+": "above", "-": "below"}
    for sign, where in neighbours.items():
        if match := re.search(rf"([\d.]+)\\ :sup:`\{sign}`", case.shown):
            words += f" {match[0]} is the next float32 {where} {match[1]}."
    return words


def side(block: str, known: Mapping[str, str], record: Mapping[str, Any]) -> list[str]:
    """Return a row: who stores what, and how that is known; StaleNoteError if two ways of knowing disagree."""
    found: dict[str, Stored] = {}
    if "recorded" in known:
        found["run"] = Stored.recorded(column_of(record, "blocks", known["recorded"])["stored"][block])
        version = next(p["version"] for p in record["peers"].values() if known["recorded"] in p["blocks"])
        if version not in known["name"]:
            raise StaleNoteError(f"{known['name']}: the record is of release {version}")
    if "mxref" in known:
        found[f"mxref {_options(known['mxref'])}"] = mxref_stores(block, known["mxref"])
    if "stated" in known:
        stated = Stored.recorded(known["stated"])
        rest = next(iter(found.values())).codes[len(stated.codes) :] if found else ()
        found = {"seen or read": Stored(stated.scale, stated.codes + rest)} | found
    if len(set(found.values())) != 1:
        raise StaleNoteError(f"{known['name']}, block {block!r}: {found}")
    stored = next(iter(found.values()))
    digits = stored.digits(len(cases.BLOCKS[block].values))
    how = ", as ".join(found)
    return [_rst(known["name"]), f"``{stored.scale:02X}``", f"``{digits}``" if digits else "not stated", how]


def column_of(record: Mapping[str, Any], kind: str, name: str) -> Any:
    """Return what the record has under the name of a column."""
    return next(peer[kind][name] for peer in record["peers"].values() if name in peer[kind])


def _first_same(peer: Mapping[str, Any]) -> str:
    return peer["same"][0]["args"] if "same" in peer else "--dialect ocp"


def _nearest(peer: Mapping[str, Any]) -> str:
    """Return the options of the index page: those of the default setting, and whether they have only some bits."""
    if "same" not in peer:
        return "none"
    return f"{peer.get('share', '')} {_options(_first_same(peer))}".strip()


def _options(args: str) -> str:
    """Return options of the command line, each with its value as one literal."""
    return " ".join(f"``--{option.strip()}``" for option in args.split("--") if option)


def _from(case: Mapping[str, Any]) -> str:
    return _heading(f"From {case['from']}", "~")


def _heading(text: str, mark: str) -> str:
    return f"{text}\n{mark * len(text)}\n"


def _rst(text: str) -> str:
    """Return a sentence of the source with its codes as literals wherever the page is rendered.

    A hyphen would let a negative exponent break.
    """
    text = text.replace(":sup:`-", ":sup:`−")
    return re.sub(r":\w+:`[^`]+`|`([^`]+)`", lambda found: f"``{found[1]}``" if found[1] else found[0], text)
