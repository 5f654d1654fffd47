"""The shrinker: from a request that a backend answers wrongly to the simplest one that shows the same fault.

A `Search` holds a case and what is wrong with it. A simpler case takes its place only if the same is wrong with it, so
a finding is never shrunk into another fault: a backend may have several. `smallest_block`, `smallest_product` and
`fewest_elements` say what is simpler for a quantization, a product and the input of a transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.blame import symptom
from mxref.conformance.checking import Subject
from mxref.conformance.requests.decoding import first_place
from mxref.conformance.requests.multiplying import Product, decided, rows_of
from mxref.conformance.requests.quantizing import Judge, Place, Request, alone
from mxref.formats import BlockShape
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.recipe import UNTURNED
from mxref.steps.hadamard import SignPolicy
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

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
    zero = (want.codes & (request.element.sign - 1) == 0).all(axis=-1)
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
    for changes in _SIMPLER:
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
    if request.spec.rounding is Rounding.SR and request.spec.block is BlockShape.ROW:
        before = request.elements_before(row, block)
        if before + plan.unit <= MAX_WORDS and before % plan.unit == 0:
            padded = np.concatenate([np.zeros((1, before), plain.x.dtype), plain.x], axis=1)
            yield replace(plain, x=padded), (0, before // request.format.k + here[1])


_SIMPLER: tuple[dict[str, Any], ...] = (
    UNTURNED, {"signs": SignPolicy.NONE, "sign_vector": None}, {"rounding": Rounding.RNE, "sr_bits": 16},
    {"sr_bits": 16}, {"prescale": False}, {"block": BlockShape.ROW}, {"zero_scale": 0},
    {"scale_rule": ScaleRule.FLOOR},
)  # fmt: skip
"""Treatments with one choice less; each is tried on top of those that were taken."""


def smallest_product(
    subject: Subject, product: Product, at: tuple[int, ...], clause: str, blamed: str
) -> tuple[Product, tuple[int, ...]]:
    """Return the plainest product found that is wrong under the clause that is blamed, and where it is wrong.

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
        _plainer_operand(search, "a")
        _plainer_operand(search, "b")
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


def _plainer_operand(search: Search[Product], side: Literal["a", "b"]) -> None:
    """Make elements of an operand 0 or 1 and scales 1, and leave its prescale out."""

    def operand() -> MXArray:
        return search.case.a if side == "a" else search.case.b

    def changed(**parts: Any) -> Product:
        q = replace(operand(), **parts)
        return replace(search.case, a=q) if side == "a" else replace(search.case, b=q)

    def with_codes(codes: NDArray[np.uint8]) -> Product:
        return changed(codes=pack(codes, element))

    element = operand().format.element
    fewest_elements(search, unpack(operand().codes, element), with_codes)
    one = element.values.index(1.0)
    for place in np.argwhere(unpack(operand().codes, element)).tolist():
        codes = unpack(operand().codes, element)
        if codes[tuple(place)] != one:
            codes[tuple(place)] = one
            search.take(with_codes(codes))
    for place in np.argwhere(operand().scales != 127).tolist():
        scales = operand().scales.copy()
        scales[tuple(place)] = 127
        search.take(changed(scales=scales))
    if operand().prescale:
        search.take(changed(prescale=False))


def _rows(q: MXArray, rows: list[int]) -> MXArray:
    return replace(q, codes=q.codes[rows], scales=q.scales[rows], shape=(len(rows), q.length))


def _blocks_of(q: MXArray, blocks: list[int]) -> MXArray:
    rows = len(q.scales)
    codes = q.codes.reshape(rows, -1, q.format.code_bytes(q.format.k))[:, blocks].reshape(rows, -1)
    return replace(q, codes=codes, scales=q.scales[:, blocks], shape=(rows, q.format.k * len(blocks)))
