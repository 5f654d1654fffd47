"""The FP8 baseline: one float32 scale per tensor."""

from fractions import Fraction

from oracle.elements import ELEMENTS, round_ratio
from oracle.floats import INF32, UNIT, f32_mul, f32_value, is_nan, is_nonfinite, round_f32, units


def fp8_value(code: int, name: str) -> Fraction | None:
    """The value of an FP8 code; None for NaN and infinities."""
    element = ELEMENTS[name]
    return element.value(code) if element.kind(code) == "finite" else None


def fp8_cast(bits: int, scale_bits: int, name: str) -> int:
    """The FP8 code of fl32(x * scale): NaN is 0x7F, what is above the largest value saturates, ties go to even."""
    element = ELEMENTS[name]
    w = f32_mul(bits, scale_bits)
    if is_nan(w):
        return 0x7F
    code = (
        element.top if is_nonfinite(w) else round_ratio(units(w & 0x7FFFFFFF), UNIT, "rne", element=element)
    )
    return w >> 31 << 7 | code


def fp8_scale(amax_bits: int, name: str) -> int | None:
    """The float32 bits of min(fl32(largest / amax), FLT_MAX); None if amax is 0, NaN or infinite."""
    if is_nonfinite(amax_bits) or not amax_bits & 0x7FFFFFFF:
        return None
    return min(round_f32(ELEMENTS[name].largest / f32_value(amax_bits)), INF32 - 1)
