"""The norm of a gradient that lies on several ranks, and its clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.share import added
from mxref_training.distributed.tensors import copies, own_part

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
