"""What all linear layers of a model share: the place of a micro-batch in training, its recipe, and the census of GEMMs.

Weights never change format. What changes at the first step of a recipe's phase is how the GEMMs read them.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from mxref.backend import Backend
from mxref.discovery import get_backend
from mxref.errors import MxrefError, RecipeError
from mxref.layer_choice import matching
from mxref.recipe import OperandSpec, Recipe, Span
from mxref.steps.random import Stream
from mxref_torch import operators
from mxref_torch.errors import LayerError, StepError


def recipe_by_layer(recipe: Recipe, names: Collection[str]) -> dict[str, Recipe]:
    """Return the recipe of each layer by its name, of a recipe without a schedule; LayerError if it does not fit."""
    try:
        for glob in recipe.keep_bf16:
            if glob not in Recipe.keep_bf16:
                matching(names, glob, "keep_bf16")
        return recipe.by_layer(names)
    except RecipeError as err:
        raise LayerError(str(err)) from err


class RecipeSchedule:
    """The phases of a run, and the recipe of each layer in each of them.

    RecipeError for a schedule that does not fit the run's `steps`, LayerError for one that does not fit the layers.
    """

    def __init__(self, recipe: Recipe, names: Collection[str], steps: int | None = None) -> None:
        self.spans: tuple[Span, ...] = recipe.spans(steps)
        self.recipes = tuple(recipe_by_layer(span.recipe, names) for span in self.spans)
        self.names = tuple(names)
        self.phase = 0
        """Number of the phase in force."""

    @property
    def span(self) -> Span:
        """The phase that the current step belongs to."""
        return self.spans[self.phase]

    def phase_at(self, step: int) -> int:
        """Return the number of the phase that a step lies in."""
        return max(i for i, span in enumerate(self.spans) if span.first <= max(step, 0))

    def begins(self, step: int) -> str | None:
        """Return the name of the phase whose first step this is; None if there is none, or only one phase."""
        return next((span.name for span in self.spans if len(self.spans) > 1 and span.first == step), None)


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
    """
    Index of the micro-batch's first token within the optimizer step (sample index * sequence length). A handle that
    follows an optimizer moves it on, until it is set by hand.
    """
    global_tokens: int | None = None
    """
    Tokens of the whole optimizer step over all ranks, or None for those of the tensor itself. A handle that follows an
    optimizer sets it to 2^30, so that bits do not depend on the number of tokens.
    """
    layers: Any = field(default_factory=weakref.WeakKeyDictionary)
    """The layers that exist, in the order in which they were made. A copy of one takes no other with it."""
    sole_uses: Mapping[Any, torch.Tensor] = field(default_factory=dict)
    """Weights to whose `.grad` Wgrad adds in place, by node, from `mxref_torch.sole_uses`. Autograd adds the others."""
    schedule: RecipeSchedule | None = None
    """The phases of the run; `schedule.span` is the one in force."""

    def __post_init__(self) -> None:
        Stream(self.seed)  # checks its range
        self.backend_key = operators.register_backend(self.backend)
        self.closed: int | None = None
        """The last optimizer step that was closed; a CUDA graph that was replayed has closed its own."""
        self._warned = False
        self._streams: dict[int, torch.Tensor] = {}  # of all layers, by operand

    def stream(self, index: int, operand: int, spec: OperandSpec) -> torch.Tensor:
        """Return the random stream of a layer's operand, as operators take it.

        Layers whose operand would be the same get the same tensor: a compiler then sees that it is.
        """
        if operators.draws_by_layer(spec):
            return operators.stream_words(self.seed, index, operand)
        return self._streams.setdefault(operand, operators.stream_words(self.seed, 0, operand))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LEAST and not (name == "global_tokens" and value is None):
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or value < _LEAST[name]:
                raise LayerError(f"{name} = {value!r}, but it must be a whole number from {_LEAST[name]}")
        if name == "step" and self.schedule is not None:
            self._enter_phase(value)
        super().__setattr__(name, value)
        if name in _LEAST:
            # A new tensor each time: a backward pass still to come keeps that of its forward.
            self.batch_place = operators.batch_place(self.step, self.token_origin, self.global_tokens)

    def _enter_phase(self, step: int) -> None:
        """Give every layer its recipe at an optimizer step; nothing happens within a phase.

        The FP8 scales of a layer whose recipe changes start anew. Where StepError is raised, no recipe has changed.
        """
        schedule = self.schedule
        if schedule is None or (phase := schedule.phase_at(step)) == schedule.phase:
            return
        if any(layer.in_region for layer in self.layers):
            raise StepError(
                f"step {step} begins the phase {schedule.spans[phase].name!r} within `with mxref_torch.recipe(...)`: "
                "leave the region before the phase changes"
            )
        turning = [(layer, schedule.recipes[phase][schedule.names[layer.index]]) for layer in self.layers]
        for layer, recipe in turning:
            layer.check_use(recipe)
        for layer, recipe in turning:
            layer.use(recipe)
        schedule.phase = phase

    @property
    def follows_schedule(self) -> bool:
        """Whether layers change their recipes during the run, so that the step has to be right."""
        return self.schedule is not None and len(self.schedule.spans) > 1

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, with a backend that can be found by its name as its name."""
        state = vars(self) | {"layers": None}
        with suppress(MxrefError):
            if get_backend(self.backend.name) is self.backend:
                state["backend"] = self.backend.name
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`, in this process or another."""
        vars(self).update(state, layers=weakref.WeakKeyDictionary())
        if isinstance(state["backend"], str):
            self.backend = get_backend(state["backend"])
        self.backend_key = operators.register_backend(self.backend)

    @property
    def census(self) -> operators.Census:
        """GEMMs of all layers that ran since `reset_census`."""
        total: operators.Census = Counter()
        for layer in self.layers:
            total.update(layer.census)
        return total

    def reset_census(self) -> None:
        """Forget the GEMMs counted so far."""
        for layer in self.layers:
            layer.census.clear()

    def counted(self) -> list[tuple[operators.Census, bool]]:
        """Return what was counted so far, for `set_counted`."""
        return [(Counter(layer.census), layer.census.ran) for layer in self.layers]

    def set_counted(self, counted: list[tuple[operators.Census, bool]]) -> None:
        """Set the census to what `counted` returned."""
        self.reset_census()
        for layer, (held, ran) in zip(self.layers, counted, strict=True):
            layer.census.update(held)
            layer.census.ran = ran

    @property
    def trained(self) -> bool:
        """Whether a GEMM of a backward pass ran since the last optimizer step."""
        return any(layer.census.trained for layer in self.layers)

    def close_step(self, draws: bool) -> bool:
        """Close an optimizer step; return whether it is the first step that trained anything.

        Raises:
            StepError: layers draw random bits or the recipe has a schedule, and the step had the number of the last.
        """
        if not self.trained:
            return False
        if self.closed == self.step:
            if draws:
                raise StepError(
                    f"step {self.step} was already trained, and its random bits were drawn again: {WAY_OUT}; after a "
                    "skipped update, or to repeat the step, call mxref_torch.restart(model) instead of advance"
                )
            if self.follows_schedule:
                raise StepError(stood_still(self.step))
        first = self.closed is None
        self.reopen_step()
        self.closed = self.step
        return first

    @property
    def next_step(self) -> int:
        """Number of the next optimizer step: one more than `step` where that step was closed."""
        return self.step + (self.closed == self.step)

    def note_next_step(self) -> None:
        """Warn once if the weights were updated and `mxref_torch.advance` has closed no step."""
        if self.closed is not None or self._warned or not self.trained:
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
        self.closed = None
        for layer in self.layers:
            layer.census.trained = False


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread: a forward pass within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


WAY_OUT = (
    "let the handle follow the optimizer (`handle.follow(optimizer)`), or call `handle.advance()` after each optimizer "
    "step; evaluate within torch.no_grad()"
)


def stood_still(step: int) -> str:
    """Return the message of a step whose number was not increased under a recipe with a schedule."""
    return (
        f"the recipe's schedule uses the number of the step, and step {step} was already trained: {WAY_OUT}; before "
        "you repeat the step, call mxref_torch.restart(model)"
    )
