"""One GEMM of a linear layer, from its high-precision operands.

Every operand is quantized from its high-precision source, along the contraction axis of the GEMM that reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mxref.backend import Backend
from mxref.errors import BackendError, RecipeError
from mxref.placement import Placement
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.random import Stream


def linear_gemm(
    role: GemmRole,
    a: Any,
    b: Any,
    recipe: Recipe | str,
    backend: Backend,
    stream: Stream,
    out_dtype: str = "float32",
) -> Any:
    """Return one GEMM of a linear layer whose two operands are in block formats.

    Args:
        role: which GEMM; it fixes what `a` and `b` are (see `mxref.roles.OPERANDS`).
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
        backend.quantize(
            tensor, spec, axis=operand.axis, placement=Placement(replace(stream, operand=operand.id))
        )
        for tensor, spec, operand in zip((a, b), specs, OPERANDS[role], strict=True)
    ]
    return backend.scaled_gemm(*quantized, profile=recipe.gemm, out_dtype=out_dtype)
