"""AdamW over parameters that are split over ranks: each rank updates its own parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mxref_training.distributed.tensors import own_part


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
