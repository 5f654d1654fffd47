"""Ranks that each hold the whole model: gradients are added over them while the backward pass makes more of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Replicas:
    """Adds gradients over ranks. On a GPU it does so beside the backward pass, on a stream of its own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Prepare to add the gradients of parameters, which are whole and the same on every rank."""
        self._parameters = [p for p in parameters if p.requires_grad]
        device = self._parameters[0].device
        # Of high priority: every rank waits for these kernels, which take few multiprocessors.
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Run a backward pass in the block; behind that of the last micro-batch each gradient is the sum over ranks.

        The order in which gradients get ready is that of the graph, which is the same on every rank.
        """
        if not last:
            yield
            return
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        hooks: list[Any] = []
        try:
            hooks.extend(p.register_post_accumulate_grad_hook(self._add) for p in self._parameters)  # type: ignore[no-untyped-call]
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _add(self, parameter: Tensor) -> None:
        gradient, stream = parameter.grad, self._stream
        assert gradient is not None
        if stream is None:
            dist.all_reduce(gradient)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            dist.all_reduce(gradient)
