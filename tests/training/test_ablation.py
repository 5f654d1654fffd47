"""The ladder: its file, tokens to target, resumption, and the verdicts on a paper's claims."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, tiny
from mxref.backend import every_gemm
from mxref.errors import FileFormatError, RecipeError, UnsupportedError
from mxref.formats import MXFP4
from mxref.recipe import GemmProfile
from mxref.reference import ReferenceBackend
from mxref.roles import OPERANDS, GemmRole
from mxref.tomlio import build
from mxref_training.data.corpus import prepare_corpus
from mxref_training.errors import ConfigError
from mxref_training.lab import fingerprint
from mxref_training.lab.ladder import Ladder, load_ladder
from mxref_training.lab.statistics import (
    Crossing,
    Noise,
    Overhead,
    Reach,
    Verdict,
    first_crossing,
    judge,
    loss_at,
    overhead,
    seed_noise,
    student_t95,
)
from mxref_training.lab.study import load_results, run_ladder
from mxref_training.run.divergence import has_diverged
from mxref_training.run.interrupt import Interrupted
from mxref_training.run.loop import train

CURVE = [(100.0, 5.0), (200.0, 4.0), (300.0, 4.5), (400.0, 3.0)]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (4.5, Crossing(Reach.CROSSED, 150.0)),
        (4.75, Crossing(Reach.CROSSED, 125.0)),
        (4.0, Crossing(Reach.CROSSED, 200.0)),  # equal is reached, exactly at the evaluation
        (3.75, Crossing(Reach.CROSSED, 350.0)),  # the rise from 4.0 to 4.5 crosses nothing
        (4.25, Crossing(Reach.CROSSED, 175.0)),  # met three times: the first counts
        (5.0, Crossing(Reach.FIRST, 100.0)),
        (6.0, Crossing(Reach.FIRST, 100.0)),
        (2.9, Crossing(Reach.NEVER, 400.0)),
    ],
)
def test_first_crossing_of_the_piecewise_linear_curve(target: float, expected: Crossing) -> None:
    assert first_crossing(CURVE, target) == expected


def test_a_curve_counts_up_to_its_first_loss_that_is_not_finite() -> None:
    broken = [*CURVE[:2], (300.0, math.nan), (400.0, 1.0)]
    assert first_crossing(broken, 3.5) == Crossing(Reach.NEVER, 200.0)
    assert first_crossing([(100.0, math.nan)], 3.5) == Crossing(Reach.NEVER, 0.0)


def test_loss_at_interpolates_and_refuses_to_extrapolate() -> None:
    assert loss_at(CURVE, 125) == 4.75
    assert loss_at(CURVE, 400) == 3.0
    with pytest.raises(ConfigError, match=r"no two evaluations enclose 50 tokens.*run\.eval_every"):
        loss_at(CURVE, 50)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.0, 4.0, 3.0], False),
        ([5.0, 3.0, 3.9], False),  # a spike of less than half of what was gained
        ([5.0, 3.0, 4.1], True),
        ([5.0, 4.99, 5.0], False),  # no rise worth the name
        ([5.0, math.nan], True),
        ([5.0, 4.0, math.inf], True),
        ([5.0], False),
    ],
)
def test_divergence_rule(losses: list[float], diverged: bool) -> None:
    assert has_diverged([(100.0 * i, loss) for i, loss in enumerate(losses, 1)]) is diverged


def crossed(tokens: float) -> Crossing:
    return Crossing(Reach.CROSSED, tokens)


def test_overhead_of_one_pair_has_the_noise_of_the_seeds() -> None:
    found = overhead([(crossed(110), crossed(100))], Noise(4.0, 3))
    assert (found.reach, found.runs, str(found)) == (Reach.CROSSED, 3, "+10.0 %")
    assert (found.low, found.high) == pytest.approx((6, 14))


def test_overhead_over_seeds_is_paired() -> None:
    pairs = [(crossed(110), crossed(100)), (crossed(224), crossed(200)), (crossed(57), crossed(50))]
    found = overhead(pairs, Noise(50.0, 2))
    assert found.percent == pytest.approx((10 + 12 + 14) / 3)
    assert found.half_width == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert found.runs == 3


def test_interval_is_never_narrower_than_the_evaluations_resolve() -> None:
    assert overhead([(crossed(110), crossed(100))], Noise(0.1, 2), resolution=5.0).half_width == 5.0


def test_unreached_target_is_censored_and_divergence_is_no_number() -> None:
    never = overhead([(Crossing(Reach.NEVER, 143), crossed(100))], Noise(2.0, 3))
    assert (str(never), never.high) == ("> 43.0 %", math.inf)
    first = overhead([(Crossing(Reach.FIRST, 50), crossed(100))], Noise(2.0, 3))
    assert (str(first), first.low) == ("≤ -50.0 %", -math.inf)
    gone = Crossing(Reach.DIVERGED, math.nan)
    assert str(overhead([(gone, crossed(100))], Noise(2.0, 3))) == "DNC"
    assert str(overhead([(gone, crossed(100)), (crossed(101), crossed(100))], Noise())) == "DNC (1 of 2)"


def test_seed_noise_is_students_interval_of_a_difference() -> None:
    found = seed_noise([crossed(100), crossed(102)])
    # One degree of freedom: the standard deviation times the root of two is the difference itself.
    assert found.half_width == pytest.approx(12.706 * 2)
    assert found.runs == 2
    assert seed_noise([crossed(100)]) == Noise(math.inf, 1)
    assert seed_noise([crossed(100), Crossing(Reach.NEVER, 140)]) == Noise(math.inf, 2)


@pytest.mark.parametrize("freedom", [1, 2, 5, 20])
def test_student_t_holds_95_percent(freedom: int) -> None:
    t = np.linspace(-student_t95(freedom), student_t95(freedom), 400_001)
    density = (1 + t * t / freedom) ** (-(freedom + 1) / 2)
    constant = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    assert constant * np.trapezoid(density, t) == pytest.approx(0.95, abs=5e-5)
    assert student_t95(0) == math.inf


def measured(percent: float, half_width: float, reach: Reach = Reach.CROSSED, runs: int = 3) -> Overhead:
    return Overhead(reach, percent, half_width, runs)


@pytest.mark.parametrize(
    ("claim", "found", "verdict"),
    [
        ((8, 9), measured(10, 2), Verdict.REPRODUCED),
        ((8, 9), measured(10, 2, runs=2), Verdict.UNDERPOWERED),
        ((8, 9), measured(10, 5), Verdict.UNDERPOWERED),  # meets the claim, cannot tell it from none
        ((8, 9), measured(30, 5), Verdict.NOT_REPRODUCED),
        ((8, 9), measured(-2, 3), Verdict.NOT_REPRODUCED),
        ((8, 9), measured(43, 2, Reach.NEVER), Verdict.NOT_REPRODUCED),
        ((50, 60), measured(43, 2, Reach.NEVER), Verdict.UNDERPOWERED),
        ((8, 9), measured(math.nan, math.nan, Reach.DIVERGED), Verdict.NOT_REPRODUCED),
        ((8, 9), None, Verdict.UNDERPOWERED),
        (None, measured(20, 5), Verdict.NOT_REPRODUCED),
        (None, measured(40, 5), Verdict.UNDERPOWERED),  # the interval runs past the budget of 43 %
        (None, measured(43, 2, Reach.NEVER), Verdict.UNDERPOWERED),
        (None, Overhead(Reach.DIVERGED, math.nan, math.nan, 3, diverged=3, seeds=3), Verdict.REPRODUCED),
        (None, Overhead(Reach.DIVERGED, math.nan, math.nan, 3, diverged=1, seeds=3), Verdict.UNDERPOWERED),
        (None, Overhead(Reach.DIVERGED, math.nan, math.nan, 1, diverged=1, seeds=1), Verdict.UNDERPOWERED),
    ],
)
def test_verdict_rule(claim: tuple[float, float] | None, found: Overhead | None, verdict: Verdict) -> None:
    assert judge(claim, found, budget=43.0)[0] is verdict


# --- the ladder's file ---------------------------------------------------------------------------------

# What each arm of the paper's ladder gives to (Fprop X, Fprop W, Dgrad dY, Dgrad W, Wgrad dY, Wgrad X).
PLAIN, FP8, BF16 = "mxfp4", "fp8", "bf16"
PAPER = {
    "fp8": [FP8] * 6,
    "fp8-seed2": [FP8] * 6,
    "bf16": [BF16] * 6,
    "wgrad": [FP8, FP8, FP8, FP8, PLAIN, PLAIN],
    "fprop": [PLAIN, PLAIN, FP8, FP8, FP8, FP8],
    "fprop-dgrad": [PLAIN, PLAIN, PLAIN, PLAIN, FP8, FP8],
    "all": [PLAIN] * 6,
    "all-sr-dy": [PLAIN, PLAIN, "mxfp4 sr", PLAIN, "mxfp4 sr", PLAIN],
    "all-sr": ["mxfp4 sr"] * 6,
    "all-rht16-fixed": ["mxfp4 h16 fixed"] * 6,
    "all-rht16-redrawn": ["mxfp4 h16 per_step"] * 6,
    "all-h16": ["mxfp4 h16"] * 6,
    "all-h32": ["mxfp4 h32"] * 6,
    "mxfp8": ["mxfp8_e4m3 rceil"] * 6,
}


def test_paper_ladder_resolves_to_the_papers_treatments() -> None:
    ladder = load_ladder("paper")
    assert [arm.name for arm in ladder.arm] == list(PAPER)
    for arm in ladder.arm:
        recipe = ladder.resolve(arm)
        for (spec, operand), expected in zip(
            [pair for role in GemmRole for pair in zip(recipe.operands(role), OPERANDS[role], strict=True)],
            PAPER[arm.name],
            strict=True,
        ):
            format_, *extra = expected.split()
            size = next((int(word[1:]) for word in extra if word[0] == "h"), 0)
            wanted = {
                "format": format_,
                "scale_rule": "rceil" if "rceil" in extra else "even",
                "zero_scale": 0 if "rceil" in extra else 127,
                "rounding": "sr" if "sr" in extra else "rne",
                "hadamard": size,
                "signs": next((word for word in extra if word in ("fixed", "per_step")), "none"),
                "prescale": False,
                "block": "1x32",
            }
            found = {key: getattr(spec, key) for key in wanted} | {"format": spec.format.name}
            assert found == wanted, f"{arm.name}, {operand}"
        assert recipe.gemm == "ordered"


def test_arms_can_be_left_out() -> None:
    ladder = load_ladder("paper")
    assert ladder.names([], ["mxfp8"]) == [name for name in PAPER if name != "mxfp8"]
    assert ladder.names(["all", "wgrad"], ["wgrad"]) == ["fp8", "all"]
    with pytest.raises(ConfigError, match="no arm is named 'mxfp4'"):
        ladder.names([], ["mxfp4"])
    with pytest.raises(ConfigError, match="fp8 is the reference"):
        ladder.names([], ["fp8"])


def test_paper_ladder_claims() -> None:
    claims = {arm.name: arm.paper.overhead for arm in load_ladder("paper").arm if arm.paper}
    assert claims == {
        "fprop": "8-9 %",
        "fprop-dgrad": "10-11 %",
        "all": "26-27 %",
        "all-sr-dy": "DNC",
        "all-sr": "DNC",
        "all-rht16-fixed": "DNC",
        "all-rht16-redrawn": "DNC",
        "all-h16": "8-9 %",
        "all-h32": "8-9 %",
    }


def table(**changes: Any) -> dict[str, Any]:
    return {
        "title": "three arms",
        "train": {"preset": "tiny"},
        "recipe": {"dialect": "amd", "all": {"format": "fp8"}},
        "target": {"high_precision": ""},
        "arm": [
            {"name": "fp8", "label": "FP8"},
            {"name": "fp8-seed2", "label": "FP8 again", "seed_offset": 7},
            {"name": "h16", "label": "H16", "recipe": {"all": {"format": "mxfp4", "hadamard": 16}}},
            {"name": "bad", "label": "bad", "recipe": {"all": {"format": "mxfp4"}}},
        ],
        **changes,
    }


def ladder(**changes: Any) -> Ladder:
    return build(Ladder, table(**changes), "test.toml")


FP8_ARM = {"name": "fp8", "label": "FP8"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, r"unknown key 'titel' \(did you mean 'title'\?\)"),
        ({"arm": [{**FP8_ARM, "lable": "x"}]}, r"arm\[0\]: unknown key 'lable' \(did you mean 'label'\?\)"),
        ({"target": {"referense": "fp8"}}, r"unknown key 'referense' \(did you mean 'reference'\?\)"),
        ({"target": {"reference": "fp9"}}, r"target.reference = 'fp9' is no arm .*did you mean 'fp8'"),
        ({"target": {"fraction": 1.5, "high_precision": ""}}, r"target.fraction = 1.5 is outside 0 .. 1"),
        ({"arm": [FP8_ARM, FP8_ARM]}, "two arms are named 'fp8'"),
        ({"arm": [{**FP8_ARM, "name": "../fp8"}]}, "'../fp8' is not made of lower-case letters"),
        (
            {"arm": [{**FP8_ARM, "recipe": {"all": {"roundign": "sr"}}}]},
            r"'fp8'.*'roundign' \(did you mean 'rounding'\?\)",
        ),
        (
            {"arm": [{**FP8_ARM, "paper": {"overhead": "much", "source": "s"}}]},
            "'much' is neither a percentage",
        ),
        ({"arm": [{**FP8_ARM, "seed_offset": 1}]}, "reference arm 'fp8' has seed_offset = 1"),
        (
            {
                "arm": [
                    FP8_ARM,
                    {"name": "b", "label": "b", "seed_offset": 1, "recipe": {"all": {"format": "bf16"}}},
                ]
            },
            "arm 'b' has seed_offset = 1 and another recipe",
        ),
    ],
)
def test_ladder_errors_name_the_key_and_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((RecipeError, ConfigError), match=message) as caught:
        ladder(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_ladder_and_arm_name_the_nearest() -> None:
    with pytest.raises(FileFormatError, match="no ladder is named 'papper'.*did you mean 'paper'"):
        load_ladder("papper")
    with pytest.raises(ConfigError, match="no arm is named 'h61'.*did you mean 'h16'"):
        ladder().select(["h61"])


# --- running it ----------------------------------------------------------------------------------------


def run(
    out: Path, trainer: Any, lad: Ladder | None = None, **options: Any
) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    options = {"config": tiny(), "corpus": FakeCorpus, "backend": mxref.get_backend("reference"), **options}
    results = run_ladder(lad or ladder(), out=out, trainer=trainer, say=said.append, **options)
    return results, said


def by_name(results: dict[str, Any]) -> dict[str, Any]:
    return {arm["name"]: arm for arm in results["arms"]}


def test_results_against_hand_computed_overheads(tmp_path: Path) -> None:
    trainer = FakeTrainer({"H16": 0.10, "bad": 1.0})
    results, _ = run(tmp_path, trainer)
    arms = by_name(results)
    tokens = 100 * 8 * 64
    assert results["tokens"] == tokens
    # Seed 0 stretches nothing: the curve is 2 + 6 step^-1/4, evaluated every 10 steps, 70 among them.
    assert results["target"]["losses"]["0"] == pytest.approx(2 + 6 * 70**-0.25)
    assert arms["fp8"]["tokens_to_target"] == pytest.approx(0.7 * tokens)
    # 10 % slower, that crosses on the chord between steps 70 and 80, a little above the curve's own 77.
    before, after = (2 + 6 * (step / 1.1) ** -0.25 for step in (70, 80))
    chord = 70 + 10 * (before - (2 + 6 * 70**-0.25)) / (before - after)
    assert 77 < chord < 77.3
    assert arms["h16"]["tokens_to_target"] == pytest.approx(chord * 512)
    assert arms["h16"]["overhead"]["percent"] == pytest.approx(100 * (chord / 70 - 1))
    assert arms["bad"]["overhead"]["text"] == "> 42.9 %"
    assert arms["bad"]["tokens_to_target"] is None
    assert arms["h16"]["gap_reference"] == pytest.approx(6 * (100 / 1.1) ** -0.25 - 6 * 100**-0.25)
    noise = arms["fp8-seed2"]["overhead"]["percent"]
    assert noise == pytest.approx(
        100 * 0.01 * math.sin(7), rel=0.1
    )  # the fake's stretch at seed 7, on a chord
    assert results["noise"]["half_width"] == pytest.approx(12.706 * noise)
    assert load_results(tmp_path) == results


def test_pairs_share_seeds_and_noise_arms_do_not(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    results, _ = run(tmp_path, trainer, seeds=2)
    expected = [("FP8", 0), ("FP8 again", 7), ("H16", 0), ("bad", 0), ("FP8", 1), ("H16", 1), ("bad", 1)]
    assert trainer.calls == expected
    assert by_name(results)["h16"]["overhead"]["percent"] == pytest.approx(0)
    assert by_name(results)["h16"]["overhead"]["runs"] == 2
    assert results["noise"]["runs"] == 3


def test_divergence_is_a_result(tmp_path: Path) -> None:
    results, said = run(tmp_path, FakeTrainer(diverging=["bad"]))
    bad = by_name(results)["bad"]
    assert bad["overhead"]["text"] == "DNC"
    assert bad["runs"][0]["curve"] == [[10 * 512, 5.5]]
    assert bad["final_loss"] is None
    assert any("diverged: loss is not finite at step 17" in line for line in said)


def test_a_diverged_reference_leaves_no_target(tmp_path: Path) -> None:
    results, _ = run(tmp_path, FakeTrainer(diverging=["FP8"]))
    assert results["target"]["losses"] == {"0": None}
    assert all(arm["overhead"] is None for arm in results["arms"])


def test_interrupted_ladder_resumes_at_the_unfinished_arm(tmp_path: Path) -> None:
    def stop(label: str) -> None:
        if label == "H16":
            raise Interrupted("SIGINT after step 3")

    with pytest.raises(Interrupted):
        run(tmp_path, FakeTrainer(interrupt=stop))
    assert [arm["name"] for arm in load_results(tmp_path)["arms"]] == ["fp8", "fp8-seed2"]
    assert load_results(tmp_path)["unfinished"] == ["h16", "bad"]
    (tmp_path / "arms" / "h16" / "checkpoint").touch()  # stands for what the trainer left
    trainer = FakeTrainer()
    results, said = run(tmp_path, trainer)
    assert [label for label, _ in trainer.calls] == ["H16", "bad"]
    assert "[1/4] fp8: finished before, kept" in said
    assert "[3/4] h16: resumes where it stopped" in said
    assert (tmp_path / "arms" / "h16" / "checkpoint").exists()
    assert results["unfinished"] == []


def test_a_changed_recipe_reruns_that_arm_alone_and_says_why(tmp_path: Path) -> None:
    run(tmp_path, FakeTrainer())
    arms = table()["arm"]
    arms[2]["recipe"]["all"]["hadamard"] = 32
    trainer = FakeTrainer()
    _, said = run(tmp_path, trainer, ladder(arm=arms))
    assert trainer.calls == [("H16", 0)]
    line = next(line for line in said if "anew" in line)
    assert line.startswith("[3/4] h16: starts anew, because recipe dgrad.dy.hadamard, dgrad.w.hadamard,")
    assert (tmp_path / "superseded" / "h16-1" / "result.json").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config": tiny("optim.lr=1e-4")}, "optim lr changed"),
        ({"config": tiny("run.steps=90")}, "run steps changed"),
        ({"corpus": lambda: FakeCorpus({"train": "zz", "val": "bb"})}, "data tokenizer, train changed"),
    ],
)
def test_changed_configuration_or_data_reruns_everything(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    run(tmp_path, FakeTrainer())
    trainer = FakeTrainer()
    _, said = run(tmp_path, trainer, **options)
    assert len(trainer.calls) == 4
    assert sum(reason in line for line in said) == 4


def test_changed_code_reruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, FakeTrainer())
    monkeypatch.setattr("mxref_training.lab.study.code_digest", lambda: "0" * 12)
    _, said = run(tmp_path, FakeTrainer())
    assert "because the code changed" in said[0]


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        ("run/loop", True),
        ("model/laboratory", True),
        ("something_new", True),
        ("lab/report/plots", False),
        ("cli/train", False),
    ],
)
def test_code_digest_sees_what_can_change_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, counts: bool
) -> None:
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "lab" / "fingerprint.py"))
    before = fingerprint.code_digest()
    file = tmp_path / f"{module}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x = 1\n")
    after = fingerprint.code_digest()
    assert (before != after) is counts


def test_more_steps_go_on_from_the_finished_run(tmp_path: Path) -> None:
    run(tmp_path, FakeTrainer())
    (tmp_path / "arms" / "fp8" / "checkpoint").touch()
    trainer = FakeTrainer()
    results, said = run(tmp_path, trainer, config=tiny("run.steps=200"))
    assert len(trainer.calls) == 4
    assert said[0] == "[1/4] fp8: goes on from 100 to 200 steps"
    assert (tmp_path / "arms" / "fp8" / "checkpoint").exists()
    assert results["tokens"] == 200 * 512


def test_what_is_written_when_and_not_computed_reruns_nothing(tmp_path: Path) -> None:
    run(tmp_path, FakeTrainer())
    trainer = FakeTrainer()
    run(tmp_path, trainer, config=tiny("run.checkpoint_every=3", "run.keep=5"))
    assert trainer.calls == []


def test_a_damaged_record_is_trained_again(tmp_path: Path) -> None:
    run(tmp_path, FakeTrainer())
    (tmp_path / "arms" / "h16" / "result.json").write_text('{"arm": "h16"')
    trainer = FakeTrainer()
    run(tmp_path, trainer)
    assert trainer.calls == [("H16", 0)]


def test_selected_arms_run_with_the_reference_and_others_stay_in_the_results(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    results, _ = run(tmp_path, trainer, arms=["bad"])
    assert trainer.calls == [("FP8", 0), ("bad", 0)]
    assert list(by_name(results)) == ["fp8", "bad"]
    results, _ = run(tmp_path, trainer, arms=["h16"])
    assert trainer.calls[2:] == [("H16", 0)]
    assert list(by_name(results)) == ["fp8", "h16", "bad"]


class _Limited(ReferenceBackend):
    def __init__(self, **capabilities: Any) -> None:
        self.capabilities = replace(ReferenceBackend.capabilities, **capabilities)


def test_nothing_is_written_when_the_ladder_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.eval_every = 80 .* set run\.eval_every = 10"):
        run(tmp_path, FakeTrainer(), config=tiny("run.eval_every=80"))
    with pytest.raises(UnsupportedError, match="does not declare 16 in hadamard_sizes"):
        run(tmp_path, FakeTrainer(), backend=_Limited(hadamard_sizes=frozenset({32})))
    with pytest.raises(UnsupportedError, match="does not declare ordered of mxfp4 in gemms.*--without"):
        run(tmp_path, FakeTrainer(), backend=_Limited(gemms=every_gemm({GemmProfile.EXACT}, {MXFP4})))
    assert list(tmp_path.iterdir()) == []


def test_results_hold_no_number_that_json_lacks(tmp_path: Path) -> None:
    run(tmp_path, FakeTrainer(diverging=["bad"]), arms=["bad"])
    text = (tmp_path / "results.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in results.json"))


def test_missing_and_foreign_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"cannot read .*results\.json.*mxref ablate"):
        load_results(tmp_path)
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(FileFormatError, match="holds no results"):
        load_results(tmp_path)


def test_real_training_of_a_small_ladder(tmp_path: Path) -> None:
    words = [
        "scale",
        "block",
        "element",
        "shared",
        "code",
        "value",
        "round",
        "stochastic",
        "gradient",
        "weight",
    ]
    order = np.random.default_rng(0)
    documents = tmp_path / "text.jsonl"
    with documents.open("w") as f:
        for _ in range(200):
            f.write(json.dumps({"text": " ".join(order.choice(words, 60))}) + "\n")
    sizes = [
        "model.layers=1",
        "model.width=64",
        "model.ffn=64",
        "model.vocab=300",
        "run.seq_len=32",
        "run.batch=2",
    ]
    lengths = ["run.micro_batch=0", "run.steps=6", "run.eval_every=2", "run.eval_tokens=64", "optim.warmup=0"]
    config = tiny(*sizes, *lengths, f"data.train={documents}", "data.max_documents=0")
    arms = [arm for arm in table()["arm"] if arm["name"] != "fp8-seed2"]
    options = {"config": config, "corpus": lambda: prepare_corpus(config)}
    results, _ = run(tmp_path / "out", train, ladder(arm=arms), **options)
    assert [arm["name"] for arm in results["arms"]] == ["fp8", "h16", "bad"]
    finals = [arm["final_loss"] for arm in results["arms"]]
    assert len(set(finals)) == 3  # the recipes were used
    assert all(abs(loss - finals[0]) < 0.1 for loss in finals)  # from the same weights, on the same data
    assert [point[0] for point in results["arms"][0]["runs"][0]["curve"]] == [128, 256, 384]
    assert results["arms"][0]["runs"][0]["environment"]["versions"]["torch"]
    assert results["data"]["hashes"] == prepare_corpus(config).hashes

    again, said = run(tmp_path / "out", train, ladder(arm=arms), **options)
    assert again == results
    assert all("kept" in line for line in said)
