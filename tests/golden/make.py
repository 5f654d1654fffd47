"""Golden vectors made: inputs from the drafts of modules such as `elements` and `formats`, results from the oracle.

A record is written only where the oracle computed it and the reference agreed, so no vector is the output of
the code that it tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from golden import elements, formats, nearest, stored, tensors
from golden.answers import answer
from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS
from mxref.reference import backend as reference
from mxref.vectors import CHAPTERS, FORMAT, FORMAT_CHAPTERS, Record
from mxref.vectors.run import run_record

GENERATOR = 2
"""Version of the rules that choose the inputs; a change to them raises it."""
MAX_LINE = 65_535
"""Longest line of a file in characters, so that a reader in C needs one fixed buffer."""

Answer = Callable[[Record], dict[str, str]]
"""Gives the results of a record."""

_DRAFTS: dict[str, tuple[str, Callable[[], Iterator[Record]]]] = {
    "scale": (
        "shared scales: four rules at every exponent, zero blocks, NaN and Inf, tiles",
        elements.scale,
    ),
    "rounding": (
        "rounding to E2M1: every tie and its neighbours at every scale, saturation, signs, prescale, SR thresholds",
        elements.rounding,
    ),
    "random": (
        "Philox4x32-10, counters, streams, and the random integer of each element",
        elements.random,
    ),
    "hadamard": (
        "Hadamard transforms of 2 to 256 in float32, signs, NaN, Inf and overflow",
        tensors.hadamard,
    ),
    "quantize": (
        "whole quantizations: blocks, axes, padding, input types, dialects, shards, and digests of large tensors",
        tensors.quantize,
    ),
    "dequantize": ("values of every scale byte and element code", stored.dequantize),
    "packing": ("packed codes and their exchange with ml_dtypes", stored.packing),
    "gemm": ("scaled GEMM: exact, ordered and bounded", stored.gemm),
}


def _drafts(chapter: str) -> tuple[str, Callable[[], Iterator[Record]]]:
    """Return the description and the drafts of a chapter's file."""
    if chapter not in FORMAT_CHAPTERS:
        return _DRAFTS[chapter]
    made = BLOCK_FORMATS[chapter]
    drafts = formats.drafts if made.scale.powers else nearest.drafts
    return f"{made.title}: every operation that takes a block format", partial(drafts, made)


def generate(chapter: str, oracle: Answer = answer) -> str:
    """Return the text of a chapter's file.

    Args:
        chapter: one of `mxref.vectors.CHAPTERS`.
        oracle: gives every result.

    Raises:
        FileFormatError: the oracle, the reference and, where there is one, the published answer disagree;
            the message names the record.
    """
    description, drafts = _drafts(chapter)
    lines = []
    for draft in drafts():
        result = oracle(draft)
        if draft.expected and draft.expected != result:
            raise FileFormatError(f"{draft.id}: published {draft.expected}, but the oracle gives {result}")
        record = replace(draft, expected=result)
        if mismatch := run_record(record, reference):
            raise FileFormatError(f"the reference and the oracle disagree: {mismatch}")
        line = record.line()
        if len(line) >= MAX_LINE:
            raise FileFormatError(f"{record.id} takes {len(line)} characters, more than {MAX_LINE - 1}")
        lines.append(line)
    header = {
        "format": FORMAT,
        "chapter": chapter,
        "description": description,
        "generator": GENERATOR,
        "count": len(lines),
    }
    head = ",\n".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in header.items())
    return "{\n" + head + ',\n"records":[\n' + ",\n".join(lines) + "\n]\n}\n"


def write_vectors(
    folder: Path, chapters: Sequence[str] = CHAPTERS, oracle: Answer = answer
) -> Iterator[tuple[Path, bool]]:
    """Write the files of chapters, each replaced only when it is complete; yield its path and whether it changed."""
    for chapter in chapters:
        path, text = folder / f"{chapter}.json", generate(chapter, oracle)
        changed = not path.is_file() or path.read_text(encoding="utf-8") != text
        if changed:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                temporary.write_text(text, encoding="utf-8", newline="\n")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        yield path, changed
