"""The interface of a layer to the ranks that compute it together; `mxref_torch.layer.split` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from mxref.placement import Placement


class Split(Protocol):
    """How a rank's part of a layer lies in the whole, and how parts make the whole."""

    @property
    def tensors(self) -> frozenset[str]:
        """Which of `x`, `w` and `dy` a rank has only a part of."""

    def placements(self, shape: tuple[int, int]) -> dict[str, Placement]:
        """Return where a rank's part lies in each split tensor of a layer whose whole weight has a shape."""

    def own(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of the weight that lies on this rank, a plain tensor through which gradients pass."""

    def run(self, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return Y of X, both of the type of X; `compute` is the layer's own part of it, in float32."""

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the largest amax of all ranks."""
