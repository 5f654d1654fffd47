"""The second analysis: pools of their own, contrasts that were declared late, ladders together, and flags."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ablation_fakes import ladder
from mxref.tomlio import build
from mxref_training.cli.report import report
from mxref_training.errors import ConfigError
from mxref_training.lab.answers import Answers, combined
from mxref_training.lab.contrasts import student_point
from mxref_training.lab.ladder import Ladder, extended
from mxref_training.lab.measures import Measures, flags, late_slope
from mxref_training.lab.result_file import write_json
from mxref_training.report.ladder.page import flag_line

SEEDS = range(5)
SR = {"all": {"format": "mxfp4", "rounding": "sr"}}
NAMES = ("fp8", "a", "b", "sr", "sr-too")
LADDER = ladder(
    arm=[
        {"name": name, "label": name.upper(), "seeds": 5} | ({"recipe": SR} if name[:2] == "sr" else {})
        for name in NAMES
    ],
    contrast=[{"name": name, "arm": name, "against": "fp8", "question": f"{name}?"} for name in ("a", "sr")],
    exploratory=[
        {"name": "late", "arm": "b", "against": "a", "question": "Late?"},
        {"name": "both", "arm": "sr", "against": "sr-too", "question": "Both?"},
    ],
)


def runs(noise: float, seed: int = 3) -> dict[str, dict[int, float]]:
    """Losses of arms with noise 0.01 around a seed's effect, those with SR with another noise."""
    rng = np.random.default_rng(seed)
    seeds = rng.normal(4, 0.1, 5)
    return {
        name: {s: float(seeds[s] + rng.normal(0, noise if name[:2] == "sr" else 0.01)) for s in SEEDS}
        for name in NAMES
    }


def explored(losses: dict[str, dict[int, float]]) -> dict[str, Any]:
    return Answers(LADDER, Measures(losses, {}, {}, slopes=losses), 5).explored()


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["contrasts"]}


def test_arms_that_are_noisier_have_a_pool_of_their_own() -> None:
    losses = runs(noise=0.08)
    found = explored(losses)
    assert found["noisy"] == ["sr", "sr-too"]
    rest, noisy = found["pools"]
    assert (rest["freedom"], noisy["freedom"]) == (2 * 4, 1 * 4)  # (arms - 1) (seeds - 1)
    assert rest["nats"] < 0.03 < noisy["nats"]
    assert found["noisy_p"] < 0.01
    a, sr, both = (rows(found)[name]["loss"] for name in ("a", "sr", "both"))
    assert (a["freedom"], both["freedom"]) == (8, 4)
    # Across the pools: half of the sum of the variances, and between the two degrees of freedom.
    halves = [(pool["nats"] ** 2 / 2, freedom) for pool, freedom in zip((rest, noisy), (8, 4), strict=True)]
    variance = sum(part for part, _ in halves)
    assert sr["freedom"] == pytest.approx(variance**2 / sum(part**2 / own for part, own in halves))
    point = student_point(0.05, sr["freedom"])
    assert (sr["high"] - sr["low"]) / 2 == pytest.approx(point * math.sqrt(variance / 5))


def test_arms_that_are_not_shown_to_be_noisier_stay_in_the_pool() -> None:
    losses = runs(noise=0.01)
    found = explored(losses)
    assert len(found["pools"]) == 1
    registered = Answers(LADDER, Measures(losses, {}, {}), 5).table()
    for row in registered:
        again = rows(found)[row["name"]]["loss"]
        assert (again["low"], again["p"]) == (row["loss"]["low"], row["loss"]["p"])


def test_late_contrasts_stand_outside_the_registered_family() -> None:
    losses = runs(noise=0.01)
    table = Answers(LADDER, Measures(losses, {}, {}), 5).table()
    assert [row["name"] for row in table] == ["a", "sr"]
    found = rows(explored(losses))
    assert [row["declared"] for row in found.values()] == [True, True, False, False]
    smallest = min(row["loss"]["p"] for row in found.values())
    assert min(row["loss"]["corrected_p"] for row in found.values()) == min(1.0, 4 * smallest)
    base = {"title": "base", "exploratory": [{"name": "late"}], "arm": [], "contrast": []}
    assert "exploratory" not in extended({"extends": "base"}, base, "new.toml")
    with pytest.raises(ConfigError, match="contrast 'late': arm = 'c' is no arm"):
        ladder(exploratory=[{"name": "late", "arm": "c", "against": "fp8", "question": "?"}])
    assert build(Ladder, {"title": "t", "train": {"preset": "tiny"}, "arm": [{"name": "fp8", "label": "x"}],
                          "target": {"high_precision": ""}}, "t").exploratory == ()  # fmt: skip


def test_intervals_across_the_pools_cover_the_truth() -> None:
    """Noise of SR four times that of the rest; 400 ladders, so a standard error of 1.1 %."""
    covered = 0
    for seed in range(400):
        losses = runs(noise=0.04, seed=seed)
        found = rows(explored(losses))["sr"]["loss"]
        own = np.mean([losses["sr"][s] - losses["fp8"][s] for s in SEEDS])
        assert found["nats"] == pytest.approx(own)
        covered += found["low"] <= 0 <= found["high"]
    assert covered / 400 == pytest.approx(0.95, abs=0.035)


def test_ladders_together_have_the_pairs_of_both(tmp_path: Path) -> None:
    results = []
    for number, seed in enumerate((3, 4)):
        losses = runs(noise=0.01, seed=seed)
        results.append(
            {
                "format": "mxref-ablation/1",
                "title": f"ladder {number}",
                "arms": [{"name": name, "label": name, "stage": ""} for name in NAMES],
                "exploratory": explored(losses),
            }
        )
        (tmp_path / str(number)).mkdir()
        write_json(tmp_path / str(number) / "results.json", results[-1])
    found = {row["name"]: row for row in combined(results)}
    assert list(found) == ["a", "sr", "late", "both"]
    pairs = [d for one in results for _, d in rows(one["exploratory"])["late"]["loss"]["pairs"]]
    loss = found["late"]["loss"]
    assert loss["nats"] == pytest.approx(np.mean(pairs))
    half = 2.262157 * np.std(pairs, ddof=1) / math.sqrt(10)  # t of 9 degrees of freedom
    assert loss["high"] - loss["nats"] == pytest.approx(half, rel=1e-6)
    assert loss["same_sign"] == max(sum(d > 0 for d in pairs), sum(d < 0 for d in pairs))
    shown = CliRunner().invoke(report, [str(tmp_path / "0"), str(tmp_path / "1")])
    assert shown.exit_code == 0, shown.output
    assert f"| b less a | after | {loss['nats']:+.4f}".replace("-", "−") in shown.output
    for one in results:
        one["exploratory"]["contrasts"] = one["exploratory"]["contrasts"][: 2 if one is results[0] else 0]
    with pytest.raises(ConfigError, match="'ladder 0', 'ladder 1' have no contrast in common"):
        combined(results)


def test_the_slope_is_that_of_the_last_half() -> None:
    curve = [(float(t), 9.0 if t < 50 else 4 - 0.25 * math.log(t)) for t in range(1, 101)]
    assert late_slope(curve, 100) == pytest.approx(-0.25)
    assert math.isnan(late_slope(curve[:50], 100))


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([70.0, 62.0, 61.0], ["its loss stays above that of a uniform guess, 9.70: it ends at 61.00"]),
        ([9.6, 5.0, 5.31], ["it ends 0.31 nats above its own minimum"]),
        ([9.6, 5.0, 5.29], []),
        ([12.0, 9.8, 9.6], []),
        ([math.nan], []),
        ([11.0, 10.0, 10.5], ["its loss stays above that of a uniform guess, 9.70: it ends at 10.50",
                              "it ends 0.50 nats above its own minimum"]),
    ],
)  # fmt: skip
def test_runs_that_did_not_learn_or_rose_again_are_flagged(losses: list[float], said: list[str]) -> None:
    assert flags([(float(i), loss) for i, loss in enumerate(losses, 1)], 16_384) == said


def test_a_reference_that_is_flagged_is_named_first() -> None:
    flagged = [
        {"arm": "fp8", "pair": 0, "reason": "it ends at 61.00", "reference": True},
        *({"arm": "a", "pair": i, "reason": "r", "reference": False} for i in range(6)),
    ]
    arms = [{"name": name, "label": name.upper(), "stage": ""} for name in NAMES]
    line = flag_line({"arms": arms, "flagged": flagged})
    assert line.startswith("The reference itself is flagged")
    assert "Flagged: FP8, pair 0: it ends at 61.00; A, pair 0: r; " in line
    assert line.endswith("; and 2 more.")
    assert flag_line({"arms": arms, "flagged": []}) == ""
