"""Blocks of elements under one shared scale: quantized, and decoded."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from oracle.elements import E2M1, Element, Rounding, round_ratio
from oracle.floats import (
    INF16,
    INF32,
    NAN16,
    NAN32,
    SIGN16,
    SIGN32,
    UNIT,
    f32_bits_to_bf16_bits,
    f32_value,
    round_bf16,
    round_f32,
    round_to_float,
    units,
)
from oracle.orders import Numbers, Order, element_in, scale_in
from oracle.scales import E8M0, ONE, Rule, Scale, nearest_scale, scale_value, shared_scale

Choice = Literal["off", "absolute", "squared", "largest"]


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
    scale: Scale = E8M0,
    tensor: int = ONE,
    order: Order | None = None,
    tensor_amax: int = 0,
    four_over_six: Choice = "off",
) -> tuple[int, list[int]]:
    """Byte and codes of the float32 elements that share one scale: those of a block, or of a tile.

    Any NaN or infinity gives the byte of NaN and codes 0. All zeros give byte `zero_scale`. Codes keep the sign bit
    of their element, also on zeros and underflow. `prescale` rounds fl32(factor v) for v, scale unchanged.
    A scale format with a mantissa has the rule `nearest` alone, and no prescale; `tensor` is the bits of the scale of
    the tensor. Under a scale of zero all magnitudes are 0. With an order of float32 operations, `tensor` is what that
    makes of the tensor's amax, of bits `tensor_amax`. `four_over_six` names the error by which the scale is chosen.
    """
    magnitudes = [b & 0x7FFFFFFF for b in bits]
    amax = max(magnitudes)  # float32 magnitudes order as their bits do
    if amax >= INF32:
        return scale.nan, [0] * len(magnitudes)
    if scale != E8M0 and (rule != "nearest" or prescale):
        raise ValueError(f"{scale.name} has the rule nearest and no prescale")
    if order is not None:
        numbers = Numbers(tensor_amax, tensor, element, scale)
        byte = scale_in(order, amax, numbers)
        drawn = r or [None] * len(bits)
        codes = [
            element.code(element_in(order, b & 0x7FFFFFFF, byte, numbers, rounding, one, R), b >= SIGN32)
            for b, one in zip(bits, drawn, strict=True)
        ]
        return byte, codes
    if not amax:
        byte = zero_scale
    elif scale == E8M0:
        byte = shared_scale(amax, rule, element)
    else:
        byte = nearest_scale(amax, element, scale, tensor)
        if four_over_six != "off":
            power = Fraction(2) ** element.largest_exponent
            other = nearest_scale(amax, element, scale, tensor, power)
            first, second = (
                _error(magnitudes, one, four_over_six, element, scale, tensor) for one in (byte, other)
            )
            byte = other if second < first else byte
    shared = scale.values[byte]
    over, under = shared.numerator * units(tensor), shared.denominator  # X t, in units of 2^-149
    factor = element.prescale
    codes = []
    for i, (b, magnitude) in enumerate(zip(bits, magnitudes, strict=True)):
        if not shared:
            codes.append(element.code(0, b >= SIGN32))
            continue
        num, den = units(magnitude) * under, over
        if prescale:
            num = units(round_to_float(factor.numerator * num, factor.denominator * den, 24))
            den = UNIT
        code = round_ratio(num, den, rounding, None if r is None else r[i], R, element)
        codes.append(element.code(code, b >= SIGN32))
    return byte, codes


def _error(
    magnitudes: Sequence[int], byte: int, choice: Choice, element: Element, scale: Scale, tensor: int
) -> Fraction:
    """What elements rounded to nearest under a scale byte are off by, in all or at most."""
    shared = scale.values[byte] * f32_value(tensor)
    errors = []
    for magnitude in magnitudes:
        x, code = f32_value(magnitude), 0
        if shared:
            v = x / shared
            code = round_ratio(v.numerator, v.denominator, "rne", element=element)
        errors.append(abs(x - element.grid[code] * shared))
    if choice == "largest":
        return max(errors)
    return sum((e if choice == "absolute" else e**2 for e in errors), Fraction(0))


def dequantize_real(
    byte: int, code: int, element: Element = E2M1, scale: Scale = E8M0, tensor: int = ONE
) -> Fraction | None:
    """The number that a code under a scale byte and a tensor scale stands for, None if it stands for none."""
    shared = scale_value(byte, scale)
    if shared is None or element.kind(code) != "finite":
        return None
    return element.value(code) * shared * f32_value(tensor)


def dequantize_f32(
    byte: int, code: int, element: Element = E2M1, scale: Scale = E8M0, tensor: int | None = None
) -> int:
    """Element times scale, times the tensor's scale if there is one, rounded once to float32.

    A NaN scale gives NaN. A code of infinity is an infinity under every other scale, zero too.
    """
    if scale_value(byte, scale) is None or element.kind(code) == "nan":
        return NAN32
    sign = SIGN32 if code & element.sign else 0
    value = dequantize_real(byte, code, element, scale, ONE if tensor is None else tensor)
    return sign | (INF32 if value is None else round_f32(abs(value)))


def dequantize_bf16(
    byte: int, code: int, element: Element = E2M1, scale: Scale = E8M0, tensor: int | None = None
) -> int:
    """Element times scale rounded once to bfloat16; with a scale of the tensor, its float32 rounded to bfloat16."""
    if tensor is not None:
        return f32_bits_to_bf16_bits(dequantize_f32(byte, code, element, scale, tensor))
    if scale_value(byte, scale) is None or element.kind(code) == "nan":
        return NAN16
    sign = SIGN16 if code & element.sign else 0
    value = dequantize_real(byte, code, element, scale)
    return sign | (INF16 if value is None else round_bf16(abs(value)))
