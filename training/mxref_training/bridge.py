"""Torch tensors as a backend's arrays and back, without copying where memory can be shared."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from mxref.backend import Backend
from mxref_training.errors import ConfigError


def to_backend(tensor: torch.Tensor, backend: Backend) -> Any:
    """Return a tensor as an array of the backend, sharing its memory.

    Args:
        tensor: any shape and strides; bfloat16 becomes ml_dtypes.bfloat16 for a NumPy backend.
        backend: its `capabilities.arrays` says whether it takes torch tensors or NumPy arrays.

    Raises:
        ConfigError: a tensor on a device that the backend cannot read.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type not in backend.capabilities.devices:
        devices = ", ".join(sorted(backend.capabilities.devices))
        raise ConfigError(
            f"backend {backend.name!r} works on {devices}, got a tensor on {tensor.device}; "
            "move the model there or choose a backend for that device"
        )
    if backend.capabilities.arrays == "torch":
        return tensor
    # NumPy has no bfloat16 of its own, and torch refuses to export it: the bits go as integers.
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_backend(array: Any, backend: Backend) -> torch.Tensor:
    """Return one of the backend's arrays as a contiguous tensor, sharing its memory where it is contiguous."""
    if backend.capabilities.arrays == "torch":
        tensor: torch.Tensor = array.contiguous()
        return tensor
    array = np.require(array, requirements=["C", "W"])
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
