"""An ablation over made-up curves, and the results that it must report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from ablation_fakes import FakeCorpus, FakeResult, run_ladder, tiny
from mxref.discovery import get_backend
from mxref.tomlio import build
from mxref_training.config import TrainConfig
from mxref_training.lab.ladder import Ladder
from training_oracle import study as oracle

SEEDS = 3
EVERY, STEPS = 10, 100
CONFIG = tiny(f"run.steps={STEPS}", f"run.eval_every={EVERY}", "run.seed=20", "run.data_seed=70")
STEP_TOKENS = CONFIG.run.batch * CONFIG.run.seq_len

SLOWER = {"reference": 1.0, "slower": 1.17, "faster": 0.9, "stuck": 1.5, "early": 0.07, "unstable": 1.05}
"""How many times the reference's tokens an arm takes to any loss."""
FIXED = 4.1


def curve(arm: str, seed: int) -> list[tuple[int, float]]:
    """Validation losses by step; seeds differ by more than most arms do, and wiggle."""
    stretch = SLOWER[arm] * (1 + 0.12 * seed + 0.02 * math.sin(7 * seed + len(arm)))
    points = [(step, 2 + 6 * (step / stretch) ** -0.25) for step in range(EVERY, STEPS + 1, EVERY)]
    points = [(step, loss + 0.12 * math.sin(step)) for step, loss in points]
    if arm == "unstable" and seed == 1:
        points[-1] = (STEPS, points[0][1] + 1)
    return points


@dataclass
class Study:
    fixed: dict[str, Any]
    """Results under a fixed target."""
    relative: dict[str, Any]
    """Results under a target at a part of the reference's tokens."""
    seeds: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    """Seeds of weights and of data that each arm was trained with, in the order of the pairs."""


def study(folder: Path) -> Study:
    """Run a ladder of six arms over three seeds, by a trainer that looks its curves up."""
    trained: dict[str, list[tuple[int, int | None]]] = {}

    def trainer(config: TrainConfig, recipe: Any, out: Path, *, label: str, **_: Any) -> FakeResult:
        pair = len(trained.setdefault(label, []))
        trained[label].append((config.run.seed, config.run.data_seed))
        return FakeResult(curve(label, pair), tokens=STEPS * STEP_TOKENS)

    results = {}
    for name, target in (("fixed", {"loss": FIXED}), ("relative", {"fraction": 0.65})):
        trained.clear()
        arms = [{"name": arm, "label": arm} for arm in SLOWER]
        against = {"reference": "reference", "high_precision": ""} | target
        table = {"title": "curves", "train": {"preset": "tiny"}, "arm": arms, "target": against}
        ladder = build(Ladder, table, "ladder")
        options: dict[str, Any] = {"trainer": trainer, "corpus": FakeCorpus, "say": lambda line: None}
        backend = get_backend("reference")
        results[name] = run_ladder(ladder, CONFIG, folder / name, backend=backend, seeds=SEEDS, **options)
    return Study(results["fixed"], results["relative"], dict(trained))


def _tokens(arm: str, seed: int) -> oracle.Curve:
    return [(step * STEP_TOKENS, loss) for step, loss in curve(arm, seed)]


def _row(results: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(row for row in results["arms"] if row["name"] == arm)


def _compare(results: dict[str, Any], targets: list[float]) -> None:
    for arm in SLOWER:
        if arm in ("reference", "unstable"):
            continue
        pairs = [(_tokens(arm, seed), _tokens("reference", seed)) for seed in range(SEEDS)]
        reach, percent = oracle.overhead(pairs, targets)
        found = _row(results, arm)["overhead"]
        assert found["reach"] == reach, arm
        assert math.isclose(found["percent"], percent, rel_tol=1e-9), arm


def seeds_of_pairs(s: Study) -> None:
    """All arms of a pair have one seed of the weights and one of the data, and each pair its own."""
    expected = [(CONFIG.run.seed + i, 70 + i) for i in range(SEEDS)]
    assert s.seeds == dict.fromkeys(SLOWER, expected)


def crossings(s: Study) -> None:
    """Each run crosses the fixed target where the straight lines of its own curve first meet it."""
    for arm in SLOWER:
        for seed, run in enumerate(_row(s.fixed, arm)["runs"]):
            if arm == "unstable" and seed == 1:
                continue
            reach, tokens = oracle.crossing(_tokens(arm, seed), FIXED)
            assert run["crossing"]["reach"] == reach, (arm, seed)
            assert math.isclose(run["crossing"]["tokens"], tokens, rel_tol=1e-12), (arm, seed)


def fixed_target(s: Study) -> None:
    """Under a fixed target every arm is compared with the reference of its own seed."""
    _compare(s.fixed, [FIXED] * SEEDS)


def relative_target(s: Study) -> None:
    """The target is the reference's own loss at a part of its tokens, for each seed."""
    at = Fraction(65, 100) * STEPS * STEP_TOKENS
    targets = [float(oracle.value_at(_tokens("reference", seed), at)) for seed in range(SEEDS)]
    for seed, target in enumerate(targets):
        assert math.isclose(s.relative["target"]["losses"][str(seed)], target, rel_tol=1e-12)
    _compare(s.relative, targets)


def intervals(s: Study) -> None:
    """Spreads are pooled, a noisier arm has its own; none is below half the distance of evaluations."""
    converged = [arm for arm in SLOWER if arm != "unstable"]
    finals = [[curve(arm, seed)[-1][1] for seed in range(SEEDS)] for arm in converged]
    spread, freedom = oracle.pooled_spread(finals)
    found = s.fixed["spread"]["loss"]
    assert math.isclose(found["nats"], spread, rel_tol=1e-9)
    assert (found["freedom"], found["outside"]) == (freedom, [])

    # The target lies where this arm's curves wiggle: its tokens scatter 20 times as much as the others'.
    assert s.fixed["spread"]["tokens"]["outside"] == ["faster"]
    tokens = {
        arm: [oracle.crossing(_tokens(arm, seed), FIXED)[1] for seed in range(SEEDS)]
        for arm in ("reference", "faster")
    }
    resolution = float(max(50 * EVERY * STEP_TOKENS / t for t in tokens["reference"]))
    row = _row(s.fixed, "faster")["overhead"]
    pairs = list(zip(tokens["faster"], tokens["reference"], strict=True))
    expected = oracle.half_width(pairs, row["percent"])
    assert expected > resolution
    assert math.isclose(row["half_width"], expected, rel_tol=1e-6)
    assert math.isclose(_row(s.fixed, "slower")["overhead"]["half_width"], resolution, rel_tol=1e-12)


def divergence(s: Study) -> None:
    """An arm is diverged if one of its seeds is, and no mean is made of the others."""
    for results in (s.fixed, s.relative):
        found = _row(results, "unstable")["overhead"]
        assert found["reach"] == "diverged"
        assert found["percent"] is None
        assert found["text"] == "DNC (1 of 3)"


STUDY: dict[str, Callable[[Study], None]] = {
    check.__name__: check
    for check in (seeds_of_pairs, crossings, fixed_target, relative_target, intervals, divergence)
}
