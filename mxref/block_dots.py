"""Dot products of blocks, exact, and their sum with an accumulator under one rounding.

Implements: gemm.block_dot
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat
from mxref.layouts.packed import unpack
from mxref.mxarray import MXArray
from mxref.steps.scale import scale_exponent, scale_significand

Floats = NDArray[np.float64]

_FLOAT32_BITS = 24
"""Bits of a float32's mantissa, with the hidden one."""
_WIDE = 24
"""Elements whose magnitudes span more bits than this are split: the small ones are multiplied apart."""
_SMALL = 12
"""Bits that the small magnitudes span."""

to_int = np.frompyfunc(int, 1, 1)
"""Integral floats as Python's integers."""


@dataclass(frozen=True)
class BlockDot:
    """The dot products of one block of every row of A with the same block of every row of B."""

    parts: tuple[Floats, ...]
    """One or two float64 [M, N] whose real sum is the dot product; a zero is +0."""
    exponent: NDArray[np.int32]
    """[M, N]: the dot product is scaled by 2^exponent."""
    special: Floats | None
    """[M, N]: NaN or Inf where IEEE arithmetic on the decoded values gives it, else 0; None if it never does."""
    unit: int
    """Every part is a multiple of 2^unit."""
    few_bits: bool
    """Whether a dot product has no more bits than a float32, as in MXFP4: one float64 addition then rounds right."""

    def approximate(self) -> Floats:
        """Return dot * 2^exponent, float64 [M, N], exact to 2^-52 of the sum of magnitudes."""
        total = sum(self._terms(), start=np.zeros(self.exponent.shape))
        return total if self.special is None else total + self.special

    def added_to(self, acc: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return acc + dot * 2^exponent, the real sum rounded once to float32; an infinite `acc` stays.

        Implements: gemm.ordered
        """
        wide = acc.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            if self.few_bits:
                # An inexact sum is at least 5 bits away from every tie of float32.
                total = wide + self._terms()[0]
            else:
                total = np.where(np.isfinite(wide), _odd_total(wide, *self._terms()), wide)
            if self.special is not None:
                total = np.where(self.special == 0, total, wide + self.special)
            # Rounded to odd, a float64 rounds to float32 as the real sum does: it has 29 bits more.
            return total.astype(np.float32)

    def integers(self, lowest: int) -> NDArray[Any]:
        """Return dot * 2^exponent as integer multiples of 2^lowest, Python's integers [M, N]; special dots are 0."""
        scaled = [np.asarray(to_int(np.ldexp(part, -self.unit)), object) for part in self.parts]
        shift = (self.exponent + (self.unit - lowest)).astype(object)
        whole: NDArray[Any] = scaled[0] + sum(scaled[1:])
        integers: NDArray[Any] = whole << shift
        return integers

    def _terms(self) -> list[Floats]:
        return [np.ldexp(part, self.exponent) for part in self.parts]


def values(q: MXArray) -> Floats:
    """Return the decoded elements without their scales, float64 [rows..., K]."""
    element = q.format.element
    return np.array(element.values)[unpack(np.asarray(q.codes), element)]


def lowest_exponent(a: MXArray, b: MXArray) -> int:
    """Return the exponent of the power of two of which every scaled product is a multiple."""
    return sum(q.format.element.unit_exponent + q.format.scale.unit_exponent for q in (a, b))


def with_significands(q: MXArray) -> Floats:
    """Return the decoded elements times the significands of their scales, float64 [rows..., K]; exact."""
    if q.format.scale.powers:
        return values(q)
    return values(q) * np.repeat(scale_significand(np.asarray(q.scales), q.format.scale), q.format.k, axis=-1)


def exact_blocks(block_format: BlockFormat) -> bool:
    """Return whether float64 holds block dots of this format; not for E5M2 under scales with a mantissa."""
    return block_format.scale.powers or _span(block_format) <= _WIDE


def _span(block_format: BlockFormat) -> int:
    """Return the bits that the magnitudes of elements times their scales' significands span."""
    element = block_format.element
    return (
        element.max_exponent
        + 1
        - element.unit_exponent
        + (block_format.scale.mantissa_bits + 1) * (not block_format.scale.powers)
    )


def block_dots(a: MXArray, b: MXArray) -> Iterator[BlockDot]:
    """Yield the dot products of the blocks, in ascending order.

    Every float64 here is exact in any order of summation: a product of parts spans at most 48 bits, a block adds 5.

    Implements: gemm.block_dot
    """
    k = a.format.k
    va, vb = with_significands(a), with_significands(b)  # [M, K], [N, K]
    (large_a, small_a), (large_b, small_b) = _split(va, a.format), _split(vb, b.format)
    finite = all(np.isfinite(v).all() for v in (va, vb))
    ea, eb = (scale_exponent(q.scales, q.format.scale) for q in (a, b))  # [M, K/k], [N, K/k]
    unit = a.format.element.unit_exponent + b.format.element.unit_exponent
    largest = k * _largest(a.format) * _largest(b.format)
    few_bits = largest < 2.0 ** (unit + _FLOAT32_BITS)
    for i in range(ea.shape[1]):
        block = np.s_[:, i * k : (i + 1) * k]
        parts = [large_a[block] @ large_b[block].T]
        pairs = ((large_a, small_b), (small_a, large_b), (small_a, small_b))
        small = [x[block] @ y[block].T for x, y in pairs if x is not None and y is not None]
        if small:
            parts.append(sum(small[1:], start=small[0]))
        # Adding +0 turns a sum of negative zeros into the +0 of the definition.
        dots = tuple(part + 0.0 for part in parts)
        exponent = ea[:, i, None] + eb[None, :, i]
        yield BlockDot(dots, exponent, None if finite else _special(va[block], vb[block]), unit, few_bits)


def _largest(block_format: BlockFormat) -> float:
    """Return the largest element times the largest significand of a scale."""
    significand = 1 if block_format.scale.powers else (2 << block_format.scale.mantissa_bits) - 1
    return block_format.element.max_value * significand


def _split(v: Floats, block_format: BlockFormat) -> tuple[Floats, Floats | None]:
    """Split finite elements into large and small ones, each 0 where the other is not.

    The small ones are None if the format is so narrow that large ones suffice. NaN and Inf count as 0.
    """
    v = v if np.isfinite(v).all() else np.where(np.isfinite(v), v, 0.0)
    if _span(block_format) <= _WIDE:
        return v, None
    element = block_format.element
    small = np.where(np.abs(v) < 2.0 ** (element.unit_exponent + _SMALL), v, 0.0)
    return v - small, small


def _special(pa: Floats, pb: Floats) -> Floats | None:
    """Return where a block's dot products [M, N] are NaN or Inf as IEEE arithmetic has it, and 0 elsewhere.

    Implements: gemm.special, conventions.nan
    """
    rows, columns = (np.flatnonzero(~np.isfinite(v).all(axis=1)) for v in (pa, pb))
    if not rows.size and not columns.size:
        return None
    dots = np.zeros((len(pa), len(pb)))
    with np.errstate(invalid="ignore"):
        for m in rows:
            dots[m] = (pa[m] * pb).sum(axis=1)
        for n in columns:
            dots[:, n] = (pa * pb[n]).sum(axis=1)
    return np.where(np.isfinite(dots), 0.0, dots)


def _two_sum(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return fl(x + y) and its error, exact (Knuth)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


def _odd_sum(x: Floats, y: Floats) -> Floats:
    """Return x + y rounded to odd: exact, or the neighbour with the odd last bit."""
    return rounded_to_odd(*_two_sum(x, y))


def rounded_to_odd(nearest: Floats, error: Floats) -> Floats:
    """Return real numbers rounded to odd: exact, or the neighbour with the odd last bit.

    Args:
        nearest: the numbers rounded to nearest.
        error: anything with the sign of number - nearest, and 0 where they are equal.
    """
    even = nearest.view(np.int64) & 1 == 0
    return np.where((error != 0) & even, np.nextafter(nearest, np.copysign(np.inf, error)), nearest)


def _odd_total(acc: Floats, high: Floats, low: Floats | None = None) -> Floats:
    """Return the sum of two or three finite terms, rounded to odd.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd" (IEEE Transactions on Computers, 2008).
    """
    if low is None:
        return _odd_sum(acc, high)
    high, low = _two_sum(high, low)
    total, error = _two_sum(acc, high)
    return _odd_sum(total, _odd_sum(error, low))
