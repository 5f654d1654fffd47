"""Which clause decides which bit of a quantization, so that a wrong bit is reported under that clause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.requests.quantization import Blocks, Judge, Request, all_of_it, scales_only
from mxref.formats import BlockShape
from mxref.plan import plan_quantize
from mxref.steps.hadamard import hadamard
from mxref.steps.rounding import Rounding
from mxref.steps.scale import INFINITY_BITS, magnitude_bits, scale_exponent


def deciders(request: Request) -> Iterator[tuple[str, Judge]]:
    """Yield the clauses that decide an answer's bits, each with the judge of those bits; together they judge all.

    Scales are divided by the kind of block; signs belong to their clause; magnitudes, judged only where the
    scale is right, to what decides them: prescale, SR, saturation, the division by the scale, or the rounding.
    """
    spec, want, element, k = request.spec, request.expected_blocks, request.element, request.format.k
    magnitude = element.sign - 1
    bits = _stored_bits(request)  # [R, B, k]
    amax = bits.max(axis=-1)
    if spec.block is BlockShape.TILE:
        amax = np.repeat(amax.reshape(-1, k, amax.shape[-1]).max(axis=1), k, axis=0)
    nonfinite, zero = amax >= INFINITY_BITS, amax == 0
    clamped = (amax < 2 << 23) & ~zero
    yield "scale.nonfinite", _scales(nonfinite, codes_too=True)
    yield "scale.zero", _scales(zero)
    yield "scale.clamp", _scales(clamped)
    yield f"scale.rule.{spec.scale_rule.kind}", _scales(~(nonfinite | zero | clamped))
    finite = np.broadcast_to(~nonfinite[..., None], bits.shape)
    yield "rounding.sign", _elements(element.sign, finite, magnitude)
    if spec.prescale:
        yield "rounding.prescale", _elements(magnitude, finite, magnitude)
        return
    if spec.rounding is Rounding.SR:
        yield "rounding.sr", _elements(magnitude, finite, magnitude)
        return
    magnitudes = np.where(finite, bits, np.uint32(0)).view(np.float32).astype(np.float64)
    v = np.ldexp(magnitudes, -scale_exponent(want.scales)[..., None])
    on_grid = np.isin(v, element.magnitudes[1:]) | (v < element.magnitudes[1] / 4)
    saturated = finite & (v > element.max_value)
    scaled = finite & on_grid & (clamped[..., None] | (bits < 1 << 23))
    yield "rounding.saturate", _elements(magnitude, saturated, magnitude)
    yield "rounding.scaled", _elements(magnitude, scaled, magnitude)
    yield f"rounding.{spec.rounding.value}", _elements(magnitude, finite & ~saturated & ~scaled, magnitude)


def blame(request: Request, got: Blocks, row: int, block: int) -> str | None:
    """Return the clause that decides the first wrong bit of a block, None where the block is right."""
    wrong = (
        clause for clause, judge in deciders(request) if judge(got, request.expected_blocks)[0][row, block]
    )
    return next(wrong, None)


def _stored_bits(request: Request) -> NDArray[np.uint32]:
    arguments = request.arguments
    x = request.array()
    plan = plan_quantize(x.shape, request.spec, arguments.pop("axis"), **arguments)
    rows = np.moveaxis(x, plan.axis, -1).reshape(plan.rows, -1).astype(np.float32)
    rows = np.pad(rows, [(0, 0), (0, plan.length - rows.shape[1])])
    y = hadamard(rows, plan.rotation) if plan.rotation else rows
    return magnitude_bits(y).reshape(plan.rows, plan.length // request.format.k, request.format.k)


def _scales(kind: NDArray[np.bool_], codes_too: bool = False) -> Judge:
    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        return (all_of_it if codes_too else scales_only)(got, want)[0] & kind, int(kind.sum())

    return judge


def _elements(mask: int, elements: NDArray[np.bool_], magnitude: int) -> Judge:
    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        wrong = (((got.codes ^ want.codes) & mask != 0) & elements).any(axis=-1)
        if mask == magnitude:
            wrong &= got.scales == want.scales
        return wrong, int(elements.any(axis=-1).sum())

    return judge
