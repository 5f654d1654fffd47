"""A step as one CUDA graph: its capture, which leaves nothing behind if it fails, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from mxref_torch import operators
from mxref_torch.captured.operations import StepOperations
from mxref_torch.errors import LayerError


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


WARM_UP = 2
"""Steps of training before the capture: they compile kernels, and make the optimizer's state and FP8's history."""


class StepRunner:
    """Runs a step repeatedly; on request, it captures the step after the first ones."""

    def __init__(self, operations: StepOperations, capture: bool) -> None:
        self._operations, self.capture = operations, capture
        on_gpu = operations.device.type == "cuda"
        self._stream = torch.cuda.Stream(operations.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._graph: Any = None
        self._recipes: list[Any] = []  # of the layers in the graph
        self._taken = 0

    def run(self) -> None:
        """Start the next step.

        Raises:
            LayerError: it cannot be captured.
            torch.OutOfMemoryError: the GPU lacks memory for the graph.
        """
        recipes = [layer.recipe for layer in self._operations.layers]
        if recipes != self._recipes:
            # A region, or a step that the caller set, gave the layers other recipes than those of the graph.
            self.forget_graph()
            self._recipes = recipes
        if self.capture and self._graph is None and self._taken >= WARM_UP:
            self._graph = self._captured()
        if self._graph is None:
            self.run_eagerly()
        else:
            self._graph.replay()
            self._operations.context.note_closed()
        self._taken += 1

    def forget_graph(self) -> None:
        """Begin with eager steps again, before the next capture."""
        self._graph, self._taken = None, 0

    def run_eagerly(self) -> None:
        """Run one operation at a time."""
        self._aside(self._whole)

    def _aside(self, run: Callable[[], None]) -> None:
        """Run on the stream of the capture, after the caller's stream, which then waits for it."""
        if self._stream is None:
            run()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._operations.device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._operations.device).wait_stream(self._stream)

    def _captured(self) -> Any:
        """Return the graph of the step; if it cannot be captured, LayerError, and model and GPU are as they were."""
        graph = torch.cuda.CUDAGraph()
        self._operations.forget_gradients()
        try:
            with operators.device_step(self._operations.number), capturing(graph, self._stream):
                self._operations.run()
        except Exception as err:
            self._operations.discard()
            # Ending the capture raises a second error, which hides the cause.
            cause: BaseException = err
            while cause.__context__ is not None:
                cause = cause.__context__
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None  # less memory is the way out, and callers know this error
            raise LayerError(
                f"the step cannot be captured as a CUDA graph: {type(cause).__name__}: {cause}; the weights are as "
                "they were; keep the loss free of waits for the GPU, of printing and of shapes that depend on values, "
                "or pass capture=False"
            ) from err
        except BaseException:
            self._operations.discard()
            raise
        return graph

    def _whole(self) -> None:
        self._operations.forget_gradients()
        try:
            with operators.device_step(self._operations.number) if self.capture else nullcontext():
                self._operations.run()
        except BaseException:
            self._operations.discard()
            raise
