"""Torch tensors as a backend's arrays and back, without copying where memory can be shared. No value is changed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.errors import DtypeError
from mxref_torch.errors import LayerError


class _Memory:
    """A CPU tensor's memory as NumPy reads it; an array made of it keeps the tensor alive.

    `Tensor.numpy` would mark the memory as never to be resized, as sharded training (FSDP2) frees a gathered weight.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": _TYPES[tensor.dtype],
            "shape": tuple(tensor.shape),
            "strides": tuple(size * step for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


# NumPy has no bfloat16 of its own, so its bits go as integers.
_TYPES = {
    torch.float32: "=f4", torch.float16: "=f2", torch.bfloat16: "=i2", torch.uint8: "|u1", torch.int8: "|i1",
    torch.int16: "=i2", torch.int32: "=i4", torch.int64: "=i8", torch.float64: "=f8", torch.bool: "|b1",
}  # fmt: skip


def to_backend(tensor: torch.Tensor, backend: Backend) -> Any:
    """Return a tensor, of any shape and strides, as an array of the backend, sharing its memory.

    The array is for the length of a call: the tensor's owner may free or refill its memory later.

    Raises:
        LayerError: a tensor on a device that the backend cannot read, or without memory.
        DtypeError: a type that NumPy does not have.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():  # a view whose elements memory holds negated
        tensor = tensor.resolve_neg()
    if tensor.device.type not in backend.capabilities.devices:
        devices = ", ".join(sorted(backend.capabilities.devices))
        raise LayerError(
            f"backend {backend.name!r} works on {devices}, got a tensor on {tensor.device}; "
            "move the model there or choose a backend for that device"
        )
    if backend.capabilities.arrays == "torch":
        return tensor
    if tensor.dtype not in _TYPES:
        raise DtypeError(f"NumPy has no type for {tensor.dtype}; cast the tensor to float32 or bfloat16")
    if tensor.numel() and not tensor.data_ptr():
        raise LayerError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory: sharded training has freed it; "
            "call the layer through the module that was sharded, which gathers its weights first"
        )
    array: NDArray[Any] = np.asarray(_Memory(tensor))
    return array.view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else array


def from_backend(array: Any, backend: Backend) -> torch.Tensor:
    """Return one of the backend's arrays as a contiguous tensor, sharing its memory where it is contiguous."""
    if backend.capabilities.arrays == "torch":
        tensor: torch.Tensor = array.contiguous()
        return tensor
    array = np.require(array, requirements=["C", "W"])
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
