"""From a wrong block to the clause that it breaks.

`deciders` says which clause decides which bit of an answer. Where that is not enough, the same block is asked again
without one feature: without its Hadamard transform, in rows instead of tiles, in float32, or as an array of its own.
If the block is right then, the clause of that feature is broken. `symptom` and `cause` put both together. After a
change here every backend of `tests/mutants` must still be caught under the same clauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import Subject
from mxref.conformance.requests.quantizing import Blocks, Judge, Place, Request, all_of_it, alone, scales_only
from mxref.formats import BlockShape
from mxref.recipe import UNTURNED
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
    """Return the clause that decides the first wrong bit of a block; None if the block is right."""
    wrong = (
        clause for clause, judge in deciders(request) if judge(got, request.expected_blocks)[0][row, block]
    )
    return next(wrong, None)


def _stored_bits(request: Request) -> NDArray[np.uint32]:
    x, plan = request.array(), request.plan
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


Without = Callable[[Request, Place], tuple[Request, Place] | None]
"""Returns a block without one feature, as a request of its own; None if the block does not have the feature."""


def symptom(
    subject: Subject, clause: str, judge: Judge, request: Request, got: Blocks, place: Place
) -> str | None:
    """Return what is wrong with a block, seen from a clause; None if nothing is. Shrinking keeps it constant.

    It is the clause itself if the block shows the fault of this clause alone: the wrong bits are those that the clause
    decides, or the block is right without the feature of the clause. It is what decides the first wrong bit otherwise.
    A block that does not have the feature of the clause cannot show its fault. The judge is that of the check.
    """
    want, judges = request.expected_blocks, dict(deciders(request))
    if clause in judges and judges[clause](got, want)[0][place]:
        return clause
    if not judge(got, want)[0][place]:
        return None
    without = _feature(clause)
    if without is not None:
        plainer = without(request, place)
        if plainer is None:
            return None
        if right(subject, *plainer):
            return clause
    return _kind(blame(request, got, *place))


def cause(subject: Subject, request: Request, got: Blocks, place: Place) -> str:
    """Return the clause that a wrong block of the answer breaks, whatever it was asked for."""
    decided = blame(request, got, *place) or "quantize.order"
    if request.spec.rounding is Rounding.SR and right(subject, *_plain(request, place)):
        return decided
    for clause, without in _FEATURES.items():
        plainer = without(request, place)
        if plainer is not None and right(subject, *plainer):
            along_last = request.plan.axis == len(request.plan.shape) - 1
            return "quantize.axis" if clause == "quantize.strides" and not along_last else clause
    return decided


def right(subject: Subject, request: Request, place: Place) -> bool:
    """Return whether the backend answers a block right; not if it raises or does not declare the request."""
    try:
        return not request.wrong(subject)[place]
    except Exception:  # a request that is not possible shows nothing
        return False


def _kind(clause: str | None) -> str | None:
    """Return the clause of a bit without the choice of rule or rounding, which a simpler request may change."""
    if clause is None:
        return None
    if clause.startswith("scale.rule."):
        return "scale.rule"
    values = {f"rounding.{each.value}" for each in Rounding} | {"rounding.prescale"}
    return "rounding" if clause in values else clause


def _feature(clause: str) -> Without | None:
    """Return the function that removes the feature of the clause from a block; None if the clause has no feature."""
    chapter = clause.partition(".")[0]
    if chapter in ("hadamard", "linear"):
        return _untransformed
    if chapter == "random":
        return _on_the_grid
    if chapter == "quantize" and clause != "quantize.order":
        return _plain
    return _FEATURES.get(clause)


def _plain(request: Request, place: Place) -> tuple[Request, Place]:
    """Return the block as a request of its own, without random bits, which its place decides."""
    found, place = alone(request, place)
    if found.spec.rounding is Rounding.SR:
        found = replace(found, spec=replace(found.spec, rounding=Rounding.RNE, sr_bits=16))
    return found, place


def _untransformed(request: Request, place: Place) -> tuple[Request, Place] | None:
    rotation = request.plan.rotation
    if rotation is None:
        return None
    found, place = _plain(request, place)
    x = hadamard(found.x.astype(np.float32), rotation)
    return replace(found, x=x, spec=replace(found.spec, **UNTURNED)), place


def _on_the_grid(request: Request, place: Place) -> tuple[Request, Place] | None:
    """Return the block with the values that it is rounded to: random bits decide nothing there."""
    if request.spec.rounding is not Rounding.SR:
        return None
    want = request.expected_blocks
    elements = np.array(request.element.values)[want.codes[place]]
    values = np.ldexp(elements, int(want.scales[place]) - 127)
    bare = replace(request.spec, **UNTURNED, prescale=False, block=BlockShape.ROW)
    return Request(values.astype(request.x.dtype)[None], bare, rng=request.rng), (0, 0)


def _by_row(request: Request, place: Place) -> tuple[Request, Place] | None:
    if request.spec.block is not BlockShape.TILE:
        return None
    found, place = _plain(request, place)
    return replace(found, spec=replace(found.spec, block=BlockShape.ROW)), place


def _widened(request: Request, place: Place) -> tuple[Request, Place] | None:
    if request.x.dtype == np.float32:
        return None
    found, place = _plain(request, place)
    return replace(found, x=found.x.astype(np.float32)), place


_FEATURES: dict[str, Without] = {
    "hadamard.order": _untransformed, "scale.block.tile": _by_row, "conventions.inputs": _widened,
    "quantize.strides": _plain,
}  # fmt: skip
"""Features of a block by clause, each with the function that removes it."""
