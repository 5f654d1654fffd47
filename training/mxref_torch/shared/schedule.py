"""The recipe in force: which recipe each linear layer of a model has at an optimizer step.

Weights never change format. What changes at the first step of a phase is how a layer's three GEMMs read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mxref.errors import RecipeError
from mxref.layer_choice import matching
from mxref.recipe import Recipe, Span
from mxref_torch.errors import LayerError, StepError


class TakesRecipe(Protocol):
    """A layer whose recipe can change between optimizer steps, as `MXLinear` can."""

    def check_use(self, recipe: Recipe) -> None:
        """Raise StepError if `use` would."""

    def use(self, recipe: Recipe) -> None:
        """Compute by this recipe from now on."""


def recipe_by_layer(recipe: Recipe, names: Collection[str]) -> dict[str, Recipe]:
    """Return the recipe of each linear layer at one moment.

    Args:
        recipe: without a schedule.
        names: qualified names of all linear layers of a model, without wrappers.

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
        self._entered = self._held = 0
        self._layers: weakref.WeakValueDictionary[int, TakesRecipe] = weakref.WeakValueDictionary()

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

    def join(self, index: int, layer: TakesRecipe) -> None:
        """Take a layer that has its recipe of the phase in force, by its index among all linear layers."""
        self._layers[index] = layer

    def enter(self, step: int) -> None:
        """Give every layer its recipe at an optimizer step; nothing happens within a phase.

        The FP8 scales of a layer whose recipe changes start anew; a layer that has an equal recipe in both phases
        goes on with its own.

        Raises:
            StepError: the step before is not closed by `advance`, or the phase ends within `hold`; no layer's recipe
                has then changed.
        """
        found = self._place(step)
        if found != self._entered:
            if self._held:
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

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Refuse a change of phase within a `with` statement that gives the layers other recipes."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def begins(self, step: int) -> str | None:
        """Return the name of the phase whose first step this is; None if there is none, or only one phase."""
        return next((span.name for span in self.spans if self.changes and span.first == step), None)
