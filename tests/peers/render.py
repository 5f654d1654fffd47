"""The measured results as reStructuredText, beside the present results of mxref for the same inputs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import RECORDS, newest, read
from mxref import OperandSpec, ScaleRule, quantize
from mxref.dialects import dialect
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from mxref.steps.scale import EXPONENT_RULES
from peers import cases, notes
from peers.measure import PEER_NORMAL_BLOCKS, as_seen, values_of
from peers.notes import Note
from rst_table import csv_table

DIFFERS, SAME_VALUES = "≠", "≈"
PART = "peers.inc"
HEADER = """\
Measured on {date}, {machine}, Python {python}, NumPy {numpy}: {versions}.
"""

Block = tuple[int, np.ndarray]  # a scale byte and 32 codes


class StaleNoteError(Exception):
    """The notes do not fit the results: a note explains no difference, or a difference has no note."""


class _Notes:
    """The notes of one table, numbered, and which of its cells each explains."""

    def __init__(self, table: Sequence[Note]) -> None:
        self.table = table
        self.number = {
            (column, row): i
            for i, note in enumerate(table, 1)
            for column in note.columns
            for row in note.rows
        }
        self.marked: set[tuple[str, str]] = set()

    def cell(self, column: str, row: str, text: str, mark: str) -> str:
        """Return a cell, with its mark and the number of its note if it has a mark."""
        if not mark:
            return text
        if (column, row) not in self.number:
            raise StaleNoteError(f"{column}, {row}: {text} differs from mxref, and no note says why")
        self.marked.add((column, row))
        return f"**{mark}** {text} [{self.number[column, row]}]"

    def explanations(self) -> str:
        """Return the notes as a list; every cell of every note has been marked."""
        for column, row in self.number.keys() - self.marked:
            raise StaleNoteError(f"{column}, {row}: a note explains a difference that does not exist")
        items = [f"[{i}] **{', '.join(note.columns)}.** {note.text}" for i, note in enumerate(self.table, 1)]
        return "\n".join(f"| {item}" for item in items) + "\n"


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the tables of the newest record by the name under which the page includes them."""
    return {PART: render(read(newest("peers", records)))}


def render(results: Mapping[str, Any]) -> str:
    """Return the tables as reStructuredText; StaleNoteError names a cell that the notes do not fit."""
    versions = ", ".join(f"{name} {peer['version']}" for name, peer in results["peers"].items())
    names = {"mxref ocp": dialect("ocp").spec, "mxref amd": dialect("amd").spec}
    above = {"mxref ceil": OperandSpec(scale_rule=ScaleRule.CEIL), "mxref nvidia": dialect("nvidia").spec}
    floor, even = ({name: spec} for name, spec in names.items())
    sections = {
        "The blocks": _block_list(),
        "FLOOR": _block_table(results, floor, notes.FLOOR),
        "EVEN": _block_table(results, even, notes.EVEN),
        "CEIL and RCEIL": _block_table(results, above, notes.CEIL_RCEIL),
        "On ordinary data": _normal(results),
    }
    body = [f"{title}\n{'-' * len(title)}\n\n{text}" for title, text in sections.items()]
    header = HEADER.format(date=results["date"], versions=versions, **results["environment"])
    return "\n".join([header, *body])


# ---- whole blocks ----


def _block_list() -> str:
    rows = [[raised(name), case.shown, case.catches] for name, case in cases.BLOCKS.items()]
    return csv_table(["block", "starts with; zeros follow", "what it catches"], rows, widths=(16, 32, 52))


def _block_table(
    results: Mapping[str, Any], references: Mapping[str, OperandSpec], explanations: Sequence[Note]
) -> str:
    """Return the table of the references, each followed by the peers of its rule."""
    explained = _Notes(explanations)
    columns: dict[str, list[str]] = {}
    differing: set[str] = set()
    for name, spec in references.items():
        columns[name] = [_block_text(row, block) for row, block in _reference_blocks(spec).items()]
        for title, measured in _of_rule(results, spec.scale_rule):
            columns[title] = []
            ours = _reference_blocks(spec, measured["bfloat16"])
            for row, stored in measured["stored"].items():
                mark, text = _compare(row, stored, ours[row])
                columns[title].append(explained.cell(title, row, text, mark))
                if mark:
                    differing.add(row)
    rows = [
        [raised(row), *(column[i] for column in columns.values())]
        for i, row in enumerate(cases.BLOCKS)
        if row in differing
    ]
    same = "; ".join(raised(row) for row in cases.BLOCKS if row not in differing)
    table = csv_table(["block", *columns], rows)
    return f"{table}\n{explained.explanations()}\nAll store the same bits for: {same}.\n"


def _of_rule(results: Mapping[str, Any], rule: ScaleRule) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for peer in results["peers"].values():
        for title, measured in peer["blocks"].items():
            if measured["rule"] == rule:
                yield title, measured


def _reference_blocks(spec: OperandSpec, bfloat16: bool = False) -> dict[str, Block]:
    q = quantize(as_seen(cases.block_array(), bfloat16), spec)
    return dict(
        zip(cases.BLOCKS, zip(q.scales[:, 0].tolist(), unpack(q.codes, E2M1), strict=True), strict=True)
    )


def _block_text(row: str, block: Block) -> str:
    byte, codes = block
    return f"``{byte:02X}:{''.join(f'{code:X}' for code in codes[: len(cases.BLOCKS[row].values)])}``"


def _compare(row: str, stored: str, ours: Block) -> tuple[str, str]:
    """Return the mark and the text of what a peer stored."""
    byte, _, digits = stored.partition(" ")
    if not digits:
        return DIFFERS, stored
    theirs = int(byte, 16), np.array([int(digit, 16) for digit in digits], np.uint8)
    text = _block_text(row, theirs)
    if theirs[0] == ours[0] and (theirs[1] == ours[1]).all():
        return "", text
    scales, codes = (np.array(pair) for pair in zip(theirs, ours, strict=True))
    got, want = values_of(scales.astype(np.uint8), codes)
    return SAME_VALUES if np.array_equal(got, want, equal_nan=True) else DIFFERS, text


def raised(name: str) -> str:
    """Return the name of a row or a column, its power of two as one; a hyphen would let it break."""
    return re.sub(r"\^(-?\d+)", lambda match: f"\\ :sup:`{match[1].replace('-', '−')}`", name)


# ---- N(0, 1) ----


def _normal(results: Mapping[str, Any]) -> str:
    normal = results["normal"]
    rows = []
    for pair, share in normal["bytes"].items():
        a, b = pair.split()
        rows.append([f"`{a}`, `{b}`", f"{share:.1%}", f"{normal['values'][pair]:.1%}"])
    table = csv_table(["rules", "blocks whose scale byte differs", "elements whose value differs"], rows)
    same = {
        title: measured["normal"] for rule in EXPONENT_RULES for title, measured in _of_rule(results, rule)
    }
    fewer = [f"{title} in {count:,}" for title, count in same.items() if count < PEER_NORMAL_BLOCKS]
    exceptions = f", but {', '.join(fewer)}" if fewer else ""
    return (
        f"In {normal['blocks']:,} blocks of N(0, 1) in float32:\n\n{table}\n"
        f"In all of the first {PEER_NORMAL_BLOCKS:,}, every peer above stores the byte and the values of mxref "
        f"under its own rule{exceptions}.\n"
    )
