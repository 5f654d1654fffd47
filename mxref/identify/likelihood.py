"""The likelihood of a block's codes under a scale rule, whatever the size of its weights.

A rule keeps the largest magnitude of a block, over its scale X, within one octave: (2^(emax - 1) c, 2^emax c] for the
rule that adds one to the exponent above the threshold c. So the codes of a block have the likelihood

    product of P(bin) over weights at or below the end of the octave, less the same at or below its start,

where P depends on the deviation of the block's weights. Its distribution over the blocks of a tensor is estimated by
expectation maximisation, on a grid that the scale bytes anchor: a block whose byte is one higher has weights of twice
the size. The shape of the weights is not known either; the family that fits best is taken, for each threshold its own.
Weights of code 0 are left out, so that pruned weights are no case of their own. A share of the blocks is free of the
rule, for weights that changed between the choice of the scale and the rounding, as under GPTQ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mxref.formats import ElementFormat

Floats = NDArray[np.float64]
Rule = tuple[float, ...]
"""A threshold c; of several, each block takes one at random, as where the smaller error chooses the scale."""

STEPS = 6
"""Grid points of the deviation in an octave."""
_BELOW, _ABOVE = 5, 1
"""Octaves of the grid below and above 2^emax X."""
_ROUNDS = 12
_FREE_OCTAVES = 6.0
"""Over how many octaves the largest magnitude of a block free of the rule is spread."""
_IMPOSSIBLE = -1e9
_FIRST = 768
"""Blocks that choose the family for each rule."""


def _power(beta: float, hollow: float = 0.0) -> Callable[[Floats], Floats]:
    """Return the density z^hollow exp(-z^beta / beta) of a magnitude."""
    return lambda z: z**hollow * np.exp(-(z**beta) / beta)


def _student(freedom: float) -> Callable[[Floats], Floats]:
    return lambda z: (1 + z * z / freedom) ** (-(freedom + 1) / 2)


_DENSITIES: dict[str, Callable[[Floats], Floats]] = {
    "normal": _power(2),
    "t8": _student(8),
    "t4": _student(4),
    "t3": _student(3),
    "t2": _student(2),
    "laplace": _power(1),
    "light": _power(3),
    "lighter": _power(5),
    "hollow": _power(2, 1),
    "uniform": lambda z: np.where(z <= 1, 1.0, 0.0),
}
_TWO_OF_FOUR = "two of four"
FAMILIES = (*_DENSITIES, _TWO_OF_FOUR)
HOLLOW = ("hollow", _TWO_OF_FOUR)
"""Shapes of weights; hollow ones have few small weights, as where the two smaller of four are pruned."""

# Distribution functions by the trapezoidal rule: of a fine step near zero, of a large end for heavy tails.
_AT = np.concatenate([np.linspace(0, 8, 8001), np.geomspace(8, 4096, 4001)[1:]])


@lru_cache
def _distribution(family: str) -> Floats:
    """Return P(magnitude <= z) at the points `_AT`."""
    if family == _TWO_OF_FOUR:  # of normal weights those that are among the two largest of four
        below = _distribution("normal")
        density = _DENSITIES["normal"](_AT) * (below**3 + 3 * below**2 * (1 - below))
    else:
        density = _DENSITIES[family](_AT)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(_AT))])
    return np.asarray(area / area[-1])


@dataclass(frozen=True)
class Bins:
    """The codes of an element that the likelihood reads: all but zero, or those of the upper five octaves."""

    first: int
    """The lowest code that is read."""
    bounds: Floats
    """The lower bound of each code from `first` on, and infinity."""
    octave: float
    """2^(emax - 1), where the octave of c = 1 begins."""


@lru_cache
def bins(element: ElementFormat, whole: bool = False) -> Bins:
    """Return the bins of an element; `whole`, those of all its codes but zero."""
    grid = np.array(element.magnitudes)
    first = 1 if whole else max(1, int(np.searchsorted(grid, grid[-1] / 32)))
    between = np.append(0.0, (grid[:-1] + grid[1:]) / 2)
    bounds = np.append(between[first:], np.inf)
    return Bins(first, bounds, 2.0 ** (element.max_exponent - 1))


def counts(magnitudes: NDArray[np.uint8], element: ElementFormat, whole: bool = False) -> Floats:
    """Return how often each bin occurs in each block, [n, bins], from codes of magnitudes [n, elements]."""
    size = element.max_code + 1
    flat = magnitudes.astype(np.int64) + size * np.arange(len(magnitudes))[:, None]
    table = np.bincount(flat.reshape(-1), minlength=size * len(magnitudes)).reshape(-1, size)
    return table[:, bins(element, whole).first :].astype(np.float64)


@lru_cache(maxsize=512)
def _shares(element: ElementFormat, family: str, end: float, whole: bool = False) -> Floats:
    """Return P of each bin of weights at or below `end` X, [bins, grid], of weights that fall into a bin."""
    made = bins(element, whole)
    deviation = 2 * made.octave * np.exp2(np.arange(-_BELOW * STEPS, _ABOVE * STEPS + 1) / STEPS)
    bounds = np.minimum(np.minimum(made.bounds, end)[:, None] / deviation, _AT[-1])
    below = np.interp(bounds, _AT, _distribution(family))
    below[np.isinf(np.minimum(made.bounds, end))] = 1.0
    return np.asarray(np.diff(below, axis=0) / np.maximum(1 - below[0], 1e-300))


@lru_cache(maxsize=512)
def _logs(element: ElementFormat, family: str, end: float, whole: bool = False) -> Floats:
    share = _shares(element, family, end, whole)
    with np.errstate(divide="ignore"):
        return np.where(share > 0, np.log(share), _IMPOSSIBLE)


@dataclass(frozen=True)
class Fit:
    """The best fit of a rule to the blocks of a tensor."""

    rule: Rule
    family: str
    blocks: Floats
    """The log likelihood of each block."""
    free: float
    """The share of blocks that do not follow the rule."""
    surplus: Floats | None
    """By how much the share of blocks with each bin as their largest exceeds what the fit expects, if it was asked."""

    @property
    def total(self) -> float:
        """The log likelihood of all blocks."""
        return float(self.blocks.sum())


@dataclass(frozen=True)
class CodeBlocks:
    """Blocks in ascending order of their scale: what the codes of each are."""

    element: ElementFormat
    table: Floats
    """How often each bin occurs in each block, [n, bins]."""
    parts: tuple[slice, ...]
    """The blocks of each scale."""
    places: tuple[int, ...]
    """Where the grid of each scale begins on the common grid."""
    whole: bool = False
    """Whether the bins are those of all codes but zero."""

    @classmethod
    def of(
        cls, table: Floats, steps: NDArray[np.int64], element: ElementFormat, whole: bool = False
    ) -> CodeBlocks:
        """Return blocks of any order; `steps` are the logarithms of their scales, in steps of the grid."""
        order = np.argsort(steps, kind="stable")
        values, first = np.unique(steps[order], return_index=True)
        parts = tuple(slice(a, b) for a, b in zip(first, [*first[1:], len(table)], strict=True))
        return cls(element, table[order], parts, tuple(int(v - values[0]) for v in values), whole)

    def some(self, step: int) -> CodeBlocks:
        """Return every `step`-th block."""
        steps = np.repeat(self.places, [part.stop - part.start for part in self.parts])
        return CodeBlocks.of(self.table[::step], steps[::step], self.element)


def _fit(blocks: CodeBlocks, family: str, rule: Rule, check: bool = False) -> Fit:
    """Return the fit of a rule and a family."""
    octave, table = bins(blocks.element).octave, blocks.table
    free = table @ _logs(blocks.element, family, math.inf, blocks.whole)
    top = free.max(axis=1, keepdims=True)

    def upto(end: float) -> Floats:
        return np.asarray(np.exp(table @ _logs(blocks.element, family, end, blocks.whole) - top))

    free = np.exp(free - top)
    ruled = np.zeros_like(free)
    for c in rule:
        ruled += (upto(2 * c * octave) - upto(c * octave)) / len(rule)
    free /= _FREE_OCTAVES
    width = ruled.shape[1]
    size = blocks.places[-1] + width
    weights, share = np.full(size, 1 / size), 0.02
    total, of_free = np.empty(len(table)), np.empty(len(table))
    for _ in range(_ROUNDS):
        grown = np.zeros(size)
        for part, place in zip(blocks.parts, blocks.places, strict=True):
            w = weights[place : place + width]
            of_free[part] = share * (free[part] @ w)
            total[part] = (1 - share) * (ruled[part] @ w) + of_free[part]
            inverse = 1 / total[part]
            grown[place : place + width] += w * (
                (1 - share) * (inverse @ ruled[part]) + share * (inverse @ free[part])
            )
        weights, share = grown / len(table), float(np.clip((of_free / total).mean(), 1e-4, 0.9))
    surplus = None
    if check:
        posterior = np.concatenate(
            [
                ruled[part] * weights[place : place + width]
                for part, place in zip(blocks.parts, blocks.places, strict=True)
            ]
        )
        surplus = _surplus(
            blocks, family, rule, posterior / np.maximum(posterior.sum(axis=1, keepdims=True), 1e-300)
        )
    return Fit(rule, family, np.log(total) + top[:, 0], share, surplus)


def _surplus(blocks: CodeBlocks, family: str, rule: Rule, posterior: Floats) -> Floats:
    """Return the observed less the expected shares of the largest bins."""
    octave, table = bins(blocks.element).octave, blocks.table
    count = table.sum(axis=1).astype(int)
    largest = table.shape[1] - 1 - (table[:, ::-1] > 0).argmax(axis=1)
    observed = np.bincount(largest, minlength=table.shape[1]) / len(table)
    expected = np.zeros(table.shape[1])
    for c in rule:
        upto = np.cumsum(_shares(blocks.element, family, 2 * c * octave), axis=0)  # [bins, grid]
        start = _shares(blocks.element, family, c * octave).sum(axis=0)
        for n in np.unique(count):
            below = np.maximum(upto, start) ** n - start**n
            share = np.diff(below, axis=0, prepend=0) / np.maximum(below[-1], 1e-300)
            expected += share @ posterior[count == n].sum(axis=0)
    return np.asarray(observed - expected / len(table) / len(rule))


def best_fit(blocks: CodeBlocks, rule: Rule, family: str = "", check: bool = False) -> Fit:
    """Return the fit of a rule, of a family; without one, the one that fits some of the blocks best.

    Args:
        blocks: the blocks.
        rule: the rule.
        family: one of `FAMILIES`.
        check: whether the surplus is computed.
    """
    if not family:
        few = blocks.some(max(1, len(blocks.table) // _FIRST))
        family = max(FAMILIES, key=lambda name: _fit(few, name, rule).total)
    return _fit(blocks, family, rule, check)


def free_likelihood(
    table: Floats, steps: NDArray[np.int64], element: ElementFormat, whole: bool = False
) -> Floats:
    """Return the log likelihood of each block without any rule, in order: how well scales and codes go together.

    Args:
        table: how often each bin occurs in each block, as `counts` returns it.
        steps: the logarithm of each block's scale, in steps of the grid.
        element: the element of the codes.
        whole: whether the bins are those of all codes but zero, so that several elements can be compared.
    """
    order = np.argsort(steps, kind="stable")
    blocks = CodeBlocks.of(table, steps, element, whole)
    best = max(
        (_fit(blocks, family, ()) for family in (FAMILIES if whole else ("normal", "t4", "laplace"))),
        key=lambda fit: fit.total,
    )
    found = np.empty(len(table))
    found[order] = best.blocks
    return found


def lead(better: Floats, worse: Floats) -> float:
    """Return by how many standard deviations one log likelihood of blocks is ahead of another of the same blocks."""
    ahead = better - worse
    return float(ahead.sum() / (ahead.std() * math.sqrt(len(ahead)) + 1e-9))
