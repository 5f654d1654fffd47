"""Ranks that each hold the whole model: gradients are added over the ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 128 << 20
"""Bytes of gradients that are added together. Each addition waits until both GPUs have multiprocessors free for it."""


class Replicas:
    """Adds gradients over ranks, in an order that does not depend on which is ready first.

    On a GPU it does so beside the backward pass, on a stream of its own.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Prepare to add the gradients of parameters, which are whole and the same on every rank.

        Args:
            parameters: in the order of the forward pass.
        """
        self._buckets = _buckets([p for p in parameters if p.requires_grad])
        device = self._buckets[0][0].device
        self._stream: Any = None
        if device.type == "cuda":
            # Of high priority: every rank waits for these kernels, which take few multiprocessors.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._missing: list[int] = []
        self._next = 0

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Run a backward pass in the block; after that of the last micro-batch, each gradient is the sum over ranks."""
        if not last:
            yield
            return
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._missing, self._next = [len(bucket) for bucket in self._buckets], 0
        hooks: list[Any] = []
        try:
            for number, bucket in enumerate(self._buckets):
                note = self._note(number)
                hooks.extend(p.register_post_accumulate_grad_hook(note) for p in bucket)  # type: ignore[no-untyped-call]
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets[self._next :]:  # some of these have no gradient
            self._add(bucket)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _note(self, number: int) -> Any:
        """Return a hook that counts a gradient of a bucket, and adds all buckets whose turn it is."""

        def ready(_: Tensor) -> None:
            self._missing[number] -= 1
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._next += 1
                self._add(self._buckets[self._next - 1])

        return ready

    def _add(self, bucket: Sequence[Tensor]) -> None:
        gradients = [p.grad for p in bucket if p.grad is not None]
        stream = self._stream
        together: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            together = dist._coalescing_manager(device=stream.device)  # type: ignore[attr-defined]
        with torch.cuda.stream(stream), together:
            for gradient in gradients:
                dist.all_reduce(gradient)


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the parameters in the order of the backward pass, in parts of at least `BUCKET` bytes but for the last."""
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if size >= BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets
