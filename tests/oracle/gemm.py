"""One element of a scaled GEMM, summed in fractions.

A contribution is a Fraction. If codes of NaN or infinity meet, it is a Python float with that NaN or infinity.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Literal

from oracle.elements import E2M1, Element
from oracle.floats import (
    INF16,
    INF32,
    NAN16,
    NAN32,
    SIGN16,
    SIGN32,
    f32_mul,
    f32_value,
    is_nonfinite,
    round_bf16,
    round_f32,
)
from oracle.scales import E8M0, ONE, Scale, scale_value

Block = tuple[int, Sequence[int]]  # a scale byte and the element codes it scales
Elements = tuple[Element, Element]
Scales = tuple[Scale, Scale]
Prescaled = int | tuple[bool, bool]
"""How many operands carry their prescale, A first; or for each operand whether it does."""


def _sum(terms: Sequence[Fraction | float]) -> Fraction | float:
    """A sum with IEEE 754's rules for NaN and infinities: both infinities, or a NaN, make NaN."""
    specials = {term for term in terms if isinstance(term, float)}
    if any(map(math.isnan, specials)) or len(specials) == 2:
        return math.nan
    return specials.pop() if specials else sum(terms, Fraction(0))


def _special(code: int, element: Element) -> float:
    if element.kind(code) == "nan":
        return math.nan
    return -math.inf if code & element.sign else math.inf


def _product(p: int, q: int, elements: Elements) -> float:
    """The product of two codes of which at least one stands for no number."""
    sides = []
    for code, element in zip((p, q), elements, strict=True):
        if element.kind(code) == "finite":
            value = element.value(code)
            sides.append(float((value > 0) - (value < 0)))  # its sign decides; infinity times zero is NaN
        else:
            sides.append(_special(code, element))
    return sides[0] * sides[1]


def block_dot(
    codes_a: Sequence[int], codes_b: Sequence[int], elements: Elements = (E2M1, E2M1)
) -> Fraction | float:
    """The sum of the products of element values, before any scale."""
    a, b = elements
    pairs = list(zip(codes_a, codes_b, strict=True))
    specials = [_product(p, q, elements) for p, q in pairs if p % a.sign > a.top or q % b.sign > b.top]
    if specials:
        return _sum(specials)
    total = sum(_count(p, a) * _count(q, b) for p, q in pairs)
    return Fraction(total, a.per_one * b.per_one)


def _count(code: int, element: Element) -> int:
    """The value of a code in units of the smallest positive magnitude."""
    if code >= 2 * element.sign:
        raise ValueError(f"{element.name} has no code {code}")
    return element.signed_counts[code]


def _contributions(
    a_blocks: Sequence[Block], b_blocks: Sequence[Block], elements: Elements, scales: Scales
) -> list[Fraction | float]:
    """Every block's dot times both of its scales; NaN where a scale is NaN."""
    out: list[Fraction | float] = []
    for (byte_a, codes_a), (byte_b, codes_b) in zip(a_blocks, b_blocks, strict=True):
        scale_a, scale_b = scale_value(byte_a, scales[0]), scale_value(byte_b, scales[1])
        if scale_a is None or scale_b is None:
            out.append(math.nan)
            continue
        dot = block_dot(codes_a, codes_b, elements)
        out.append(dot * scale_a * scale_b if isinstance(dot, Fraction) else dot)
    return out


@cache
def undo_factor(prescaled: Prescaled, elements: Elements = (E2M1, E2M1)) -> Fraction:
    """What undoes the prescales: 1 over the product of the factors of the operands that carry one."""
    if isinstance(prescaled, int):
        if prescaled not in (0, 1, 2):
            raise ValueError(f"0, 1 or 2 operands carry the prescale, not {prescaled}")
        prescaled = (prescaled > 0, prescaled > 1)
    factor = Fraction(1)
    for carried, element in zip(prescaled, elements, strict=True):
        factor /= element.prescale if carried else 1
    return factor


def gemm_exact(
    a_blocks: Sequence[Block],
    b_blocks: Sequence[Block],
    out: Literal["float32", "bfloat16"] = "float32",
    prescaled: Prescaled = 0,
    elements: Elements = (E2M1, E2M1),
    scales: Scales = (E8M0, E8M0),
    tensor_scales: tuple[int, int] = (ONE, ONE),
) -> int:
    """The real sum of all contributions over the prescales, times the tensors' scales, rounded once to `out`.

    `tensor_scales` are float32 bits: those of 1 for an operand without a scale of its tensor.
    """
    if out not in ("float32", "bfloat16"):
        raise ValueError(f"no exact GEMM to out={out!r}")
    nan, inf, sign = (NAN32, INF32, SIGN32) if out == "float32" else (NAN16, INF16, SIGN16)
    total = _sum(_contributions(a_blocks, b_blocks, elements, scales))
    if isinstance(total, float):
        return nan if math.isnan(total) else inf | (sign if total < 0 else 0)
    total *= undo_factor(prescaled, elements) * f32_value(tensor_scales[0]) * f32_value(tensor_scales[1])
    return round_f32(total) if out == "float32" else round_bf16(total)


def gemm_ordered(
    a_blocks: Sequence[Block],
    b_blocks: Sequence[Block],
    prescaled: Prescaled = 0,
    elements: Elements = (E2M1, E2M1),
    scales: Scales = (E8M0, E8M0),
    tensor_scales: tuple[int, int] = (ONE, ONE),
) -> int:
    """From +0, blocks ascending: add each contribution to the float32 accumulator, rounding each sum once.

    An infinite accumulator stays until it meets NaN or the other infinity, which make NaN. Prescaled operands
    cost a last float32 multiply by the nearest float32 to `undo_factor`; then comes one by A's tensor scale, then one
    by B's. `tensor_scales` are float32 bits, and to multiply by those of 1 changes nothing.
    """
    acc = 0
    for contribution in _contributions(a_blocks, b_blocks, elements, scales):
        if isinstance(contribution, float):
            infinity = INF32 | (SIGN32 if contribution < 0 else 0)
            clash = is_nonfinite(acc) and acc != infinity
            acc = NAN32 if math.isnan(contribution) or clash else infinity
        elif not is_nonfinite(acc):
            acc = round_f32(f32_value(acc) + contribution)
    factor = undo_factor(prescaled, elements)
    if factor != 1:
        acc = f32_mul(acc, round_f32(factor))
    for tensor_scale in tensor_scales:
        acc = f32_mul(acc, tensor_scale)
    return acc
