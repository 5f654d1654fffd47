"""Tests whether a wrong block shows the fault of its own clause, which shrinking must keep.

A backend may break several clauses. One block can then be wrong in several ways, and shrinking would otherwise end at
the same simple block for all clauses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.model import Subject, declares
from mxref.conformance.requests.quantization import Blocks, Judge, Request, all_of_it, tile_rows, unit_rows
from mxref.conformance.shrink.blame import deciders
from mxref.formats import BlockShape, ElementFormat
from mxref.plan import QuantPlan
from mxref.recipe import UNTURNED, OperandSpec
from mxref.steps.hadamard import hadamard
from mxref.steps.rounding import Rounding

Place = tuple[int, int]
"""Stored row and number of a block."""
_MAX_PLACES = 24


@dataclass(frozen=True)
class Own:
    """Tests whether the answer for a block breaks one clause."""

    subject: Subject
    clause: str
    judge: Judge
    kind: str | None = None
    """For a clause that joins many: the clause of the wrong bits, which must stay the same."""
    alone: bool = True
    """Whether the block must be right without the feature of the clause."""

    def shown(self, request: Request, place: Place) -> bool:
        """Return whether a declared request still shows the fault; an exception is another failure."""
        if not all(declares(self.subject.capabilities, name, value) for name, value in request.needs):
            return False
        try:
            return self._shown(request, Blocks.of(request.answer(self.subject)), place)
        except Exception:
            return False

    def _shown(self, request: Request, got: Blocks, place: Place) -> bool:
        want, judges = request.expected_blocks, dict(deciders(request))
        if self.alone and _decided(self.clause):
            return self.clause in judges and bool(judges[self.clause](got, want)[0][place])
        without = _feature(self.clause)
        if without is None or not self.alone:
            judge = self.judge if without is None else all_of_it
            same = self.kind in (None, _kind(judges, got, want, place))
            return (
                same
                and bool(judge(got, want)[0][place])
                and (without is None or without(request, place) is not None)
            )
        plainer = without(request, place)
        return bool(all_of_it(got, want)[0][place]) and plainer is not None and not self._wrong(*plainer)

    def _wrong(self, request: Request, place: Place) -> bool:
        if not all(declares(self.subject.capabilities, name, value) for name, value in request.needs):
            return False
        got = Blocks.of(request.answer(self.subject))
        return bool(all_of_it(got, request.expected_blocks)[0][place])


def own_block(
    subject: Subject, request: Request, place: Place, clause: str, judge: Judge
) -> tuple[Own, Place]:
    """Return a wrong block of a request that shows the fault of a clause, and what tells so of others.

    Args:
        subject: the backend.
        request: what it answers wrongly.
        place: of a wrong block, which is tried first.
        clause: that it is reported under.
        judge: of the clause's check.
    """
    got, want = Blocks.of(request.answer(subject)), request.expected_blocks
    wrong = judge(got, want)[0]
    places = [place, *(p for p in _places(wrong, want, request.element) if p != place)][:_MAX_PLACES]
    own = Own(subject, clause, judge)
    found = next((p for p in places if own.shown(request, p)), None)
    kind = _kind(dict(deciders(request)), got, want, found or place)
    return replace(own, kind=kind, alone=found is not None), found or place


def _places(wrong: NDArray[np.bool_], want: Blocks, element: ElementFormat) -> list[Place]:
    """Return the places of wrong blocks; blocks of zeros are last, because they show the least."""
    zero: NDArray[np.bool_] = np.logical_not((want.codes & (element.sign - 1)).any(axis=-1))
    found = sorted(np.argwhere(wrong).tolist(), key=lambda p: (bool(zero[tuple(p)]), *p))
    return [(row, block) for row, block in found]


def _decided(clause: str) -> bool:
    """Return whether `deciders` has a judge of the clause's own bits."""
    if clause.startswith("rounding."):
        return clause != "rounding.native_sr"
    return clause.startswith("scale.rule.") or clause in ("scale.nonfinite", "scale.zero", "scale.clamp")


def _kind(judges: dict[str, Judge], got: Blocks, want: Blocks, place: Place) -> str | None:
    """Return what decides the first wrong bit of a block, without the choice of rule or rounding."""
    found = next((clause for clause, judge in judges.items() if judge(got, want)[0][place]), None)
    if found is None:
        return None
    if found.startswith("scale.rule."):
        return "scale.rule"
    values = {f"rounding.{each.value}" for each in Rounding} | {"rounding.prescale"}
    return "rounding" if found in values else found


Without = Callable[[Request, Place], "tuple[Request, Place] | None"]


def _feature(clause: str) -> Without | None:
    """Return the function that removes the feature of the clause from a block; None if the clause has no feature."""
    chapter = clause.partition(".")[0]
    if chapter in ("hadamard", "linear"):
        return _untransformed
    if chapter == "random":
        return _on_the_grid
    if clause == "scale.block.tile":
        return _by_row
    if clause == "conventions.inputs":
        return _widened
    if chapter == "quantize" and clause != "quantize.order":
        return _plain
    return None


def _alone(request: Request, place: Place, spec: OperandSpec) -> tuple[Request, Place]:
    """Return the block as a request of its own, without random bits, which its place decides."""
    plan, (row, block) = request.plan, place
    if spec.rounding is Rounding.SR:
        spec = replace(spec, rounding=Rounding.RNE, sr_bits=16)
    x = np.ascontiguousarray(unit_rows(request, row, block))
    return Request(x, spec, rng=request.rng), (row - tile_rows(request, row)[0], block % _blocks(plan))


def _blocks(plan: QuantPlan) -> int:
    return plan.unit // plan.format.k


def _plain(request: Request, place: Place) -> tuple[Request, Place] | None:
    return _alone(request, place, request.spec)


def _untransformed(request: Request, place: Place) -> tuple[Request, Place] | None:
    rotation = request.plan.rotation
    if rotation is None:
        return None
    found, place = _alone(request, place, request.spec)
    spec = replace(found.spec, **UNTURNED)
    return replace(found, x=hadamard(found.x.astype(np.float32), rotation), spec=spec), place


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
    return _alone(request, place, replace(request.spec, block=BlockShape.ROW))


def _widened(request: Request, place: Place) -> tuple[Request, Place] | None:
    if request.x.dtype == np.float32:
        return None
    found, place = _alone(request, place, request.spec)
    return replace(found, x=found.x.astype(np.float32)), place


FEATURES: dict[str, Without] = {
    "hadamard.order": _untransformed, "scale.block.tile": _by_row, "conventions.inputs": _widened,
    "quantize.strides": _plain,
}  # fmt: skip
"""Features of a block by clause, each with the function that removes it."""


def without_random_bits(request: Request, place: Place) -> tuple[Request, Place] | None:
    """Return a block under SR as a request of its own under RNE; None for any other rounding."""
    return _plain(request, place) if request.spec.rounding is Rounding.SR else None
