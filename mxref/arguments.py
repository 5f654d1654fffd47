"""What callers pass, as the operations take it: what is natural is converted, the rest refused by an MxrefError.

Implements: conventions.inputs
"""

from __future__ import annotations

import sys
from operator import index
from typing import Any

import ml_dtypes
import numpy as np

from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.mxarray import MXArray
from mxref.philox import Stream
from mxref.recipe import Dialect, OperandSpec, dialect


def described(value: Any) -> str:
    """Return a value as an error message names it: its type, and the value itself where it is short."""
    if isinstance(value, str) and len(value) <= 40:
        return repr(value)
    text = repr(value) if isinstance(value, int | float | None) else ""
    return f"{text} ({type(value).__name__})" if text and len(text) <= 40 else type(value).__name__


def as_array(x: Any) -> Any:
    """Return an array of another library as a NumPy array, sharing its memory; anything else as it is.

    Args:
        x: a NumPy array, a PyTorch tensor on the CPU (bfloat16 and `requires_grad` included), or any object
            that has a type and a shape and gives a NumPy array by `__array__`.

    Raises:
        DtypeError: a tensor that does not lie in the memory of the CPU.
    """
    if isinstance(x, np.ndarray):
        return x
    torch = sys.modules.get("torch")  # a tensor exists only where torch was imported
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(x, torch)
    if all(hasattr(x, name) for name in ("__array__", "dtype", "shape")):
        return np.asarray(x)
    return x


def _from_torch(x: Any, torch: Any) -> Any:
    if x.device.type != "cpu" or x.layout is not torch.strided:
        where = f"on {x.device}" if x.device.type != "cpu" else f"of layout {x.layout}"
        raise DtypeError(
            f"a tensor {where} cannot be read as a NumPy array; copy it first, as in x.cpu() or x.to_dense(), "
            "or take a backend for that device, as in mxref.get_backend('triton')"
        )
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return x.numpy()
    except TypeError as err:
        raise DtypeError(
            f"input type {x.dtype} is not taken; cast it to float32, bfloat16 or float16"
        ) from err


def as_spec(spec: Any) -> OperandSpec:
    """Return the treatment that a spec, a dialect or a dialect's name stands for; None is the dialect `ocp`.

    Raises:
        RecipeError: an unknown name, or something else.
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
        "an operand of a recipe is recipe.fprop.x, say"
    )


def check_stream(rng: Any) -> Stream | None:
    """Return a random stream or None; RecipeError for anything else."""
    if rng is None or isinstance(rng, Stream):
        return rng
    raise RecipeError(
        f"rng must be a Stream, got {described(rng)}; make one, as in mxref.Stream(seed=1, step=0)"
    )


def check_bool(name: str, value: Any) -> bool:
    """Return a truth value as Python's own; RecipeError for anything else."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise RecipeError(f"{name} must be True or False, got {described(value)}")


def check_integer(name: str, value: Any) -> int:
    """Return an integer as Python's own; ShapeError for anything else."""
    try:
        return index(value)
    except TypeError:
        raise ShapeError(f"{name} must be an integer, got {described(value)}") from None


def check_name(name: str, value: Any) -> str:
    """Return the name of a data type; DtypeError for anything but a string."""
    if isinstance(value, str):
        return value
    raise DtypeError(f"{name} must be the name of a type, as in 'float32', got {described(value)}")


def check_mxarray(operation: str, q: Any) -> MXArray:
    """Return an MXArray; DtypeError for anything else."""
    if isinstance(q, MXArray):
        return q
    raise DtypeError(
        f"{operation} takes an MXArray, got {described(q)}; quantize it first, as in mxref.quantize(x), "
        "along the axis that is contracted"
    )
