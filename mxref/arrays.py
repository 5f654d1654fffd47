"""Conversion of arrays of other libraries; an array without a safe conversion is an error.

Implements: conventions.inputs
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from mxref.errors import DtypeError


def described(value: Any) -> str:
    """Return the text for a value in an error message: its type, and the value if it is short."""
    if isinstance(value, str) and len(value) <= 40:
        return repr(value)
    text = repr(value) if isinstance(value, int | float | None) else ""
    return f"{text} ({type(value).__name__})" if text and len(text) <= 40 else type(value).__name__


def as_array(x: Any) -> Any:
    """Return an array of another library as a NumPy array for reading; return other objects unchanged.

    Args:
        x: a NumPy array, a PyTorch tensor on the CPU (bfloat16 and `requires_grad` included), or any object
            with `dtype`, `shape` and `__array__`, which may return a copy.

    Raises:
        DtypeError: an object that cannot become a NumPy array, such as a tensor on a GPU.
    """
    if isinstance(x, np.ndarray):
        return x
    torch = _torch()
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(x, torch)
    if all(hasattr(x, name) for name in ("__array__", "dtype", "shape")):
        try:
            return np.asarray(x)
        except Exception as err:  # whatever that library raises
            raise DtypeError(
                f"{type(x).__name__} cannot be converted to a NumPy array ({type(err).__name__}: {err}); convert "
                "it yourself, as in x.get() for CuPy, or use a backend for its device"
            ) from err
    return x


def as_sum(onto: Any, arrays: str) -> Any:
    """Return the array to which a backend adds a product in place; the result shares its memory.

    Args:
        onto: a NumPy array or a PyTorch tensor on the CPU; for a backend of torch tensors, a tensor.
        arrays: the backend's library of arrays, `numpy` or `torch`.

    Raises:
        DtypeError: any other object. `__array__` can return a copy, and the sum would be lost.
    """
    torch = _torch()
    tensor = torch is not None and isinstance(onto, torch.Tensor)
    if not tensor and (arrays != "numpy" or not isinstance(onto, np.ndarray)):
        wanted = "a NumPy array or a PyTorch tensor on the CPU" if arrays == "numpy" else "a PyTorch tensor"
        raise DtypeError(
            f"add_product adds to a float32 array in place and takes {wanted}, got {type(onto).__name__}; "
            "add the result of scaled_gemm to it"
        )
    if tensor and onto.is_neg():
        raise DtypeError(
            "add_product writes to memory, and this tensor is a negated view of its memory; pass a clone"
        )
    return as_array(onto) if arrays == "numpy" else onto


def _torch() -> Any:
    """Return torch if it was imported, else None; without the import no tensor can exist."""
    return sys.modules.get("torch")


def _from_torch(x: Any, torch: Any) -> Any:
    if x.device.type != "cpu" or x.layout is not torch.strided:
        where = f"on {x.device}" if x.device.type != "cpu" else f"of layout {x.layout}"
        raise DtypeError(
            f"a tensor {where} cannot be read as a NumPy array; copy it first, as in x.cpu() or x.to_dense(), "
            "or use a backend for that device, as in mxref.get_backend('triton')"
        )
    x = x.detach().resolve_conj().resolve_neg()
    try:
        if x.dtype is torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    except TypeError as err:
        raise DtypeError(
            f"input type {x.dtype} is not supported; cast it to float32, bfloat16 or float16"
        ) from err
    except RuntimeError as err:  # from a subclass without values, such as FakeTensor
        raise DtypeError(
            f"a tensor of type {type(x).__name__} cannot be converted to a NumPy array ({err}); pass a plain "
            "tensor with its values"
        ) from err
