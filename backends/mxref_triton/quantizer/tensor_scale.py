"""The scale of a tensor from its largest finite magnitude, on the device, so that graphs can capture it."""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxref.formats import BlockFormat
from mxref.steps.four_over_six import FourOverSix
from mxref_triton.lane.registers import bits_of
from mxref_triton.launch import launch

_DIGITS = tl.constexpr(24)
"""Binary digits of the quotient of two integers behind the point: with those before it, float64 holds them."""


@triton.jit
def _store_scale(amax, scale, ODD: tl.constexpr, EXPONENT: tl.constexpr):
    """Write amax / (ODD * 2^EXPONENT), rounded once to float32, but at least 2^-149; 1 if amax is 0.

    The integer quotient is cut off. A quotient that is no midpoint of two float32 is 1 / ODD of the last bit of amax
    away from it, far more than that.
    """
    bits = bits_of(tl.load(amax))
    field = tl.maximum(bits >> 23, 1).to(tl.int64)
    whole = (bits & 0x7FFFFF) + tl.where(bits > 0x7FFFFF, 0x800000, 0).to(tl.uint32)
    digits = (whole.to(tl.int64) << _DIGITS) // ODD
    power = ((field - 150 - EXPONENT - _DIGITS + 1023) << 52).to(tl.float64, bitcast=True)
    found = (digits.to(tl.float64) * power).to(tl.float32)
    # As integers: an amax that is given may be -0.
    tl.store(scale, tl.where(bits.to(tl.int32, bitcast=True) <= 0, 1.0, tl.maximum(found, 2.0**-149)))


def tensor_scale(amax: torch.Tensor, made: BlockFormat, by: FourOverSix) -> torch.Tensor:
    """Return the scale of a tensor of a format, float32 [1], whose largest finite magnitude is float32 [1].

    A block that takes amax / 4 has a scale 1.5 times as large: if blocks choose, that of the largest is a power of two.
    """
    scale = torch.empty_like(amax)
    largest = made.scale.max_value if by is FourOverSix.OFF else 2.0**made.scale.max_exponent
    top = int(made.element.max_value / 2.0**made.element.unit_exponent)
    top *= int(largest / 2.0**made.scale.unit_exponent)
    zeros = (top & -top).bit_length() - 1
    exponent = made.element.unit_exponent + made.scale.unit_exponent + zeros
    launch(_store_scale, (1,), amax, scale, ODD=top >> zeros, EXPONENT=exponent, num_warps=1)
    return scale
