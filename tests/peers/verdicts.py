"""Verdicts on the bytes that an implementation stored: for each clause, whether they are the reference's.

Nothing is asked again, so bytes from a file of another machine are judged as those of this one are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref import MXArray, OperandSpec, dequantize
from mxref.conformance.blame import deciders
from mxref.conformance.dump import other_treatments
from mxref.conformance.finding import block_failure
from mxref.conformance.replay import Call, RecordedProduct, RecordedQuantization
from mxref.conformance.requests.crafted import crafted_blocks
from mxref.conformance.requests.decoding import differs
from mxref.conformance.requests.quantizing import Blocks, Judge, Place, all_of_it, alone, magnitude_codes
from mxref.errors import MxrefError
from mxref.explain.link import explorer_link, treatment_text
from mxref.formats import BlockFormat, ElementFormat
from peers.peer import Decoder

PASSES, DIFFERS, MASKED = "passes", "differs", "masked"
"""Outcomes of a clause; it is masked where another wrong bit, such as the scale, hides what it decides."""

DIVISION = "rounding.scaled"

Mask = NDArray[np.bool_]


@dataclass
class Judged:
    """What one clause decides in one recorded matrix."""

    wrong: Mask
    """Blocks [R, B] with a wrong bit."""
    right: Mask
    """Blocks whose bits are right, and could have been wrong."""
    looked: Mask


@dataclass(frozen=True)
class Answered:
    """A recorded matrix, and what each clause decides in it."""

    call: RecordedQuantization
    got: Blocks
    correct: Mask
    """Blocks without a wrong bit."""
    same: Mask
    """Blocks with the values of the reference: signs of zeros, and codes under a NaN scale, change none."""
    clauses: dict[str, Judged] = field(default_factory=dict)


def verdicts(calls: Iterable[Call]) -> dict[str, dict[str, Any]]:
    """Return the verdict on each clause that recorded quantizations and products depend on."""
    calls, found = list(calls), dict[str, dict[str, Any]]()
    for call in calls:
        if isinstance(call, RecordedProduct):
            found |= _product(call, found)
    answered = _answered(calls)
    for clause, some in _by_clause(answered).items():
        if any(each.clauses[clause].wrong.any() for each in some):
            found[clause] = {"outcome": DIFFERS} | _shown(clause, some, answered)
        elif count := sum(int(each.clauses[clause].right.sum()) for each in some):
            found[clause] = {"outcome": PASSES, "blocks": count}
        elif any(each.clauses[clause].looked.any() for each in some):
            found[clause] = {"outcome": MASKED}
    return found


def wrong_blocks(calls: Iterable[Call]) -> dict[str, tuple[NDArray[np.float32], bool]]:
    """Return, for each clause that is wrong, its wrong block that is easiest to read, and whether its values are right.

    The block comes with what it depends on: the rows of its tile, and its Hadamard group.
    """
    found = {}
    for clause, some in _by_clause(_answered(calls)).items():
        if places := list(_places(clause, some)):
            each, place = min(places, key=lambda found: found[0])[1]
            found[clause] = alone(each.call.request, place)[0].x.astype(np.float32), bool(each.same[place])
    return found


def decoded(decoder: Decoder) -> dict[str, dict[str, Any]]:
    """Return the verdict on each clause of dequantization: code 7 of E2M1 under every scale byte."""
    scales = np.arange(256, dtype=np.uint8)
    q = MXArray(np.full((256, 16), 0x77, np.uint8), scales[:, None], (256, 32), 1)
    want = dequantize(q, decoder.dtype)[:, 0].astype(np.float64)
    wrong = differs(decoder.run(scales).astype(np.float64), want)
    got, nan = decoder.run(scales).astype(np.float64), scales == 255
    parts = {"value": ~nan & np.isfinite(want), "overflow": ~nan & ~np.isfinite(want), "nan": nan}
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        if not (wrong & part).any():
            if part.any():
                found[f"dequantize.{name}"] = {"outcome": PASSES, "blocks": int(part.sum())}
            continue
        byte = int(np.flatnonzero(wrong & part)[0])
        # FLOOR stores this number as code 7 under the byte; float32 does not hold the number of the last two.
        with np.errstate(over="ignore"):
            number = np.float32(np.nan if byte == 255 else np.ldexp(6.0, byte - 127))
        found[f"dequantize.{name}"] = {
            "outcome": DIFFERS, "inputs": [f"scale byte {byte:02x}, code 7"],
            "expected": f"{want[byte]:.9g}", "got": f"{got[byte]:.9g}",
            "link": "" if np.isinf(number) else _link(np.resize(np.append(number, np.zeros(31)), (1, 32))),
        }  # fmt: skip
    return found


def coverage(calls: Iterable[Call]) -> tuple[int, int]:
    """Return how many of the kit's finite crafted blocks recorded matrices hold, and how many there are."""
    held, wanted = set[bytes](), set[bytes]()
    for call in calls:
        if isinstance(call, RecordedQuantization) and call.request.spec.format.scale.powers:
            made, x = call.request.format, call.request.x
            crafted = crafted_blocks(made, full=False).x
            crafted = crafted[np.isfinite(crafted).all(axis=1)].astype(x.dtype)
            crafted = crafted[np.isfinite(crafted.astype(np.float32)).all(axis=1)]
            wanted |= {block.tobytes() for block in crafted}
            rows = np.ascontiguousarray(np.moveaxis(x, call.request.axis, -1))
            held |= {block.tobytes() for block in rows.reshape(-1, made.k)}
    return len(held & wanted), len(wanted)


def _product(call: RecordedProduct, before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the verdict on a product, unless one before it was wrong already."""
    failure, clause = call.failure, call.check.clause
    if failure is None:
        return {} if clause in before else {clause: {"outcome": PASSES, "blocks": int(call.result.size)}}
    inputs = [f"{name}: {' '.join(words)}" for name, words in failure.inputs.items()]
    shown = {"inputs": inputs, "expected": failure.expected, "got": failure.got, "link": ""}
    return {failure.clause: {"outcome": DIFFERS} | shown}


def _answered(calls: Iterable[Call]) -> list[Answered]:
    """Return the quantizations among recorded calls, judged."""
    found = [_judged(call) for call in calls if isinstance(call, RecordedQuantization) and call.scales.size]
    _blame_the_division(found)
    return found


def _by_clause(answered: Iterable[Answered]) -> dict[str, list[Answered]]:
    found: dict[str, list[Answered]] = {}
    for each in answered:
        for clause in each.clauses:
            found.setdefault(clause, []).append(each)
    return found


def _judged(call: RecordedQuantization) -> Answered:
    got, want = call.answer, call.request.expected_blocks
    element, made = call.request.element, call.request.format
    values = [_values(blocks, made) for blocks in (got, want)]
    each = Answered(
        call, got, ~all_of_it(got, want)[0], np.isclose(*values, 0, 0, equal_nan=True).all(axis=-1)
    )
    if made.tensor_scale and not np.isfinite(call.request.x.astype(np.float32)).all():
        # A NaN or Inf spoils the scale of the tensor, and with it every block.
        whole = np.ones(each.correct.shape, np.bool_)
        each.clauses["scale.nonfinite"] = Judged(~each.correct, each.correct, whole)
        return each
    for clause, judge in deciders(call.request):
        wrong, looked = judge(got, want)[0], _looked(judge, want, element)
        comparable = looked & (got.tensor == want.tensor)
        if clause == "rounding.sign":  # of elements that differ in nothing else
            alike = magnitude_codes(got.codes, element) == magnitude_codes(want.codes, element)
            wrong &= ((got.codes != want.codes) & alike).any(axis=-1) & (got.tensor == want.tensor)
        elif clause.startswith("rounding."):
            comparable &= got.scales == want.scales
        if before := each.clauses.get(clause):
            wrong, comparable, looked = (
                before.wrong | wrong,
                before.right | comparable,
                before.looked | looked,
            )
        each.clauses[clause] = Judged(wrong, comparable & ~wrong, looked)
    return each


def _values(blocks: Blocks, made: BlockFormat) -> NDArray[np.float64]:
    """Return the numbers [R, B, k] that blocks stand for."""
    tensor = 1.0 if blocks.tensor is None else float(np.uint32(blocks.tensor).view(np.float32))
    scales = np.array(made.scale.values, np.float64)[blocks.scales] * tensor
    found: NDArray[np.float64] = np.array(made.element.values)[blocks.codes] * scales[..., None]
    return found


def _blame_the_division(answered: Sequence[Answered]) -> None:
    """Leave out of the other roundings what another divisor than the stored scale explains.

    An element on the grid is wrong only under another divisor, which then spoils every element under this scale code.
    """
    spoiled = [each.got.scales[each.clauses[DIVISION].wrong] for each in answered if DIVISION in each.clauses]
    scales = np.unique(np.concatenate(spoiled)) if spoiled else []
    for each in answered:
        under = np.isin(each.got.scales, scales)
        for clause, judged in each.clauses.items():
            if clause.startswith("rounding.") and clause not in (DIVISION, "rounding.sign"):
                judged.wrong &= ~under
                judged.right &= ~under


def _looked(judge: Judge, want: Blocks, element: ElementFormat) -> Mask:
    """Return the blocks that a judge looks at: those that it finds wrong in spoiled answers."""
    spoiled = [
        want._replace(scales=want.scales ^ 1),
        want._replace(codes=want.codes ^ (2 * element.sign - 1)),
    ]
    if want.tensor is not None:
        spoiled.append(want._replace(tensor=want.tensor ^ 1))
    return np.any([judge(answer, want)[0] for answer in spoiled], axis=0)


def _shown(clause: str, some: Sequence[Answered], answered: Sequence[Answered]) -> dict[str, Any]:
    """Return the wrong block that is easiest to read, and what else is known of the clause."""
    each, place = min(_places(clause, some), key=lambda found: found[0])[1]
    request = each.call.request
    failure = block_failure(request, place, clause, "", each.got)
    treatment = next(_treatments(clause, request.spec, answered), None)
    plain, (row, block) = alone(request, place)
    index = row * (request.plan.unit // request.format.k) + block
    return {
        "inputs": list(failure.inputs["x"]), "expected": failure.expected, "got": failure.got,
        "command": failure.command or "", "amax": plain.amax,
        "link": _link(plain.x, plain.spec, index, plain.amax, treatment and treatment[1]),
        "under": treatment[0] if treatment else "",
        "zeros": clause == "rounding.sign" and all(map(_signs_of_zeros, some)),
        "same": all(each.same[each.clauses[clause].wrong].all() for each in some),
    }  # fmt: skip


def _places(clause: str, some: Sequence[Answered]) -> Iterator[tuple[Any, tuple[Answered, Place]]]:
    """Yield the wrong blocks of a clause, each with what makes it hard to read."""
    for number, each in enumerate(some):
        request, want = each.call.request, each.call.request.expected_blocks
        rows = np.moveaxis(request.array(), request.plan.axis, -1).astype(np.float32)
        count = np.count_nonzero(rows.reshape(want.codes.shape).view(np.uint32), axis=-1)
        far = np.abs(want.scales.astype(int) - request.format.scale.one_code)
        for row, block in np.argwhere(each.clauses[clause].wrong):
            place = int(row), int(block)
            yield (bool(each.same[place]), int(count[place]), int(far[place]), number, place), (each, place)


def _signs_of_zeros(each: Answered) -> bool:
    """Return whether the wrong signs are those of zeros."""
    want, element = each.call.request.expected_blocks, each.call.request.element
    magnitudes = magnitude_codes(want.codes, element)
    wrong = (each.got.codes != want.codes) & (magnitude_codes(each.got.codes, element) == magnitudes)
    wrong &= each.clauses["rounding.sign"].wrong[..., None]
    return not magnitudes[wrong].any()


def _treatments(
    clause: str, asked: OperandSpec, answered: Sequence[Answered]
) -> Iterator[tuple[str, OperandSpec]]:
    """Yield treatments under which the wrong blocks of a clause are right, and those that were right stay so."""
    for text, spec in other_treatments(asked):
        try:
            if all(_fits(each, clause, spec) for each in answered):
                yield text, spec
        except MxrefError:  # a treatment that the shape does not have
            continue


def _fits(each: Answered, clause: str, spec: OperandSpec) -> bool:
    """Return whether the wrong blocks, and those that were right, are those of a treatment; signs of zeros aside."""
    request = replace(each.call.request, spec=spec)
    got, want = each.got, request.expected_blocks
    zero = magnitude_codes(got.codes | want.codes, request.element) == 0
    codes = got.codes if clause == "rounding.sign" else np.where(zero, want.codes, got.codes)
    equal = ~all_of_it(got._replace(codes=codes), want)[0]
    judged = each.clauses.get(clause)
    held = each.correct if judged is None else each.correct | judged.wrong
    return bool(equal[held].all())


def _link(
    x: NDArray[Any], spec: OperandSpec | None = None, index: int = 0, amax: float | None = None,
    beside: OperandSpec | None = None,
) -> str:  # fmt: skip
    """Return what follows `#` in the explorer's address of a block, empty where the page cannot show it."""
    try:
        link = explorer_link(x.astype(np.float32), spec, index=index, page="#", amax=amax)
    except MxrefError:
        return ""
    return link.partition("#")[2].lstrip("#") + (f"&b={treatment_text(beside)}" if beside else "")
