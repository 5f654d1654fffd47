"""What the codes of a weight say about how it was quantized, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat, ElementFormat
from mxref.identify.likelihood import (
    HOLLOW,
    STEPS,
    CodeBlocks,
    Fit,
    Floats,
    Rule,
    best_fit,
    counts,
    free_likelihood,
    lead,
)
from mxref.identify.weights import Sample
from mxref.steps.scale import EXPONENT_RULES, MANTISSA_MASK, ScaleRule, bump_above, scale_value

LEAD = 6.0
"""Standard deviations by which the best rule must be ahead of every other named one."""
LEAD_OF_OTHERS = 5.0
"""The same, of rules without a name: thresholds between the named ones, and choices by error."""
LEAD_OF_ELEMENTS = 20.0
"""The lead of the best of several elements of equal size."""
MISFIT = 0.03
"""Share of the blocks whose largest code the best fit may get wrong."""
PRUNED = 0.4
"""Share of zeros from which weights count as pruned."""
FEWEST = 256
"""Blocks below which nothing is said."""
AMAX_OVER_6 = "nearest"
BY_ERROR = "by_error"
"""A scale with a mantissa that the smaller error chooses: four over six, or a search among more scales."""


@dataclass(frozen=True)
class Evidence:
    """What was counted in a sample of blocks."""

    blocks: int
    zero_blocks: int
    """Blocks of zeros."""
    nan_blocks: int
    """Blocks whose scale is NaN."""
    scale_bytes: dict[int, int]
    """How often a scale is the byte 0, 254 or 255."""
    zero_block_bytes: dict[int, int]
    """The scale bytes of blocks of zeros."""
    largest: dict[float, float]
    """The share of the blocks, those of zeros left out, whose largest magnitude is each of the element's, over X."""
    shared: float
    """The share of these whose largest code occurs more than once."""
    minus_zeros: float | None
    """The share of zeros that have a minus sign; None without a zero."""


@dataclass(frozen=True)
class RuleFound:
    """The scale rule that codes show."""

    rule: str | None
    """The name; None is undecided."""
    lead: float
    """By how many standard deviations it is ahead of the next named rule; of an undecided one, the best is."""
    next: str | None
    """The next named rule."""
    possible: tuple[str, ...]
    """The rules that remain, most likely first."""
    reason: str
    """Why, in a sentence."""
    details: dict[str, Any] = field(default_factory=dict)
    """The family of weights that fits, its misfit, and the share of blocks that follow no rule."""


def count(samples: list[Sample], layouts: list[str]) -> Evidence:
    """Return what samples of one format hold, each read under a layout of its scales."""
    made = samples[0].reading.made
    scales = np.concatenate([one.scales[layout] for one, layout in zip(samples, layouts, strict=True)])
    zero, largest, times = (np.concatenate(each) for each in zip(*map(_largest, samples), strict=True))
    grid = np.array(made.element.magnitudes)
    share = np.bincount(np.minimum(largest[~zero], made.element.max_code), minlength=len(grid)) / max(
        (~zero).sum(), 1
    )
    zeros = sum(one.zeros for one in samples)
    return Evidence(
        blocks=len(scales),
        zero_blocks=int(zero.sum()),
        nan_blocks=int((scales == made.scale.nan_code).sum()),
        scale_bytes={byte: int((scales == byte).sum()) for byte in (0, 254, 255)},
        zero_block_bytes={int(b): int(n) for b, n in zip(*np.unique(scales[zero], return_counts=True), strict=True)},
        largest={float(value): round(float(s), 6) for value, s in zip(grid, share, strict=True) if s},
        shared=round(float((times[~zero] > 1).mean()), 6) if (~zero).any() else 0.0,
        minus_zeros=round(sum(one.negative_zeros for one in samples) / zeros, 6) if zeros else None,
    )  # fmt: skip


def _largest(sample: Sample) -> tuple[NDArray[np.bool_], NDArray[np.uint8], NDArray[np.int64]]:
    """Return of each block whether it is zero, its largest code, and how often that occurs."""
    largest = sample.magnitudes.max(axis=1)
    return largest == 0, largest, (sample.magnitudes == largest[:, None]).sum(axis=1)


class Measured:
    """A sample, read under a layout of its scales, and how well rules fit it; each fit is computed once."""

    def __init__(self, sample: Sample, layout: str) -> None:
        self.made = made = sample.reading.made
        scales = sample.scales[layout]
        odd = sample.magnitudes > made.element.max_code
        # At the ends of a scale format a rule is clamped. A subnormal scale is so coarse that amax / X may be anything.
        least = 1 if made.scale.powers else 1 << made.scale.mantissa_bits
        kept = (sample.magnitudes.max(axis=1) > 0) & ~odd.any(axis=1) & (scales >= least)
        kept &= scales < made.scale.max_code
        self.magnitudes = sample.magnitudes[kept]
        """Codes of magnitudes of blocks that are neither zero nor NaN nor at an end of the scale format."""
        self.scales = scales[kept]
        self._found: dict[tuple[Rule, str], Fit] = {}
        self._surplus: dict[Rule, Floats] = {}

    @cached_property
    def blocks(self) -> CodeBlocks:
        """The blocks that hold a code of the upper octaves, as the likelihood reads them."""
        table = counts(self.magnitudes, self.made.element)
        some = table.any(axis=1)
        return CodeBlocks.of(table[some], _steps(self.scales[some], self.made), self.made.element)

    def fit(self, rule: Rule, family: str = "") -> Fit:
        """Return the fit of a rule, of a family or of the best one."""
        key = rule, family
        if key not in self._found:
            self._found[key] = best_fit(self.blocks, rule, family)
        return self._found[key]

    def surplus(self, rule: Rule) -> Floats:
        """Return the surplus of the best fit of a rule."""
        if rule not in self._surplus:
            found = best_fit(self.blocks, rule, self.fit(rule).family, check=True).surplus
            assert found is not None
            self._surplus[rule] = found
        return self._surplus[rule]


def verdict(parts: list[Measured]) -> RuleFound:
    """Return the scale rule of samples of one format."""
    return _rule_of_powers(parts) if parts[0].made.scale.powers else _rule_of_quotients(parts)


# ---- scales that are powers of two ----


def named_rules(element: ElementFormat) -> dict[Rule, str]:
    """Return the names of an element's rules by their thresholds, ascending."""
    named = {1 + (bump_above(rule, element) + 1) / (MANTISSA_MASK + 1): rule.value for rule in EXPONENT_RULES}
    return {(c,): named[c] for c in sorted(named)}


def nameless_rules(element: ElementFormat, best: Rule) -> list[Rule]:
    """Return the rules without a name that are near a named one: thresholds between, and choices by error."""
    thresholds = [c for (c,) in named_rules(element)]
    *_, even, floor = thresholds
    ends = [*thresholds, 2.24]
    near = [((a + b) / 2,) for a, b in pairwise(ends) if best[0] in (a, b)]
    # Where the smaller square error chooses the scale of E2M1, it turns at 1.78 to 1.84, by the other weights.
    by_error = tuple(even + share * (floor - even) for share in (1 / 8, 1 / 4, 3 / 8))
    wide = tuple(np.linspace(thresholds[1], floor, 5).tolist())
    return [*near, by_error, wide]


def _rule_of_powers(parts: list[Measured]) -> RuleFound:
    element = parts[0].made.element
    names = named_rules(element)
    parts = [part for part in parts if len(part.magnitudes)]
    size = sum(len(part.blocks.table) for part in parts)
    if size < FEWEST:
        return _undecided(tuple(names.values()), f"{size} blocks that are not zero are too few: {FEWEST}")
    logs = {rule: np.concatenate([part.fit(rule).blocks for part in parts]) for rule in names}
    best, second, *_ = sorted(logs, key=lambda rule: -logs[rule].sum())
    others = nameless_rules(element, best)
    of_best = [part.fit(best) for part in parts]
    for rule in others:
        logs[rule] = np.concatenate(
            [part.fit(rule, fit.family).blocks for part, fit in zip(parts, of_best, strict=True)]
        )
    leads = {rule: lead(logs[best], logs[rule]) for rule in logs if rule != best}
    ahead, behind = leads[second], min(leads[rule] for rule in others)
    shares = [len(part.blocks.table) / size for part in parts]
    surplus = sum(part.surplus(best) * share for part, share in zip(parts, shares, strict=True))
    misfit = float(np.abs(surplus).sum() / 2)
    details = {
        "families": sorted({fit.family for fit in of_best}),
        "misfit": round(misfit, 4),
        "free": round(float(sum(fit.free * share for fit, share in zip(of_best, shares, strict=True))), 4),
        "lead_of_others": round(behind, 2),
        "blocks": size,
    }
    zeros = float(np.average([(part.magnitudes == 0).mean() for part in parts], weights=shares))
    hollow = any(fit.family in HOLLOW for fit in of_best)
    possible = tuple(names[rule] for rule in names if rule == best or leads[rule] < LEAD)
    reason = ""
    if any(fit.family == "uniform" for fit in of_best):
        reason = "the weights are spread evenly, and the likelihood is not calibrated for such weights"
    elif names[best] == ScaleRule.EVEN and (zeros > PRUNED or hollow):
        reason = "in pruned weights the smaller error chooses nearly the scales of even"
    elif ahead < LEAD:
        reason = f"{names[best]} is only {ahead:.1f} standard deviations ahead of {names[second]}"
    elif behind < LEAD_OF_OTHERS:
        reason = f"a rule without a name fits about as well as {names[best]}, or better"
    elif misfit > MISFIT:
        reason = f"no shape of weights fits: the largest code is another one in {misfit:.1%} of the blocks"
    if reason:
        return RuleFound(None, round(ahead, 2), names[second], possible, reason, details)
    said = f"{ahead:.1f} standard deviations ahead of {names[second]}, {behind:.1f} of rules without a name"
    return RuleFound(names[best], round(ahead, 2), names[second], possible, said, details)


def _undecided(possible: tuple[str, ...], reason: str) -> RuleFound:
    return RuleFound(None, 0.0, None, possible, reason)


# ---- scales with a mantissa ----


def _rule_of_quotients(parts: list[Measured]) -> RuleFound:
    """Return whether blocks have scales for their largest magnitude over M, or some for it over 4."""
    element, possible = parts[0].made.element, (AMAX_OVER_6, BY_ERROR)
    codes = np.concatenate([part.magnitudes.max(axis=1, initial=0) for part in parts])
    if len(codes) < FEWEST:
        return _undecided(possible, f"{len(codes)} blocks that are not zero are too few: {FEWEST}")
    top = element.max_code
    four = int(np.searchsorted(element.magnitudes, 2.0**element.max_exponent))
    at_top, at_four = float((codes == top).mean()), float((codes == four).mean())
    other = 1 - at_top - at_four
    details = {
        "largest": round(at_top, 4),
        "four": round(at_four, 4),
        "other": round(other, 4),
        "blocks": len(codes),
    }
    said = f"the largest code is 6 in {at_top:.2%}, 4 in {at_four:.2%}, another in {other:.2%} of the blocks"
    if at_four + other <= 0.001:
        return RuleFound(AMAX_OVER_6, 0.0, BY_ERROR, (AMAX_OVER_6,), said, details)
    if other <= 0.001 and at_four >= 0.1 and at_top >= 0.1:
        return RuleFound(BY_ERROR, 0.0, AMAX_OVER_6, (BY_ERROR,), said, details)
    return RuleFound(None, 0.0, None, possible, said, details)


# ---- layouts and elements ----


def layout_by_codes(sample: Sample) -> tuple[str | None, float]:
    """Return the layout under which scales and codes go together, and its lead; None if the codes cannot tell.

    Under the right layout a block of larger codes has, among others of its size, a smaller scale.
    """
    made = sample.reading.made
    table = counts(np.minimum(sample.magnitudes, made.element.max_code), made.element)
    kept = table.sum(axis=1) > 0
    if kept.sum() < FEWEST:
        return None, 0.0
    # Several layouts can put the same bytes at the same places; the first one stands for them.
    different = {scales.tobytes(): (name, scales) for name, scales in reversed(sample.scales.items())}
    return _best(
        {
            name: free_likelihood(table[kept], _steps(scales[kept], made), made.element)
            for name, scales in different.values()
        }
    )


def element_by_codes(samples: dict[str, Sample]) -> tuple[str | None, float]:
    """Return which of several readings the codes have, by name, and its lead; None if they cannot tell.

    Zeros are left out, for pruned weights.
    """
    found = {}
    for name, one in samples.items():
        made = one.reading.made
        odd = (one.magnitudes > made.element.max_code).sum(axis=1)
        table = counts(np.minimum(one.magnitudes, made.element.max_code), made.element, whole=True)
        scales = next(iter(one.scales.values()))
        found[name] = free_likelihood(table, _steps(scales, made), made.element, whole=True) - 30.0 * odd
    best, ahead = _best(found)
    return (best, ahead) if ahead >= LEAD_OF_ELEMENTS else (None, ahead)


def _steps(scales: NDArray[np.uint8], made: BlockFormat) -> NDArray[np.int64]:
    """Return the logarithms of scales in steps of the grid; those of zero and of NaN are some."""
    value = scale_value(scales, made.scale)
    value = np.where(np.isnan(value), 1.0, np.maximum(value, 2.0**-140))
    steps: NDArray[np.int64] = np.rint(np.log2(value) * STEPS).astype(np.int64)
    return steps


def _best(found: dict[str, Floats]) -> tuple[str | None, float]:
    best, *others = sorted(found, key=lambda name: -found[name].sum())
    ahead = min((lead(found[best], found[name]) for name in others), default=0.0)
    return (best, round(ahead, 2)) if ahead >= LEAD else (None, round(ahead, 2))
