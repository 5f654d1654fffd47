"""What all linear layers of a model share: the place of a micro-batch in training, and the census of GEMMs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from mxref.backend import Backend
from mxref.discovery import get_backend
from mxref.errors import MxrefError
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream
from mxref_torch import operators
from mxref_torch.errors import LayerError, StepError
from mxref_torch.shared.schedule import RecipeSchedule

_LEAST = {"step": 0, "token_origin": 0, "global_tokens": 1}
"""The place of a micro-batch in training, and the least number of each."""


@dataclass
class StepContext:
    """What every linear layer of a model needs to know about the step; set before each forward."""

    backend: Backend
    seed: int
    step: int = 0
    """Optimizer step, from 0. Setting it gives every layer its recipe at that step."""
    token_origin: int = 0
    """Index of the micro-batch's first token within the optimizer step (sample index * sequence length)."""
    global_tokens: int | None = None
    """Tokens of the whole optimizer step; None: those of the tensor itself."""
    census: operators.Census = field(default_factory=Counter)
    """GEMMs that ran since `reset_census`."""
    layers: list[operators.LayerCensus] = field(default_factory=list)
    """The same for each layer, in the order of layer indices."""
    sole_uses: Mapping[Any, torch.Tensor] = field(default_factory=dict)
    """Weights to whose `.grad` Wgrad adds in place, by node, from `mxref_torch.sole_uses`. Autograd adds the others."""
    schedule: RecipeSchedule | None = None
    """The phases of the run; `schedule.span` is the one in force."""

    def __post_init__(self) -> None:
        Stream(self.seed)  # checks its range
        self.backend_key = operators.register_backend(self.backend)
        self._closed: int | None = None
        self._warned = False
        self._streams: dict[int, torch.Tensor] = {}  # of all layers, by operand

    def stream(self, index: int, operand: int, spec: OperandSpec) -> torch.Tensor:
        """Return the random stream of a layer's operand, as operators take it.

        Layers whose operand would be the same get the same tensor: a compiler then sees that it is.

        Args:
            index: the layer's index in the random streams.
            operand: the operand's, from `mxref.roles.OPERANDS`.
            spec: its treatment.
        """
        if operators.draws_by_layer(spec):
            return operators.stream_words(self.seed, index, operand)
        if operand not in self._streams:
            self._streams[operand] = operators.stream_words(self.seed, 0, operand)
        return self._streams[operand]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LEAST and not (name == "global_tokens" and value is None):
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or value < _LEAST[name]:
                raise LayerError(f"{name} = {value!r}, but it must be a whole number from {_LEAST[name]}")
        if name == "step" and self.schedule is not None:
            self.schedule.enter(value)
        super().__setattr__(name, value)
        if name in _LEAST:
            # A new tensor each time: a backward pass still to come keeps that of its forward.
            self.place = operators.step_place(self.step, self.token_origin, self.global_tokens)

    @property
    def follows_schedule(self) -> bool:
        """Whether layers change their recipes during the run, so that the step has to be right."""
        return self.schedule is not None and self.schedule.changes

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle; a backend that can be found by its name is stored as its name."""
        state = dict(vars(self))
        with suppress(MxrefError):
            if get_backend(self.backend.name) is self.backend:
                state["backend"] = self.backend.name
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`, in this process or another."""
        vars(self).update(state)
        if isinstance(state["backend"], str):
            self.backend = get_backend(state["backend"])
        self.backend_key = operators.register_backend(self.backend)

    def reset_census(self) -> None:
        """Forget the GEMMs counted so far."""
        for census in (self.census, *self.layers):
            census.clear()

    def counted(self) -> list[tuple[operators.Census, bool]]:
        """Return what was counted so far, for `set_counted`."""
        return [(Counter(self.census), True), *((Counter(own), own.ran) for own in self.layers)]

    def set_counted(self, counted: list[tuple[operators.Census, bool]]) -> None:
        """Set the census to what `counted` returned."""
        for census, (held, ran) in zip((self.census, *self.layers), counted, strict=True):
            census.clear()
            census.update(held)
            if isinstance(census, operators.LayerCensus):
                census.ran = ran

    def close_step(self, draws: bool) -> bool:
        """Close an optimizer step; return whether it is the first step that trained anything.

        Args:
            draws: whether the layers draw random bits.

        Raises:
            StepError: they do or the recipe has a schedule, and the step before it had the same number.
        """
        if not any(own.trained for own in self.layers):
            return False
        if self._closed == self.step:
            if draws:
                raise StepError(_closed_before(self.step))
            if self.follows_schedule:
                raise StepError(stood_still(self.step))
        for own in self.layers:
            own.trained = False
        first, self._closed = self._closed is None, self.step
        return first

    @property
    def next_step(self) -> int:
        """Number of the next optimizer step: one more than `step` where that step was closed."""
        return self.step + (self._closed == self.step)

    def note_closed(self) -> None:
        """Record that a CUDA graph has taken the step: a replay does not close a step in Python."""
        self._closed = self.step

    def note_next_step(self) -> None:
        """Warn once if the weights were updated and `mxref_torch.advance` has closed no step."""
        if self._closed is not None or self._warned or not any(own.trained for own in self.layers):
            return
        self._warned = True
        warnings.warn(
            f"the weights have changed since a backward pass, context.step is {self.step}, and "
            "mxref_torch.advance(model) was never called: let the handle follow the optimizer "
            "(`handle.follow(optimizer)`), or call `handle.advance()` after each optimizer step; otherwise FP8's "
            "scales stay as they are, and layers that never run are not reported",
            stacklevel=2,
        )

    def reopen_step(self) -> None:
        """Forget the last optimizer step, so that its number may be used again."""
        self._closed = None
        for own in self.layers:
            own.trained = False


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread: a forward pass within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


_WAY_OUT = (
    "let the handle follow the optimizer (`handle.follow(optimizer)`), or call `handle.advance()` after each optimizer "
    "step; evaluate within torch.no_grad()"
)


def repeated(step: int) -> str:
    """Return the message of a step whose number was not increased although the weights changed."""
    return (
        f"the weights have changed since a forward pass of step {step}, and its random bits would be drawn again: "
        f"{_WAY_OUT}; before you repeat the step, or after you loaded weights, call mxref_torch.restart(model)"
    )


def stood_still(step: int) -> str:
    """Return the message of a step whose number was not increased under a recipe with a schedule."""
    return (
        f"the recipe's schedule uses the number of the step, and step {step} was already trained: {_WAY_OUT}; before "
        "you repeat the step, call mxref_torch.restart(model)"
    )


def another_place(forward: list[int], recomputed: list[int]) -> str:
    """Return the message of a recomputation that has drawn other random bits than its forward pass."""
    return (
        f"activation checkpointing computed a forward pass again at another place (step {recomputed[0]}, token "
        f"{recomputed[1]}) than it ran at (step {forward[0]}, token {forward[1]}), with other random bits: run the "
        "backward pass of each micro-batch before the next forward pass, and once"
    )


def _closed_before(step: int) -> str:
    """Return the message of a step that is closed a second time under its number."""
    return (
        f"step {step} was already trained, and its random bits were drawn again: {_WAY_OUT}; after a skipped update, "
        "or to repeat the step, call mxref_torch.restart(model) instead of advance"
    )
