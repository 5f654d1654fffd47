"""Operands as kernels read them: packed rows, whole in memory and aligned."""

from __future__ import annotations

import torch

from mxref.mxarray import MXArray

_ALIGNMENT = 16


def rows_of(q: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes [rows, K / 2] and scale codes [rows, K / 32] of a matrix, aligned to 16 bytes."""
    return _aligned(q.codes), _aligned(q.scales)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()
