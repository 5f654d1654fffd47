"""An optimizer step that never waits for the device, and on a GPU is one CUDA graph.

Loss, norm and finiteness stay on the device and are read when the next step has been started. An update whose loss or
gradient is not finite is left out on the device. A step in which an operand left the range of the backend's fast GEMM
holds back all later ones on the device, until it has been repeated in the wider range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mxref.errors import ShapeError, UnsupportedError
from mxref_torch import operators
from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.gradient import sole_uses
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_parameters
from mxref_torch.optimizer_step.end import restart
from mxref_torch.shared.context import StepContext

WARM_UP = 2
"""Steps of training before the capture: they compile kernels, and make the optimizer's state and FP8's history."""

LossFunction = Callable[..., Tensor]
"""Returns the mean loss of a micro-batch from the model and the micro-batch's tensors."""


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to, read after it."""

    step: int
    losses: tuple[float, ...]
    """Of the micro-batches, each divided by their number."""
    norm: float
    """Of all gradients before clipping; NaN where the loss is not finite."""
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


@dataclass
class _Pending:
    """A step that was started, and whose outcome has not been read."""

    step: int
    batch: tuple[Tensor, ...]
    """A copy: the caller may fill the same memory with the next batch."""
    lrs: list[Tensor]
    host: Tensor
    done: Any = None


class CapturedStep:
    """The optimizer steps of a converted model, without a wait for the device.

    The first two steps are taken one operation at a time; on a GPU the third is captured, and replayed from then on.
    Each call returns the outcome of the previous step; `finish` returns the last. Call `finish` before you read, save
    or change weights or optimizer. Python does not see a replay: the census counts steps up to the capture, and hooks
    of modules and optimizer do not run.
    Where a schedule changes the recipe, the step before is settled first, and there is a new capture.

    The learning rate becomes a float32 tensor in `optimizer.param_groups`, so that it can change between replays; set
    it there as ever, as a number or by a scheduler.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Handle | StepContext,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        tokens: int,
        micro_batches: int = 1,
        clip: float = 0.0,
        capture: bool | None = None,
    ) -> None:
        """Prepare to take steps.

        Args:
            model: converted; it or its blocks may be compiled.
            context: what `convert` returned, or its context.
            loss: called as `loss(model, *micro_batch)`.
            optimizer: fused AdamW or Adam over the model's parameters.
            tokens: of a whole step: rows of what enters the linear layers.
            micro_batches: equal parts, along axis 0, into which each batch is split.
            clip: largest global norm of the gradient; 0 switches clipping off.
            capture: whether to capture a CUDA graph; None: where the model lies on a GPU.

        Raises:
            UnsupportedError: the recipe draws random bits, and the backend cannot read the step from the device.
            LayerError: the optimizer is not a fused one or has hooks, the model is not on one device, or a number is
                out of its range.
        """
        for name, value, least in (
            ("tokens", tokens, 1),
            ("micro_batches", micro_batches, 1),
            ("clip", clip, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise LayerError(f"CapturedStep: {name} = {value!r}, and it is a number from {least}")
        self.context = context.context if isinstance(context, Handle) else context
        self.model, self.optimizer = model, optimizer
        self._loss, self._tokens, self._parts, self._clip = loss, tokens, micro_batches, clip
        self._layers = [module for module in model.modules() if isinstance(module, MXLinear)]
        trained = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
        devices = {p.device for _, p in trained}
        if len(devices) != 1:
            raise LayerError(f"CapturedStep takes a model on one device, got {sorted(map(str, devices))}")
        (self._device,) = devices
        self._names, self._parameters = zip(*trained, strict=True)
        on_gpu = self._device.type == "cuda"
        self.capture = on_gpu if capture is None else capture
        self._check(on_gpu)
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._lrs = [torch.zeros((), device=self._device) for _ in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["capturable"] = True
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._held = torch.zeros((), dtype=torch.bool, device=self._device)
        self._outcome = torch.zeros(micro_batches + 3, device=self._device)
        self._inputs: tuple[Tensor, ...] = ()
        self._graded: list[int] = []  # parameters that have a gradient
        self._graph: Any = None
        self._recipes: list[Any] = []  # of the layers in the graph
        self._taken = 0
        self._next: int | None = None  # number of the next step
        self._pending: _Pending | None = None
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    def _check(self, on_gpu: bool) -> None:
        if not all(group.get("fused") for group in self.optimizer.param_groups):
            raise LayerError(
                "CapturedStep needs a fused optimizer, because only these can skip an update on the GPU: pass "
                f"fused=True to {type(self.optimizer).__name__}"
            )
        if self.optimizer._optimizer_step_post_hooks or self.optimizer._optimizer_step_pre_hooks:
            raise LayerError(
                "the optimizer has hooks, which a CUDA graph does not run (handle.follow adds one): call "
                "handle.unfollow(), or remove them; CapturedStep moves the step itself"
            )
        if self.capture and not on_gpu:
            raise UnsupportedError(
                f"a CUDA graph needs a GPU, and the model is on {self._device}: pass capture=False, or move the model"
            )
        backend = self.context.backend
        reads_step = getattr(backend.capabilities, "device_steps", False)
        if self.capture and not reads_step and self._draws():
            raise UnsupportedError(
                f"the recipe draws random bits in each step, and backend {backend.name!r} does not declare "
                "device_steps: a captured step would draw the same bits again; pass capture=False, or take a recipe "
                "without SR and without random signs"
            )

    def _before_loading(self, _optimizer: Any, _state: Any) -> None:
        if self._pending is not None:
            raise StepError(
                f"the outcome of step {self._pending.step} has not been read, and it may have to be repeated: call "
                "finish() before optimizer.load_state_dict"
            )

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer has new tensors, and a graph would go on with the old ones.
        self._graph, self._taken = None, 0
        for group in optimizer.param_groups:
            group["capturable"] = True

    def _draws(self) -> bool:
        """Return whether a layer draws random bits, now or in a later phase."""
        schedule = self.context.schedule
        recipes = {own for phase in schedule.recipes for own in phase.values()} if schedule else set()
        return any(layer.draws or any(map(layer.would_draw, recipes)) for layer in self._layers)

    def __call__(self, *batch: Tensor, step: int | None = None) -> StepOutcome | None:
        """Start a step and return the outcome of the one before it; None where there is none.

        Args:
            batch: what `loss` takes after the model, whole batches, on the CPU or the model's device.
            step: its number; default one more than the last, and at first the context's.

        Raises:
            ShapeError: a batch that does not split, or is not shaped as the first one.
            StepError: the number of the step before it.
        """
        if step is None:
            step = self.context.next_step if self._next is None else self._next
        if self._pending and step == self._pending.step:
            raise StepError(f"step {step} was started already; each step has a number of its own")
        self._check_batch(batch)
        schedule = self.context.schedule
        if schedule is not None and schedule.turns(step):
            # The last step of a phase may have to be repeated under its recipe, so it is settled first.
            last = self.finish()
            self.context.step = step
            self._check(self._device.type == "cuda")
            self._graph, self._taken = None, 0
            self._pending, self._next = self._start(step, batch), step + 1
            return last
        before = self._pending
        self._pending, self._next = self._start(step, batch), step + 1
        return None if before is None else self._settled(before)

    def finish(self) -> StepOutcome | None:
        """Wait for the last step and return its outcome; None where it was returned already."""
        last, self._pending = self._pending, None
        if last is None:
            return None
        return self._settled(last)

    def _check_batch(self, batch: Sequence[Tensor]) -> None:
        for tensor in batch:
            if not tensor.ndim or tensor.shape[0] % self._parts:
                raise ShapeError(
                    f"a batch of shape {tuple(tensor.shape)} does not split into {self._parts} equal micro-batches "
                    "along axis 0"
                )
        shapes, first = ([(tuple(t.shape), t.dtype) for t in tensors] for tensors in (batch, self._inputs))
        if first and shapes != first:
            raise ShapeError(
                f"a batch of {shapes} after one of {first}: a captured step takes one shape; leave the last, short "
                "batch out, or fill it up"
            )

    def _start(self, step: int, batch: tuple[Tensor, ...]) -> _Pending:
        """Start a step, and the copy of its outcome to the host."""
        if not self._inputs:
            self._inputs = tuple(torch.empty_like(t, device=self._device) for t in batch)
        self._set(step)
        for own, tensor in zip(self._inputs, batch, strict=True):
            to_gpu = own.device.type == "cuda" and tensor.device.type == "cpu"
            own.copy_(tensor.pin_memory() if to_gpu else tensor, non_blocking=True)
        kept, rates = tuple(t.clone() for t in self._inputs), [lr.clone() for lr in self._lrs]
        recipes = [layer.recipe for layer in self._layers]
        if recipes != self._recipes:
            # A region, or a step that was set from outside, gave the layers other recipes than the graph has.
            self._graph, self._taken, self._recipes = None, 0, recipes
        if self.capture and self._graph is None and self._taken >= WARM_UP:
            self._graph = self._captured()
        if self._graph is None:
            self._aside(self._whole)
        else:
            self._graph.replay()
            self.context.note_closed()
        self._taken += 1
        return self._sent(_Pending(step, kept, rates, self._outcome))

    def _set(self, step: int) -> None:
        """Tell layers, kernels and optimizer the step and the learning rates."""
        if len(self.optimizer.param_groups) != len(self._lrs):
            raise LayerError(
                f"the optimizer has {len(self.optimizer.param_groups)} groups of parameters, and had {len(self._lrs)} "
                "when the CapturedStep was made: make another one"
            )
        self.context.step, self.context.global_tokens = step, self._tokens
        self._step.fill_(step)
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            if group["lr"] is not lr:
                lr.fill_(float(group["lr"]))
                group["lr"] = lr

    def _sent(self, pending: _Pending) -> _Pending:
        """Send the outcome to the host."""
        if self._device.type == "cuda":
            pending.host = torch.empty(self._outcome.shape, pin_memory=True)
            pending.host.copy_(self._outcome, non_blocking=True)
            pending.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.done.record()
        else:
            pending.host = self._outcome.clone()
        return pending

    def _settled(self, pending: _Pending) -> StepOutcome:
        """Return a step's outcome; one that left the range is repeated, and then the one that was started after it."""
        outcome, exceeded = self._read(pending)
        if not exceeded:
            return outcome
        after = self._pending
        if after is not None and after.done is not None:
            after.done.synchronize()
        self._held.zero_()
        outcome = self._repeated(pending)
        if after is not None:
            self._pending = self._start(after.step, after.batch)
        return replace(outcome, widened=True)

    def _read(self, pending: _Pending) -> tuple[StepOutcome, bool]:
        """Return a step's outcome, and whether an operand left the range."""
        if pending.done is not None:
            pending.done.synchronize()
        *losses, norm, first, exceeded = pending.host.tolist()
        if not math.isfinite(sum(losses)):
            norm = math.nan
        name = self._names[self._graded[int(first)]] if first >= 0 else ""
        return StepOutcome(pending.step, tuple(losses), norm, name), bool(exceeded)

    def _repeated(self, pending: _Pending) -> StepOutcome:
        """Take a step again, one operation at a time and in the wider range, and wait for it."""
        gradients = [p.grad for p in self._parameters]
        restart(self.model)  # its number comes again
        self._set(pending.step)
        now = [lr.clone() for lr in self._lrs]
        try:
            for own, tensor in zip((*self._inputs, *self._lrs), (*pending.batch, *pending.lrs), strict=True):
                own.copy_(tensor)
            with self.context.backend.widened():
                self._aside(self._whole)
            outcome, exceeded = self._read(self._sent(_Pending(pending.step, (), [], self._outcome)))
        finally:
            for lr, rate in zip(self._lrs, now, strict=True):
                lr.copy_(rate)
            for p, gradient in zip(self._parameters, gradients, strict=True):
                p.grad = gradient  # a graph writes into the memory that it was captured with
        if exceeded:
            self._held.zero_()
            self._discard()
            self._pending, self._next = None, pending.step
            raise UnsupportedError(
                f"backend {self.context.backend.name!r} left its range in step {pending.step}, and again in its "
                "widest range, so the weights were not updated: take another GEMM profile or backend"
            )
        return outcome

    def _aside(self, run: Callable[[], None]) -> None:
        """Run on the stream of the capture, in turn with the caller's."""
        if self._stream is None:
            run()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _captured(self) -> Any:
        """Return the graph of the step; LayerError, and the model is as it was, if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        for p in self._parameters:
            p.grad = None
        try:
            with operators.device_step(self._step), torch.cuda.graph(graph, stream=self._stream):
                self._body()
        except Exception as err:
            self._discard()
            # What ends the capture raises too, and hides the cause.
            cause: BaseException = err
            while cause.__context__ is not None:
                cause = cause.__context__
            raise LayerError(
                f"the step cannot be captured as a CUDA graph: {type(cause).__name__}: {cause}; the weights are as "
                "they were; keep the loss free of waits for the GPU, of printing and of shapes that depend on values, "
                "or pass capture=False"
            ) from err
        except BaseException:
            self._discard()
            raise
        return graph

    def _discard(self) -> None:
        """Forget a step that did not end: gradients, weights that are held, and amaxes."""
        self.context.sole_uses = {}
        for p in self._parameters:
            p.grad = None
        restart(self.model)

    def _whole(self) -> None:
        for p in self._parameters:
            p.grad = None
        try:
            with operators.device_step(self._step) if self.capture else nullcontext():
                self._body()
        except BaseException:
            self._discard()
            raise

    def _body(self) -> None:
        """Run all of a step; nothing in it waits for the device."""
        losses = []
        if self._parts > 1:
            for layer in self._layers:
                layer.hold_weights(self.context.place)
        for number, micro_batch in enumerate(zip(*(t.chunk(self._parts) for t in self._inputs), strict=True)):
            self.context.token_origin = number * (self._tokens // self._parts)
            loss = self._loss(self.model, *micro_batch) / self._parts
            losses.append(loss.detach().float())
            # The first micro-batch makes the gradients.
            self.context.sole_uses = sole_uses(loss) if number else {}
            loss.backward()  # type: ignore[no-untyped-call]
            self.context.sole_uses = {}
        with torch.no_grad():
            self._update(torch.stack(losses))
        self.context.close_step(draws=False)

    def _update(self, losses: Tensor) -> None:
        """Clip the gradients, update the weights unless something forbids it, and store the outcome."""
        self._graded = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        gradients = [self._parameters[i].grad for i in self._graded]
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(norms)
        finite = torch.isfinite(losses).all() & torch.isfinite(norm)
        exceeded = torch.zeros_like(self._held)
        for word in self.context.backend.range_words():
            exceeded |= (word != 0).any()
            word.zero_()
        self._held |= exceeded
        if self._clip > 0:
            # As torch.nn.utils.clip_grads_with_norm_ has it; a norm that is not finite scales nothing.
            factor = torch.clamp(self._clip / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, torch.where(finite, factor, 1.0))
        self.optimizer.found_inf = (~finite | self._held).float()  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        for layer in self._layers:
            layer.advance(self._held)
        places = torch.arange(len(gradients), device=self._device)
        last = torch.where(torch.isfinite(norms), -1, places).max()
        self._outcome.copy_(torch.cat([losses, norm[None], last[None], exceeded[None]]))
