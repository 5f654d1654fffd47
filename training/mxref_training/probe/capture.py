"""X, W and dY of every chosen layer, one layer at a time, from one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Take = Callable[[str, Tensor, Tensor], None]
"""Receives a layer's name, X [tokens, inputs] and dY [tokens, outputs], while the backward pass waits."""


@contextmanager
def captured(layers: Mapping[str, nn.Linear], take: Take) -> Iterator[None]:
    """Give X and dY of each layer to `take` when the backward pass within the block reaches the layer.

    Both are as the layer has them, in its compute type. A layer has to run once in the forward pass.
    """
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_hook(name, take)).remove)
        yield


def _hook(name: str, take: Take) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(_layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        x = arguments[0].detach()

        def arrived(dy: Tensor) -> None:
            with torch.no_grad():
                take(name, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    return hook
