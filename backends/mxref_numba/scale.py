"""The shared scale of a block: of a power of two, on every path, the scale rule as one addition to the bits of amax.

Float32 and E8M0 have the same bias, so the exponent field of amax, less the exponent of the element's largest binade,
is the scale code of the rule `floor`. Every other rule counts some amax as if they were one binade higher:
`mxref.steps.scale.bump_above` has the last mantissa that is not. `round_up` is the number that carries from any larger
mantissa into the exponent, and from no other:

    code = ((bits of amax + round_up) >> 23) - max_exponent, from 0 to 254

A block of zeros has the code `zero_scale`, one with NaN or Inf the code of NaN. `code_of_amax` says this in plain
Numba, `scale_codes` on the lanes of vectors.

A scale with a mantissa is a real quotient, rounded once: `QuotientNumbers` has what it asks.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from mxref.formats import E8M0, BlockFormat, ScaleFormat
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import lower_largest
from mxref.steps.scale import MANTISSA_MASK, bump_above
from mxref_numba.grids import SCALE_CODE, decoded, grid_of
from mxref_numba.kernels import address_of, float_of, kernel, written
from mxref_numba.lanes import F16, F32, F64, I8, I16, I32, I64, Lanes, constant, splat

NAN_CODE = np.uint8(E8M0.nan_code)
INFINITY = np.int32(0x7F800000)
"""The bits of Inf in float32; an amax from there on is not finite."""
_LARGEST_CODE = np.int32(254)
_SMALLEST = np.int32(1 << 22)
"""Bits of 2^-127, which is subnormal."""


class ScaleNumbers(NamedTuple):
    """What a treatment asks of amax."""

    round_up: np.int32
    """What carries into the exponent of amax exactly when the scale rule bumps it."""
    zero_scale: np.int32
    """Code of a block of zeros."""
    max_exponent: np.int32
    """Of the element's largest binade."""


class QuotientNumbers(NamedTuple):
    """What a scale with a mantissa asks: it is the quotient of amax by M t, rounded once; a power of two has none."""

    grid: int = 0
    """Address of the `Grid` of the scale format; 0 for a power of two."""
    values: int = 0
    """Address of the scales, float64 [256]."""
    most: np.float32 = np.float32(1)
    """M, the largest element."""
    lower: np.float32 = np.float32(1)
    """The largest power of two among the elements, which four over six may take in place of M."""
    elements: int = 0
    """Address of the values of the element's codes, float32 [16]."""
    tensor: np.float32 = np.float32(1)
    """t, the scale of the tensor."""


def scale_numbers(spec: OperandSpec) -> ScaleNumbers:
    """Return what a treatment asks of amax."""
    assert isinstance(spec.format, BlockFormat)  # checked when the plan was made
    element, powers = spec.format.element, spec.format.scale.powers
    return ScaleNumbers(
        round_up=np.int32(MANTISSA_MASK - bump_above(spec.scale_rule, element) if powers else 0),
        zero_scale=np.int32(spec.zero_scale),
        max_exponent=np.int32(element.max_exponent),
    )


def quotient_numbers(made: BlockFormat) -> QuotientNumbers:
    """Return what the scales of a format ask; the scale of the tensor is that of one call."""
    if made.scale.powers:
        return QuotientNumbers()
    grid, values = _written_grid(made.scale), scale_values(made.scale, np.float64)
    return QuotientNumbers(
        address_of(grid), address_of(values), np.float32(made.element.max_value),
        np.float32(lower_largest(made)), address_of(decoded(made.element)),
    )  # fmt: skip


@cache
def _written_grid(scale: ScaleFormat) -> NDArray[np.uint8]:
    return written(grid_of(scale))


@cache
def scale_values(scale: ScaleFormat, dtype: type) -> NDArray[Any]:
    """Return the values of all scale codes, of a type, read-only [256]."""
    values: NDArray[Any] = np.array(scale.values, dtype)
    values.flags.writeable = False
    return values


# ---- plain Numba ----


@kernel
def code_of_amax(amax, numbers):
    """Return the E8M0 code of a block from its finite amax bits, int32 0 to 254."""
    code = np.int32(np.int32(np.int32(amax + numbers.round_up) >> np.int32(23)) - numbers.max_exponent)
    return min(max(code, np.int32(0)), _LARGEST_CODE)


@kernel
def inverse_scale(code):
    """Return 2^-e of an E8M0 code of at most 254, float32, exact: at code 254 it is subnormal."""
    return float_of(max(np.int32(np.int32(_LARGEST_CODE - code) << np.int32(23)), _SMALLEST))


# ---- lanes of vectors ----


def scale_codes(
    amax: Lanes, round_up: Any, zero_scale: Any, max_exponent: Any, *, to_the_end: bool
) -> tuple[Lanes, Lanes, Lanes]:
    """Return E8M0 codes with all policies applied, 2^-e as float32, and which blocks are finite.

    Args:
        amax: magnitude bits.
        round_up: int32; what carries into the exponent exactly when the scale rule bumps it.
        zero_scale: int32; code of a block of zeros.
        max_exponent: int32; exponent of the element's largest binade.
        to_the_end: whether an element's largest binade may be so low that codes reach the last one, 254. The code of
            E2M1 never does, and would lose 4 % of its speed to the two steps that hold it there.
    """
    builder, count = amax.builder, amax.count
    exponent, top = (amax + splat(builder, round_up, count)) >> 23, splat(builder, max_exponent, count)
    code = exponent.call("umax", top) - top
    code = code.call("umin", int(_LARGEST_CODE)) if to_the_end else code
    inverse = ((code ^ 0xFF) - 1) << 23
    inverse = inverse.call("umax", int(_SMALLEST)) if to_the_end else inverse
    finite = amax.compare("<", int(INFINITY))
    stored = amax.compare("==", 0).choose(splat(builder, zero_scale, count), code)
    stored = finite.choose(stored, splat(builder, ir.Constant(I32, int(NAN_CODE)), count))
    return stored, inverse.cast(F32), finite


def store_codes(codes: Lanes, address: Any, k: int) -> None:
    """Store the scale codes that `scale_codes` gives for groups of k / 8 lanes, as bytes."""
    codes.cast(I8).pick(range(0, 4 * codes.count, k // 2)).store(address)


_DROPPED = (1 << 29) - 1
"""The bits of a float64 that float32 lacks."""


def quotient_scales(amax: Lanes, made: BlockFormat, tensor: Any) -> tuple[Lanes, Lanes]:
    """Return the codes of scales with a mantissa, int32, and scales times that of the tensor, float64; Inf for 0.

    Args:
        amax: magnitude bits, one lane for each block.
        made: the format.
        tensor: t, float32.
    """
    builder, count, grid = amax.builder, amax.count, grid_of(made.scale)
    t = splat(builder, builder.fpext(tensor, F64), count)
    v, top = amax.cast(F32).convert("fpext", F64) / (t * made.element.max_value), float(grid.top)
    bits = v.ordered("<", top).choose(v, constant(builder, F64, [top] * count)).cast(I64)
    # Rounded to odd, it stays on its side of every midpoint.
    odd = ((bits & _DROPPED) + _DROPPED) & (_DROPPED + 1)
    held = ((bits | odd) & ~_DROPPED).cast(F64).convert("fptrunc", F32)
    binade = (held.cast(I32) & int(INFINITY)).call("umax", int(grid.smallest_normal))
    steps = binade.cast(F32).call("fma", float(grid.even_unit), held)
    code = (steps.cast(I32) + (binade >> int(grid.step_shift))) & SCALE_CODE
    scale = binade.cast(F32).call("fma", -float(grid.even_unit), steps)  # exact
    divisor = scale.convert("fpext", F64) * t
    return code, divisor.ordered("==", 0.0).choose(float("inf"), divisor)


def mantissa_scales(codes: Lanes, scale: ScaleFormat) -> Lanes:
    """Return the values of codes, int32, of a scale format that float16 holds: float32."""
    half = (codes << 10 - scale.mantissa_bits).convert("trunc", I16).cast(F16)
    return half.convert("fpext", F32) * 2.0 ** (15 - scale.bias)
