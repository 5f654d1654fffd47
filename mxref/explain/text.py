"""An explained block in words: the choice of its scale, the rounding of each element, and unusual events."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from mxref.explain import BlockExplanation, Case, ElementExplanation
from mxref.formats import E8M0, BlockShape, ElementFormat
from mxref.steps.rounding import Rounding
from mxref.steps.scale import INFINITY_BITS, MANTISSA_BITS, MANTISSA_MASK, ScaleRule, bump_above


def _up_when(rule: ScaleRule, element: ElementFormat) -> str:
    """Return the condition on the mantissa m of amax under which the exponent is one more than FLOOR's."""
    bound = bump_above(rule, element)
    if not bound:
        return "m != 0"
    return f"m >= 0x{bound + 1:06x}" if bound % 2 else f"m > 0x{bound:06x}"


def _range(rule: ScaleRule, element: ElementFormat) -> str:
    """Return the interval of amax / X under a rule, and whether its upper end saturates."""
    bound = bump_above(rule, element)
    turn = (
        bound + bound % 2
    ) / 2**MANTISSA_BITS + 1  # mantissas above `bound`, or from the odd `bound` + 1 on
    low, high = math.ldexp(turn, element.max_exponent - 1), math.ldexp(turn, element.max_exponent)
    interval = f"[{low:g}, {high:g})" if bound % 2 else f"({low:g}, {high:g}]"
    return interval + (f": above {element.max_value:g} saturates" if high > element.max_value else "")


def number(value: float) -> str:
    """Return a float32 value in its shortest exact form."""
    text = str(np.float32(value))
    return text.removesuffix(".0")


def scale_steps(block: BlockExplanation) -> list[str]:
    """Return the arithmetic of the shared scale, one step per sentence."""
    scale, symbol, element = block.scale, "y" if block.rotation else "x", block.format.element
    k = block.format.k
    if scale.amax_at is None:
        where = f"in another row of the {k}x{k} tile"
    else:
        where = f"at element {scale.amax_at}"
    of = f"the {k * k:,} elements of the tile" if block.spec.block is BlockShape.TILE else f"|{symbol}|"
    if scale.amax_bits >= INFINITY_BITS:
        kind = "NaN" if scale.amax_bits > INFINITY_BITS else "Inf"
        return [
            f"{kind} {where} (bits 0x{scale.amax_bits:08x} >= 0x7f800000): no finite amax, no rule applies",
            "policy nonfinite = nan_block: byte 255 (0xff), which is NaN; all codes are 0",
        ]
    if scale.amax_bits == 0:
        return [
            f"amax = max of {of} = 0: every element is zero, no rule applies",
            f"policy zero_scale = {block.spec.zero_scale}: byte {scale.byte} (0x{scale.byte:02x}), "
            f"X = 2^{scale.byte - E8M0.bias}; codes keep the signs of their zeros",
        ]
    assert scale.unclamped is not None
    steps = [
        f"amax = max of {of} = {number(scale.amax)} {where}",
        f"bits 0x{scale.amax_bits:08x}: exponent field E = {scale.exponent_field}, mantissa m = 0x{scale.mantissa:06x}"
        + (" (E = 0: subnormal)" if scale.exponent_field == 0 else ""),
    ]
    rule = scale.rule.value.upper()
    start = f"{rule}: e = E - 127 - {element.max_exponent}"
    bias = 127 + element.max_exponent
    if bump_above(scale.rule, element) == MANTISSA_MASK:
        steps.append(f"{start} = {scale.exponent_field} - {bias} = {scale.unclamped}")
    else:
        holds = "holds" if scale.bump else "does not hold"
        steps.append(
            f"{start} + {scale.bump} = {scale.exponent_field} - {bias} + {scale.bump} = {scale.unclamped}"
            f" (+1 when {_up_when(scale.rule, element)}: {holds})"
        )
    exponent = scale.byte - E8M0.bias
    if exponent != scale.unclamped:
        steps.append(
            f"{scale.unclamped} is outside [{E8M0.min_exponent}, {E8M0.max_exponent}], all that E8M0 holds: "
            f"clamped to e = {exponent}"
        )
    steps.append(
        f"byte = e + {E8M0.bias} = {scale.byte} (0x{scale.byte:02x}), shared scale X = 2^{exponent}"
        + (f" = {number(scale.value)}" if -24 <= exponent <= 24 else "")
    )
    ratio = f"amax / X = {number(scale.amax / scale.value)}"
    if exponent == scale.unclamped and scale.exponent_field > 1:
        ratio += f", which {rule} keeps in {_range(scale.rule, element)}"
    return [
        *steps,
        ratio + (f", before the factor {Fraction(element.prescale)}" if block.spec.prescale else ""),
    ]


def reason(element: ElementExplanation, block: BlockExplanation) -> str:
    """Return the reason for the element's code in a few words."""
    spec, top = block.spec, f"{block.format.element.max_value:g}"
    if element.case is Case.NAN:
        return "NaN block: code 0"
    if element.case is Case.EXACT:
        return "on the grid"
    if element.case is Case.SATURATED:
        return f"above {top}: saturates"
    if element.case is Case.TIE:
        return f"halfway: {'to the even code' if spec.rounding is Rounding.RNE else 'away from zero'}"
    if element.threshold is not None and element.random is not None:
        total, full = element.threshold + element.random, 1 << spec.sr_bits
        return f"T+r = {total} {'>=' if total >= full else '<'} {full}: {element.case.value}"
    if spec.rounding is Rounding.RTZ:
        return "toward zero"
    return f"nearer to {abs(element.element):g}"


def notes(block: BlockExplanation) -> list[str]:
    """Return a sentence for each unusual event in the block."""
    out = []
    k, grid = block.format.k, block.format.element
    padded = sum(e.padded for e in block.elements)
    if padded:
        out.append(f"{padded} of {k} elements are padding: zeros appended before anything else is done")
    if block.scale.byte == E8M0.nan_code:
        inputs = [e.position for e in block.elements if e.x_bits & 0x7F800000 == 0x7F800000]
        if inputs:
            out.append(f"NaN or Inf in the input at {_places(inputs)}: one spoils the whole block")
        elif block.rotation:
            out.append("the input of this block is finite: NaN or Inf came out of its Hadamard group")
        else:
            out.append(f"this row is finite: NaN or Inf is in another row of the {k}x{k} tile")
        out.append(f"the block dequantizes to {k} NaN, and every GEMM result that meets it is NaN")
        return out
    saturated = [e.position for e in block.elements if e.case is Case.SATURATED]
    if saturated:
        out.append(
            f"{len(saturated)} saturated to {grid.max_value:g}, {_places(saturated)}: "
            f"{block.scale.rule.value.upper()} may scale amax above {grid.max_value:g}"
        )
    lost = [e.position for e in block.elements if e.y != 0 and e.element == 0]
    if lost:
        out.append(
            f"{len(lost)} nonzero became zero, {_places(lost)}; a zero keeps its sign (code {grid.sign})"
        )
    if block.scale.unclamped is not None and block.scale.unclamped < E8M0.min_exponent:
        out.append("the scale is clamped: amax / X is below the rule's range, so few codes are left to use")
    if block.spec.prescale:
        out.append(
            f"values and errors include the {1 / Fraction(grid.prescale)} by which a GEMM undoes the prescale"
        )
    if block.rotation:
        out.append("values and errors are those of the transformed block: a GEMM needs no inverse transform")
    return out


def _places(positions: list[int]) -> str:
    shown = ", ".join(map(str, positions[:6]))
    return f"element{'s' if len(positions) > 1 else ''} {shown}" + (", ..." if len(positions) > 6 else "")
