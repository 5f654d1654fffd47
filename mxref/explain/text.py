"""An explained block in words: the choice of its scale, the rounding of each element, and unusual events."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from mxref.explain import BlockExplanation, Case, ElementExplanation
from mxref.formats import ElementFormat, Negatives
from mxref.steps.four_over_six import FourOverSix, lower_largest
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import Rounding, nearest_code
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
    interval = f"[{low:.9g}, {high:.9g})" if bound % 2 else f"({low:.9g}, {high:.9g}]"
    return interval + (f": above {element.max_value:.9g} saturates" if high > element.max_value else "")


def number(value: float) -> str:
    """Return a float32 value in its shortest exact form."""
    text = str(np.float32(value))
    return text.removesuffix(".0")


def real(value: float, *points: float) -> str:
    """Return a real number in seven digits, or in more where these would show it on a point that it is only near."""
    text = f"{value:.7g}"
    near = any(float(text) == point != value for point in points)
    return f"{value:.13g}" if near else text


def scaled(element: ElementExplanation, block: BlockExplanation) -> str:
    """Return v, in so many digits that they decide the rounding."""
    v, lower, upper = element.v, element.lower, element.upper
    if v is None or lower is None or upper is None:
        return ""
    if block.format.scale.powers:
        return number(v) if v >= 0.1 or v == 0 else f"{v:.3g}"
    return real(v, lower, (lower + upper) / 2, upper) if v >= 0.1 or v == 0 else f"{v:.3g}"


def scale_steps(block: BlockExplanation) -> list[str]:
    """Return the arithmetic of the shared scale, one step per sentence."""
    scale, symbol, element = block.scale, "y" if block.rotation else "x", block.format.element
    scales, shape = block.format.scale, block.spec.block
    if scale.amax_at is None:
        where = f"in another row of the {shape} tile"
    else:
        where = f"at element {scale.amax_at}"
    of = f"the {shape.rows * shape.columns:,} elements of the tile" if shape.is_tile else f"|{symbol}|"
    if scale.amax_bits >= INFINITY_BITS:
        kind = "NaN" if scale.amax_bits > INFINITY_BITS else "Inf"
        return [
            f"{kind} {where} (bits 0x{scale.amax_bits:08x} >= 0x7f800000): no finite amax, no rule applies",
            f"policy nonfinite = nan_block: byte {scale.byte} (0x{scale.byte:02x}), which is NaN; all codes are 0",
        ]
    if scale.amax_bits == 0 and block.spec.arithmetic is not Arithmetic.REAL:
        return [
            f"amax = max of {of} = 0: every element is zero",
            *_tensor_steps(block),
            f"{block.spec.arithmetic} stores for it byte {scale.byte} (0x{scale.byte:02x}), X = {scale.value:g}",
        ]
    if scale.amax_bits == 0:
        value = f"2^{scale.byte - scales.bias}" if scales.powers else f"{scale.value:g}"
        signs = "; codes keep the signs of their zeros" if element.negatives is Negatives.SIGN else ""
        return [
            f"amax = max of {of} = 0: every element is zero, no rule applies",
            f"policy zero_scale = {block.spec.zero_scale}: byte {scale.byte} (0x{scale.byte:02x}), X = {value}{signs}",
        ]
    amax = f"amax = max of {of} = {number(scale.amax)} {where}"
    if scale.unclamped is None:
        return [amax, *_tensor_steps(block), *_nearest_steps(block)]
    steps = [
        amax,
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
    exponent = scale.byte - scales.bias
    if exponent != scale.unclamped:
        steps.append(
            f"{scale.unclamped} is outside [{scales.min_exponent}, {scales.max_exponent}], all that {scales.name} "
            f"holds: clamped to e = {exponent}"
        )
    steps.append(
        f"byte = e + {scales.bias} = {scale.byte} (0x{scale.byte:02x}), shared scale X = 2^{exponent}"
        + (f" = {number(scale.value)}" if -24 <= exponent <= 24 else "")
    )
    ratio = f"amax / X = {number(scale.amax / scale.value)}"
    if exponent == scale.unclamped and scale.exponent_field > 1:
        ratio += f", which {rule} keeps in {_range(scale.rule, element)}"
    return [
        *steps,
        ratio + (f", before the factor {Fraction(element.prescale)}" if block.spec.prescale else ""),
    ]


def _tensor_steps(block: BlockExplanation) -> list[str]:
    """Return the step from the tensor's amax to its scale, for a format that has one."""
    scale, made = block.scale, block.format
    if scale.tensor_amax is None or scale.tensor_scale is None:
        return []
    if block.spec.arithmetic is not Arithmetic.REAL:
        bits = int(np.float32(scale.tensor_scale).view(np.uint32))
        return [
            f"the tensor's amax A = {number(scale.tensor_amax)}: its scale in the float32 operations of "
            f"{block.spec.arithmetic} is t = {number(scale.tensor_scale)} (0x{bits:08x})"
        ]
    if scale.tensor_amax == 0:
        return ["the tensor's amax A = 0: its scale is t = 1"]
    bits = int(np.float32(scale.tensor_scale).view(np.uint32))
    chosen = block.spec.four_over_six is not FourOverSix.OFF
    top = 2.0**made.scale.max_exponent if chosen else made.scale.max_value
    return [
        f"the tensor's amax A = {number(scale.tensor_amax)}: its scale is t = A / ({made.element.max_value:.9g} * "
        f"{top:.9g}) = {number(scale.tensor_scale)} in float32 (0x{bits:08x})"
    ]


def _nearest_steps(block: BlockExplanation) -> list[str]:
    """Return the steps from amax to a scale with a mantissa: the quotient, its two neighbours, the chosen one."""
    scale, made = block.scale, block.format
    quotient, lower, upper = scale.quotient, scale.lower, scale.upper
    assert quotient is not None
    assert lower is not None
    assert upper is not None
    largest, top, codes = f"{scale.over:.9g}", made.scale.max_value, made.scale.values
    middle = (lower + upper) / 2
    over, of = (f"({largest} t)", "(X t)") if made.tensor_scale else (largest, "X")
    chosen = f"byte {scale.byte} (0x{scale.byte:02x}), shared scale X = {scale.value:.9g}"
    name = block.spec.scale_rule.upper()
    if quotient >= top:
        choice = f"{name}: {top:g} is the largest scale of {made.scale.name}: {chosen}"
    elif quotient == lower:
        choice = f"{name}: that is a scale of {made.scale.name}: {chosen}"
    else:
        ends = " and ".join(f"{value:.9g} (0x{codes.index(value):02x})" for value in (lower, upper))
        why = "halfway, so the even code" if quotient == middle else "the nearer one"
        choice = f"{name}: between the scales {ends} of {made.scale.name}, {why}: {chosen}"
    shown = real(quotient, lower, middle, upper)
    steps = [f"amax / {over} = {shown}, the real quotient", choice]
    if block.spec.four_over_six is not FourOverSix.OFF:
        name = block.spec.four_over_six.value
        other = made.element.max_value if scale.over != made.element.max_value else lower_largest(made)
        steps.insert(0, f"four_over_six = {name}: amax / {largest} errs no more than amax / {other:.9g}")
    if block.spec.arithmetic is not Arithmetic.REAL:
        steps[0] = f"amax / {over} = {shown} in the float32 operations of {block.spec.arithmetic}"
        nearer = nearest_code(np.array([quotient]), np.array(codes[: made.scale.max_code + 1]))
        if scale.byte != nearer:
            steps[1] = (
                f"{block.spec.arithmetic} does not take the scale nearest to it, 0x{nearer[0]:02x}: {chosen}"
            )
    if scale.value == 0 and block.spec.arithmetic in (Arithmetic.TE, Arithmetic.TE_2_13):
        return [
            *steps,
            "the scale underflows to 0, by which the elements are divided all the same: they saturate",
        ]
    if scale.value == 0:
        return [*steps, "the scale underflows to 0: every code is that of 0, with its sign"]
    ratio = scale.amax / (scale.value * (scale.tensor_scale or 1.0))
    beyond = f": above {made.element.max_value:.9g} saturates" if ratio > made.element.max_value else ""
    return [*steps, f"amax / {of} = {real(ratio, made.element.max_value)}{beyond}"]


def reason(element: ElementExplanation, block: BlockExplanation) -> str:
    """Return the reason for the element's code in a few words."""
    spec, top = block.spec, f"{block.format.element.max_value:.9g}"
    if element.case is Case.NAN:
        return "NaN block: code 0"
    if element.case is Case.EXACT:
        return "on the grid"
    if element.v is None:
        return "the scale is 0: code 0"
    if element.case is Case.SATURATED:
        return f"above {top}: saturates"
    if element.case is Case.TIE:
        return f"halfway: {'to the even code' if spec.rounding is Rounding.RNE else 'away from zero'}"
    if element.threshold is not None and element.random is not None:
        total, full = element.threshold + element.random, 1 << spec.sr_bits
        return f"T+r = {total} {'>=' if total >= full else '<'} {full}: {element.case.value}"
    if spec.rounding is Rounding.RTZ:
        return "toward zero"
    return f"nearer to {abs(element.element):.9g}"


def notes(block: BlockExplanation) -> list[str]:
    """Return a sentence for each unusual event in the block."""
    out = []
    k, grid, scales = block.format.k, block.format.element, block.format.scale
    padded = sum(e.padded for e in block.elements)
    if padded:
        out.append(f"{padded} of {k} elements are padding: zeros appended before anything else is done")
    if block.is_nan:
        inputs = [e.position for e in block.elements if e.x_bits & 0x7F800000 == 0x7F800000]
        if inputs:
            out.append(f"NaN or Inf in the input at {_places(inputs)}: one spoils the whole block")
        elif block.rotation:
            out.append("the input of this block is finite: NaN or Inf came out of its Hadamard group")
        else:
            out.append(f"this row is finite: NaN or Inf is in another row of the {block.spec.block} tile")
        out.append(f"the block dequantizes to {k} NaN, and every GEMM result that meets it is NaN")
        return out
    saturated = [e.position for e in block.elements if e.case is Case.SATURATED]
    quotient = block.scale.quotient or 0.0
    if quotient > scales.max_value:
        out.append(
            f"amax is above the tensor's amax: the quotient {quotient:.7g} is beyond {scales.max_value:.9g}, "
            "the largest scale"
        )
    if saturated:
        out.append(
            f"{len(saturated)} saturated to {grid.max_value:.9g}, {_places(saturated)}: "
            f"{block.scale.rule.value.upper()} may scale amax above {grid.max_value:.9g}"
        )
    lost = [e.position for e in block.elements if e.y != 0 and e.element == 0]
    if lost:
        keeps = f"; a zero keeps its sign (code {grid.sign})" if grid.negatives is Negatives.SIGN else ""
        out.append(f"{len(lost)} nonzero became zero, {_places(lost)}{keeps}")
    if block.scale.value == 0 and block.scale.amax_bits and block.spec.arithmetic is Arithmetic.REAL:
        out.append(
            f"the scale underflows to 0: amax / (M t) is at most {scales.values[1] / 2:.9g}, half the smallest scale, "
            "so the whole block becomes zero"
        )
    if grid.negatives is Negatives.TWOS_COMPLEMENT and any(e.code & grid.sign for e in block.elements):
        steps = f"{1 / grid.magnitudes[1]:g}"
        out.append(f"codes are two's complement: a negative element is (code - {2 * grid.sign}) / {steps}")
    if block.scale.unclamped is not None and block.scale.unclamped < scales.min_exponent:
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
