"""The results that an ablation must report of validation curves: tokens to a target, and overheads of pairs.

Written from the rules that the report prints, in fractions instead of floats; no code is shared with mxref.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

Curve = list[tuple[int, float]]
"""Tokens and loss."""


def crossing(curve: Curve, target: float) -> tuple[str, Fraction]:
    """How a finite curve stands to a target, and at how many tokens."""
    if curve[0][1] <= target:
        return "first", Fraction(curve[0][0])
    for number in range(1, len(curve)):
        (t0, l0), (t1, l1) = curve[number - 1], curve[number]
        if l1 <= target:
            part = (Fraction(l0) - Fraction(target)) / (Fraction(l0) - Fraction(l1))
            return "crossed", t0 + part * (t1 - t0)
    return "never", Fraction(curve[-1][0])


def value_at(curve: Curve, tokens: Fraction) -> Fraction:
    """Loss on the straight line between the evaluations around a number of tokens."""
    for (t0, l0), (t1, l1) in pairwise(curve):
        if t0 <= tokens <= t1:
            return Fraction(l0) + (Fraction(l1) - Fraction(l0)) * (tokens - t0) / (t1 - t0)
    raise ValueError("outside the curve")


def overhead(pairs: list[tuple[Curve, Curve]], targets: list[float]) -> tuple[str, float]:
    """How an arm stands to its pairs' targets, and its mean overhead in percent.

    Each pair is the arm's curve and that of the reference with the same seed. One seed that never crosses makes
    the mean a lower bound, one that is there at its first evaluation an upper one.
    """
    stands, percents = [], []
    for (arm, reference), target in zip(pairs, targets, strict=True):
        stand, tokens = crossing(arm, target)
        base_stand, base = crossing(reference, target)
        assert base_stand == "crossed"
        stands.append(stand)
        percents.append(100 * (tokens - base) / base)
    worst = next((s for s in ("never", "first") if s in stands), "crossed")
    return worst, float(sum(percents, Fraction(0)) / len(percents))


def pooled_spread(values: list[list[float]]) -> tuple[float, int]:
    """Standard deviation of a difference of two runs of a seed, and its degrees of freedom.

    Args:
        values: by arm, and in it by seed; every arm has every seed.
    """
    arms, seeds = len(values), len(values[0])
    grand = math.fsum(map(math.fsum, values)) / (arms * seeds)
    of_arm = [math.fsum(arm) / seeds for arm in values]
    of_seed = [math.fsum(column) / arms for column in zip(*values, strict=True)]
    rest = [values[i][j] - of_arm[i] - of_seed[j] + grand for i in range(arms) for j in range(seeds)]
    freedom = (arms - 1) * (seeds - 1)
    return math.sqrt(2 * math.fsum(r * r for r in rest) / freedom), freedom


def half_width(pairs: list[tuple[Fraction, Fraction]], percent: float) -> float:
    """Half the 95 % interval of an overhead in percent, from the spread of its own pairs' tokens alone."""
    (arms, references) = zip(*pairs, strict=True)
    logs = [[math.log(t) for t in side] for side in (arms, references)]
    spread, freedom = pooled_spread(logs)
    return (100 + percent) * student_t95(freedom) * spread / math.sqrt(len(pairs))


def student_t95(freedom: int) -> float:
    """Two-sided 95 % point, by bisection of the integral of the density (Simpson's rule)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def inside(t: float) -> float:
        count = 2000
        h = t / count
        total = 0.0
        for i in range(count + 1):
            weight = 1 if i in (0, count) else 4 if i % 2 else 2
            total += weight * (1 + (i * h) ** 2 / freedom) ** (-(freedom + 1) / 2)
        return 2 * scale * total * h / 3

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return (low + high) / 2
