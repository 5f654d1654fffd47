"""FP8's largest magnitudes over all ranks: the scales of the next step are then those of the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mxref_torch.layer.fp8 import Fp8Scales
from mxref_training.distributed.ranks import Ranks


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
