"""An optimizer step that never waits for the device, and on a GPU is one CUDA graph.

Loss, norm and finiteness stay on the device and are read when the next step has been started. An update whose loss or
gradient is not finite is left out on the device. A step in which an operand left the range of the backend's fast GEMM
holds back all later ones on the device, until it has been repeated in the wider range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mxref.errors import ShapeError, UnsupportedError
from mxref_torch.captured.operations import ALONE, LossFunction, StepOperations, StepOutcome, StepRunner, Team
from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError, StepError
from mxref_torch.optimizer_step import require_float32, restart
from mxref_torch.step_context import StepContext


@dataclass
class _Pending:
    """A step that was started, and whose outcome has not been read."""

    step: int
    batch: tuple[Tensor, ...]
    """A copy: the caller may fill the same memory with the next batch."""
    lrs: Sequence[Tensor]
    host: Tensor
    done: Any = None


class CapturedStep:
    """The optimizer steps of a converted model, without a wait for the device.

    The first two steps are taken one operation at a time; on a GPU the third is captured, and replayed from then on.
    Each call returns the outcome of the previous step; `finish` returns the last. Call `finish` before you read, save,
    load or change weights or optimizer. Python does not see a replay: the census counts steps up to the capture, and
    hooks of modules and optimizer do not run. Where a schedule changes the recipe, there is a new capture.

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
        team: Team = ALONE,
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
            team: the ranks that take the steps together. Each passes its own part of a batch; `tokens` counts all.

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
            if not least <= value < math.inf:
                raise LayerError(f"CapturedStep: {name} = {value!r}, but it must be a number from {least}")
        self.context = context.context if isinstance(context, Handle) else context
        self.model, self.optimizer = model, optimizer
        self._tokens, self._micro_batches = tokens, micro_batches
        self._operations = StepOperations(
            model,
            self.context,
            loss,
            optimizer,
            tokens=tokens,
            micro_batches=micro_batches,
            clip=clip,
            team=team,
        )
        self._device = self._operations.device
        on_gpu = self._device.type == "cuda"
        self.capture = on_gpu if capture is None else capture
        self._check(on_gpu)
        self._runner = StepRunner(self._operations, self.capture)
        self._lrs = [torch.zeros((), device=self._device) for _ in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["capturable"] = True
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
        schedule, layers = self.context.schedule, self._operations.layers
        recipes = {own for phase in schedule.recipes for own in phase.values()} if schedule else set()
        draws = any(layer.draws or any(map(layer.would_draw, recipes)) for layer in layers)
        if self.capture and draws and not getattr(backend.capabilities, "device_steps", False):
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
        # The optimizer has new tensors, but the graph would still use the old ones.
        self._runner.forget_graph()
        for group in optimizer.param_groups:
            group["capturable"] = True

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
        schedule, last = self.context.schedule, None
        if schedule is not None and schedule.phase_at(step) != schedule.phase:
            # The last step of a phase may have to be repeated under its recipe, so it is settled first.
            last = self.finish()
        before = self._pending
        self._pending, self._next = self._start(step, batch), step + 1
        return last if before is None else self._settled(before)

    def finish(self) -> StepOutcome | None:
        """Wait for the last step and return its outcome; None where it was returned already."""
        last, self._pending = self._pending, None
        return None if last is None else self._settled(last)

    def close(self) -> None:
        """Free the CUDA graph, before ranks disconnect; the outcome of a step that has not been read is lost."""
        self._pending = None
        self._runner.forget_graph()

    def _check_batch(self, batch: Sequence[Tensor]) -> None:
        for tensor in batch:
            if not tensor.ndim or tensor.shape[0] % self._micro_batches:
                raise ShapeError(
                    f"a batch of shape {tuple(tensor.shape)} does not split into {self._micro_batches} equal "
                    "micro-batches along axis 0"
                )
        shapes, first = (
            [(tuple(t.shape), t.dtype) for t in tensors] for tensors in (batch, self._operations.inputs)
        )
        if first and shapes != first:
            raise ShapeError(
                f"a batch of {shapes} after one of {first}: a captured step takes one shape; leave the last, short "
                "batch out, or fill it up"
            )

    def _start(self, step: int, batch: tuple[Tensor, ...]) -> _Pending:
        """Start a step, and the copy of its outcome to the host."""
        self._set(step)
        self._operations.fill(batch)
        kept, rates = tuple(t.clone() for t in self._operations.inputs), [lr.clone() for lr in self._lrs]
        self._runner.run()
        return self._sent(step, kept, rates)

    def _set(self, step: int) -> None:
        """Give the step to layers and kernels, and the learning rates to the optimizer."""
        require_float32(zip(self._operations.names, self._operations.parameters, strict=True))
        self.context.step, self.context.global_tokens = step, self._tokens
        self._operations.number.fill_(step)
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            if group["lr"] is not lr:
                lr.fill_(float(group["lr"]))
                group["lr"] = lr

    def _sent(self, step: int, batch: tuple[Tensor, ...] = (), lrs: Sequence[Tensor] = ()) -> _Pending:
        """Send the outcome to the host."""
        outcome = self._operations.outcome
        if self._device.type != "cuda":
            return _Pending(step, batch, lrs, outcome.clone())
        host = torch.empty(outcome.shape, pin_memory=True)
        host.copy_(outcome, non_blocking=True)
        # A waiting thread sleeps, because other processes that share the GPU need its core.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        return _Pending(step, batch, lrs, host, done)

    def _settled(self, pending: _Pending) -> StepOutcome:
        """Return a step's outcome; one that left the range is repeated, and then the one that was started after it."""
        outcome, exceeded = self._read(pending)
        if not exceeded:
            return outcome
        after = self._pending
        if after is not None and after.done is not None:
            after.done.synchronize()
        self._operations.withheld.zero_()
        outcome = self._repeated(pending)
        if after is not None:
            self._pending = self._start(after.step, after.batch)
        return replace(outcome, widened=True)

    def _read(self, pending: _Pending) -> tuple[StepOutcome, bool]:
        """Wait for a step; return its outcome, and whether an operand left the range."""
        if pending.done is not None:
            pending.done.synchronize()
        return self._operations.read(pending.step, pending.host)

    def _repeated(self, pending: _Pending) -> StepOutcome:
        """Take a step again, one operation at a time and in the wider range, and wait for it."""
        parameters = self._operations.parameters
        gradients = [p.grad for p in parameters]
        restart(self.model)  # its number is used again
        self._set(pending.step)
        now = [lr.clone() for lr in self._lrs]
        try:
            for own, tensor in zip(
                (*self._operations.inputs, *self._lrs), (*pending.batch, *pending.lrs), strict=True
            ):
                own.copy_(tensor)
            with self.context.backend.widened():
                self._runner.run_eagerly()
            outcome, exceeded = self._read(self._sent(pending.step))
        finally:
            for lr, rate in zip(self._lrs, now, strict=True):
                lr.copy_(rate)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient  # a graph writes into the memory that it was captured with
        if exceeded:
            self._operations.withheld.zero_()
            self._operations.discard()
            self._pending, self._next = None, pending.step
            raise UnsupportedError(
                f"backend {self.context.backend.name!r} left its range in step {pending.step}, and again in its "
                "widest range, so the weights were not updated: take another GEMM profile or backend"
            )
        return outcome
