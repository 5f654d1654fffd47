"""The operations of a step, the ranks that take it together, and its capture as one CUDA graph.

All of `StepOperations.run` is captured: it may not wait for the device, read a value, print, or depend on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mxref_torch import operators
from mxref_torch.conversion.convert import weights_held
from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import advance_scales
from mxref_torch.layer.linear import converted, sole_uses
from mxref_torch.names import named_parameters
from mxref_torch.optimizer_step import restart
from mxref_torch.step_context import StepContext


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, read after it."""

    step: int
    losses: tuple[float, ...]
    """The losses of the micro-batches, each divided by their number."""
    norm: float
    """The norm of all gradients before clipping; NaN if the loss is not finite."""
    nonfinite: str = ""
    """The first weight, in the order of the backward pass, whose gradient is not finite; else empty."""
    widened: bool = False
    """Whether the step was repeated, because an operand had left the range of the backend's fast GEMM."""

    @property
    def loss(self) -> float:
        """The loss of the step."""
        total = 0.0
        for loss in self.losses:
            total += loss
        return total

    @property
    def updated(self) -> bool:
        """Whether the weights were updated: loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Survey(NamedTuple):
    """The outcome of a step over all ranks: tensors on the device, the same on every rank."""

    losses: Tensor
    """Losses of all parts of the batch, in their order, float32."""
    norm: Tensor
    """Norm of all gradients; its values are float32 numbers. Clipping computes in its type."""
    last: Tensor
    """The largest index of a gradient that is not finite, else -1."""
    exceeded: Tensor
    """Whether an operand left the range of the backend's fast GEMM on any rank."""


class Team:
    """The ranks that take a step together; this class is for a single process.

    The methods of a subclass, which adds over ranks, are captured too, and called on every rank in the same order.
    """

    index = 0
    parts = 1
    """Number of this rank's part of each micro-batch, and how many parts it has."""

    def own(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that lies on this rank."""
        return tensor

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Run a backward pass in the block; after that of the last micro-batch, each gradient is the sum over ranks."""
        yield

    def survey(self, losses: Tensor, gradients: list[Tensor], exceeded: Tensor) -> Survey:
        """Return the outcome of the step, from this rank's losses, gradients, and whether it left the range."""
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(norms)
        return Survey(losses, norm, last_nonfinite(norms), exceeded)

    def share_scales(self, model: nn.Module) -> None:
        """Set FP8's history on every rank to the largest magnitudes of all ranks."""


def last_nonfinite(norms: Tensor) -> Tensor:
    """Return the largest index of a norm that is not finite; -1 where all are."""
    places = torch.arange(len(norms), device=norms.device)
    return torch.where(torch.isfinite(norms), -1, places).max()


ALONE = Team()
"""A process alone."""


LossFunction = Callable[..., Tensor]
"""Returns the mean loss of a micro-batch from the model and the micro-batch's tensors."""


class StepOperations:
    """Forward and backward passes, clipping and update of a step, on tensors that stay where they are.

    The device skips an update whose loss or gradient is not finite. If an operand leaves the range of the backend's
    fast GEMM, it skips the update of this step and of all later ones, until `withheld` is set to zero.
    """

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        tokens: int,
        micro_batches: int,
        clip: float,
        team: Team = ALONE,
    ) -> None:
        """Prepare the memory of a step, with arguments as of `CapturedStep`; LayerError for several devices."""
        self.model, self.context = model, context
        self._optimizer, self._loss = optimizer, loss
        self._tokens, self._micro_batches, self._clip, self._team = tokens, micro_batches, clip, team
        self.layers = list(converted(model).values())
        trained = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
        devices = {p.device for _, p in trained}
        if len(devices) != 1:
            raise LayerError(f"CapturedStep takes a model on one device, got {sorted(map(str, devices))}")
        (self.device,) = devices
        self.names, self.parameters = zip(*trained, strict=True)
        self.number = torch.zeros(1, dtype=torch.int64, device=self.device)
        """Number of the step, as kernels read it."""
        self.withheld = torch.zeros((), dtype=torch.bool, device=self.device)
        self.outcome = torch.zeros(micro_batches * team.parts + 3, device=self.device)
        """Losses of all parts, norm, index of the first gradient that is not finite, and whether the range was left."""
        self.inputs: tuple[Tensor, ...] = ()
        self._graded: list[int] = []  # parameters that have a gradient

    def fill(self, batch: Sequence[Tensor]) -> None:
        """Copy a batch into the memory that the step reads."""
        if not self.inputs:
            self.inputs = tuple(torch.empty_like(t, device=self.device) for t in batch)
        for own, tensor in zip(self.inputs, batch, strict=True):
            to_gpu = own.device.type == "cuda" and tensor.device.type == "cpu"
            own.copy_(tensor.pin_memory() if to_gpu else tensor, non_blocking=True)

    def forget_gradients(self) -> None:
        """Remove the gradients of all parameters."""
        for p in self.parameters:
            p.grad = None

    def run(self) -> None:
        """Run all of a step; nothing in it waits for the device."""
        # One micro-batch alone would take more memory for it, and compiled code quantizes as it reads.
        with weights_held(self.model) if self._micro_batches > 1 else nullcontext():
            losses = self._gradients()
        with torch.no_grad():
            self._update(torch.stack(losses))
        self.context.close_step(draws=False)

    def _gradients(self) -> list[Tensor]:
        """Run all forward and backward passes, and return the losses."""
        losses, team = [], self._team
        own = self._tokens // self._micro_batches // team.parts  # tokens of this rank's part of a micro-batch
        for number, micro_batch in enumerate(
            zip(*(t.chunk(self._micro_batches) for t in self.inputs), strict=True)
        ):
            self.context.token_origin = (number * team.parts + team.index) * own
            loss = self._loss(self.model, *micro_batch) / (self._micro_batches * team.parts)
            losses.append(loss.detach().float())
            # The first micro-batch makes the gradients.
            self.context.sole_uses = sole_uses(loss) if number else {}
            with team.adding(last=number == self._micro_batches - 1):
                loss.backward()  # type: ignore[no-untyped-call]
            self.context.sole_uses = {}
        return losses

    def _update(self, losses: Tensor) -> None:
        """Clip the gradients, update the weights unless something forbids it, and store the outcome."""
        self._graded = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        team = self._team
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        exceeded = torch.zeros_like(self.withheld)
        for word in self.context.backend.range_words():
            exceeded |= (word != 0).any()
            word.zero_()
        losses, norm, last, exceeded = team.survey(losses, gradients, exceeded)
        finite = torch.isfinite(losses).all() & torch.isfinite(norm)
        self.withheld |= exceeded
        if self._clip > 0:
            # As in torch.nn.utils.clip_grads_with_norm_; a norm that is not finite does not scale.
            factor = torch.clamp(self._clip / (norm + 1e-6), max=1.0)
            torch._foreach_mul_([team.own(g) for g in gradients], torch.where(finite, factor, 1.0).float())
        self._optimizer.found_inf = (~finite | self.withheld).float()  # type: ignore[attr-defined]
        try:
            self._optimizer.step()
        finally:
            del self._optimizer.found_inf  # type: ignore[attr-defined]
        team.share_scales(self.model)
        advance_scales((layer.fp8 for layer in self.layers if hasattr(layer, "fp8")), self.withheld)
        self.outcome.copy_(torch.cat([losses, norm[None], last[None], exceeded[None]]))

    def read(self, step: int, host: Tensor) -> tuple[StepOutcome, bool]:
        """Return a step's outcome from a copy of `outcome` on the host, and whether an operand left the range."""
        *losses, norm, first, exceeded = host.tolist()
        if not math.isfinite(sum(losses)):
            norm = math.nan
        name = self.names[self._graded[int(first)]] if first >= 0 else ""
        return StepOutcome(step, tuple(losses), norm, name), bool(exceeded)

    def discard(self) -> None:
        """Discard what a step that did not end has left: gradients, held weights, and amaxes."""
        self.context.sole_uses = {}
        self.forget_gradients()
        restart(self.model)


@contextmanager
def capturing(graph: Any, stream: Any) -> Iterator[None]:
    """Capture what the block starts into a CUDA graph. If that fails, the GPU can be used as before.

    After a wait for the GPU, for example, CUDA refuses to end the capture, and PyTorch raises before it has ended its
    own part. The stream of the capture is then still the current one, its memory pool holds back all memory that other
    streams have used, and the generator refuses to draw, also in graphs that were captured before.

    `graph` is a new `torch.cuda.CUDAGraph`, `stream` one of the GPU that the block computes on, not its default stream.
    """
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except BaseException:
        try:
            graph.pool()
        except RuntimeError:
            ended = False
        else:
            ended = True  # in PyTorch too, so that the graph knows its pool
        graph.reset()  # NCCL does not close connections while a graph exists, and the traceback would keep this one
        if not ended:
            _end(pool, stream)
        raise


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
        """Start the next step; LayerError if it cannot be captured, or OutOfMemoryError if the GPU lacks memory."""
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
            self._operations.context.closed = self._operations.context.step
        self._taken += 1

    def forget_graph(self) -> None:
        """Begin with eager steps again, before the next capture."""
        self._graph, self._taken = None, 0

    def run_eagerly(self) -> None:
        """Run one operation at a time, on the stream of the capture, for which the caller's stream then waits."""
        if self._stream is None:
            self._whole()
            return
        own = torch.cuda.current_stream(self._operations.device)
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            self._whole()
        own.wait_stream(self._stream)

    def _captured(self) -> Any:
        """Return the graph of the step; if it cannot be captured, LayerError, and model and GPU are as they were."""
        graph = torch.cuda.CUDAGraph()
        self._operations.forget_gradients()
        try:
            with operators.device_step(self._operations.number), capturing(graph, self._stream):
                self._operations.run()
        except BaseException as err:
            self._operations.discard()
            if not isinstance(err, Exception):
                raise
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
        return graph

    def _whole(self) -> None:
        self._operations.forget_gradients()
        try:
            with operators.device_step(self._operations.number) if self.capture else nullcontext():
                self._operations.run()
        except BaseException:
            self._operations.discard()
            raise
