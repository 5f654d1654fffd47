"""The bytes of every operand with random bits that a model's layers quantize, by what they are and where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mxref_torch import operators
from mxref_torch.operators import Multiplied, Quantized

Bytes = NDArray[np.uint8]
Where = tuple[int, int, int]
"""Layer, operand and block axis: one tensor of a step."""
Part = tuple[tuple[int, ...], Bytes, Bytes]
"""Origin of a part of a tensor, its codes and its scale codes, block axis last."""


class Operands:
    """Keeps what the operators quantize in the first step of a run, and not what checks quantize before it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.parts: dict[Where, list[Part]] = {}

    def quantized(self, call: Quantized) -> None:
        stream = call.stream
        assert stream is not None
        if not call.random or (stream.seed, stream.step) != (self.seed, 0):
            return
        place = call.placement
        where = stream.layer, stream.operand, call.axis
        part = place.origin or (0, 0), np.array(call.q.codes), np.array(call.q.scales)
        self.parts.setdefault(where, []).append(part)

    def multiplied(self, call: Multiplied) -> None:
        """Take no notice."""

    def reading(self, layer: int, tensor: str) -> None:
        """Take no notice."""


@contextmanager
def kept(seed: int) -> Iterator[Operands]:
    """Keep all operands of the first step of a run with this seed."""
    watcher = Operands(seed)
    operators.watchers.append(watcher)
    try:
        yield watcher
    finally:
        operators.watchers.remove(watcher)


def assembled(parts: list[Part], axis: int) -> tuple[Bytes, Bytes]:
    """Return codes and scale codes of a tensor, put together of its parts; equal parts of one place count once.

    Parts lie side by side along either axis of the tensor. Codes have the block axis last, so a part that begins
    further along the block axis continues the rows.
    """
    by_place: dict[tuple[int, ...], tuple[Bytes, Bytes]] = {}
    for origin, codes, scales in parts:
        held = by_place.setdefault(origin, (codes, scales))
        np.testing.assert_array_equal(held[0], codes)
        np.testing.assert_array_equal(held[1], scales)
    across = sorted({origin[1 - axis] for origin in by_place})
    along = sorted({origin[axis] for origin in by_place})

    def place(row: int, column: int) -> tuple[int, ...]:
        return (column, row) if axis == 0 else (row, column)

    codes, scales = (
        np.concatenate(
            [np.concatenate([by_place[place(r, c)][which] for c in along], axis=1) for r in across], axis=0
        )
        for which in (0, 1)
    )
    return codes, scales
