"""Operands as kernels read them: packed rows, contiguous and aligned."""

from __future__ import annotations

import torch

from mxref.gemm import prescale_product
from mxref.mxarray import MXArray

_ALIGNMENT = 16


def rows_of(q: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes [rows, K * bits / 8] and scale codes [rows, K / k] of a matrix, aligned to 16 bytes."""
    return _aligned(q.codes), _aligned(q.scales)


def unprescale(a: MXArray, b: MXArray) -> float:
    """Return the factor that undoes the prescale of operands; kernels round it to float32."""
    return float(1 / prescale_product(a, b))


def _aligned(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()
