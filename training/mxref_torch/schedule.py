"""The recipe in force: which recipe each linear layer of a model has at an optimizer step.

Weights never change format. What changes at the first step of a phase is how a layer's three GEMMs read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from mxref.errors import RecipeError
from mxref.layer_choice import matching
from mxref.recipe import Recipe, Span
from mxref_torch.errors import LayerError


class TakesRecipe(Protocol):
    """A layer whose recipe can change between optimizer steps, as `MXLinear` can."""

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
        self.layers: Mapping[str, TakesRecipe] = {}
        self._entered = 0

    @property
    def span(self) -> Span:
        """The phase in force."""
        return self.spans[self._entered]

    @property
    def changes(self) -> bool:
        """Whether there is more than one phase."""
        return len(self.spans) > 1

    def attach(self, layers: Mapping[str, TakesRecipe]) -> None:
        """Take the layers, which have the recipes of step 0, by their names."""
        if self.changes:  # a copy of one layer would copy all of them
            self.layers = dict(layers)

    def enter(self, step: int) -> None:
        """Give every layer its recipe at an optimizer step; nothing happens within a phase.

        The FP8 scales of a layer whose recipe changes start anew; a layer that has an equal recipe in both phases
        goes on with its own.

        Raises:
            StepError: the step before is not closed by `advance`.
        """
        found = max(i for i, span in enumerate(self.spans) if span.first <= max(step, 0))
        if found != self._entered:
            for name, layer in self.layers.items():
                layer.use(self.recipes[found][name])
            self._entered = found

    def begins(self, step: int) -> str | None:
        """Return the name of the phase whose first step this is; None if there is none, or only one phase."""
        return next((span.name for span in self.spans if self.changes and span.first == step), None)
