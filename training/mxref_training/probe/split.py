"""The error of an operand, split by cause. `docs/how-to/probe.rst` explains the parts.

v is the source as the rounding sees it, q the result. Each element belongs to one of three sets: D, the dead zone,
where q is zero and v is not; C, clipped, where |v| is above the largest magnitude under the block's scale; and N, the
others. Within a block, a = <q, v> / <v, v> over N. The four parts

    dead zone  -v         on D
    clipping   q - v      on C
    scale bias (a - 1) v  on N
    grid noise q - a v    on N

add up to q - v in each element. Their energies add up too, because v and q - a v are orthogonal on N. Grid noise has no
projection on v, so the operand's bias is the sum of the other three projections.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mxref_torch.checks.measures import Slab, finite

CAUSES = ("scale", "dead", "clip", "grid")
"""Scale bias, dead zone, clipping and grid noise, in the order of all tables and figures."""


@dataclass
class Sums:
    """Sums over the elements of an operand: source v, result q, error e = q - v."""

    signal: float = 0.0
    """<v, v>."""
    noise: float = 0.0
    """<e, e>."""
    cross: float = 0.0
    """<e, v>."""
    inner_cross: float = 0.0
    """<e, v> over N."""
    inner_signal: float = 0.0
    inner_noise: float = 0.0
    shrink: float = 0.0
    """Sum over the blocks of <e, v>^2 / <v, v>, both over N."""
    dead: float = 0.0
    """<v, v> over D."""
    clip: float = 0.0
    """<e, e> over C."""
    clip_cross: float = 0.0
    """<e, v> over C."""
    elements: float = 0.0
    """Elements that are not zero."""
    dead_elements: float = 0.0
    clipped_elements: float = 0.0
    invalid: float = 0.0
    """Elements of NaN blocks, and those that are not finite."""


class ErrorSplit:
    """The split of an operand whose rows come in parts.

    Args:
        blocks: whether the operand has blocks; else the whole tensor is one.
        height: rows of a block.
    """

    def __init__(self, blocks: bool, height: int = 1) -> None:
        self.blocks, self.height = blocks, height
        self.sums = Sums()

    def add(self, slab: Slab) -> tuple[Tensor, Tensor]:
        """Add rows as `Rounded.slabs` yields them; return the source and the error, zero where they do not count."""
        v, q, limit, valid = slab
        v, e = torch.where(valid, v, 0.0), torch.where(valid, q - v, 0.0)
        zero, dead, clipped = v == 0, q == 0, v.abs() > limit
        cross, signal, noise = e * v, v.square(), e.square()
        whole = [each.sum() for each in (signal, noise, cross)]
        lost = [
            torch.where(where, each, 0.0).sum()
            for where, each in ((dead, signal), (clipped, noise), (clipped, cross))
        ]
        outside = dead | clipped
        inner = [each.masked_fill_(outside, 0.0) for each in (cross, signal, noise)]
        counts = [torch.count_nonzero(each) for each in (v, dead & ~zero, clipped, ~valid)]
        counts[-1] *= v.numel() // valid.numel()
        found = *whole, *(each.sum() for each in inner), self._shrink(*inner[:2]), *lost, *counts
        for each, value in zip(
            fields(Sums), torch.stack([one.double() for one in found]).tolist(), strict=True
        ):
            setattr(self.sums, each.name, getattr(self.sums, each.name) + value)
        return v, e

    def _shrink(self, cross: Tensor, signal: Tensor) -> Tensor:
        if not self.blocks:  # known when all rows are
            return torch.zeros((), dtype=torch.float64, device=cross.device)
        c, s = (torch.unflatten(each.sum(dim=2), 0, (-1, self.height)).sum(dim=1) for each in (cross, signal))
        return torch.where(s > 0, c.square() / s, 0.0).sum()

    def energies(self) -> dict[str, float]:
        """Return the squared norm of each part of the error, by cause; they add up to <e, e>."""
        s = self.sums
        scale = s.shrink
        if not self.blocks:
            scale = s.inner_cross**2 / s.inner_signal if s.inner_signal else 0.0
        return {
            "scale": scale,
            "dead": max(0.0, s.dead),
            "clip": s.clip,
            "grid": max(0.0, s.inner_noise - scale),
        }

    def projections(self) -> dict[str, float]:
        """Return the inner product of each part with v, by cause; they add up to <e, v>."""
        s = self.sums
        return {"scale": s.inner_cross, "dead": -s.dead, "clip": s.clip_cross, "grid": 0.0}

    def row(self) -> dict[str, float | None]:
        """Return SNR, shares and biases as a row of the probe has them."""
        s = self.sums
        return {
            "zeroed": over(100 * s.dead_elements, s.elements),
            "clipped": over(100 * s.clipped_elements, s.elements),
            "invalid": s.invalid,
            "noise": over(s.noise, s.signal),
            "bias": over(s.cross, s.signal),
            **{f"noise_{cause}": over(value, s.signal) for cause, value in self.energies().items()},
            **{f"bias_{cause}": over(value, s.signal) for cause, value in self.projections().items()},
        }


def at_once(tensor: Tensor) -> int:
    """Return how many elements of a tensor are compared at a time.

    On a CPU an array of 64 KiB is reused from the heap; a larger one would be mapped, page by page, in each operation.
    """
    return 1 << 13 if tensor.device.type == "cpu" else 1 << 22


def over(value: float, whole: float) -> float | None:
    """Return a share; None of nothing, and where it is not finite."""
    return finite(value / whole) if whole else None
