"""Operands made on the device, their exact products in float64, and `ordered` step by step."""

from __future__ import annotations

import torch

from mxref import MXArray
from mxref.formats import E2M1
from mxref_triton.launch import DEVICE


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the elements of packed codes [rows, K / 2], float64 [rows, K]."""
    grid = torch.tensor(
        [*E2M1.magnitudes, *(-m for m in E2M1.magnitudes)], dtype=torch.float64, device=DEVICE
    )
    return grid[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]


def drawn(rows: int, k: int, spread: float = 1.0, centre: float = 120, seed: int = 0) -> MXArray:
    """Drawn codes under scales whose logarithms are normal."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=DEVICE, generator=generator)
    scales = centre + spread * torch.randn(rows, k // 32, device=DEVICE, generator=generator)
    return MXArray(codes, scales.round().clamp(0, 254).to(torch.uint8), (rows, k), 1)


def exact(a: MXArray, b: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products and the sums of the magnitudes of their terms, float64 [M, N]: to 2^-52 of the latter."""
    va, vb = (
        values_of(q.codes) * torch.exp2(q.scales.double() - 127).repeat_interleave(32, 1) for q in (a, b)
    )
    return va @ vb.T, va.abs() @ vb.abs().T


def tolerance(k: int, magnitude: torch.Tensor, error_class: str, out_dtype: str = "float32") -> torch.Tensor:
    """Return how far a `bounded` result of operands without prescale may lie from the exact product, float64.

    Args:
        k: length of the sums.
        magnitude: sums of the magnitudes of their terms, as `exact` returns them; below 2^127.
        error_class: `fp32` or `fp8-hopper`.
        out_dtype: `bfloat16` adds one rounding.
    """
    eps = {"fp32": k * 2.0**-24, "fp8-hopper": 2.0**-6}[error_class]
    bound = eps * magnitude + k * 2.0**-149
    if out_dtype == "bfloat16":
        bound = bound + (magnitude + bound) * 2.0**-8 + 2.0**-133
    return bound


def ordered(a: MXArray, b: MXArray) -> torch.Tensor:
    """Return what `ordered` must give: one float64 addition per block, rounded to float32."""
    pa, pb = (values_of(q.codes).float() for q in (a, b))
    powers = [torch.exp2(torch.where(q.scales == 255, torch.nan, q.scales.double() - 127)) for q in (a, b)]
    acc = torch.zeros(len(pa), len(pb), device=DEVICE)
    for i in range(a.scales.shape[1]):
        block = slice(32 * i, 32 * i + 32)
        dot = (pa[:, block].double() @ pb[:, block].T.double()) + 0.0
        acc = (acc.double() + dot * powers[0][:, i, None] * powers[1][None, :, i]).float()
    return acc


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two float32 results agree to the bit, every NaN of `got` being the canonical one."""
    want = torch.where(want.isnan(), 0x7FC00000, want.view(torch.int32))
    return torch.equal(got.view(torch.int32), want)
