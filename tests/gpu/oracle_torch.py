"""Quantization of a block in 64-bit integers, in torch: no part of it is shared with what is under test."""

from __future__ import annotations

import torch

# Where a rounding leaves one code for the next, in quarters: (threshold, whether the tie goes up).
THRESHOLDS = {
    "rne": ((1, False), (3, True), (5, False), (7, True), (10, False), (14, True), (20, False)),
    "rna": ((1, True), (3, True), (5, True), (7, True), (10, True), (14, True), (20, True)),
    "rtz": ((2, True), (4, True), (6, True), (8, True), (12, True), (16, True), (24, True)),
}
# The smallest mantissa at which a rule takes the next power of two.
TURNS = {"floor": 1 << 23, "ceil": 1, "rceil": 0x400001, "even": 0x600000}


def scale_codes(bits: torch.Tensor, rule: str) -> torch.Tensor:
    """Return the E8M0 codes of blocks [N, 32] of float32 bits, int64 [N]; 255 where a block holds NaN or Inf."""
    amax = (bits & 0x7FFFFFFF).amax(dim=1)
    exponent, mantissa = amax >> 23, amax & 0x7FFFFF
    code = (exponent - 2 + (mantissa >= TURNS[rule]).long()).clamp(min=0)
    code = torch.where(exponent <= 1, 0, code)
    return torch.where(exponent == 255, 255, code)


def element_codes(bits: torch.Tensor, scale: torch.Tensor, rounding: str) -> torch.Tensor:
    """Return the codes of elements [N, J] of float32 bits under scale codes [N], int64; 0 in NaN blocks.

    The magnitude is m * 2^(e - 150) for integers m < 2^24 and e >= 1; in quarters of the scale it is m / 2^k.
    """
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    m = torch.where(exponent > 0, mantissa + (1 << 23), mantissa)
    k = (148 - exponent.clamp(min=1) + scale[:, None] - 127).clamp(max=40)
    code = torch.zeros_like(bits)
    for threshold, tie_up in THRESHOLDS[rounding]:
        edge = torch.tensor(threshold, device=bits.device) << k.clamp(min=0)
        lifted = m << (-k).clamp(min=0)
        code += (lifted >= edge) if tie_up else (lifted > edge)
    code |= (bits >> 28) & 8
    return torch.where(scale[:, None] == 255, 0, code)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [N, J] two per byte, the even ones low."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
