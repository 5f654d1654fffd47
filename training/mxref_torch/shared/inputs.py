"""Operands of an X that several layers read: q, k and v, or gate and up, quantize it once."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_KEPT = 2
"""Tensors whose operands are kept: parallel attention and MLP read one X with another in between."""

Made = dict[Any, Any]
"""Operands of one tensor, by their treatment."""


class SharedOperands:
    """The operands that were made of the last tensors that layers read, for as long as these tensors live.

    A tensor is told by its identity, version and memory, so that a change in place makes its operands anew. A layer
    that reads a tensor again does so in another forward pass. Only what does not depend on the layer belongs here.
    """

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[torch.Tensor], tuple[int, int], Made, set[int]]] = []

    def of(self, x: torch.Tensor, layer: object) -> Made | None:
        """Return what other layers made of a tensor, to look up and to add to; None if changes of it go unnoticed."""
        if x.is_inference():
            return None
        state = x._version, x.data_ptr()
        others = []
        for entry in self._held:
            held, (_, held_state, made, readers) = entry[0](), entry
            if held is x and held_state == state and id(layer) not in readers:
                readers.add(id(layer))
                return made
            if held is not None and held is not x:
                others.append(entry)
        new: Made = {}
        self._held = [*others[1 - _KEPT :], (weakref.ref(x, self._drop), state, new, {id(layer)})]
        return new

    def clear(self) -> None:
        """Forget all operands."""
        self._held = []

    def _drop(self, reference: weakref.ref[torch.Tensor]) -> None:
        self._held = [entry for entry in self._held if entry[0] is not reference]

    def __len__(self) -> int:
        return len(self._held)

    def __reduce__(self) -> tuple[type[SharedOperands], tuple[()]]:
        """Return how to copy or pickle it: with nothing kept."""
        return SharedOperands, ()
