"""How far products and operands of a GEMM are from exact ones; `docs/how-to/probe.rst` defines every number.

An operand's error is split by cause. v is the source as the rounding sees it, q the result. Each element belongs to one
of three sets: D, the dead zone, where q is zero and v is not; C, clipped, where |v| is above the largest magnitude
under the block's scale; and N, the others. Within a block, a = <q, v> / <v, v> over N. The four parts

    dead zone  -v         on D
    clipping   q - v      on C
    scale bias (a - 1) v  on N
    grid noise q - a v    on N

add up to q - v in each element. Their energies add up too, because v and q - a v are orthogonal on N. Grid noise has no
projection on v, so the operand's bias is the sum of the other three projections.

An operand and its error are split into the mean of each Hadamard group and the rest too. The mean of a group of n
elements is its component along 1/sqrt(n) (1, .., 1), the DC component. The rotation R of the group is orthogonal, so
the component is read in the rotated group, along R 1/sqrt(n): nothing has to be rotated back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import Rotation, hadamard
from mxref_torch.checks.measures import Slab, finite

GROUP = 16
"""Elements of a group of an operand that is not rotated."""


def exact_product(role: GemmRole, a: Tensor, b: Tensor) -> Tensor:
    """Return a role's product of unquantized operands in float64, [M, N].

    Args:
        role: the GEMM.
        a: its first operand as a layer holds it, float32 or bfloat16.
        b: its second operand.
    """
    left, right = (
        t.double() if operand.axis == 1 else t.double().t()
        for operand, t in zip(OPERANDS[role], (a, b), strict=True)
    )
    return left @ right.t()


@dataclass
class ProductError:
    """Sums over the elements of a product: exact e, computed q."""

    elements: int
    signal: float
    """<e, e>."""
    noise: float
    """<q - e, q - e>."""
    cross: float
    """<q - e, e>."""
    signed: float
    """Sum of q - e."""

    @classmethod
    def of(cls, exact: Tensor, computed: Tensor) -> ProductError:
        """Return the sums of a product [M, N] against the exact one, float64."""
        sums = torch.zeros(4, dtype=torch.float64, device=exact.device)
        parts = (torch.split(each.flatten(), at_once(each)) for each in (exact, computed))
        for e, q in zip(*parts, strict=True):
            error = q.double() - e
            sums += torch.stack((e @ e, error @ error, error @ e, error.sum()))
        return cls(exact.numel(), *sums.tolist())

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None if one of them is zero or not finite."""
        computed = self.noise + 2 * self.cross + self.signal
        norm = math.sqrt(self.signal) * math.sqrt(max(0.0, computed)) if math.isfinite(computed) else 0.0
        return over(self.signal + self.cross, norm)

    def row(self) -> dict[str, float | None]:
        """Return the numbers as a row of the probe has them."""
        ratio = over(self.signal, self.noise)
        size = math.sqrt(self.signal / self.elements) if self.elements and math.isfinite(self.signal) else 0.0
        return {
            "snr": finite(10 * math.log10(ratio)) if ratio else None,
            "cosine": self.cosine,
            "bias": over(self.cross, self.signal),
            "mean_error": over(self.signed / self.elements, size) if size else None,
        }


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


@dataclass
class _MeanSums:
    signal: float = 0.0
    """Squares of the groups' mean components."""
    noise: float = 0.0
    cross: float = 0.0
    first: float = 0.0
    """Squares of the first coefficients of the rotated groups."""


class MeanSplit:
    """The split of an operand whose rows come in parts.

    Args:
        rotation: that of the operand; None: it is not rotated, and its groups have `GROUP` elements.
    """

    def __init__(self, rotation: Rotation | None) -> None:
        self.rotation = rotation
        self.n = GROUP if rotation is None else rotation.n
        ones = torch.full((self.n,), self.n**-0.5)
        self._direction = ones if rotation is None else torch.from_numpy(hadamard(ones.numpy(), rotation))
        self._sums = _MeanSums()

    def add(self, v: Tensor, e: Tensor) -> None:
        """Add rows of the source and the error, float64, the contraction axis last."""
        source, error = (self._groups(each) for each in (v, e))
        along = self._direction.to(v.device, torch.float64)
        means = source @ along, error @ along
        found = (
            *(a @ b for a, b in ((means[0], means[0]), (means[1], means[1]), means)),
            source[:, 0].square().sum(),
        )
        for each, value in zip(fields(_MeanSums), torch.stack(found).tolist(), strict=True):
            setattr(self._sums, each.name, getattr(self._sums, each.name) + value)

    def _groups(self, values: Tensor) -> Tensor:
        """Return rows as groups [.., n]; rows of a format without blocks are filled up with zeros."""
        values = values.flatten(1)
        missing = -values.shape[1] % self.n
        return (torch.nn.functional.pad(values, (0, missing)) if missing else values).reshape(-1, self.n)

    def row(self, whole: Sums) -> dict[str, float | None]:
        """Return the shares and biases as a row of the probe has them.

        Args:
            whole: the sums over all elements.
        """
        s = self._sums
        return {
            "group": self.n,
            "dc_source": over(s.signal, whole.signal),
            "dc_first": None if self.rotation is None else over(s.first, whole.signal),
            "dc_noise": over(s.noise, whole.noise),
            "dc_bias": over(s.cross, s.signal),
            "rest_bias": over(whole.cross - s.cross, whole.signal - s.signal),
        }


def at_once(tensor: Tensor) -> int:
    """Return how many elements of a tensor are compared at a time.

    On a CPU an array of 64 KiB is reused from the heap; a larger one would be mapped, page by page, in each operation.
    """
    return 1 << 13 if tensor.device.type == "cpu" else 1 << 22


def over(value: float, whole: float) -> float | None:
    """Return a share; None of nothing, and where it is not finite."""
    return finite(value / whole) if whole else None
