"""Watchers are called after each operator of a block format: a shadow or a recording. Usually there is none.

The operators call each watcher after the backend has answered. Watchers are a list of the process: autograd runs
the backward pass of a GPU in a thread of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from mxref.backend import Backend
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec


class Watcher(Protocol):
    """What the operators call."""

    def quantized(
        self,
        backend: Backend,
        x: torch.Tensor,
        spec: OperandSpec,
        axis: int,
        placement: Placement,
        pad: bool,
        q: MXArray,
    ) -> None:
        """Look at a quantization.

        Args:
            backend: that answered.
            x: [M, N].
            spec: the treatment.
            axis: the block axis, 0 or 1.
            placement: random stream and place.
            pad: whether the block axis is filled up with zeros.
            q: the answer, of the backend's arrays.
        """

    def multiplied(
        self,
        backend: Backend,
        a: MXArray,
        b: MXArray,
        profile: GemmProfile,
        out_dtype: str,
        role: str,
        product: Any,
    ) -> None:
        """Look at a scaled GEMM.

        Args:
            backend: that answered.
            a: [M, K], of the backend's arrays.
            b: [N, K].
            profile: of the GEMM.
            out_dtype: `float32` or `bfloat16`.
            role: the linear layer's GEMM.
            product: the answer [M, N], an array of the backend.
        """

    def reading(self, layer: int, tensor: str) -> None:
        """Take note that the operators that follow read a tensor of a layer.

        Args:
            layer: the layer's index.
            tensor: `x`, `w` or `dy`.
        """


watchers: list[Watcher] = []
