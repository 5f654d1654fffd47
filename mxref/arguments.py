"""Checks and conversions of the arguments of public operations; a wrong argument raises an MxrefError.

Implements: conventions.inputs
"""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from mxref.arrays import as_array, described
from mxref.dialects import Dialect, dialect
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import OperandSpec


def as_spec(spec: Any) -> OperandSpec:
    """Return the OperandSpec for a spec, a dialect or the name of a dialect; None means the dialect `ocp`.

    Raises:
        RecipeError: an unknown name, or an object of another type.
    """
    if isinstance(spec, OperandSpec):
        return spec
    if spec is None:
        return OperandSpec()
    if isinstance(spec, Dialect):
        return spec.spec
    if isinstance(spec, str):
        return dialect(spec).spec
    raise RecipeError(
        f"expected an OperandSpec, a dialect or its name, got {described(spec)}; "
        "the spec of one operand of a recipe is, for example, recipe.fprop.x"
    )


def check_placement(name: str, value: Any) -> Placement:
    """Return a placement; RecipeError for anything else."""
    if isinstance(value, Placement):
        return value
    raise RecipeError(
        f"{name} must be a Placement, got {described(value)}; make one, as in "
        "mxref.Placement(mxref.Stream(seed=1))"
    )


def check_bool(name: str, value: Any) -> bool:
    """Return a boolean as a Python bool; RecipeError for any other type."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise RecipeError(f"{name} must be True or False, got {described(value)}")


def check_integer(name: str, value: Any) -> int:
    """Return an integer as a Python int; ShapeError for any other type."""
    try:
        return index(value)
    except TypeError:
        raise ShapeError(f"{name} must be an integer, got {described(value)}") from None


def check_name(name: str, value: Any) -> str:
    """Return the name of a data type; DtypeError for anything but a string."""
    if isinstance(value, str):
        return value
    raise DtypeError(f"{name} must be the name of a type, as in 'float32', got {described(value)}")


def check_mxarray(operation: str, q: Any, library: str = "numpy") -> MXArray:
    """Return an MXArray of arrays of a library, `numpy` or `torch`; DtypeError for anything else."""
    if not isinstance(q, MXArray):
        raise DtypeError(
            f"{operation} takes an MXArray, got {described(q)}; quantize it first along the contraction axis, "
            "as in mxref.quantize(x)"
        )
    codes, scales = as_array(q.codes, library), as_array(q.scales, library)
    return q if codes is q.codes and scales is q.scales else replace(q, codes=codes, scales=scales)
