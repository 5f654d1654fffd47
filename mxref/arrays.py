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


def as_array(x: Any, library: str = "numpy") -> Any:
    """Return an input as an array of the library that a backend computes with; every backend takes inputs through here.

    A view whose elements memory holds negated, as `z.conj().imag` in PyTorch, is copied. Objects that are no arrays
    are returned unchanged.

    Args:
        x: for NumPy: a NumPy array or a subclass of it, a PyTorch tensor on the CPU (bfloat16 and `requires_grad`
            included), or any object with `dtype`, `shape` and `__array__`, which may return a copy. For PyTorch: a
            tensor.
        library: `numpy` or `torch`.

    Raises:
        DtypeError: an array whose elements are not all values (masked, sparse, without memory of its own), or one
            that would have to be moved between libraries or devices.
    """
    if type(x) is np.ndarray and library == "numpy":
        return x
    torch = _torch()
    if torch is not None and isinstance(x, torch.Tensor):
        x = _plain_tensor(x, torch)
        return x if library == "torch" else _from_torch(x, torch)
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            "a masked array has elements without values; say what they are, as in x.filled(0), or drop them"
        )
    is_array = isinstance(x, np.ndarray) or all(hasattr(x, n) for n in ("__array__", "dtype", "shape"))
    if not is_array:
        return x
    if library == "torch":
        raise DtypeError(
            f"this backend takes PyTorch tensors, got {type(x).__name__}; convert it by the backend's from_numpy"
        )
    try:
        return np.asarray(x)
    except Exception as err:  # whatever that library raises
        raise DtypeError(
            f"{type(x).__name__} cannot be converted to a NumPy array ({type(err).__name__}: {err}); convert "
            "it yourself, as in x.get() for CuPy, or use a backend for its device"
        ) from err


def as_sum(onto: Any, library: str) -> Any:
    """Return the array to which a backend adds a product in place; the result shares its memory.

    Args:
        onto: a NumPy array or a PyTorch tensor on the CPU; for a backend of torch tensors, a tensor.
        library: the backend's library of arrays, `numpy` or `torch`.

    Raises:
        DtypeError: any other object. `__array__` can return a copy, and the sum would be lost.
    """
    torch = _torch()
    tensor = torch is not None and isinstance(onto, torch.Tensor)
    if not tensor and (library != "numpy" or not isinstance(onto, np.ndarray)):
        wanted = "a NumPy array or a PyTorch tensor on the CPU" if library == "numpy" else "a PyTorch tensor"
        raise DtypeError(
            f"add_product adds to a float32 array in place and takes {wanted}, got {type(onto).__name__}; "
            "add the result of scaled_gemm to it"
        )
    if tensor and onto.is_neg():
        raise DtypeError(
            "add_product writes to memory, and this tensor is a negated view of its memory; pass a clone"
        )
    return as_array(onto, library)


def _torch() -> Any:
    """Return torch if it was imported, else None; without the import no tensor can exist."""
    return sys.modules.get("torch")


def _plain_tensor(x: Any, torch: Any) -> Any:
    """Return a tensor whose memory holds its elements; DtypeError if it has none."""
    if x.layout is not torch.strided:
        raise DtypeError(
            f"a tensor of layout {x.layout} is not taken; make a strided one, as in x.to_dense()"
        )
    # A subclass that dispatches for itself, such as DTensor or MaskedTensor, keeps its elements elsewhere.
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise DtypeError(
            f"a tensor of type {type(x).__name__} does not hold its elements in memory of its own; pass a plain "
            "tensor with its values, as in x.to_local() for DTensor"
        )
    return x.resolve_neg() if x.is_neg() else x


def _from_torch(x: Any, torch: Any) -> Any:
    if x.device.type != "cpu":
        raise DtypeError(
            f"a tensor on {x.device} cannot be read as a NumPy array; copy it first, as in x.cpu(), "
            "or use a backend for that device, as in mxref.get_backend('triton')"
        )
    x = x.detach().resolve_conj()
    try:
        if x.dtype is torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    except TypeError as err:
        raise DtypeError(
            f"input type {x.dtype} is not supported; cast it to float32, bfloat16 or float16"
        ) from err
