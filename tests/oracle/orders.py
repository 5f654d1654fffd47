"""Orders of float32 operations for scales with a mantissa, on bit patterns: each operation is a real, rounded once.

Written from the clause `scale.arithmetic`. All patterns here are of magnitudes: no sign, and NaN only as 0 / 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from oracle.elements import Element, Rounding, round_ratio
from oracle.floats import INF32, NAN32, UNIT, f32_mul, f32_value, is_nan, round_f32, round_to_float, units
from oracle.scales import ONE, Scale

Order = Literal["te", "te_2_13", "torchao", "modelopt", "compressed_tensors", "ggml"]
LARGEST = INF32 - 1


def f32_div(a: int, b: int) -> int:
    """IEEE 754 float32 division of magnitudes."""
    if is_nan(a) or is_nan(b) or (a == b and a in (0, INF32)):
        return NAN32
    if a == INF32 or b == 0:
        return INF32
    return 0 if b == INF32 else round_to_float(units(a), units(b), 24)


@dataclass(frozen=True)
class Numbers:
    """What an order reads beside its operand: A and t of the tensor, and the formats."""

    A: int
    t: int
    element: Element
    scale: Scale

    @property
    def M(self) -> int:
        """The largest element."""
        return round_f32(self.element.largest)

    @property
    def MS(self) -> int:
        """The largest element times the largest scale."""
        return round_f32(self.element.largest * self.scale.largest)

    @property
    def G(self) -> int:
        """The inverse that Transformer Engine keeps."""
        return min(f32_div(self.MS, self.A), LARGEST) if self.A else ONE

    @property
    def g(self) -> int:
        """The inverse that compressed-tensors keeps."""
        found = f32_mul(f32_div(ONE, max(self.A, 1 << 23)), self.MS)
        return ONE if found == INF32 else found


def tensor_scale_in(order: Order, amax: int, element: Element, scale: Scale) -> int:
    """The bits of t of a tensor whose largest finite magnitude has these bits."""
    n = Numbers(amax, 0, element, scale)
    return {
        "te": lambda: f32_div(ONE, n.G),
        "te_2_13": lambda: f32_div(ONE, n.G),
        "torchao": lambda: f32_div(n.A, n.MS),
        "modelopt": lambda: f32_div(n.A, n.MS),
        "compressed_tensors": lambda: f32_div(ONE, n.g),
        "ggml": lambda: ONE,
    }[order]()


_QUOTIENTS: dict[str, Callable[[int, Numbers], int]] = {
    "te": lambda a, n: f32_mul(a, f32_mul(n.G, f32_div(ONE, n.M))),
    "te_2_13": lambda a, n: f32_mul(f32_div(a, n.M), n.G),
    "torchao": lambda a, n: f32_div(f32_div(a, n.M), n.t),
    "modelopt": lambda a, n: f32_div(a, f32_mul(n.M, n.t)),
    "compressed_tensors": lambda a, n: f32_mul(n.g, f32_div(a, n.M)),
    "ggml": lambda a, n: f32_div(a, n.M),
}

_ELEMENTS: dict[str, Callable[[int, int, Numbers], int]] = {
    "te": lambda x, s, n: f32_mul(x, min(f32_div(ONE, f32_mul(s, f32_div(ONE, n.G))), LARGEST)),
    "torchao": lambda x, s, n: f32_mul(x, f32_div(f32_div(ONE, n.t), s)),
    "modelopt": lambda x, s, n: f32_div(x, f32_mul(s, n.t)),
    "compressed_tensors": lambda x, s, n: f32_div(x, f32_div(s, n.g)),
}
_ELEMENTS["te_2_13"] = _ELEMENTS["te"]


def scale_in(order: Order, amax: int, n: Numbers) -> int:
    """The scale code of a block whose largest magnitude has the bits `amax`."""
    bits = _QUOTIENTS[order](amax, n)
    nearest = n.scale.nearest
    if bits == INF32:
        return n.scale.nan - 1
    q = None if is_nan(bits) else f32_value(bits)
    if order == "torchao":
        return nearest(max(q or Fraction(0), Fraction(1, 64)))
    if order == "modelopt":
        return nearest(max(q, Fraction(1, 512)) if q else Fraction(1))
    assert q is not None
    if order == "compressed_tensors":
        return nearest(q) or nearest(Fraction(1, 8))
    return _ggml(q, n.scale) if order == "ggml" else nearest(q)


def _ggml(q: Fraction, scale: Scale) -> int:
    """Halves up; every scale from the largest power of two on is the largest, and a subnormal one stays subnormal."""
    values, subnormals = scale.values, 2**scale.mantissa_bits
    if q < values[subnormals]:
        steps = f32_value(round_f32(q / values[1] + Fraction(1, 2)))
        return min(int(steps), subnormals - 1)
    # Of two equally near scales the larger one is the first of those from the top.
    code = min(reversed(range(scale.nan)), key=lambda code: abs(values[code] - q))
    top = max(value for value in values if value.numerator & (value.numerator - 1) == 0 and value)
    return scale.nan - 1 if values[code] >= top else code


def element_in(
    order: Order, magnitude: int, byte: int, n: Numbers, rounding: Rounding, r: int | None, R: int
) -> int:
    """The magnitude code of an element, given its bits without the sign and its scale code."""
    s = n.scale.values[byte]
    if order == "ggml":
        if not s:
            return 0
        v = Fraction(units(magnitude), UNIT) / s
        middles = [(low + high) / 2 for low, high in zip(n.element.grid, n.element.grid[1:], strict=False)]
        if v in middles:
            # The largest number below v with 53 significant bits.
            power = Fraction(2) ** (v.numerator.bit_length() - v.denominator.bit_length())
            while power > v:
                power /= 2
            v -= power / 2 ** (52 if power != v else 53)
        return round_ratio(v.numerator, v.denominator, rounding, r, R, n.element)
    if not magnitude:
        return 0
    v32 = min(_ELEMENTS[order](magnitude, round_f32(s), n), LARGEST)
    return round_ratio(units(v32), UNIT, rounding, r, R, n.element)
