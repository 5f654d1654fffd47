"""The checks of a first step: every GEMM ran in its format, and all state is float32."""

from __future__ import annotations

import torch

import mxref_torch
from mxref.recipe import Recipe
from mxref_torch import StepContext
from mxref_training.config import TrainConfig
from mxref_training.model.llama import Llama
from mxref_training.run.optim import require_float32_state


class FirstStep:
    """Checks the first step of this process, and the first of each phase, whose update was not skipped."""

    def __init__(
        self,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        context: StepContext,
        recipe: Recipe,
        config: TrainConfig,
    ) -> None:
        self._model, self._optimizer, self._context = model, optimizer, context
        self._recipe, self._run = recipe, config.run
        self._expected = True

    def expect(self) -> None:
        """Check the next step: it begins a phase."""
        self._expected = True

    def count_anew(self) -> None:
        """Forget the GEMMs counted so far if a check is still to come."""
        if self._expected:
            self._context.reset_census()

    def check(self, step: int) -> None:
        """Check a step, unless one was checked before it.

        Raises:
            LayerError: a GEMM ran in another format than the recipe's.
            ConfigError: a weight, a gradient or a moment of the optimizer is not float32.
        """
        if not self._expected:
            return
        # By the run's own recipe, not by the one to which the model was converted.
        spans = self._recipe.spans(self._run.steps)
        recipe = next(span.recipe for span in reversed(spans) if span.first <= step)
        mxref_torch.check_census(self._context, self._model, recipe, self._run.micro_batches)
        require_float32_state(self._model, self._optimizer)
        self._expected = False
