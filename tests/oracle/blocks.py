"""Blocks of elements under one shared scale: quantized, and decoded."""

from collections.abc import Sequence

from oracle.elements import E2M1, Element, Rounding, round_ratio
from oracle.floats import (
    INF16,
    INF32,
    NAN16,
    NAN32,
    SIGN16,
    SIGN32,
    UNIT,
    round_bf16,
    round_f32,
    round_to_float,
    units,
)
from oracle.scales import NAN_BYTE, Rule, scale_value, shared_scale


def quantize_block(
    bits: Sequence[int],
    rule: Rule,
    rounding: Rounding,
    *,
    zero_scale: int = 0,
    prescale: bool = False,
    r: Sequence[int] | None = None,
    R: int = 16,
    element: Element = E2M1,
) -> tuple[int, list[int]]:
    """Byte and codes of the float32 elements that share one scale: 32 of a block, or 1,024 of a tile.

    Any NaN or infinity gives byte 255 and codes 0. All zeros give byte `zero_scale`. Codes keep the sign bit
    of their element, also on zeros and underflow. `prescale` rounds fl32(factor v) for v, scale unchanged.
    """
    magnitudes = [b & 0x7FFFFFFF for b in bits]
    amax = max(magnitudes)  # float32 magnitudes order as their bits do
    if amax >= INF32:
        return NAN_BYTE, [0] * len(magnitudes)
    byte = shared_scale(amax, rule, element) if amax else zero_scale
    scale = 1 << (byte + 22)  # 2^(byte-127) in units of 2^-149
    factor = element.prescale
    codes = []
    for i, (b, magnitude) in enumerate(zip(bits, magnitudes, strict=True)):
        num, den = units(magnitude), scale
        if prescale:
            num = units(round_to_float(factor.numerator * num, factor.denominator * den, 24))
            den = UNIT
        code = round_ratio(num, den, rounding, None if r is None else r[i], R, element)
        codes.append(b >> 31 << (element.bits - 1) | code)
    return byte, codes


def dequantize_f32(byte: int, code: int, element: Element = E2M1) -> int:
    """Element times shared scale as float32, exact except for overflow to infinity; byte 255 is NaN."""
    scale, kind = scale_value(byte), element.kind(code)
    if scale is None or kind == "nan":
        return NAN32
    sign = SIGN32 if code & element.sign else 0
    return sign | (INF32 if kind == "infinite" else round_f32(abs(element.value(code)) * scale))


def dequantize_bf16(byte: int, code: int, element: Element = E2M1) -> int:
    """Element times shared scale rounded once to bfloat16; byte 255 is NaN."""
    scale, kind = scale_value(byte), element.kind(code)
    if scale is None or kind == "nan":
        return NAN16
    sign = SIGN16 if code & element.sign else 0
    return sign | (INF16 if kind == "infinite" else round_bf16(abs(element.value(code)) * scale))
