"""How far the product of a GEMM is from the exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mxref.roles import OPERANDS, GemmRole
from mxref_torch.checks.measures import finite
from mxref_torch.checks.measuring import Alignment
from mxref_training.probe.split import over

_SLAB = 1 << 22
"""Elements that are compared at a time."""


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
    cosine: float | None

    @classmethod
    def of(cls, exact: Tensor, computed: Tensor) -> ProductError:
        """Return the sums of a product [M, N] against the exact one, float64."""
        alignment = Alignment()
        totals = torch.zeros(4, dtype=torch.float64)
        rows = max(1, _SLAB // max(1, exact.shape[1]))
        for e, q in zip(torch.split(exact, rows), torch.split(computed, rows), strict=True):
            alignment.add(e, q)
            error = q.double() - e
            sums = e.square().sum(), error.square().sum(), (error * e).sum(), error.sum()
            totals += torch.stack(sums).cpu()
        signal, noise, cross, signed = totals.tolist()
        return cls(exact.numel(), signal, noise, cross, signed, alignment.cosine)

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
