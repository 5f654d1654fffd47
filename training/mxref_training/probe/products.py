"""How far the product of a GEMM is from the exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mxref.roles import OPERANDS, GemmRole
from mxref_torch.checks.measures import finite
from mxref_training.probe.split import at_once, over


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
