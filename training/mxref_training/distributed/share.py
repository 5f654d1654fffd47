"""A rank's share of a step: its part of the batch, and sums, norms, clipping and updates over all parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mxref_torch.captured import operations
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_training.config import ONE, Axes, RunConfig
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.sharded import copies, free, own_part


@dataclass(frozen=True)
class Share:
    """A rank's part of each batch. Ranks of one tensor-parallel group have the same part."""

    ranks: Ranks = SOLE
    axes: Axes = ONE

    @property
    def index(self) -> int:
        """Number of the part, from 0."""
        return self.ranks.rank // self.axes.tensor

    @property
    def parts(self) -> int:
        """How many parts a batch has."""
        return self.axes.data

    def free(self, model: nn.Module) -> None:
        """Free the weights that forward passes without a backward pass have left gathered."""
        if not self.axes.whole:
            free(model)

    def sequences(self, run: RunConfig) -> int:
        """Return a rank's sequences of each micro-batch."""
        return run.sequences // self.parts

    def rows(self, run: RunConfig, number: int) -> slice:
        """Return which sequences of a step's batch this rank has in a micro-batch.

        Args:
            run: gives the sizes.
            number: of the micro-batch, from 0.
        """
        own = self.sequences(run)
        first = number * run.sequences + self.index * own
        return slice(first, first + own)

    def in_order(self, values: Sequence[float]) -> list[float]:
        """Return the values of all parts: all first ones in the order of parts, then all second ones, and so on.

        This is their order in one process that takes the parts one after the other. Every rank gets them all.
        """
        rows = self.ranks.gather_numbers(values)[:: self.axes.tensor]
        return [row[i] for i in range(len(values)) for row in rows]


ALONE = Share()
"""The share of one process: all of the batch."""


def added(values: Iterable[float]) -> float:
    """Return the sum from left to right. Python's `sum` adds in another way from version 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


_STABILIZER = 1e-6
"""What `torch.nn.utils.clip_grads_with_norm_` adds to the norm."""


def own_norms(gradients: Sequence[Tensor], ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the norms of this rank's parts, and its share of the square of the norm over all ranks: both float64.

    What several ranks hold counts once. Nothing here waits for the device.
    """
    norms = torch._foreach_norm([own_part(g) for g in gradients], 2, dtype=torch.float64)
    squares = torch._foreach_mul(norms, norms)
    torch._foreach_div_(squares, [float(copies(g, ranks.world)) for g in gradients])
    return torch.stack(norms), torch.stack(squares).sum()


def global_norm(gradients: Iterable[Tensor], ranks: Ranks) -> float:
    """Return the 2-norm over the gradients of all ranks, the same number on each.

    Squares are added in float64 and the norm is rounded to float32, so that it depends on the layout of ranks only
    through float64 rounding. One process adds in float32 (`mxref_training.optim.clip_gradients`).
    """
    held = list(gradients)
    squares = own_norms(held, ranks)[1].item() if held else 0.0
    total = math.sqrt(added(row[0] for row in ranks.gather_numbers([squares])))
    return float(torch.tensor(total, dtype=torch.float64).to(torch.float32))


@torch.no_grad()
def clip_split_gradients(model: nn.Module, limit: float, ranks: Ranks) -> float:
    """Scale all gradients so that their norm over all ranks is at most `limit` (0: never); return the norm before.

    A norm that is not finite scales nothing.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = global_norm(gradients, ranks)
    factor = limit / (norm + _STABILIZER)
    if limit > 0 and math.isfinite(norm) and factor < 1:
        torch._foreach_mul_([own_part(g) for g in gradients], factor)
    return norm


@torch.no_grad()
def share_amax(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the largest amax that any rank has seen in this step, for each tensor of each FP8 layer.

    Call it before `mxref_torch.advance`, on every rank. NaN becomes infinity, from which no scale is made either.
    """
    if not ranks.several:
        return
    held = [module.amax for module in model.modules() if isinstance(module, Fp8Scales) and module.delayed]
    if held:
        together = torch.stack(held).nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        torch._foreach_copy_(held, list(together.unbind()))


BUCKET = 128 << 20
"""Bytes of gradients that are added together. Each addition waits until both GPUs have multiprocessors free for it."""


class Replicas:
    """Adds gradients over ranks, in an order that does not depend on which is ready first.

    On a GPU it does so beside the backward pass, on a stream of its own.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Prepare to add the gradients of parameters, which are whole and the same on every rank.

        Args:
            parameters: in the order of the forward pass.
        """
        self._buckets = _buckets([p for p in parameters if p.requires_grad])
        device = self._buckets[0][0].device
        self._stream: Any = None
        if device.type == "cuda":
            # Of high priority: every rank waits for these kernels, which take few multiprocessors.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._missing: list[int] = []
        self._next = 0

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Run a backward pass in the block; after that of the last micro-batch, each gradient is the sum over ranks."""
        if not last:
            yield
            return
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._missing, self._next = [len(bucket) for bucket in self._buckets], 0
        hooks: list[Any] = []
        try:
            for number, bucket in enumerate(self._buckets):
                note = self._note(number)
                hooks.extend(p.register_post_accumulate_grad_hook(note) for p in bucket)  # type: ignore[no-untyped-call]
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets[self._next :]:  # some of these have no gradient
            self._add(bucket)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _note(self, number: int) -> Any:
        """Return a hook that counts a gradient of a bucket, and adds all buckets whose turn it is."""

        def ready(_: Tensor) -> None:
            self._missing[number] -= 1
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._next += 1
                self._add(self._buckets[self._next - 1])

        return ready

    def _add(self, bucket: Sequence[Tensor]) -> None:
        gradients = [p.grad for p in bucket if p.grad is not None]
        stream = self._stream
        together: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            together = dist._coalescing_manager(device=stream.device)  # type: ignore[attr-defined]
        with torch.cuda.stream(stream), together:
            for gradient in gradients:
                dist.all_reduce(gradient)


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the parameters in the order of the backward pass, in parts of at least `BUCKET` bytes but for the last."""
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if size >= BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


class SplitAdamW(torch.optim.AdamW):
    """Fused AdamW whose kernels get this rank's parts alone.

    PyTorch's own gives split tensors to the kernel, which then finds a way for each of them in Python, and takes no
    flag of the device that leaves the update out. The state is split as the parameters are, and its names and values
    are those of PyTorch's own.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; where `found_inf` is set and not zero, leave them as they are."""
        assert closure is None
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in held]
            beta1, beta2 = group["betas"]
            adamw(
                params=[own_part(p) for p in held], grads=[own_part(p.grad) for p in held],
                exp_avgs=[own_part(state["exp_avg"]) for state in states],
                exp_avg_sqs=[own_part(state["exp_avg_sq"]) for state in states],
                max_exp_avg_sqs=[], state_steps=[state["step"] for state in states], fused=True, foreach=False,
                capturable=group["capturable"], found_inf=getattr(self, "found_inf", None), amsgrad=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                maximize=False,
            )  # fmt: skip

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter, made as zeros before its first update."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        return state


class RankTeam(operations.Team):
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

    def survey(self, losses: Tensor, gradients: list[Tensor], exceeded: Tensor) -> operations.Survey:
        """Return the outcome of the step over all ranks, with the norm as `clip_split_gradients` computes it."""
        norms, square = own_norms(gradients, self._share.ranks)
        own = torch.cat(
            [
                losses.double(),
                torch.stack([square, operations.last_nonfinite(norms).double(), exceeded.double()]),
            ]
        )
        rows = rows_of(own, self._share)
        squares, last, any_exceeded = rows[:, -3], rows[:, -2], rows[:, -1]
        total = squares[0]
        for other in squares[1:]:  # from left to right, as on the host
            total = total + other
        every = rows[:: self._share.axes.tensor, :-3].t().flatten().float()
        return operations.Survey(every, total.sqrt().float().double(), last.max(), any_exceeded.any())

    def share_scales(self, model: nn.Module) -> None:
        """Set FP8's history on every rank to the largest magnitudes of all ranks."""
        share_amax(model, self._share.ranks)


def rows_of(own: Tensor, share: Share) -> Tensor:
    """Return the vectors [N] of all ranks, exactly, as rows [ranks, N]; a value that is not finite stays so."""
    rows = own.new_zeros(share.ranks.world, own.numel())
    rows[share.ranks.rank].copy_(own)
    dist.all_reduce(rows)
    return rows


def team_of(share: Share, model: nn.Module) -> operations.Team:
    """Return the ranks that train a model together."""
    if not share.ranks.several:
        return operations.ALONE
    return RankTeam(share, Replicas(list(model.parameters())) if share.axes.whole else None)
