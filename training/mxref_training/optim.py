"""AdamW with the benchmark's parameter groups, the learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mxref_training.config import OptimConfig, Schedule
from mxref_training.distributed.sharded import by_mesh, is_split
from mxref_training.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The state of AdamW for each parameter."""


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of an optimizer step.

    It rises linearly to `lr` over the first `warmup` steps (step 0 already takes lr / warmup), and then follows the
    schedule.

    Args:
        config: the optimizer's settings.
        step: from 0.
        steps: length of the run, which ends the decay where `decay_steps` is 0.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule is Schedule.CONSTANT:
        return config.lr
    end = config.decay_steps or steps
    start = config.warmup if config.decay_start is None else config.decay_start
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    if config.schedule is not Schedule.COSINE:
        return config.lr * (1 - progress)
    lowest = config.lr * config.min_lr_ratio
    return lowest + (config.lr - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's two groups: matrices, which decay, and norm weights, which do not.

    Where weights are split over different ranks, each has one group for every mesh.

    Linear weights, `lm_head` and the embedding decay, as under Megatron's rule that only biases and
    one-dimensional weights are spared; MLPerf's Llama reference trains so.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in parameters if (p.ndim >= 2) is wanted] for wanted in (True, False))
    return [
        *({"params": same, "weight_decay": weight_decay} for same in by_mesh(matrices)),
        *({"params": same, "weight_decay": 0.0} for same in by_mesh(others)),
    ]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return fused AdamW over float32 master weights, which may be split over ranks."""
    kind = torch.optim.AdamW
    if any(map(is_split, model.parameters())):
        from mxref_training.distributed.share import SplitAdamW

        kind = SplitAdamW
    return kind(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def require_float32_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError, naming the parameter, unless AdamW's moments exist and are float32."""
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state or state[moment].dtype is not torch.float32:
                found = state[moment].dtype if moment in state else "missing"
                raise ConfigError(f"optimizer state must be float32, but {moment} of {name} is {found}")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `limit` (0: never), and return the norm before.

    A norm that is not finite is returned as it is and scales nothing.
    """
    held = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
    if limit > 0 and bool(torch.isfinite(norm)):
        nn.utils.clip_grads_with_norm_(held, limit, norm)
    return norm


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name, as `exp_avg/model.norm.weight`; empty before its first step."""
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Give the optimizer the state that `optimizer_tensors` returned: of every parameter, or none at all."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters() if tensors else ():
        optimizer.state[parameter] = {moment: tensors[f"{moment}/{name}"] for moment in MOMENTS}
