"""Which treatment of the original weight gives the stored bytes, or where the nearest one first differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.conformance.dump import other_treatments
from mxref.dialects import dialects_of
from mxref.errors import FileFormatError, ShapeError
from mxref.explain.link import explorer_link
from mxref.formats import BlockFormat
from mxref.identify.answer import Group, Identified
from mxref.identify.stored import Checkpoint, read_checkpoint
from mxref.identify.weights import Reading
from mxref.layouts.foreign import elements
from mxref.placement import Placement
from mxref.quantization import quantize
from mxref.recipe import OperandSpec
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

_ROWS = 64
_ELEMENTS = 1 << 18
"""Of a weight so many elements are compared, in whole rows."""


@dataclass(frozen=True)
class FirstDifference:
    """The first compared block that differs from the nearest dialect's."""

    dialect: str
    differing: int
    """How many of the compared blocks differ."""
    row: int
    block: int
    """The block's number in its row."""
    expected: str
    """The scale byte and the codes of the dialect, in hexadecimal."""
    stored: str
    link: str
    """The explorer page that shows the dialect's steps."""


@dataclass(frozen=True)
class Origin:
    """What a weight was made of."""

    weight: str
    blocks: int
    """Blocks that were compared."""
    dialects: tuple[str, ...]
    """The dialects that give every compared byte."""
    treatment: str | None
    """A treatment that gives every byte, where no dialect does."""
    but_for_zero_signs: bool
    """Whether only the signs of zeros differ."""
    transposed: bool
    """Whether blocks lie along the first axis of the original."""
    difference: FirstDifference | None


def against(identified: Identified, original: Path) -> list[Origin]:
    """Return where the first weight of each group comes from.

    Raises:
        FileFormatError: an original that cannot be read, or without the weight.
        ShapeError: an original of another shape.
    """
    source = read_checkpoint((original,))
    return [
        _origin(group, identified.readings[group.weights[0]], source, alone=len(identified.readings) == 1)
        for group in identified.groups
        if len(group.formats) == 1
    ]


def _origin(group: Group, reading: Reading, source: Checkpoint, alone: bool) -> Origin:
    x = _original(reading, source, alone)
    found = None
    for transposed, matrix in _orientations(x, reading):
        origin = _compared(group, reading, matrix, transposed)
        if origin.difference is None:
            return origin
        found = found or origin
    if found is None:
        raise ShapeError(
            f"{reading.weight.name} has {reading.rows} rows of {reading.length} elements, and the original is of shape "
            f"{x.shape}: name the file that it was made of"
        )
    return found


def _original(reading: Reading, source: Checkpoint, alone: bool) -> NDArray[Any]:
    name = reading.weight.name
    floats = {n: one for n, one in source.tensors.items() if one.dtype in ("F32", "F16", "BF16", "F64")}
    stored = next((floats[n] for n in (name, f"{name}.weight") if n in floats), None)
    if stored is None and alone and len(floats) == 1:
        (stored,) = floats.values()
    if stored is None:
        known = ", ".join(list(floats)[:5]) or "none"
        raise FileFormatError(
            f"the original has no floating-point tensor {name!r}; it has {known}{', ...' if len(floats) > 5 else ''}"
        )
    return stored.array()


def _orientations(x: NDArray[Any], reading: Reading) -> Iterator[tuple[bool, NDArray[Any]]]:
    """Yield the original as [rows, length], along its last axis and along the one before, where the sizes fit."""
    for transposed in (False, True):
        if transposed and x.ndim < 2:
            continue
        turned = np.swapaxes(x, -1, -2) if transposed else x
        if (
            turned.ndim
            and turned.shape[-1] == reading.length
            and turned.size == reading.rows * reading.length
        ):
            yield transposed, turned.reshape(reading.rows, reading.length)


def _compared(group: Group, reading: Reading, matrix: NDArray[Any], transposed: bool) -> Origin:
    made = reading.made
    rows = _rows(reading)
    x = np.ascontiguousarray(matrix[rows])
    x = x.astype(np.float32) if x.dtype == np.float64 else x
    amax = _amax(matrix) if made.tensor_scale else None
    layout = group.scale_layout or group.scale_layouts_that_fit[0]
    stored = _Bytes(elements(reading.codes(rows), made), reading.scale_layouts[layout][rows])
    signless = stored.without_zero_signs(made)
    wrong: dict[str, NDArray[np.bool_]] = {}
    unsigned, exact = [], []
    for name, spec in dialects_of(made).items():
        if spec.rounding is Rounding.SR:
            continue
        want = _quantized(x, spec, amax)
        wrong[name] = want.differing(stored)
        if not wrong[name].any():
            exact.append(name)
        elif not want.without_zero_signs(made).differing(signless).any():
            unsigned.append(name)
    facts = (reading.weight.name, stored.scales.size)
    if exact or unsigned:
        return Origin(*facts, tuple(exact or unsigned), None, not exact, transposed, None)
    few = x[: made.k], _Bytes(stored.codes[: made.k], stored.scales[: made.k])
    for text, spec in _treatments(made, reading.length):
        if all(not _quantized(part, spec, amax).differing(want).any() for part, want in (few, (x, stored))):
            return Origin(*facts, (), text, False, transposed, None)
    nearest = min(wrong, key=lambda name: int(wrong[name].sum()))
    return Origin(
        *facts, (), None, False, transposed, _difference(nearest, wrong[nearest], rows, x, amax, stored, made)
    )


def _treatments(made: BlockFormat, length: int) -> Iterator[tuple[str, OperandSpec]]:
    """Yield treatments beside the dialects: other choices, and thresholds that are those of other elements."""
    for text, spec in other_treatments(OperandSpec(made)):
        if not spec.hadamard or length % spec.hadamard == 0:
            yield text, spec
    if made.scale.powers:
        for c in ("1.5", "1.75", "1.875", "1.9375"):
            for rule in (ScaleRule(f">={c}"), ScaleRule(f">{c}")):
                yield f"scale_rule = {rule}", OperandSpec(made, scale_rule=rule)


def _rows(reading: Reading) -> NDArray[np.int64]:
    """Return the rows that are compared: groups that tiles fill, evenly spread."""
    k = reading.made.k if reading.read % reading.made.k == 0 else 1
    groups = max(1, min(reading.read // k, -(-_ELEMENTS // (reading.length * k))))
    starts = np.unique(np.linspace(0, reading.read // k - 1, groups).astype(np.int64)) * k
    return np.asarray((starts[:, None] + np.arange(k)).reshape(-1))


def _amax(matrix: NDArray[Any]) -> float:
    parts = (matrix[i : i + _ROWS].astype(np.float32) for i in range(0, len(matrix), _ROWS))
    return float(max((np.abs(p[np.isfinite(p)]).max(initial=0) for p in parts), default=0))


@dataclass(frozen=True)
class _Bytes:
    codes: NDArray[np.uint8]
    """[rows, blocks, k]"""
    scales: NDArray[np.uint8]
    """[rows, blocks]"""

    def differing(self, other: _Bytes) -> NDArray[np.bool_]:
        """Return which blocks differ."""
        return np.asarray((self.codes != other.codes).any(axis=-1) | (self.scales != other.scales))

    def without_zero_signs(self, made: BlockFormat) -> _Bytes:
        """Return the same with +0 in place of -0."""
        sign = np.uint8(made.element.sign)
        signed = made.element.negatives.value == "sign"
        return replace(self, codes=np.where(self.codes == sign, np.uint8(0), self.codes)) if signed else self

    def shown(self, row: int, block: int) -> str:
        """Return a block in hexadecimal: the scale byte, then the codes."""
        digits = 1 if self.codes.max() < 16 else 2
        return f"{self.scales[row, block]:02X}: " + "".join(f"{c:0{digits}x}" for c in self.codes[row, block])


def _quantized(x: NDArray[Any], spec: OperandSpec, amax: float | None) -> _Bytes:
    made = spec.format
    assert isinstance(made, BlockFormat)
    given = Placement(amax=None if amax is None else np.array([amax], np.float32))
    q = quantize(x, spec, placement=given)
    return _Bytes(elements(q.codes, made), q.scales)


def _difference(
    name: str, wrong: NDArray[np.bool_], rows: NDArray[np.int64], x: NDArray[Any], amax: float | None, stored: _Bytes,
    made: BlockFormat,
) -> FirstDifference:  # fmt: skip
    spec = dialects_of(made)[name]
    row, block = (int(i) for i in np.argwhere(wrong)[0])
    values = x[row : row + 1, block * made.k : (block + 1) * made.k]
    values = values if values.dtype != ml_dtypes.bfloat16 else values.astype(np.float32)
    return FirstDifference(
        name, int(wrong.sum()), int(rows[row]), block, _quantized(x, spec, amax).shown(row, block),
        stored.shown(row, block), explorer_link(values, spec, amax=amax),
    )  # fmt: skip
