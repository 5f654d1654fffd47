"""The outcome of a training step, and captured steps, each of which is reported when the next one has started."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mxref_torch import CapturedStep, StepContext, StepOutcome
from mxref_torch.captured.operations import ALONE as TEAM_ALONE
from mxref_torch.captured.operations import Team
from mxref_training.config import TrainConfig
from mxref_training.distributed.share import ALONE, Share
from mxref_training.model.llama import Llama
from mxref_training.run.evaluate import cross_entropy
from mxref_training.run.loss import CompiledLoss

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]
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


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs), targets)


class CapturedTraining:
    """Steps whose outcome is known when the next has been started: on a GPU one CUDA graph, on a CPU without it."""

    def __init__(
        self,
        model: Llama,
        context: StepContext,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        loss: CompiledLoss | None,
        share: Share = ALONE,
        team: Team = TEAM_ALONE,
    ) -> None:
        """Prepare to take steps, with the loss as it is compiled if it is, and this rank's share of each batch.

        Raises:
            MxrefError: as of `mxref_torch.CapturedStep`.
        """
        run = config.run
        self._take = CapturedStep(
            model, context, _loss if loss is None else lambda _, *batch: loss(*batch), optimizer,
            tokens=run.step_tokens, micro_batches=run.micro_batches, clip=config.optim.clip,
            team=team,
        )  # fmt: skip
        self._model, self._run, self._share = model, run, share
        self._rates: dict[int, float] = {}

    def start(self, batch: Batch, step: int, lr: float) -> Taken | None:
        """Start a step under the learning rate that the optimizer has; return the step before, if there is one."""
        self._model.train()
        self._rates[step] = lr
        return self._taken(self._take(*map(self._own, batch), step=step))

    def _own(self, side: NDArray[np.int64]) -> Tensor:
        """Return this rank's sequences of all micro-batches, one after the other."""
        run, share = self._run, self._share
        if share.parts == 1:
            return torch.from_numpy(side)
        return torch.from_numpy(
            np.concatenate([side[share.rows(run, number)] for number in range(run.micro_batches)])
        )

    def finish(self) -> Taken | None:
        """Wait for the last step and return it, unless it was returned already."""
        return self._taken(self._take.finish())

    def close(self) -> None:
        """Free the graph, before the ranks part."""
        self._take.close()

    def _taken(self, outcome: StepOutcome | None) -> Taken | None:
        if outcome is None:
            return None
        problem = ""
        if not math.isfinite(outcome.loss):
            problem = f"loss {outcome.loss} (run.capture = false names its layer)"
        elif not outcome.updated:
            where = (
                outcome.nonfinite or "the norm over all gradients"
            )  # each finite, and their squares overflow
            problem = f"gradient norm {outcome.norm} from {where}"
        rate = self._rates.pop(outcome.step)
        return Taken(outcome.step, rate, outcome.loss, outcome.norm, problem, outcome.widened)
