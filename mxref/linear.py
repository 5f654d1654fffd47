"""The three GEMMs of a linear layer: which operands each reads, along which axis, from which source.

Y = X W^T (Fprop, contraction over the inputs), dX = dY W (Dgrad, over the outputs) and dW = dY^T X
(Wgrad, over the tokens). Every operand is quantized from its high-precision source, along the
contraction axis of the GEMM that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mxref.philox import Stream

if TYPE_CHECKING:
    from mxref.backend import Backend
    from mxref.recipe import Recipe


class GemmRole(StrEnum):
    """Which of a linear layer's GEMMs; it is always passed, never guessed from a layout."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class Operand:
    """An operand of a GEMM: the tensor it reads, its random-stream id, and its contraction axis."""

    tensor: str
    """`x` [tokens, inputs], `w` [outputs, inputs] or `dy` [tokens, outputs]."""
    id: int
    axis: int


OPERANDS = {
    GemmRole.FPROP: (Operand("x", 0, axis=1), Operand("w", 1, axis=1)),
    GemmRole.DGRAD: (Operand("dy", 2, axis=1), Operand("w", 3, axis=0)),
    GemmRole.WGRAD: (Operand("dy", 4, axis=0), Operand("x", 5, axis=0)),
}


def linear_gemm(
    role: GemmRole,
    a: Any,
    b: Any,
    recipe: Recipe,
    backend: Backend,
    stream: Stream,
    out_dtype: str = "float32",
) -> Any:
    """Return one GEMM of a linear layer whose two operands are MXFP4.

    Args:
        role: which GEMM; it fixes what `a` and `b` are (see `OPERANDS`).
        a: X or dY, [tokens, features], an array of the backend.
        b: W [outputs, inputs], or X for Wgrad.
        recipe: names the treatment of both operands and the GEMM profile.
        backend: runs the three operations.
        stream: seed, step and layer; the operand ids are filled in here.
        out_dtype: `float32` or `bfloat16`.

    Returns:
        Y [tokens, outputs], dX [tokens, inputs] or dW [outputs, inputs], an array of the backend.

    Raises:
        UnsupportedError: the backend does not declare what the recipe asks for.

    Implements: linear.roles, linear.source
    """
    specs = recipe.operands(role)
    quantized = [
        backend.quantize(tensor, spec, axis=operand.axis, rng=replace(stream, operand=operand.id))
        for tensor, spec, operand in zip((a, b), specs, OPERANDS[role], strict=True)
    ]
    return backend.scaled_gemm(*quantized, profile=recipe.gemm, out_dtype=out_dtype)
