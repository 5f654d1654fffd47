"""A capture of a CUDA graph that leaves nothing behind if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def capturing(graph: Any, stream: Any) -> Iterator[None]:
    """Capture what the block starts into a CUDA graph. If that fails, the GPU can be used as before.

    After a wait for the GPU, for example, CUDA refuses to end the capture, and PyTorch raises before it has ended its
    own part. The stream of the capture is then still the current one, its memory pool holds back all memory that other
    streams have used, and the generator refuses to draw, also in graphs that were captured before.

    Args:
        graph: a new `torch.cuda.CUDAGraph`.
        stream: of the GPU that the block computes on, and not its default stream.

    Raises:
        Exception: what the block or the end of the capture raises.
    """
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except BaseException:
        ended = _ended(graph)
        graph.reset()  # NCCL does not close connections while a graph exists, and the traceback would keep this one
        if not ended:
            _end(pool, stream)
        raise


def _ended(graph: Any) -> bool:
    """Return whether a capture has ended in PyTorch too, so that the graph knows its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _end(pool: Any, stream: Any) -> None:
    """End a capture for the allocator and the generator."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):  # the capture failed earlier
            end(stream.device_index, pool)
    # A capture that succeeds takes the generator out of capture mode. Its seed and its offset stay.
    other = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(other, stream=stream):
        torch.zeros(1, device=stream.device)
    other.reset()
