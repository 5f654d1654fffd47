"""The table on the README's front: the same 32 numbers, and what four libraries and mxref store for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peers import cases
from peers.pages import Stored, column_of, mxref_stores

COLUMNS = {
    "torchao": "torchao FLOOR",
    "gfloat": "gfloat float64",
    "gguf": "gguf",
    "compressed-tensors": "compressed-tensors float32",
}
"""The distributions of the table, each with its default way to quantize."""
KNOWN_AS = {"gguf": " (llama.cpp)"}
ROWS = {
    "7": "7, 1, 2, 3",
    "ties": "4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5",
    "2^-125": "2⁻¹²⁵ and its halves",
    "Inf": "+Inf, 1, 2, −3, 4",
}
"""The blocks of the table, as the README writes them."""


def table(record: Mapping[str, Any]) -> str:
    """Return the table as Markdown; what differs from mxref is bold."""
    names = [f"{name} {record['peers'][name]['version']}{KNOWN_AS.get(name, '')}" for name in COLUMNS]
    head = ["32 numbers (zeros follow)", *names, "mxref `ocp`"]
    lines = [head, ["---" for _ in head]]
    for block, shown in ROWS.items():
        ours = mxref_stores(block, "--dialect ocp")
        theirs = (
            Stored.recorded(column_of(record, "blocks", name)["stored"][block]) for name in COLUMNS.values()
        )
        cells = [_cell(block, one) if one == ours else f"**{_cell(block, one)}**" for one in theirs]
        lines.append([shown, *cells, _cell(block, ours)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(block: str, stored: Stored) -> str:
    return f"`{stored.scale:02X}:{stored.digits(len(cases.BLOCKS[block].values))}`"
