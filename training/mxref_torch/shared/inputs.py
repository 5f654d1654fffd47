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
    """The operands that were made of the last tensors that layers read, as long as these tensors live. A tensor is
    recognised by its identity, version and memory, so its operands are made anew after a change in place. If a layer
    reads a tensor again, another forward pass has begun. Only operands that do not depend on the layer belong here.
    """

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[torch.Tensor], tuple[int, int], Made, set[int]]] = []

    def of(self, x: torch.Tensor, layer: object) -> Made | None:
        """Return the table of a tensor's operands, to extend; None if changes of the tensor cannot be seen."""
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
