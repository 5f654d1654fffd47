"""Faults of the training loop: data, loss, gradients, clipping, schedule, optimizer and evaluation.

Each function plants one, by replacing a function or method of the product for as long as `patch` lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxref_training import evaluate, loop, optim
from mxref_training.data import loader
from mxref_training.data.loader import Loader
from mxref_training.model import Llama

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

DATA_SEED, RUN_SEED, MICRO_BATCHES = 11, 3, 2

# ---- initial weights ----


def weights_of_the_data_seed(patch: Patch) -> None:
    patch.setattr(loop, "Llama", lambda config, seed, **rest: Llama(config, DATA_SEED, **rest))


def wide_outputs(patch: Patch) -> None:
    make = lambda config, seed, **rest: Llama(replace(config, scale_output_init=False), seed, **rest)  # noqa: E731
    patch.setattr(loop, "Llama", make)


# ---- the order of the data ----


def _starts(change: Callable[[Loader, int], Any]) -> Plant:
    return lambda patch: patch.setattr(Loader, "_starts", change)


_starts_right = Loader._starts
one_order_for_all_epochs = _starts(lambda self, epoch: _starts_right(self, 0))
corpus_order = _starts(lambda self, epoch: np.arange(self.windows) * self.seq_len)
windows_without_shift = _starts(lambda self, epoch: _starts_right(self, epoch) // self.seq_len * self.seq_len)
windows_apart = _starts(
    lambda self, epoch: (
        _starts_right(self, epoch) // self.seq_len * (self.seq_len + 1) % (self.windows * 16 - 16)
    )
)


def order_of_the_run_seed(patch: Patch) -> None:
    patch.setattr(loop, "Loader", lambda ids, length, seed, sha: Loader(ids, length, RUN_SEED, sha))


def loader_starts_over(patch: Patch) -> None:
    patch.setattr(Loader, "load_state_dict", lambda self, state: None)


def loader_forgets_the_place(patch: Patch) -> None:
    right = Loader.load_state_dict
    patch.setattr(Loader, "load_state_dict", lambda self, state: right(self, {**state, "position": 0}))


# ---- the loss ----


def targets_shifted(by: int) -> Plant:
    def gather(tokens: Any, starts: list[int], seq_len: int) -> Any:
        inputs = np.stack([tokens[s : s + seq_len] for s in starts]).astype(np.int64)
        return inputs, np.stack([np.roll(tokens, -by)[s : s + seq_len] for s in starts]).astype(np.int64)

    return lambda patch: patch.setattr(loader, "_gather", gather)


def _loss(change: Callable[..., Any]) -> Plant:
    """In training alone; the evaluation has a name of its own for it."""
    return lambda patch: patch.setattr(loop, "cross_entropy", change)


_right_loss = evaluate.cross_entropy
loss_in_bits = _loss(lambda logits, targets: _right_loss(logits, targets) / math.log(2))
loss_not_divided = _loss(lambda logits, targets: _right_loss(logits, targets) * MICRO_BATCHES)


def _torch_loss(**options: Any) -> Plant:
    return _loss(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options))


ignores_token_zero = _torch_loss(ignore_index=0)
smoothed_labels = _torch_loss(label_smoothing=0.05)


@_loss
def gradient_not_divided(logits: Any, targets: Any) -> Any:
    found = _right_loss(logits, targets)
    return found + (found - found.detach()) * (MICRO_BATCHES - 1)


# ---- gradients ----


def gradients_pile_up(patch: Patch) -> None:
    patch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)


def _forward(change: Callable[[Llama, Any], Any]) -> Plant:
    return lambda patch: patch.setattr(Llama, "forward", change)


_right_forward = Llama.forward


@_forward
def last_micro_batch_alone(self: Llama, tokens: Any) -> Any:
    if torch.is_grad_enabled():
        self.zero_grad()
    return _right_forward(self, tokens)


def _half(x: Any) -> Any:
    return x.detach() / 2 + x / 2


def detached_embedding(patch: Patch) -> None:
    right = torch.nn.Embedding.forward
    # A gradient so small that nobody misses it, and that all the bookkeeping finds in its place.
    patch.setattr(
        torch.nn.Embedding, "forward", lambda self, x: right(self, x).detach() + right(self, x) * 1e-6
    )


def halved_backward(patch: Patch) -> None:
    from mxref_training.model import MLP

    right = MLP.forward
    patch.setattr(MLP, "forward", lambda self, x: _half(right(self, x)))


def tied_head_detached(patch: Patch) -> None:
    def forward(self: Llama, tokens: Any) -> Any:
        x = self.model(tokens, self.compute_dtype).to(self.compute_dtype)
        return (x @ self.lm_head.weight.detach().to(x.dtype).T).float()

    patch.setattr(Llama, "forward", forward)
    patch.setattr("mxref_training.linear.check_census", lambda *args: None)


# ---- clipping ----


def _clip(change: Callable[[list[torch.Tensor], float], Any]) -> Plant:
    """`change` takes the parameters, which all have gradients."""
    return lambda patch: patch.setattr(loop, "clip_gradients", lambda held, limit: change(list(held), limit))


_clip_right = optim.clip_gradients


def _norm(held: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])


@_clip
def clips_each(held: list[torch.Tensor], limit: float) -> Any:
    norm = _norm(held)
    for parameter in held:
        _clip_right([parameter], limit)
    return norm


@_clip
def clips_matrices_apart(held: list[torch.Tensor], limit: float) -> Any:
    norm = _norm(held)
    for group in ([p for p in held if p.ndim == 2], [p for p in held if p.ndim == 1]):
        _clip_right(group, limit)
    return norm


@_clip
def largest_norm(held: list[torch.Tensor], limit: float) -> Any:
    return torch.nn.utils.clip_grad_norm_(held, limit, norm_type=math.inf)


@_clip
def clips_values(held: list[torch.Tensor], limit: float) -> Any:
    norm = _norm(held)
    torch.nn.utils.clip_grad_value_(held, 0.05)
    return norm


@_clip
def always_scales(held: list[torch.Tensor], limit: float) -> Any:
    norm = _norm(held)
    for parameter in held:
        assert parameter.grad is not None
        parameter.grad *= limit / norm
    return norm


@_clip
def logs_the_clipped_norm(held: list[torch.Tensor], limit: float) -> Any:
    _clip_right(held, limit)
    return _norm(held)


never_clips = _clip(lambda held, limit: _clip_right(held, 0))
tied_counted_twice = _clip(lambda held, limit: _clip_right([*held, held[0]], limit))

# ---- schedule ----


def _rate(change: Callable[[Any, int, int], float]) -> Plant:
    return lambda patch: patch.setattr(loop, "learning_rate", change)


_right_rate = optim.learning_rate


def _with(**fields: Any) -> Plant:
    return _rate(lambda config, step, steps: _right_rate(replace(config, **fields), step, steps))


def _cosine(change: Callable[[Any, int], float]) -> Plant:
    """`change` gives the rate after the warm-up."""
    return _rate(lambda c, step, steps: _right_rate(c, step, steps) if step < c.warmup else change(c, step))


def _half_cosine(c: Any, progress: float) -> float:
    return c.lr * (c.min_lr_ratio + (1 - c.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


cosine_without_floor, cosine_ends_with_the_run = _with(min_lr_ratio=0.0), _with(decay_steps=0)
cosine_a_step_late, warm_up_too_long = _with(decay_steps=9), _with(warmup=4)
floor_as_a_rate = _rate(
    lambda c, step, steps: _right_rate(replace(c, min_lr_ratio=min(1.0, c.min_lr_ratio / c.lr)), step, steps)
)
warm_up_from_zero = _rate(
    lambda c, step, steps: c.lr * step / c.warmup if step < c.warmup else _right_rate(c, step, steps)
)
cosine_from_zero = _cosine(lambda c, step: _half_cosine(c, min(1.0, step / c.decay_steps)))
cosine_goes_on = _cosine(lambda c, step: _half_cosine(c, (step - c.warmup) / (c.decay_steps - c.warmup)))
linear_decay = _cosine(
    lambda c, step: (
        c.lr * max(c.min_lr_ratio, 1 - (1 - c.min_lr_ratio) * (step - c.warmup) / (c.decay_steps - c.warmup))
    )
)
late_rate = _rate(lambda c, step, steps: _right_rate(c, max(0, step - 1), steps))


def rate_of_the_first_group(patch: Patch) -> None:
    def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr

    patch.setattr(loop, "set_learning_rate", set_rate)


# ---- AdamW ----


def _optimizer(change: Callable[[Any, Any], Any]) -> Plant:
    """`change` takes the model and the settings."""
    return lambda patch: patch.setattr(loop, "make_optimizer", change)


_make = optim.make_optimizer


def betas(**fields: float) -> Plant:
    return _optimizer(lambda model, config: _make(model, replace(config, **fields)))


betas_exchanged = _optimizer(
    lambda model, config: _make(model, replace(config, beta1=config.beta2, beta2=config.beta1))
)
default_eps = _optimizer(lambda model, config: _make(model, replace(config, eps=1e-8)))
nothing_decays = _optimizer(lambda model, config: _make(model, replace(config, weight_decay=0.0)))


def _with_groups(change: Callable[[Any, Any], list[dict[str, Any]]]) -> Plant:
    def make(model: Any, c: Any) -> Any:
        return torch.optim.AdamW(
            change(model, c), lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay
        )

    return _optimizer(make)


norms_decay = _with_groups(lambda model, c: [{"params": list(model.parameters())}])
embeddings_spared = _with_groups(
    lambda model, c: [
        {"params": [p for p in model.parameters() if p.ndim == 2 and len(p) < 64]},
        {"params": [p for p in model.parameters() if p.ndim < 2 or len(p) >= 64], "weight_decay": 0.0},
    ]
)


class Hand(torch.optim.AdamW):
    """AdamW written out, with a fault of the kind that `options` names."""

    options: dict[str, Any] = {}  # noqa: RUF012

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        o = {"eps": "", "corrected": True, "second_corrected": True, "decay": "", "nesterov": False}
        o |= self.options
        for group in self.param_groups:
            (b1, b2), lr, eps, wd = group["betas"], group["lr"], group["eps"], group["weight_decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    zeros = torch.zeros_like
                    state |= {"step": torch.tensor(0.0), "exp_avg": zeros(p), "exp_avg_sq": zeros(p)}
                g = p.grad + wd * p if o["decay"] == "coupled" else p.grad
                state["step"] += 1
                m = state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                v = state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m = b1 * m + (1 - b1) * g if o["nesterov"] else m
                t = float(state["step"])
                c1 = 1 - b1**t if o["corrected"] else 1.0
                c2 = 1 - b2**t if o["corrected"] and o["second_corrected"] else 1.0
                roots = {
                    "": (v / c2).sqrt() + eps,
                    "inside": (v / c2 + eps).sqrt(),
                    "before": (v.sqrt() + eps) / c2**0.5,
                }
                update = lr * m / c1 / roots[o["eps"]]
                factor = {"": 1 - lr * wd, "coupled": 1.0, "rateless": 1 - wd, "after": 1.0}[o["decay"]]
                p.mul_(factor).sub_(update)
                if o["decay"] == "after":
                    p.mul_(1 - lr * wd)


def hand(**options: Any) -> Plant:
    kind = type("Planted", (Hand,), {"options": options})
    return _optimizer(lambda model, config: kind(_make(model, config).param_groups))


def _restored(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Plant:
    right = loop.load_optimizer_tensors

    def load(model: Any, optimizer: Any, tensors: dict[str, torch.Tensor]) -> None:
        right(model, optimizer, {name: change(name, t) for name, t in tensors.items()})

    return lambda patch: patch.setattr(loop, "load_optimizer_tensors", load)


moments_lost = _restored(lambda name, t: t if name.startswith("step") else torch.zeros_like(t))
optimizer_step_lost = _restored(lambda name, t: torch.zeros_like(t) if name.startswith("step") else t)


class Narrow(torch.optim.AdamW):
    """Keeps what BF16 holds of each weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.bfloat16())


class NarrowMoments(torch.optim.AdamW):
    """Keeps what BF16 holds of each second moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())


weights_in_bfloat16 = _optimizer(lambda model, config: Narrow(_make(model, config).param_groups))
moments_in_bfloat16 = _optimizer(lambda model, config: NarrowMoments(_make(model, config).param_groups))


# ---- evaluation ----


def never_in_evaluation_mode(patch: Patch) -> None:
    patch.setattr(Llama, "eval", lambda self: self)


def never_in_training_mode(patch: Patch) -> None:
    patch.setattr(Llama, "train", lambda self, mode=True: torch.nn.Module.train(self, False))


_right_evaluate = evaluate.evaluate


def _evaluate(change: Callable[..., Any]) -> Plant:
    """`change` takes what `evaluate` does."""
    return lambda patch: patch.setattr(loop, "evaluate", change)


@_evaluate
def validates_on_training_tokens(model: Any, context: Any, tokens: Any, **rest: Any) -> Any:
    from training_scenarios import CORPUS

    return _right_evaluate(model, context, CORPUS.train.ids, **rest)


limit_ignored = _evaluate(
    lambda model, context, tokens, **rest: _right_evaluate(
        model, context, tokens, **rest | {"limit": len(tokens)}
    )
)


@_evaluate
def divided_by_the_limit(model: Any, context: Any, tokens: Any, **rest: Any) -> Any:
    found = _right_evaluate(model, context, tokens, **rest)
    return replace(found, loss=found.loss * found.tokens / rest["limit"])


def _batches(change: Callable[..., Any]) -> Plant:
    return lambda patch: patch.setattr(evaluate, "sequential_batches", change)


_right_batches = loader.sequential_batches
overlapping_windows = _batches(
    lambda tokens, seq_len, batch, limit: (
        (tokens[i : i + seq_len][None].astype(int), tokens[i + 1 : i + seq_len + 1][None].astype(int))
        for i in range(0, limit // seq_len * seq_len // 2, seq_len // 2)
    )
)
drops_the_last_batch = _batches(
    lambda tokens, seq_len, batch, limit: list(_right_batches(tokens, seq_len, batch, limit))[:-1]
)
shuffled_validation = _batches(
    lambda tokens, seq_len, batch, limit: _right_batches(np.roll(tokens, 5), seq_len, batch, limit)
)


def mean_of_means(patch: Patch) -> None:
    losses: list[float] = []

    def loss(logits: Any, targets: Any, reduction: str) -> Any:
        losses.append(_right_loss(logits, targets).item())
        return _right_loss(logits, targets, reduction)

    def mean(*args: Any, **rest: Any) -> Any:
        losses.clear()
        found = _right_evaluate(*args, **rest)
        return replace(found, loss=sum(losses) / len(losses))

    patch.setattr(evaluate, "cross_entropy", loss)
    patch.setattr(loop, "evaluate", mean)


def perplexity_of_two(patch: Patch) -> None:
    patch.setattr(evaluate.Evaluation, "perplexity", property(lambda self: 2**self.loss))
