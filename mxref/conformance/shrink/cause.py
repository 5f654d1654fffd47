"""Finds the clause that a wrong block breaks, by asking the backend for the same block in plainer ways."""

from __future__ import annotations

from mxref.conformance.model import Subject
from mxref.conformance.requests.quantization import Blocks, Request, all_of_it
from mxref.conformance.shrink.blame import blame
from mxref.conformance.shrink.own import FEATURES, Place, without_random_bits


def cause(subject: Subject, request: Request, got: Blocks, place: Place) -> str:
    """Return the clause of a wrong block.

    A block that is right without the Hadamard transform, in rows instead of tiles, in float32, or as an array of its
    own breaks the clause of that feature. Any other block breaks the clause that decides its first wrong bit.

    Args:
        subject: the backend.
        request: what it answered wrongly.
        got: its answer.
        place: stored row and number of the block.
    """
    decided = blame(request, got, *place) or "quantize.order"
    fixed = without_random_bits(request, place)
    if fixed is not None and _right(subject, *fixed):
        return decided
    for clause, without in FEATURES.items():
        plainer = without(request, place)
        if plainer is not None and _right(subject, *plainer):
            return "quantize.axis" if clause == "quantize.strides" and not _along_last(request) else clause
    return decided


def _along_last(request: Request) -> bool:
    return request.plan.axis == len(request.plan.shape) - 1


def _right(subject: Subject, request: Request, place: Place) -> bool:
    try:
        got = Blocks.of(request.answer(subject))
    except Exception:  # a request that is not possible shows nothing
        return False
    return not all_of_it(got, request.expected_blocks)[0][place]
