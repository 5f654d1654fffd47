"""From a wrong answer to the clause that it breaks, and to the smallest request that breaks the same clause.

`deciders` says which clause decides which bit of an answer. Where that is not enough, the same block is asked again
without one feature: without its Hadamard transform, in rows instead of tiles, in float32, or as an array of its own.
If the block is right then, the clause of that feature is broken. `symptom` puts both together.

A `Search` holds a case and what is wrong with it. A simpler case takes its place only if the same is wrong with it, so
a finding is never shrunk into another fault: a backend may have several. `smallest_block`, `smallest_product` and
`fewest_elements` say what is simpler for a quantization, a product and the input of a transform. After a change here
every backend of `tests/mutants` must still be caught under the same clauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import Subject, unit_amax
from mxref.conformance.requests.decoding import first_place
from mxref.conformance.requests.multiplying import Product, decided, rows_of
from mxref.conformance.requests.quantizing import (
    Blocks,
    Judge,
    Place,
    Request,
    alone,
    magnitude_codes,
)
from mxref.formats import BlockFormat, ElementFormat, Negatives
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.recipe import UNTURNED
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SignPolicy, hadamard
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import Rounding
from mxref.steps.scale import INFINITY_BITS, magnitude_bits, rules_of, scale_exponent, scale_value


def deciders(request: Request) -> Iterator[tuple[str, Judge]]:
    """Yield the clauses that decide an answer's bits, each with the judge of those bits; together they judge all.

    Scales are divided by the kind of block; signs belong to their clause; magnitudes, judged only where the
    scale is right, to what decides them: prescale, SR, saturation, the division by the scale, or the rounding.
    """
    spec, want, element = request.spec, request.expected_blocks, request.element
    made = request.format
    bits = _stored_bits(request)  # [R, B, k]
    amax = bits.max(axis=-1)
    if spec.block.is_tile:
        rows = spec.block.rows
        amax = np.repeat(amax.reshape(-1, rows, amax.shape[-1]).max(axis=1), rows, axis=0)
    nonfinite, zero = amax >= INFINITY_BITS, amax == 0
    real, chosen = spec.arithmetic is Arithmetic.REAL, spec.four_over_six is not FourOverSix.OFF
    if made.tensor_scale:
        of_tensor = "scale.tensor.amax" if request.amax is None else "scale.tensor"
        yield "scale.four_over_six" if chosen else of_tensor if real else "scale.arithmetic", _tensor_scale
    yield "scale.nonfinite", _scales(nonfinite, codes_too=True)
    if not real:
        ordinary = np.broadcast_to(~nonfinite[..., None], bits.shape)
        yield "scale.arithmetic", _scales(~nonfinite)
        yield "rounding.sign", _signs(ordinary, element)
        random = spec.rounding is Rounding.SR
        yield "rounding.sr" if random else "scale.arithmetic", _magnitudes(ordinary, element)
        return
    yield "scale.zero", _scales(zero)
    # At the lower end of the scales a power of two is held up, and any other may be 0.
    if made.scale.powers:
        low, low_clause = (amax < 2 << 23) & ~zero, "scale.clamp"
    else:
        low, low_clause = (want.scales == 0) & ~zero, "scale.underflow"
    yield low_clause, _scales(low) if made.scale.powers else _underflow(low, element)
    rule = "scale.four_over_six" if chosen else f"scale.rule.{spec.scale_rule.kind}"
    yield rule, _scales(~(nonfinite | zero | low))
    finite = np.broadcast_to(~nonfinite[..., None], bits.shape)
    yield "rounding.sign", _signs(finite, element)
    if not made.scale.powers:
        finite = finite & ~low[..., None]
    if spec.prescale:
        yield "rounding.prescale", _magnitudes(finite, element)
        return
    if spec.rounding is Rounding.SR:
        yield "rounding.sr", _magnitudes(finite, element)
        return
    magnitudes = np.where(finite, bits, np.uint32(0)).view(np.float32).astype(np.float64)
    v = magnitudes / _divisors(request)[..., None]
    saturated = finite & (v > element.max_value)
    if made.scale.powers:
        on_grid = np.isin(v, element.magnitudes[1:]) | (v < element.magnitudes[1] / 4)
        divided, clause = finite & on_grid & (low[..., None] | (bits < 1 << 23)), "rounding.scaled"
    else:
        divided, clause = finite & ~saturated & _nearly_turning(v, element), "rounding.quotient"
    yield "rounding.saturate", _magnitudes(saturated, element)
    yield clause, _magnitudes(divided, element)
    yield f"rounding.{spec.rounding.value}", _magnitudes(finite & ~saturated & ~divided, element)


def _divisors(request: Request) -> NDArray[np.float64]:
    """Return what the magnitudes of each block are divided by, [R, B]; 1 where the scale is 0 or NaN."""
    want, scale = request.expected_blocks, request.format.scale
    if scale.powers:
        return np.ldexp(1.0, scale_exponent(want.scales))
    value = scale_value(want.scales, scale)
    return np.where(value > 0, value, 1.0) * _tensor_value(want)


def _tensor_value(blocks: Blocks) -> float:
    return 1.0 if blocks.tensor is None else float(np.uint32(blocks.tensor).view(np.float32))


def _nearly_turning(v: NDArray[np.float64], element: ElementFormat) -> NDArray[np.bool_]:
    """Return where a quotient lies within a few float32 steps of a grid point or a tie, and not on it."""
    grid = np.array(element.magnitudes)
    turns = np.sort(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))
    above = np.searchsorted(turns, v).clip(1, len(turns) - 1)
    distance = np.minimum(np.abs(v - turns[above - 1]), np.abs(v - turns[above]))
    found: NDArray[np.bool_] = (distance > 0) & (distance < v * 2.0**-21)
    return found


def blame(request: Request, got: Blocks, place: Place) -> str:
    """Return the clause that decides the first wrong bit of a wrong block."""
    want = request.expected_blocks
    return next(clause for clause, judge in deciders(request) if judge(got, want)[0][place])


def _stored_bits(request: Request) -> NDArray[np.uint32]:
    x, plan = request.array(), request.plan
    rows = np.moveaxis(x, plan.axis, -1).reshape(plan.rows, -1).astype(np.float32)
    rows = np.pad(rows, [(0, 0), (0, plan.length - rows.shape[1])])
    y = hadamard(rows, plan.rotation) if plan.rotation else rows
    return magnitude_bits(y).reshape(plan.rows, plan.length // request.format.k, request.format.k)


def _scales(kind: NDArray[np.bool_], codes_too: bool = False) -> Judge:
    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        wrong = (got.scales != want.scales) & (got.tensor == want.tensor)
        if codes_too:
            wrong |= (got.codes != want.codes).any(axis=-1)
        return wrong & kind, int(kind.sum())

    return judge


def _underflow(kind: NDArray[np.bool_], element: ElementFormat) -> Judge:
    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        wrong = (got.scales != want.scales) | magnitude_codes(got.codes, element).any(axis=-1)
        return wrong & kind & (got.tensor == want.tensor), int(kind.sum())

    return judge


def _tensor_scale(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
    return np.full(want.scales.shape, got.tensor != want.tensor), want.scales.size


def _signs(elements: NDArray[np.bool_], element: ElementFormat) -> Judge:
    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        wrong = (got.codes ^ want.codes) & element.sign != 0
        if element.negatives is Negatives.TWOS_COMPLEMENT:  # where 0 has no sign
            wrong &= (got.codes != 0) & (want.codes != 0)
        return (wrong & elements).any(axis=-1), int(elements.any(axis=-1).sum())

    return judge


def _magnitudes(elements: NDArray[np.bool_], element: ElementFormat) -> Judge:
    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        first, second = (magnitude_codes(each.codes, element) for each in (got, want))
        wrong = ((first != second) & elements).any(axis=-1)
        wrong &= (got.scales == want.scales) & (got.tensor == want.tensor)
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
    want = request.expected_blocks
    if any(each == clause and decides(got, want)[0][place] for each, decides in deciders(request)):
        return clause
    if not judge(got, want)[0][place]:
        return None
    without = _feature(clause)
    if without is not None:
        plainer = without(request, place)
        if plainer is None:
            return None
        if _right(subject, *plainer):
            return clause
    return _kind(blame(request, got, place))


def _right(subject: Subject, request: Request, place: Place) -> bool:
    """Return whether the backend answers a block right; not if it raises or does not declare the request."""
    try:
        return not request.wrong(subject)[place]
    except Exception:  # a request that is not possible shows nothing
        return False


def _kind(clause: str) -> str:
    """Return the clause of a bit without the choice of rule or rounding, which a simpler request may change."""
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
    return {"scale.block.tile": _by_row, "conventions.inputs": _widened}.get(clause)


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
    made = request.format
    elements = np.array(request.element.values)[want.codes[place]]
    if not made.scale.powers:  # only a block that holds M keeps its scale
        elements[np.abs(elements).argmax()] = request.element.max_value
    values = elements * scale_value(want.scales[place], made.scale)
    bare = replace(request.spec, **UNTURNED, prescale=False, block=made.row)
    found = Request(values.astype(request.x.dtype)[None], bare, rng=request.rng, amax=unit_amax(made))
    return found, (0, 0)


def _by_row(request: Request, place: Place) -> tuple[Request, Place] | None:
    if not request.spec.block.is_tile:
        return None
    found, place = _plain(request, place)
    return replace(found, spec=replace(found.spec, block=request.format.row)), place


def _widened(request: Request, place: Place) -> tuple[Request, Place] | None:
    if request.x.dtype == np.float32:
        return None
    found, place = _plain(request, place)
    return replace(found, x=found.x.astype(np.float32)), place


# ---- the smallest request ----

Case = TypeVar("Case")

MAX_WORDS = 512
"""Longest input that is shown as words: a unit of H256, and as much before it."""
_BLOCK_TRIES, _PRODUCT_TRIES = 320, 2000
_MAX_PLACES = 24


class Search(Generic[Case]):
    """The simplest case so far that shows a fault."""

    def __init__(self, case: Case, fault: str, fault_of: Callable[[Case], str | None], tries: int) -> None:
        """Begin with a case and what is wrong with it; at most `tries` others are tried.

        `fault_of` returns what is wrong with a case, None where nothing is.
        """
        self.case = case
        self._fault, self._fault_of, self._left = fault, fault_of, tries

    def take(self, simpler: Case) -> bool:
        """Return whether the same is wrong with a simpler case, which then is the simplest so far."""
        if self._left == 0:
            return False
        self._left -= 1
        try:
            same = self._fault_of(simpler) == self._fault
        except Exception:  # an exception is another failure than the one that is being shrunk
            return False
        if same:
            self.case = simpler
        return same

    def fewest(self, parts: Iterable[int], of: Callable[[list[int]], Case]) -> None:
        """Leave out as many parts of the case as possible, runs of them first; `of` makes the case of some parts."""
        kept = list(parts)
        run = len(kept)
        while run:
            start = 0
            while start < len(kept):
                fewer = kept[:start] + kept[start + run :]
                if self.take(of(fewer)):
                    kept = fewer
                else:
                    start += run
            run //= 2


def fewest_elements(search: Search[Case], x: NDArray[Any], of: Callable[[NDArray[Any]], Case]) -> None:
    """Make as many elements or codes of an array zero as possible; `of` returns the case with another array."""

    def holding(places: list[int]) -> Case:
        some = np.zeros_like(x)
        some.reshape(-1)[places] = x.reshape(-1)[places]
        return of(some)

    search.fewest(np.flatnonzero(x.astype(np.float32).view(np.uint32)).tolist(), holding)


def smallest_block(
    subject: Subject, request: Request, place: Place, clause: str, judge: Judge
) -> tuple[Place, Request, Place]:
    """Return the place of a wrong block that shows the fault; then the simplest request found, and its wrong block.

    The block at `place` is looked at first. `clause` is what it is reported under, and the judge that of its check.
    """
    got, want = request.answer(subject), request.expected_blocks
    zero = (magnitude_codes(want.codes, request.element) == 0).all(axis=-1)
    wrong = [(int(row), int(block)) for row, block in np.argwhere(judge(got, want)[0])]
    wrong.sort(key=lambda p: bool(zero[p]))  # blocks of zeros come last, because they show the least
    places = [place, *(p for p in wrong if p != place)][:_MAX_PLACES]
    faults = {p: symptom(subject, clause, judge, request, got, p) for p in places}
    place = next((p for p in places if faults[p] == clause), place)
    fault = faults[place]
    if fault is None:
        return place, request, place

    def fault_of(case: tuple[Request, Place]) -> str | None:
        asked, at = case
        if not asked.declared(subject.capabilities):
            return None
        return symptom(subject, clause, judge, asked, asked.answer(subject), at)

    search = Search((request, place), fault, fault_of, _BLOCK_TRIES)
    any(map(search.take, _plain_forms(*search.case)))
    for changes in _simpler(request.format):
        whole, at = search.case
        spec = replace(whole.spec, **changes)
        if spec != whole.spec:
            search.take((replace(whole, spec=spec), at))
    whole, at = search.case  # without a transform, one block is a unit
    any(search.take(case) for case in _plain_forms(whole, at) if case[0].x.size < whole.x.size)
    whole, at = search.case
    fewest_elements(search, whole.x, lambda x: (replace(whole, x=x), at))
    return place, *search.case


def _plain_forms(request: Request, place: Place) -> Iterator[tuple[Request, Place]]:
    """Yield the block as a request of its own: at the origin, or where its random bits are the same."""
    plan, (row, block) = request.plan, place
    plain, here = alone(request, place)
    yield plain, here
    if request.amax is None and plain.amax is not None:
        yield replace(plain, amax=None), here
    if request.spec.rounding is Rounding.SR and not request.spec.block.is_tile:
        before = request.elements_before(row, block)
        if before + plan.unit <= MAX_WORDS and before % plan.unit == 0:
            padded = np.concatenate([np.zeros((1, before), plain.x.dtype), plain.x], axis=1)
            yield replace(plain, x=padded), (0, before // request.format.k + here[1])


def _simpler(made: BlockFormat) -> tuple[dict[str, Any], ...]:
    """Return treatments with one choice less; each is tried on top of those that were taken."""
    return (
        UNTURNED, {"signs": SignPolicy.NONE, "sign_vector": None}, {"rounding": Rounding.RNE, "sr_bits": 16},
        {"sr_bits": 16}, {"prescale": False}, {"block": made.row}, {"zero_scale": 0},
        {"scale_rule": rules_of(made.scale)[0]},
    )  # fmt: skip


def smallest_product(
    subject: Subject, product: Product, at: tuple[int, ...], clause: str, blamed: str
) -> tuple[Product, tuple[int, ...]]:
    """Return the smallest product found that is wrong under the clause that is blamed, and where it is wrong.

    `at` is a wrong result, `clause` that of the check, and `blamed` the one that decides the result.
    """

    def fault_of(candidate: Product) -> str | None:
        nonlocal at
        found, wrong = decided(subject, clause, candidate, candidate.wrong(subject)[0])
        if found != blamed or not wrong.any():
            return None
        at = first_place(wrong)  # of the candidate, which is taken
        return found

    product = replace(product, a=rows_of(product.a), b=rows_of(product.b))
    search = Search(product, blamed, fault_of, _PRODUCT_TRIES)
    single = replace(product, a=_rows(product.a, [at[0]]), b=_rows(product.b, [at[1]]))
    any(map(search.take, (replace(single, layout=""), single)))
    while True:
        before = search.case
        _fewer_rows_and_blocks(search)
        _fewer_elements(search, "a")
        _fewer_elements(search, "b")
        if search.case is before:
            return before, at


def _fewer_rows_and_blocks(search: Search[Product]) -> None:
    whole = search.case
    search.fewest(range(len(whole.a.scales)), lambda kept: replace(whole, a=_rows(whole.a, kept)))
    left = search.case
    search.fewest(range(len(left.b.scales)), lambda kept: replace(left, b=_rows(left.b, kept)))
    both = search.case
    search.fewest(
        range(both.a.scales.shape[1]),
        lambda kept: replace(both, a=_blocks_of(both.a, kept), b=_blocks_of(both.b, kept)),
    )


def _fewer_elements(search: Search[Product], side: Literal["a", "b"]) -> None:
    whole = search.case
    q: MXArray = getattr(whole, side)

    def of(codes: NDArray[np.uint8]) -> Product:
        changed = replace(q, codes=pack(codes, q.format.element))
        return replace(whole, a=changed) if side == "a" else replace(whole, b=changed)

    fewest_elements(search, unpack(q.codes, q.format.element), of)


def _rows(q: MXArray, rows: list[int]) -> MXArray:
    return replace(q, codes=q.codes[rows], scales=q.scales[rows], shape=(len(rows), q.length))


def _blocks_of(q: MXArray, blocks: list[int]) -> MXArray:
    rows = len(q.scales)
    codes = q.codes.reshape(rows, -1, q.format.code_bytes(q.format.k))[:, blocks].reshape(rows, -1)
    return replace(q, codes=codes, scales=q.scales[:, blocks], shape=(rows, q.format.k * len(blocks)))
