"""Following an optimizer: the step moves on after each of its steps, and the place after each micro-batch.

Random bits are counted in the tensor of all tokens of a step. Micro-batches that lay at the same place would
draw the same bits. So the place moves on by the tokens of a micro-batch when its backward pass ends, when the next
forward pass of the whole model begins, or when a layer that has drawn at this place begins another forward pass.
Compiled code has the place that was set before it was called, so a layer that would draw there again is refused.
Every change of where the place moves to changes the random bits of users' runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mxref.formats import BlockFormat
from mxref.roles import GemmRole
from mxref.steps.hadamard import SIZES
from mxref_torch import operators
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import some
from mxref_torch.step_context import StepContext, in_backward

STEP_TOKENS = 1 << 30
"""Tokens that a step is laid out for, over all ranks. Fixed, so that bits do not depend on the number of tokens."""


_LONGEST = max(SIZES)


class Follower:
    """Moves a context from micro-batch to micro-batch, and closes the steps of a converted model.

    The place is counted here unless the caller sets it by hand.
    """

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        layers: Sequence[MXLinear],
        close: Callable[[], None],
        rank: int | None,
        ranks: int | None,
    ) -> None:
        """Begin to count; `close` closes a step of the model, and the rest is as in `Handle.follow`."""
        together = dist.is_available() and dist.is_initialized()
        ranks = ranks if ranks is not None else dist.get_world_size() if together else 1
        rank = rank if rank is not None else dist.get_rank() if together else 0
        if not 0 <= rank < ranks <= 1 << 20:
            raise LayerError(f"rank = {rank} of ranks = {ranks}: a rank is from 0 to ranks - 1, below 2^20")
        if any(layer.census.listener is not None for layer in layers):
            raise LayerError("another handle follows an optimizer of this model; call its unfollow() first")
        self._context, self._layers, self._close = context, layers, close
        self._followed: list[weakref.ref[Optimizer]] = []
        self._closing = -1  # backward pass whose end closes the step
        share = STEP_TOKENS // ranks // _LONGEST * _LONGEST  # whole Hadamard groups
        self._first, self._last = rank * share, (rank + 1) * share
        self._tokens = 0
        self._drawn: set[int] = set()  # layers, by index, that have drawn for a forward pass at this place
        self._task = self._recomputing = -1  # backward passes, by autograd's numbers
        self._set(self._first)
        for layer in layers:
            layer.census.listener = partial(self._ran, layer)
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._begin_pass)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the object for a copied model's hook: it counts nothing, because no handle follows the copy."""
        return {"_tokens": 0, "_drawn": set()}

    # Optimizers.

    @property
    def optimizers(self) -> list[Optimizer]:
        """The followed optimizers that still exist."""
        return [one for reference in self._followed if (one := reference()) is not None]

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these optimizers too."""
        for optimizer in optimizers:
            self._followed.append(weakref.ref(optimizer))
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def stop(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.census.listener = None

    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        """Close the step that an optimizer took: its hook."""
        # A GradScaler calls a fused optimizer also for the step that it skips.
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and bool(skipped):
            for layer in self._layers:
                layer.last_pass = None  # the step continues under the same number
        elif not in_backward():
            self._end_step()
        elif self._closing != (task := torch._C._current_graph_task_id()):
            # An optimizer that steps within the backward pass: the step ends with that pass.
            self._closing = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self) -> None:
        self._closing = -1
        if any(census.trained for census in self._context.layers):
            self._close()

    # Micro-batches.

    def begin_step(self) -> None:
        """Go to the first micro-batch of a step."""
        self._tokens = 0
        self._drawn.clear()
        if self._counts:
            self._set(self._first)

    @property
    def _counts(self) -> bool:
        """Whether the place is counted here: the place is still the one that was set last."""
        context = self._context
        return (context.token_origin, context.global_tokens) == (self._origin, STEP_TOKENS)

    def _begin_pass(self, module: torch.nn.Module, arguments: Any) -> None:
        """Note that a forward pass of the whole model begins: its forward pre-hook."""
        if not torch.compiler.is_compiling() and not in_backward():
            self._move_on()

    def _ran(self, layer: MXLinear, role: GemmRole | None, tokens: int) -> None:
        """Note that a GEMM of a layer ran on this many tokens; without a role, that a forward pass of it begins.

        Raises:
            StepError: the layer has drawn the random bits of this place before.
        """
        if role in (None, GemmRole.FPROP) and in_backward():
            self._recomputing = torch._C._current_graph_task_id()
            return
        if role is None:
            if layer.index in self._drawn:
                self._move_on()
            return
        if role is GemmRole.FPROP:
            self._recomputing = -1
            if layer.index in self._drawn and self._counts:
                raise StepError(self._drawn_again(layer))
            if layer.draws_by_place:
                self._drawn.add(layer.index)
            self._tokens = max(self._tokens, tokens)
            return
        self._tokens = max(self._tokens, tokens)
        task = torch._C._current_graph_task_id()
        # A backward pass within another one ends before all recomputation has ended.
        if task not in (-1, self._task) and self._recomputing in (-1, task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._move_on)

    def _drawn_again(self, layer: MXLinear) -> str:
        return (
            f"the layer {layer.census.name} ran twice in compiled code at the place of one micro-batch "
            f"(step {self._context.step}, token {self._origin}), and would draw the same random bits: run the "
            "backward pass of each micro-batch before the next forward pass, call the model that convert was given by "
            "its own forward and compile its blocks alone, or set token_origin and global_tokens before each call; "
            "evaluate within torch.no_grad(); after an error call handle.restart()"
        )

    def _move_on(self) -> None:
        """Go to the next micro-batch, if one ran."""
        self._drawn.clear()
        tokens, self._tokens = self._tokens, 0
        if not tokens or not self._counts:
            return
        origin = self._origin + tokens + -tokens % self._unit(tokens)
        if origin > self._last:
            raise StepError(
                f"more than {self._last - self._first} tokens ran in a step on this rank, and it has random bits for "
                "no more: step the optimizer earlier, or set token_origin and global_tokens before each forward pass"
            )
        self._set(origin)

    def _unit(self, tokens: int) -> int:
        """Return the number of tokens of which a micro-batch's place is a multiple: whole blocks of Wgrad."""
        if tokens % _LONGEST == 0:
            return 1
        specs = {spec for layer in self._layers for spec in layer.recipe.operands(GemmRole.WGRAD)}
        return max(
            (operators.block_unit(spec) for spec in specs if isinstance(spec.format, BlockFormat)), default=1
        )

    def _set(self, origin: int) -> None:
        self._origin = origin
        self._context.token_origin, self._context.global_tokens = origin, STEP_TOKENS


def check_optimizers(
    optimizers: Sequence[Optimizer], known: Iterable[Optimizer], layers: Mapping[str, MXLinear]
) -> None:
    """Raise LayerError unless these optimizers can be followed besides the known ones; see `Handle.follow`."""
    if not optimizers:
        raise LayerError("follow takes one or more optimizers, got none")
    followed = list(known)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise LayerError(f"follow takes optimizers of torch.optim, got {type(optimizer).__name__}")
        if any(optimizer is one for one in followed):
            raise LayerError("this optimizer is followed already: each of its steps would count twice")
        followed.append(optimizer)
    held = {id(p) for one in followed for group in one.param_groups for p in group["params"]}
    lost = [name for name, own in layers.items() if own.weight.requires_grad and id(own.weight) not in held]
    if lost:
        raise LayerError(
            f"no followed optimizer holds the weights of {some(lost)}: make the optimizer after convert, "
            "fully_shard and model.to, pass all optimizers in one call, or freeze them by requires_grad_(False)"
        )
