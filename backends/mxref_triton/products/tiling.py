"""What one program of a GEMM on gfx950 multiplies, and which of several tiles a product takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mxref_triton.launch import INTERPRETED, tiles_of

COMPUTE_UNITS = 256
"""Of an MI355X."""
MATRIX_SIDE: dict[str, Any] = {} if INTERPRETED else {"matrix_instr_nonkdim": 16}
"""Triton's option for matrix instructions with 16 rows and columns."""


@dataclass(frozen=True)
class Tile:
    """What one program multiplies, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    """Elements along K that are loaded at a time."""
    warps: int
    stages: int = 2
    """Buffers between memory and matrix cores."""
    waves: int = 0
    """Waves per SIMD that the compiler must leave registers for; 0 leaves the choice to it."""
    sixes: bool = False
    """Whether elements of 6 bits are multiplied as they are, by `sixes`."""

    @property
    def options(self) -> dict[str, Any]:
        """What a kernel with this tile is compiled with."""
        shared = {"num_warps": self.warps, "num_stages": self.stages}
        return shared if INTERPRETED else shared | MATRIX_SIDE | {"waves_per_eu": self.waves}


def largest_busy(tiles: Sequence[Tile], m: int, n: int) -> Tile:
    """Return the first tile of which M x N has at least one for every compute unit, or the last."""
    for tile in tiles[:-1]:
        if tiles_of(m, tile.rows) * tiles_of(n, tile.columns) >= COMPUTE_UNITS:
            return tile
    return tiles[-1]
