"""The three GEMMs of a linear layer: which operands each reads, along which axis, from which source.

Y = X W^T (Fprop, contraction over the inputs), dX = dY W (Dgrad, over the outputs) and dW = dY^T X
(Wgrad, over the tokens). Every operand is quantized from its high-precision source, along the
contraction axis of the GEMM that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mxref.errors import BackendError, RecipeError
from mxref.steps.random import Stream

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
    recipe: Recipe | str,
    backend: Backend,
    stream: Stream,
    out_dtype: str = "float32",
) -> Any:
    """Return one GEMM of a linear layer whose two operands are MXFP4.

    Args:
        role: which GEMM; it fixes what `a` and `b` are (see `OPERANDS`).
        a: X or dY, [tokens, features], an array of the backend.
        b: W [outputs, inputs], or X for Wgrad.
        recipe: names the treatment of both operands and the GEMM profile; or a name or file, as in `load_recipe`.
        backend: runs the three operations.
        stream: seed, step and layer; the operand ids are filled in here.
        out_dtype: `float32` or `bfloat16`.

    Returns:
        Y [tokens, outputs], dX [tokens, inputs] or dW [outputs, inputs], an array of the backend.

    Raises:
        UnsupportedError: the backend does not declare what the recipe asks for.

    Implements: linear.roles, linear.source
    """
    from mxref.recipe import load_recipe  # which imports this module

    try:
        role = GemmRole(role)
    except (ValueError, TypeError):
        raise RecipeError(f"role {role!r} is not one of {', '.join(GemmRole)}") from None
    if not isinstance(stream, Stream):
        raise RecipeError(
            f"stream must be a Stream, got {type(stream).__name__}; make one, as in Stream(seed=1)"
        )
    if not hasattr(backend, "scaled_gemm") or isinstance(backend, type):
        raise BackendError(
            f"expected a backend, got {type(backend).__name__}; take one by mxref.get_backend(name)"
        )
    recipe = load_recipe(recipe)
    specs = recipe.operands(role)
    quantized = [
        backend.quantize(tensor, spec, axis=operand.axis, rng=replace(stream, operand=operand.id))
        for tensor, spec, operand in zip((a, b), specs, OPERANDS[role], strict=True)
    ]
    return backend.scaled_gemm(*quantized, profile=recipe.gemm, out_dtype=out_dtype)
