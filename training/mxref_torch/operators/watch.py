"""Watchers are called after each operator of a block format: a shadow or a recording. Usually there is none.

The operators call each watcher after the backend has answered. Watchers are a list of the process: autograd runs
the backward pass of a GPU in a thread of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from mxref.backend import Backend
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding


@dataclass(frozen=True)
class Quantized:
    """A quantization that an operator made."""

    backend: Backend
    """The backend that answered."""
    x: torch.Tensor
    """[M, N]."""
    spec: OperandSpec
    axis: int
    """The block axis, 0 or 1."""
    placement: Placement
    pad: bool
    """Whether the block axis is filled up with zeros."""
    q: MXArray
    """The answer, of the backend's arrays."""

    @property
    def stream(self) -> Stream | None:
        """The random stream with the number of the step, which may lie on the device."""
        stream, step = self.placement.stream, self.placement.step
        return stream if stream is None or step is None else replace(stream, step=int(step))

    @property
    def random(self) -> bool:
        """Whether the answer depends on random bits, so that the stream names the layer and the operand."""
        return self.spec.rounding is Rounding.SR or self.spec.signs is not SignPolicy.NONE


@dataclass(frozen=True)
class Multiplied:
    """A scaled GEMM that an operator computed."""

    backend: Backend
    """The backend that answered."""
    a: MXArray
    """[M, K], of the backend's arrays."""
    b: MXArray
    """[N, K]."""
    profile: GemmProfile
    out_dtype: str
    """`float32` or `bfloat16`."""
    role: str
    """The linear layer's GEMM."""
    product: Any
    """The answer [M, N], an array of the backend."""


class Watcher(Protocol):
    """Receives every operation of the operators."""

    def quantized(self, call: Quantized) -> None:
        """Receive a quantization."""

    def multiplied(self, call: Multiplied) -> None:
        """Receive a scaled GEMM."""

    def reading(self, layer: int, tensor: str) -> None:
        """Learn which layer and tensor the next operators read.

        Args:
            layer: the layer's index.
            tensor: `x`, `w` or `dy`.
        """


watchers: list[Watcher] = []
