"""Which tile of a matrix a program quantizes, in each orientation and in both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mxref_triton.lane.gfx950 import library
from mxref_triton.lane.treatment import Output, Treatment
from mxref_triton.launch import INTERPRETED, WARP, WARPS, launch, power_of_two_from, tiles_of
from mxref_triton.quantizer.column import quantize_columns
from mxref_triton.quantizer.dual import quantize_both
from mxref_triton.quantizer.inputs import Matrix
from mxref_triton.quantizer.row import quantize_rows

_WIDE_OFFSET = 1 << 31
_LARGE = 1 << 22

_ELEMENTS = 32
"""Elements that are next to each other in the work of a thread, where units are not longer."""

COLUMN_UNITS_ASIDE = 4
"""Units of a line that a program covers: side by side they fill sectors of the transposed output."""
DUAL_ROWS = 256 if INTERPRETED else 128
_WIDEST_BAND = 32
"""Tiles that programs go across before they go down."""


class Outputs(NamedTuple):
    """What kernels write, and the scale that is above what they write."""

    words: torch.Tensor
    """Contiguous int32 [rows, words]; or [1], whose word becomes the bits of amax where that is larger."""
    scales: torch.Tensor | None = None
    """Contiguous uint8 [rows, blocks], unless none are written."""
    tensor: torch.Tensor | None = None
    """The scale of the tensor, float32 [1]."""


def launch_rows(
    m: Matrix, out: Outputs, how: Treatment, random: tuple[int, ...],
    one_row: bool,
) -> None:  # fmt: skip
    """Quantize a matrix whose rows are read as words.

    Args:
        m: the matrix, its rows whole units.
        out: what is written.
        how: the treatment.
        random: arguments from `signs_low` to `stream_high`.
        one_row: whether a contiguous matrix may be read as one row: nothing depends on where rows end.
    """
    rows, units = m.rows, m.tensor.shape[1] // how.unit
    flat = rows == 1 or (one_row and m.tensor.is_contiguous())
    if flat:
        rows, units = 1, rows * units
    # With twice as many, a wavefront of gfx950 would leave registers for only one other.
    size = _units(how, (1 if how.random_bits else 2) * (1 if torch.version.hip else 2))
    across = power_of_two_from(units, size // max(how.tile, 1))
    down = max(power_of_two_from(rows, size // across), how.tile)
    stride = m.stride * how.words_in // how.unit
    tiles_down, tiles_across = tiles_of(rows, down), tiles_of(units, across)
    launch(
        quantize_rows, (tiles_across,) if flat else (tiles_down, tiles_across),
        m.tensor, *out, rows, units, stride, *random,
        P=how, ROWS=down, UNITS=across, BAND=0 if flat else 1, MASKED=bool(rows % down or units % across),
        WIDE=(down - 1) * max(abs(stride), units * how.words_out) >= _WIDE_OFFSET - units * how.words_in,
        **_linked(how),
    )  # fmt: skip


def launch_columns(
    m: Matrix, out: Outputs, how: Treatment, random: tuple[int, ...],
    length: int,
) -> None:  # fmt: skip
    """Quantize a matrix of any strides, its rows padded with zeros to `length`; the rest as in `launch_rows`."""
    lines, units = m.rows, length // how.unit
    aside = power_of_two_from(units, COLUMN_UNITS_ASIDE)
    tile = max(power_of_two_from(lines, _units(how, 1 if how.random_bits else 2) // aside), how.tile)
    is_padded = m.tensor.shape[1] != length
    together = 2 if how.two_lines and tile > 1 and m.reads_words_across() else 1
    tiles_down, tiles_across = tiles_of(units, aside), tiles_of(lines, tile)
    band = _band(tiles_across)
    launch(
        quantize_columns, (tiles_down * band, tiles_across // band),
        m.tensor, *out, lines, units, m.tensor.shape[1], m.stride, m.step // together, *random,
        P=how, LINES=tile, UNITS=aside, BAND=band, STEP=_constant_step(m) // together, TOGETHER=together,
        VECTOR=_vector(tile * aside // together, WARPS) if m.stride == 1 else 1,
        MASKED=bool(is_padded or lines % tile or units % aside), PADDED=is_padded,
        WIDE=tile * max(abs(m.stride), length) + aside * how.unit * abs(m.step) >= _WIDE_OFFSET,
        **_linked(how),
    )  # fmt: skip


def launch_both(
    m: Matrix,
    row: tuple[Outputs, tuple[Any, ...]],
    column: tuple[Outputs, tuple[Any, ...]],
    hows: tuple[Treatment, Treatment],
) -> None:
    """Quantize a matrix in both orientations.

    Args:
        m: the matrix, both axes whole units, its rows read as words.
        row: outputs, and arguments from `signs_low` to `stream_high`, for the row-wise ones.
        column: the same for the column-wise one.
        hows: both treatments.
    """
    rows, columns = m.tensor.shape
    # A wider tile fills more of each sector with scale codes; with a transform, more warps cost more than that gains.
    warps = 2 * WARPS if all(how.direct for how in hows) else WARPS
    size = min(_units(how, 1 if how.random_bits else 2) * how.unit for how in hows) * (warps // WARPS)
    tile_rows = DUAL_ROWS
    tile_columns = max(size // tile_rows, hows[0].unit)
    tiles_down, tiles_across = tiles_of(rows, tile_rows), tiles_of(columns, tile_columns)
    band = _band(tiles_across)
    launch(
        quantize_both, (tiles_down * band, tiles_across // band),
        m.tensor, *row[0], *column[0], rows, columns, m.stride, *row[1], *column[1],
        num_warps=warps, R=hows[0], C=hows[1], ROWS=tile_rows, COLUMNS=tile_columns, BAND=band,
        STEP=_constant_step(Matrix(m.tensor.T, 0)),
        VECTOR=_vector(tile_rows // hows[1].unit * tile_columns // (2 if hows[1].two_lines else 1), warps),
        MASKED=bool(rows % tile_rows or columns % tile_columns),
        WIDE=tile_rows * max(abs(m.stride), columns) + tile_columns * rows >= _WIDE_OFFSET,
        **_linked(*hows),
    )  # fmt: skip


def _linked(*hows: Treatment) -> dict[str, Any]:
    """Return the options of a launch that link what treatments call."""
    return library() if any(how.by_block for how in hows) else {}


def _units(how: Treatment, per_thread: int) -> int:
    """Return the units of a program: `per_thread` times `_ELEMENTS` elements, or one unit, for each thread."""
    if INTERPRETED:
        return 1 << 12  # its cost is per program
    if how.output is Output.TRANSFORMED:
        per_thread = 1
    elif how.chooses and how.quantizes:  # both scales' quotients take registers
        per_thread = max(1, _ELEMENTS // how.unit)
    elif how.unit > _ELEMENTS or not how.tile:  # of short units in tiles more would take all registers
        per_thread = max(1, per_thread * _ELEMENTS // how.unit)
    return per_thread * WARPS * WARP


def _vector(units: int, warps: int) -> int:
    """Return how many neighbours of so many units a thread owns."""
    return max(1, units // (warps * WARP))


def _band(across: int) -> int:
    """Return how many of the tiles across make a band, so that no program is without a tile."""
    return min(_WIDEST_BAND, across & -across)


def _constant_step(m: Matrix) -> int:
    """Return the constant step of a kernel, 0 for any step. Large inputs have few widths, and a constant is faster."""
    return m.step if m.tensor.numel() >= _LARGE else 0
