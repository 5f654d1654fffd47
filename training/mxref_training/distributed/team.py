"""The ranks of a run for `mxref_torch.CapturedStep`: the values that they exchange in a step, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxref_torch.captured.operations import ALONE, Survey, Team, last_nonfinite
from mxref_training.distributed.amax import share_amax
from mxref_training.distributed.gradients import own_norms
from mxref_training.distributed.replicas import Replicas
from mxref_training.distributed.share import Share
from mxref_training.distributed.tensors import own_part


class RankTeam(Team):
    """The ranks of a run, each with its share of the batch."""

    def __init__(self, share: Share, replicas: Replicas | None) -> None:
        """Take the ranks of a share; `replicas` where each holds the whole model, else its weights are split."""
        self._share, self._replicas = share, replicas
        self.index, self.parts = share.index, share.parts

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor."""
        return own_part(tensor)

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Run a backward pass in the block; split weights add their gradients over ranks themselves."""
        if self._replicas is None:
            yield
            return
        with self._replicas.adding(last):
            yield

    def survey(self, losses: Tensor, gradients: list[Tensor], exceeded: Tensor) -> Survey:
        """Return the outcome of the step over all ranks, with the norm as `clip_split_gradients` computes it."""
        norms, square = own_norms(gradients, self._share.ranks)
        own = torch.cat(
            [losses.double(), torch.stack([square, last_nonfinite(norms).double(), exceeded.double()])]
        )
        rows = rows_of(own, self._share)
        squares, last, any_exceeded = rows[:, -3], rows[:, -2], rows[:, -1]
        total = squares[0]
        for other in squares[1:]:  # from left to right, as on the host
            total = total + other
        every = rows[:: self._share.axes.tensor, :-3].t().flatten().float()
        return Survey(every, total.sqrt().float().double(), last.max(), any_exceeded.any())

    def share_scales(self, model: nn.Module) -> None:
        """Set FP8's history on every rank to the largest magnitudes of all ranks."""
        share_amax(model, self._share.ranks)


def rows_of(own: Tensor, share: Share) -> Tensor:
    """Return the vectors [N] of all ranks, exactly, as rows [ranks, N]; a value that is not finite stays so."""
    rows = own.new_zeros(share.ranks.world, own.numel())
    rows[share.ranks.rank].copy_(own)
    dist.all_reduce(rows)
    return rows


def team_of(share: Share, model: nn.Module) -> Team:
    """Return the ranks that train a model together."""
    if not share.ranks.several:
        return ALONE
    return RankTeam(share, Replicas(list(model.parameters())) if share.axes.whole else None)
