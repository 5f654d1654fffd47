"""Steps of training that wait for each of their values, and can therefore name what is not finite."""

from __future__ import annotations

import math

import torch

import mxref_torch
from mxref_torch import StepContext
from mxref_training.config import TrainConfig
from mxref_training.model.llama import Llama
from mxref_training.run.evaluate import cross_entropy, first_nonfinite_gradient, first_nonfinite_output
from mxref_training.run.first_step import FirstStep
from mxref_training.run.loss import CompiledLoss
from mxref_training.run.observe import Observer
from mxref_training.run.optim import clip_gradients
from mxref_training.run.stepping import Batch, Taken


class EagerTraining:
    """Steps whose outcome is known when they return."""

    def __init__(
        self,
        model: Llama,
        context: StepContext,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        first: FirstStep,
        loss: CompiledLoss | None,
    ) -> None:
        self._model, self._context, self._optimizer = model, context, optimizer
        self._config, self._first, self._compiled = config, first, loss
        self._device = next(model.parameters()).device

    def take(self, batch: Batch, step: int, lr: float, observer: Observer) -> Taken:
        """Take a step under the learning rate that the optimizer has; the update is left out if the step is not finite.

        Raises:
            ConfigError: as of `FirstStep.check`.
        """
        context = self._context
        context.step, context.global_tokens = step, self._config.run.step_tokens
        with observer.measuring(step + 1):
            loss, norm, problem = self._gradients(batch)
        widened = context.backend.range_exceeded()
        if widened:
            self._optimizer.zero_grad(set_to_none=True)
            mxref_torch.restart(self._model)
            self._first.count_anew()  # a step that is done over counts once
            with context.backend.widened(), observer.measuring(step + 1):
                loss, norm, problem = self._gradients(batch)
        if not problem:
            self._optimizer.step()
            self._first.check(step)
        self._optimizer.zero_grad(set_to_none=True)
        mxref_torch.advance(self._model)
        return Taken(step, lr, loss, norm, problem, widened)

    def _gradients(self, batch: Batch) -> tuple[float, float, str]:
        """Fill `.grad`, clipped, from a batch; return loss, norm, and what was not finite, if anything."""
        run = self._config.run
        all_inputs, all_targets = (
            torch.split(torch.from_numpy(side).to(self._device), run.sequences) for side in batch
        )
        self._model.train()
        total = 0.0
        for number, (inputs, targets) in enumerate(zip(all_inputs, all_targets, strict=True)):
            self._context.token_origin = number * run.sequences * run.seq_len
            if self._compiled is None:
                loss = cross_entropy(self._model(inputs), targets) / run.micro_batches
            else:
                loss = self._compiled(inputs, targets) / run.micro_batches
            total += loss.item()
            if not math.isfinite(total):
                where = first_nonfinite_output(self._model, self._context, inputs)
                return total, math.nan, f"loss {total} from {where}"
            # The first micro-batch makes the gradients.
            self._context.sole_uses = mxref_torch.sole_uses(loss) if number else {}
            loss.backward()  # type: ignore[no-untyped-call]
            self._context.sole_uses = {}
        norm = float(clip_gradients(self._model.parameters(), self._config.optim.clip))
        if not math.isfinite(norm):
            return total, norm, f"gradient norm {norm} from {first_nonfinite_gradient(self._model)}"
        return total, norm, ""
