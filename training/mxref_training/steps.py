"""Two ways to take an optimizer step, with one interface.

`EagerSteps` waits for each value, and can therefore name what is not finite. `CapturedSteps` starts a step and returns
the one before it: on a GPU a step is one CUDA graph, and on a CPU the same operations without a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import mxref_torch
from mxref.recipe import Recipe
from mxref_training.config import TrainConfig
from mxref_training.distributed import share as shares
from mxref_training.finite import first_nonfinite_gradient, first_nonfinite_output
from mxref_training.model.loss import CompiledLoss, cross_entropy
from mxref_training.observe import measuring
from mxref_training.optim import clip_gradients, learning_rate, require_float32_state, set_learning_rate

Tokens = np.ndarray[Any, np.dtype[np.int64]]
Batch = tuple[Tokens, Tokens]
"""Tokens and their targets."""


@dataclass(frozen=True)
class Taken:
    """The outcome of an optimizer step."""

    step: int
    """From 0."""
    lr: float
    loss: float
    norm: float
    """Norm of the gradient, before clipping."""
    problem: str
    """The value that was not finite, so that the update was skipped; else empty."""
    widened: bool
    """Whether it was repeated, because an operand left the range of the backend's fast GEMM."""
    measured: list[Mapping[str, Any]] = field(default_factory=list)
    """Lines of telemetry."""


class Steps:
    """Takes the optimizer steps of a model, on this rank's share of each batch.

    The first step of this process, and the first of each phase, is checked unless it is skipped: every GEMM ran in its
    format, and all state is float32.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        context: mxref_torch.StepContext,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        recipe: Recipe,
        loss: CompiledLoss | None,
        share: shares.Share,
    ) -> None:
        self.model, self.context, self.optimizer = model, context, optimizer
        self.config, self.recipe, self.compiled = config, recipe, loss
        self.share, self.ranks, self.team = share, share.ranks, shares.team_of(share, model)
        self._to_check = True

    def take(self, batch: Batch, step: int) -> Taken | None:
        """Take or start a step, counted from 0, and return one that has ended.

        Raises:
            LayerError: a GEMM ran in another format than the recipe's.
            ConfigError: a weight, a gradient or a moment of the optimizer is not float32.
        """
        raise NotImplementedError

    def catch_up(self) -> Taken | None:
        """Wait for the last step and return it, unless it was returned already."""
        return None

    def close(self) -> None:
        """Free what the steps hold, before the ranks part."""

    def check_next(self) -> None:
        """Check the next step too."""
        self._to_check = True

    def _set_rate(self, step: int) -> float:
        """Set the learning rate of a step, and return it."""
        rate = learning_rate(self.config.optim, step, self.config.run.steps)
        set_learning_rate(self.optimizer, rate)
        return rate

    def _count_anew(self) -> None:
        """Forget the GEMMs counted so far if a check is still to come."""
        if self._to_check:
            self.context.reset_census()

    def _check(self, step: int) -> None:
        """Check a step, unless that is done."""
        if self._to_check:
            # By the run's own recipe, not by the one to which the model was converted.
            spans = self.recipe.spans(self.config.run.steps)
            recipe = next(span.recipe for span in reversed(spans) if span.first <= step)
            mxref_torch.check_census(self.context, self.model, recipe, self.config.run.micro_batches)
            require_float32_state(self.model, self.optimizer)
            self._to_check = False


class EagerSteps(Steps):
    """Steps whose outcome is known when they return."""

    def take(self, batch: Batch, step: int) -> Taken:
        """Take a step; the update is left out if the step is not finite."""
        context, backend, lr = self.context, self.context.backend, self._set_rate(step)
        context.step, context.global_tokens = step, self.config.run.step_tokens
        self._count_anew()
        loss, norm, problem, measured = self._gradients(batch, step)
        widened = self.ranks.any(backend.range_exceeded())
        if widened:
            self.optimizer.zero_grad(set_to_none=True)
            mxref_torch.restart(self.model)
            self._count_anew()  # a step that is done over counts once
            with backend.widened():
                loss, norm, problem, measured = self._gradients(batch, step)
        if not problem:
            self.optimizer.step()
            self._check(step)
        else:
            self.share.free(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        shares.share_amax(self.model, self.ranks)
        mxref_torch.advance(self.model)
        return Taken(step, lr, loss, norm, problem, widened, measured)

    def _gradients(self, batch: Batch, step: int) -> tuple[float, float, str, list[Mapping[str, Any]]]:
        """Fill `.grad`, clipped, from a batch.

        Returns:
            Loss, norm, what was not finite, if anything, and lines of telemetry, if it is due at the step.
        """
        run, share, device = self.config.run, self.share, next(self.model.parameters()).device
        everything = tuple(torch.from_numpy(side) for side in batch)
        due = run.telemetry_every and (step + 1) % run.telemetry_every == 0 and self.ranks.first
        lines: list[Mapping[str, Any]] = []
        self.model.train()
        total = 0.0
        with (
            measuring(self.model, self.context, lines) if due else nullcontext(),
            # Compiled code quantizes weights as it reads them.
            mxref_torch.weights_held(self.model) if self.compiled is None else nullcontext(),
        ):
            for number in range(run.micro_batches):
                rows = share.rows(run, number)
                inputs, targets = (side[rows].to(device) for side in everything)
                self.context.token_origin = rows.start * run.seq_len
                if self.compiled is None:
                    loss = cross_entropy(self.model(inputs), targets)
                else:
                    loss = self.compiled(inputs, targets)
                loss = loss / (run.micro_batches * share.parts)
                for part in share.in_order([loss.item()]):
                    total += part
                if not math.isfinite(total):
                    where = first_nonfinite_output(self.model, self.context, inputs, self.ranks)
                    return total, math.nan, f"loss {total} from {where}", lines
                # The first micro-batch makes the gradients. A split weight has none of its own to add to.
                adds = number and (share.axes.whole or not self.ranks.several)
                self.context.sole_uses = mxref_torch.sole_uses(loss) if adds else {}
                with self.team.adding(last=number == run.micro_batches - 1):
                    loss.backward()  # type: ignore[no-untyped-call]
                self.context.sole_uses = {}
            norm = self._clipped()
            problem = ""
            if not math.isfinite(norm):
                problem = f"gradient norm {norm} from {first_nonfinite_gradient(self.model, self.ranks)}"
        return total, norm, problem, lines

    def _clipped(self) -> float:
        """Clip the gradients and return their norm before."""
        limit = self.config.optim.clip
        if self.ranks.several:
            return shares.clip_split_gradients(self.model, limit, self.ranks)
        return float(clip_gradients(self.model.parameters(), limit))


class CapturedSteps(Steps):
    """Steps whose outcome is known when the next has been started.

    Raises:
        MxrefError: as of `mxref_torch.CapturedStep`.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        run, loss = self.config.run, self.compiled
        self._rates: dict[int, float] = {}
        self._step = mxref_torch.CapturedStep(
            self.model,
            self.context,
            (lambda model, *batch: cross_entropy(model(batch[0]), batch[1]))
            if loss is None
            else (lambda _, *batch: loss(*batch)),
            self.optimizer,
            tokens=run.step_tokens,
            micro_batches=run.micro_batches,
            clip=self.config.optim.clip,
            team=self.team,
        )

    def take(self, batch: Batch, step: int) -> Taken | None:
        """Start a step; return the step before, if there is one."""
        self.model.train()
        self._rates[step] = self._set_rate(step)
        self._count_anew()
        taken = self._taken(self._step(*map(self._own, batch), step=step))
        self._check(step)
        return taken

    def catch_up(self) -> Taken | None:
        """Wait for the last step and return it, unless it was returned already."""
        return self._taken(self._step.finish())

    def close(self) -> None:
        """Free the graph."""
        self._step.close()

    def _own(self, side: Tokens) -> torch.Tensor:
        """Return this rank's sequences of all micro-batches, one after the other."""
        run, share = self.config.run, self.share
        if share.parts == 1:
            return torch.from_numpy(side)
        return torch.from_numpy(
            np.concatenate([side[share.rows(run, number)] for number in range(run.micro_batches)])
        )

    def _taken(self, outcome: mxref_torch.StepOutcome | None) -> Taken | None:
        if outcome is None:
            return None
        problem = ""
        if not math.isfinite(outcome.loss):
            problem = f"loss {outcome.loss} (run.capture = false names its layer)"
        elif not outcome.updated:
            # Where each gradient is finite, their squares overflow.
            problem = (
                f"gradient norm {outcome.norm} from {outcome.nonfinite or 'the norm over all gradients'}"
            )
        rate = self._rates.pop(outcome.step)
        return Taken(outcome.step, rate, outcome.loss, outcome.norm, problem, outcome.widened)
