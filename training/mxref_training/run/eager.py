"""Steps of training that wait for each of their values, and can therefore name what is not finite."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

import mxref_torch
from mxref_torch import StepContext
from mxref_training.config import TrainConfig
from mxref_training.distributed.amax import share_amax
from mxref_training.distributed.gradients import clip_split_gradients
from mxref_training.distributed.share import ALONE, Share
from mxref_training.distributed.team import team_of
from mxref_training.model.llama import Llama
from mxref_training.run.evaluate import cross_entropy, first_nonfinite_gradient, first_nonfinite_output
from mxref_training.run.first_step import FirstStep
from mxref_training.run.loss import CompiledLoss
from mxref_training.run.observe import Observer
from mxref_training.run.optim import clip_gradients
from mxref_training.run.silent import SilentObserver
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
        share: Share = ALONE,
    ) -> None:
        self._share, self._ranks, self.team = share, share.ranks, team_of(share, model)
        self._model, self._context, self._optimizer = model, context, optimizer
        self._config, self._first, self._compiled = config, first, loss
        self._device = next(model.parameters()).device

    def take(self, batch: Batch, step: int, lr: float, observer: Observer | SilentObserver) -> Taken:
        """Take a step under the learning rate that the optimizer has; the update is left out if the step is not finite.

        Raises:
            ConfigError: as of `FirstStep.check`.
        """
        context = self._context
        context.step, context.global_tokens = step, self._config.run.step_tokens
        with observer.measuring(step + 1), self._held():
            loss, norm, problem = self._gradients(batch)
        widened = self._ranks.any(context.backend.range_exceeded())
        if widened:
            self._optimizer.zero_grad(set_to_none=True)
            mxref_torch.restart(self._model)
            self._first.count_anew()  # a step that is done over counts once
            with context.backend.widened(), observer.measuring(step + 1), self._held():
                loss, norm, problem = self._gradients(batch)
        if not problem:
            self._optimizer.step()
            self._first.check(step)
        else:
            self.free()
        self._optimizer.zero_grad(set_to_none=True)
        share_amax(self._model, self._ranks)
        mxref_torch.advance(self._model)
        return Taken(step, lr, loss, norm, problem, widened)

    def _held(self) -> AbstractContextManager[None]:
        """Return a context that holds the quantized weights; compiled code quantizes them as it reads them."""
        return mxref_torch.weights_held(self._model) if self._compiled is None else nullcontext()

    def _gradients(self, batch: Batch) -> tuple[float, float, str]:
        """Fill `.grad`, clipped, from a batch; return loss, norm, and what was not finite, if anything."""
        run, share = self._config.run, self._share
        everything = tuple(torch.from_numpy(side) for side in batch)
        self._model.train()
        total = 0.0
        for number in range(run.micro_batches):
            rows = share.rows(run, number)
            inputs, targets = (side[rows].to(self._device) for side in everything)
            self._context.token_origin = rows.start * run.seq_len
            if self._compiled is None:
                loss = cross_entropy(self._model(inputs), targets) / (run.micro_batches * share.parts)
            else:
                loss = self._compiled(inputs, targets) / (run.micro_batches * share.parts)
            for part in share.in_order([loss.item()]):
                total += part
            if not math.isfinite(total):
                where = first_nonfinite_output(self._model, self._context, inputs, self._ranks)
                return total, math.nan, f"loss {total} from {where}"
            # The first micro-batch makes the gradients. A split weight has none of its own to add to.
            adds = number and (share.axes.whole or not self._ranks.several)
            self._context.sole_uses = mxref_torch.sole_uses(loss) if adds else {}
            with self.team.adding(last=number == run.micro_batches - 1):
                loss.backward()  # type: ignore[no-untyped-call]
            self._context.sole_uses = {}
        norm = self._clipped()
        if not math.isfinite(norm):
            return (
                total,
                norm,
                f"gradient norm {norm} from {first_nonfinite_gradient(self._model, self._ranks)}",
            )
        return total, norm, ""

    def free(self) -> None:
        """Free the split weights that forward passes without a backward pass have left gathered."""
        if self._ranks.several and not self._share.axes.whole:
            from mxref_training.distributed import sharded

            sharded.free(self._model)

    def _clipped(self) -> float:
        """Clip the gradients and return their norm before."""
        limit = self._config.optim.clip
        if self._ranks.several:
            return clip_split_gradients(self._model, limit, self._ranks)
        return float(clip_gradients(self._model.parameters(), limit))
