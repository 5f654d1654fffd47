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
    """Return the recipe of each linear layer of a model by its name; the recipe has no schedule.

    Raises:
        LayerError: a glob that matches nothing, blocks that the model has not, or an entry without effect.
    """
    try:
        for glob in recipe.keep_bf16:
            if glob not in Recipe.keep_bf16:
                matching(names, glob, "keep_bf16")
        return recipe.by_layer(names)
    except RecipeError as err:
        raise LayerError(str(err)) from err


class RecipeSchedule:
    """The phases of a run, and the recipe of each layer in each of them.

    A context holds it and enters the phase of a step when its `step` is set.

    Raises:
        RecipeError: phases that overlap, are empty or lie beyond the run; or a schedule in shares of the run
            without `steps`.
        LayerError: a recipe that does not fit the model's layers, as in `recipe_by_layer`.
    """

    def __init__(self, recipe: Recipe, names: Collection[str], steps: int | None = None) -> None:
        self.spans: tuple[Span, ...] = recipe.spans(steps)
        self.recipes = tuple(recipe_by_layer(span.recipe, names) for span in self.spans)
        self.names = tuple(names)
        self._entered = 0
        # `LayerState`s by their index among all linear layers.
        self._layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle without the layers; their copies join the copy."""
        return {**vars(self), "_layers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`."""
        vars(self).update(state, _layers=weakref.WeakValueDictionary())

    @property
    def span(self) -> Span:
        """The phase that the current step belongs to."""
        return self.spans[self._entered]

    @property
    def changes(self) -> bool:
        """Whether there is more than one phase."""
        return len(self.spans) > 1

    def join(self, index: int, layer: Any) -> None:
        """Take a layer that has its recipe of the phase in force, by its index among all linear layers."""
        self._layers[index] = layer

    def enter(self, step: int) -> None:
        """Give every layer its recipe at an optimizer step; nothing happens within a phase.

        The FP8 scales of a layer whose recipe changes start anew; a layer that has an equal recipe in both phases
        goes on with its own.

        Raises:
            StepError: the step before is not closed by `advance`, or the phase ends within a region of another recipe;
                no layer's recipe has then changed.
        """
        found = self._place(step)
        if found != self._entered:
            if any(layer.in_region for layer in self._layers.values()):
                raise StepError(
                    f"step {step} begins the phase {self.spans[found].name!r} within `with mxref_torch.recipe(...)`: "
                    "leave the region before the phase changes"
                )
            turning = [
                (layer, self.recipes[found][self.names[index]])
                for index, layer in sorted(self._layers.items(), key=lambda item: item[0])
            ]
            for layer, recipe in turning:
                layer.check_use(recipe)
            for layer, recipe in turning:
                layer.use(recipe)
            self._entered = found

    def _place(self, step: int) -> int:
        return max(i for i, span in enumerate(self.spans) if span.first <= max(step, 0))

    def turns(self, step: int) -> bool:
        """Return whether a step lies in another phase than the one in force."""
        return self._place(step) != self._entered

    def begins(self, step: int) -> str | None:
        """Return the name of the phase whose first step this is; None if there is none, or only one phase."""
        return next((span.name for span in self.spans if self.changes and span.first == step), None)


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
    layers: list[operators.LayerCensus] = field(default_factory=list)
    """The census of each layer, in the order of layer indices."""
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
            self.batch_place = operators.batch_place(self.step, self.token_origin, self.global_tokens)

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

    @property
    def census(self) -> operators.Census:
        """GEMMs of all layers that ran since `reset_census`."""
        total: operators.Census = Counter()
        for own in self.layers:
            total.update(own)
        return total

    def reset_census(self) -> None:
        """Forget the GEMMs counted so far."""
        for own in self.layers:
            own.clear()

    def counted(self) -> list[tuple[operators.Census, bool]]:
        """Return what was counted so far, for `set_counted`."""
        return [(Counter(own), own.ran) for own in self.layers]

    def set_counted(self, counted: list[tuple[operators.Census, bool]]) -> None:
        """Set the census to what `counted` returned."""
        for own, (held, ran) in zip(self.layers, counted, strict=True):
            own.clear()
            own.update(held)
            own.ran = ran

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
                raise StepError(
                    f"step {self.step} was already trained, and its random bits were drawn again: {WAY_OUT}; after a "
                    "skipped update, or to repeat the step, call mxref_torch.restart(model) instead of advance"
                )
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
