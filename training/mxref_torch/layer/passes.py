"""Checks of forward passes in training: each step has its own number, and a recomputation repeats its forward pass."""

from __future__ import annotations

import torch

from mxref.recipe import Recipe
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.reads import OperandMaker
from mxref_torch.shared.context import another_place, in_backward, repeated, stood_still

RECOMPUTED = (
    "activation checkpointing computes a forward pass again, and the recipe has changed since; run the "
    "backward pass within the same `with mxref_torch.recipe(...)`, and before the recipe is changed"
)


class ForwardPasses:
    """What the forward passes of a layer in training found: its recipe, and the step and version of its weight."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._trained: tuple[int, int] | None = None  # step, and version of the weight

    def forget(self) -> None:
        """Forget the step, because something other than an optimizer step changes the weight."""
        self._trained = None

    def copied(self) -> ForwardPasses:
        """Return the record of a copy of the layer, which has trained in no step."""
        return ForwardPasses(self._recipe)

    def check(self, layer: OperandMaker) -> None:
        """Check a forward pass before it runs.

        Raises:
            LayerError: a backward pass recomputes a forward pass that ran under another recipe.
            StepError: the weight has changed since the forward pass before, and the step of random bits has not.
        """
        if self._recipe is not layer.recipe:
            if in_backward() and self._recipe != layer.recipe:
                raise LayerError(RECOMPUTED)
            self._recipe = layer.recipe
        self.check_step(layer)

    def check_step(self, layer: OperandMaker) -> None:
        """Check the number of a step; errors as in `check`."""
        # A weight that its owner refills keeps its version, so changes cannot be seen here.
        if not layer.has_own_weight(layer.weight):
            return
        context = layer.context
        now = context.step, layer.weight._version
        if self._trained is not None and self._trained[1] != now[1]:
            if self._trained[0] != now[0]:
                context.note_next_step()
            elif layer.draws:
                raise StepError(repeated(now[0]))
            elif context.follows_schedule:
                raise StepError(stood_still(now[0]))
            elif layer.census.listener is None:  # a handle that follows an optimizer closes the step itself
                context.note_next_step()
        self._trained = now


def check_recomputation(
    recipes: tuple[torch.Tensor, torch.Tensor] | None,
    places: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Check that activation checkpointing, where it computed a forward pass again, computed the same.

    Args:
        recipes: markers of the recipes of the forward pass and of what it saved, one tensor unless that was saved
            anew; None where nothing is compared.
        places: the same for the places of the micro-batch, which decide random bits.

    Raises:
        LayerError: the recipes differ.
        StepError: the places differ.
    """
    if recipes is not None and recipes[0] is not recipes[1] and not torch.equal(*recipes):
        raise LayerError(RECOMPUTED)
    if places is not None and places[0] is not places[1]:
        forward, recomputed = (place.tolist() for place in places)
        if forward != recomputed:
            raise StepError(another_place(forward, recomputed))
