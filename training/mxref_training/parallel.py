"""How the ranks of a run share its work: the table `[parallel]` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mxref_training import limits
from mxref_training.errors import ConfigError
from mxref_training.limits import check, require

LAYOUT = "parallel"
"""The key of a run's identity that holds the axes of its ranks. A run may go on with other axes."""


class Axes(NamedTuple):
    """Ranks along each axis of the mesh, the slowest first."""

    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """Ranks that have sequences of their own."""
        return self.replicate * self.shard

    @property
    def whole(self) -> bool:
        """Whether each rank holds the whole model."""
        return self.shard == self.tensor == 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return prod(self)


ONE = Axes(1, 1, 1)
"""One process."""


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks along the three axes of the mesh; 0 or -1 on one axis takes the ranks that the others leave."""

    replicate: int = 1
    """Groups of ranks that each hold all weights; gradients are added over them. With `shard` and `tensor` 1 a group is
    one rank, whose weights are never gathered; else the groups are those of HSDP."""
    shard: int = 0
    """Ranks over which each layer's weights, gradients and moments are split (FSDP)."""
    tensor: int = 1
    """Ranks that compute a layer together, each with a part of its rows or columns."""
    keep_gathered: bool = False
    """Whether layers that a forward pass gathered stay so until the backward pass. They are gathered once, not twice,
    and a rank holds the weights of all layers, 4 bytes for each parameter."""

    def __post_init__(self) -> None:
        check(self, "parallel", **dict.fromkeys(("replicate", "shard", "tensor"), (-1, limits.MAX_RANKS)))
        left = [name for name in ("replicate", "shard", "tensor") if getattr(self, name) < 1]
        require(
            len(left) <= 1,
            f"parallel.{' and parallel.'.join(left)} are 0 or -1, and only one axis can take the ranks that are left",
        )

    def axes(self, ranks: int) -> Axes:
        """Return the ranks along each axis of a run of so many ranks.

        Raises:
            ConfigError: the product is another number, or no number makes it so.
        """
        wanted = (self.replicate, self.shard, self.tensor)
        given = prod(n for n in wanted if n > 0)
        if ranks % given == 0:
            found = Axes(*(n if n > 0 else ranks // given for n in wanted))
            if found.ranks == ranks:
                return found
        shown = " * ".join(
            f"{name} {n if n > 0 else 'rest'}"
            for name, n in zip(("replicate", "shard", "tensor"), wanted, strict=True)
        )
        number = "1 rank" if ranks == 1 else f"{ranks} ranks"
        multiple = "" if min(wanted) > 0 else "a multiple of "
        raise ConfigError(
            f"parallel: {shown} does not make {number}: start {multiple}{given} by torchrun --nproc-per-node, or "
            "change the table parallel; an axis of 0 takes the ranks that are left"
        )
