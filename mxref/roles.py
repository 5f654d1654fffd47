"""The three GEMMs of a linear layer: which operands each reads, and along which axis.

Y = X W^T (Fprop, contraction over the inputs), dX = dY W (Dgrad, over the outputs) and dW = dY^T X
(Wgrad, over the tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GemmRole(StrEnum):
    """Which of a linear layer's GEMMs; it is always passed, never guessed from a layout."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class GemmOperand:
    """An operand of a GEMM: the tensor it reads, its random-stream id, and its contraction axis."""

    tensor: str
    """`x` [tokens, inputs], `w` [outputs, inputs] or `dy` [tokens, outputs]."""
    id: int
    axis: int


OPERANDS = {
    GemmRole.FPROP: (GemmOperand("x", 0, axis=1), GemmOperand("w", 1, axis=1)),
    GemmRole.DGRAD: (GemmOperand("dy", 2, axis=1), GemmOperand("w", 3, axis=0)),
    GemmRole.WGRAD: (GemmOperand("dy", 4, axis=0), GemmOperand("x", 5, axis=0)),
}
