"""Shared scales: the rules that choose a scale code from a block's amax, and the codes' values.

Exponents come from the integer bit pattern alone. A floating-point log2 is wrong just below powers of
two (for 6,850 of the 32,639 positive bfloat16 values, say), which is how implementations of one rule
come to store different bytes.
"""

from __future__ import annotations

import re
from enum import StrEnum
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import RecipeError
from mxref.formats import E8M0, ElementFormat, ScaleFormat

MANTISSA_BITS = 23
MANTISSA_MASK = 0x7FFFFF
MAGNITUDE_MASK = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000

# 23 decimals write every mantissa of a float32 exactly.
_THRESHOLD = re.compile(r"(>=?) ?(1(?:\.[0-9]{1,23})?|2(?:\.0{1,23})?)")


class ScaleCast(StrEnum):
    """How a number is cast to E8M0, which chooses no shared scale."""

    DOWN = "down"
    """The exponent alone, as MLIR expands the cast."""
    NEAREST = "nearest"
    """To the nearest power of two, the larger of two equally near; as PyTorch casts."""


class ScaleRule(StrEnum):
    """How the shared scale X is chosen from a = amax, for elements up to M with the largest power of two 2^emax.

    In brackets the range of a / X that follows for E2M1, where M = 6 and 2^emax = 4. NEAREST is for scales with a
    mantissa, the others for powers of two.

    Every rule for powers of two is a threshold: written a = f * 2^n with 1 <= f < 2, the exponent of X is FLOOR's plus
    one where f lies above it. The four names take theirs from the element. `ScaleRule(">1.5")` and
    `ScaleRule(">=1.75")` give it as a number from 1 to 2, the same for all elements: for E2M1 they are RCEIL and EVEN.
    Such a rule is no member that an iteration finds, and equal to its text without zeros that change nothing.

    Implements: scale.rule.threshold
    """

    FLOOR = "floor"
    """Largest power of two <= a, over 2^emax (OCP MX v1.0, 6.3): [4, 8)."""
    CEIL = "ceil"
    """Smallest power of two >= a, over 2^emax: (2, 4]."""
    RCEIL = "rceil"
    """Smallest power of two >= a / M, so that nothing saturates: (3, 6]."""
    EVEN = "even"
    """FLOOR of a rounded to the element's own precision, one mantissa bit for E2M1: [3.5, 7)."""
    NEAREST = "nearest"
    """The real quotient a / M, over the tensor's scale if there is one, rounded once to the scale format by RNE."""

    @classmethod
    def _missing_(cls, value: object) -> ScaleRule | None:
        """Return the rule of a threshold such as `>1.5`; RecipeError if a text that begins with `>` is not one."""
        if not isinstance(value, str) or not value.startswith(">"):
            return None
        found = _THRESHOLD.fullmatch(value)
        if not found:
            raise RecipeError(
                f"{value[:40]!r} is no threshold: write > or >= and a number from 1 to 2, as in '>1.5' or "
                "'>=1.75', with at most 23 decimals"
            )
        sign, number = found.groups()
        text = sign + (number.rstrip("0").rstrip(".") if "." in number else number)
        rule = str.__new__(cls, text)
        rule._name_ = rule._value_ = text
        known = cls._value2member_map_.setdefault(text, rule)  # one object for each text, as for the names
        assert isinstance(known, cls)
        return known

    @property
    def is_threshold(self) -> bool:
        """Whether the rule is given as a number instead of a name."""
        return self.startswith(">")

    @property
    def kind(self) -> str:
        """The name, or `threshold`."""
        return "threshold" if self.is_threshold else self.value


EXPONENT_RULES = tuple(rule for rule in ScaleRule if rule is not ScaleRule.NEAREST)
"""The named rules of scales that are powers of two."""


def rules_of(scale: ScaleFormat) -> tuple[ScaleRule, ...]:
    """Return the named rules that choose scales of a format."""
    return EXPONENT_RULES if scale.powers else (ScaleRule.NEAREST,)


def bump_above(rule: ScaleRule, element: ElementFormat) -> int:
    """Return the bound that a rule sets to the 23-bit mantissa of amax: above it, the exponent is FLOOR's plus one.

    The only table of the rules; kernels take the bound from here. It is -1 to 0x7FFFFF.

    Implements: scale.rule.floor, scale.rule.ceil, scale.rule.rceil, scale.rule.even, scale.rule.threshold
    """
    if rule.is_threshold:
        turn = (Fraction(rule.removeprefix(">").removeprefix("=")) - 1) * (MANTISSA_MASK + 1)
        return ceil(turn) - 1 if rule.startswith(">=") else min(floor(turn), MANTISSA_MASK)
    if rule is ScaleRule.CEIL:
        return 0
    if rule is ScaleRule.RCEIL:
        fraction = np.ldexp(element.max_value, -element.max_exponent) - 1  # of the largest magnitude, exact
        return int(np.ldexp(fraction, MANTISSA_BITS))
    if rule is ScaleRule.EVEN:
        half_a_step = 1 << (MANTISSA_BITS - 1 - element.precision)
        return MANTISSA_MASK - half_a_step
    return MANTISSA_MASK


def scale_code(
    amax_bits: NDArray[np.uint32], rule: ScaleRule, element: ElementFormat, scale: ScaleFormat = E8M0
) -> NDArray[np.uint8]:
    """Return the code of the shared scale, a power of two, for each block's amax.

    Args:
        amax_bits: float32 bits of amax, sign bit clear, uint32 of any shape; finite (below 0x7F800000).
        rule: the scale rule.
        element: the format of the block's elements.
        scale: the format of the scales.

    Returns:
        Scale codes, uint8, same shape; never NaN, and of E8M0 never 254 for an element with emax of 1 or more.

    Implements: scale.rule.floor, scale.rule.ceil, scale.rule.rceil, scale.rule.even, scale.rule.threshold, scale.clamp
    """
    u = amax_bits.astype(np.int32)
    bump = (u & MANTISSA_MASK) > bump_above(rule, element)
    exponent = (u >> MANTISSA_BITS) - (127 + element.max_exponent) + bump
    clamped = np.minimum(np.maximum(exponent, scale.min_exponent), scale.max_exponent)
    code: NDArray[np.uint8] = (clamped + scale.bias).astype(np.uint8)
    return code


def scale_exponent(code: NDArray[np.uint8], scale: ScaleFormat = E8M0) -> NDArray[np.int32]:
    """Return the exponents e with X = significand * 2^e, int32; meaningless for NaN.

    Implements: formats.e8m0, formats.scale
    """
    field = code.astype(np.int32) >> scale.mantissa_bits
    exponent: NDArray[np.int32] = np.maximum(field, int(scale.subnormals)) - (
        scale.bias + scale.mantissa_bits
    )
    return exponent


def scale_significand(code: NDArray[np.uint8], scale: ScaleFormat = E8M0) -> NDArray[np.float64]:
    """Return the integers m with X = m * 2^e, float64, below 2^(mantissa bits + 1); 1 for every power of two.

    Implements: formats.scale
    """
    return np.ldexp(scale_value(code, scale), -scale_exponent(code, scale))


def scale_value(code: NDArray[np.uint8], scale: ScaleFormat = E8M0) -> NDArray[np.float64]:
    """Return the values of scale codes, float64, exact; for E8M0 code 255 is NaN, and code 0 is 2^-127 and not 0.

    Implements: formats.e8m0, formats.scale
    """
    return np.array(scale.values)[code]


def magnitude_bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the float32 bits of |x|, uint32; ordered as the magnitudes are, with Inf and NaN on top.

    Implements: scale.amax
    """
    bits: NDArray[Any] = x.view(np.uint32)
    return bits & np.uint32(MAGNITUDE_MASK)


def cast_to_e8m0(x: NDArray[Any], cast: ScaleCast = ScaleCast.NEAREST) -> NDArray[np.uint8]:
    """Return numbers cast to E8M0, uint8 of the same shape; the sign is not read.

    Args:
        x: float32, bfloat16 or float16, any shape.
        cast: to the nearest power of two, or to the one below.

    Source: OCP MX v1.0 has no such cast; LLVM's and PyTorch's sources have these.

    Implements: formats.e8m0.cast
    """
    bits = magnitude_bits(np.ascontiguousarray(x.astype(np.float32)))
    exponent, mantissa = bits >> MANTISSA_BITS, bits & MANTISSA_MASK
    half = 1 << MANTISSA_BITS - 1
    up = (mantissa > half) | ((mantissa == half) & (exponent > 0))
    rounded = exponent + up if ScaleCast(cast) is ScaleCast.NEAREST else exponent
    codes: NDArray[np.uint8] = np.minimum(rounded, E8M0.nan_code).astype(np.uint8)
    return codes
