"""One GEMM of a linear layer, from its high-precision operands.

Every operand is quantized along the contraction axis of the GEMM that reads it: from the tensor in high precision, or,
under `source = "fprop"`, from the values of Fprop's operand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.errors import BackendError, RecipeError
from mxref.placement import Placement
from mxref.recipe import GemmSpec, OperandSource, Recipe, ResultType
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
    """Return one GEMM of a linear layer whose operands are in block formats.

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

    Implements: linear.roles, linear.source, linear.gain, linear.out
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
    if recipe.source(role) is OperandSource.FPROP:
        b = _values_of_fprop(b, OPERANDS[role][1].tensor, recipe, backend, stream)
    quantized = [
        backend.quantize(
            tensor, spec, axis=operand.axis, placement=Placement(replace(stream, operand=operand.id))
        )
        for tensor, spec, operand in zip((a, b), recipe.operands(role), OPERANDS[role], strict=True)
    ]
    treatment = recipe.gemm_spec(role)
    plain = treatment.gain == 1 and treatment.out is ResultType.TENSOR
    product = backend.scaled_gemm(
        *quantized, profile=recipe.gemm, out_dtype=out_dtype if plain else product_dtype(treatment)
    )
    if plain:
        return product
    return backend.from_numpy(_finished(backend.to_numpy(product), treatment, out_dtype))


def _values_of_fprop(tensor: Any, name: str, recipe: Recipe, backend: Backend, stream: Stream) -> Any:
    """Return the values, float32, of the operand that Fprop makes of X or W."""
    which, operand = next(
        (i, operand) for i, operand in enumerate(OPERANDS[GemmRole.FPROP]) if operand.tensor == name
    )
    q = backend.quantize(
        tensor, recipe.operands(GemmRole.FPROP)[which], axis=operand.axis,
        placement=Placement(replace(stream, operand=operand.id)),
    )  # fmt: skip
    return backend.dequantize(q, "float32")


def product_dtype(treatment: GemmSpec) -> str:
    """Return the output type to ask a backend for, where the treatment has a gain or names its output type."""
    return "bfloat16" if treatment.gain == 1 else "float32"


def _finished(product: NDArray[Any], treatment: GemmSpec, out_dtype: str) -> NDArray[Any]:
    """Return a product times the gain, rounded to the output type, in `out_dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        if treatment.gain != 1:
            product = product * np.float32(treatment.gain)
        if treatment.out is ResultType.BF16:
            product = product.astype(ml_dtypes.bfloat16)
        return product.astype(np.float32 if out_dtype == "float32" else ml_dtypes.bfloat16)
