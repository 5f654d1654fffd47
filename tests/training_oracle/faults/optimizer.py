"""Faults of clipping, of the learning rate and of AdamW; planted as in `loop`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mxref_training import build, optim, run_state, steps
from training_oracle.faults.loop import Patch, Plant

# ---- clipping ----


def _clip(change: Callable[[list[torch.Tensor], float], Any]) -> Plant:
    """`change` takes the parameters, which all have gradients."""
    return lambda patch: patch.setattr(steps, "clip_gradients", lambda held, limit: change(list(held), limit))


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
    return lambda patch: patch.setattr(steps, "learning_rate", change)


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

    patch.setattr(steps, "set_learning_rate", set_rate)


# ---- AdamW ----


def _optimizer(change: Callable[[Any, Any], Any]) -> Plant:
    """`change` takes the model and the settings."""
    return lambda patch: patch.setattr(build, "make_optimizer", change)


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
    right = run_state.load_optimizer_tensors

    def load(model: Any, optimizer: Any, tensors: dict[str, torch.Tensor]) -> None:
        right(model, optimizer, {name: change(name, t) for name, t in tensors.items()})

    return lambda patch: patch.setattr(run_state, "load_optimizer_tensors", load)


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
        for held in self.state.values():
            held["exp_avg_sq"].copy_(held["exp_avg_sq"].bfloat16())


weights_in_bfloat16 = _optimizer(lambda model, config: Narrow(_make(model, config).param_groups))
moments_in_bfloat16 = _optimizer(lambda model, config: NarrowMoments(_make(model, config).param_groups))
