"""Shrinks a failing product to the plainest operands that still fail under the same clause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mxref.conformance.model import Subject
from mxref.conformance.requests.product import Product, decided, rows_of
from mxref.formats import ElementFormat
from mxref.mxarray import MXArray

_MAX_TRIES = 2000
_SIDES = ("a", "b")


def shrunk(
    subject: Subject, product: Product, at: tuple[int, ...], clause: str, blamed: str
) -> tuple[Product, tuple[int, ...]]:
    """Return the plainest product found that is wrong under the clause that is blamed, and where it is wrong.

    Args:
        subject: the backend.
        product: what it answers wrongly.
        at: a wrong result.
        clause: clause of the check.
        blamed: the clause that decides the wrong result.
    """
    product = replace(product, a=rows_of(product.a), b=rows_of(product.b))
    search = _Search(subject, clause, blamed, product, at)
    single = replace(product, a=_take(product.a, [at[0]]), b=_take(product.b, [at[1]]))
    if not search.take(replace(single, layout="")):
        search.take(single)
    while search.changed:
        search.changed = False
        while any(search.take(candidate) for candidate in _fewer_rows_or_blocks(search.product)):
            pass
        for side in _SIDES:
            search.plainer_codes(side)
            search.plainer_scales(side)
    return search.product, search.at


@dataclass
class _Search:
    """The plainest failing product so far, and the number of products that were tried."""

    subject: Subject
    clause: str
    blamed: str
    product: Product
    at: tuple[int, ...]
    tries: int = 0
    changed: bool = True

    def take(self, candidate: Product) -> bool:
        """Return whether a product still fails under the same clause; it is then the plainest so far."""
        if self.tries >= _MAX_TRIES:
            return False
        self.tries += 1
        try:
            blamed, wrong = decided(self.subject, self.clause, candidate, candidate.wrong(self.subject)[0])
        except Exception:  # an exception is another failure than the one that is being shrunk
            return False
        if blamed != self.blamed or not wrong.any():
            return False
        self.product, self.changed = candidate, True
        self.at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return True

    def plainer_codes(self, side: str) -> None:
        """Make elements 0 or 1, one after another."""
        for place in np.ndindex(getattr(self.product, side).codes.shape):
            for kept, set_ in _plainer_bytes(getattr(self.product, side).format.element):
                q = getattr(self.product, side)
                byte = int(q.codes[place])
                plainer = byte & kept | set_
                lost = byte & ~kept & 0xFF  # nothing is set where there was zero
                if plainer != byte and lost:
                    codes = q.codes.copy()
                    codes[place] = plainer
                    self.take(replace(self.product, **{side: replace(q, codes=codes)}))

    def plainer_scales(self, side: str) -> None:
        """Make scales 1, one after another, and leave the prescale away."""
        for place in np.ndindex(getattr(self.product, side).scales.shape):
            q = getattr(self.product, side)
            if q.scales[place] != 127:
                scales = q.scales.copy()
                scales[place] = 127
                self.take(replace(self.product, **{side: replace(q, scales=scales)}))
        q = getattr(self.product, side)
        if q.prescale:
            self.take(replace(self.product, **{side: replace(q, prescale=False)}))


def _plainer_bytes(element: ElementFormat) -> tuple[tuple[int, int], ...]:
    """Return masks that turn a byte of codes into elements of 0 and 1: the bits to keep, and the bits to set."""
    one = element.values.index(1.0)
    if element.bits == 8:
        return (0x00, 0), (0x00, one)
    return (0x00, 0), (0x0F, 0), (0xF0, 0), (0xF0, one), (0x0F, one << 4)


def _fewer_rows_or_blocks(product: Product) -> Iterator[Product]:
    """Yield the product without a run of rows of either operand, or of blocks of both; long runs first."""
    a, b = product.a, product.b
    for kept in _without_a_run(a.scales.shape[0]):
        yield replace(product, a=_take(a, kept))
    for kept in _without_a_run(b.scales.shape[0]):
        yield replace(product, b=_take(b, kept))
    for kept in _without_a_run(a.scales.shape[1]):
        yield replace(product, a=_blocks_of(a, kept), b=_blocks_of(b, kept))


def _without_a_run(count: int) -> Iterator[list[int]]:
    """Yield the numbers below `count` without a run of them, long runs first, never all."""
    run = count // 2
    while run:
        for start in range(0, count, run):
            yield [i for i in range(count) if not start <= i < start + run]
        run //= 2


def _take(q: MXArray, rows: list[int]) -> MXArray:
    return replace(q, codes=q.codes[rows], scales=q.scales[rows], shape=(len(rows), q.length))


def _blocks_of(q: MXArray, blocks: list[int]) -> MXArray:
    rows = len(q.scales)
    codes = q.codes.reshape(rows, -1, q.format.code_bytes(q.format.k))[:, blocks].reshape(rows, -1)
    return replace(q, codes=codes, scales=q.scales[:, blocks], shape=(rows, q.format.k * len(blocks)))
