"""What a ladder will cost: the estimate, what it assumes, and how long a run of each kind of recipe takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, ladder, table, tiny
from mxref.cli import main
from mxref.errors import FileFormatError
from mxref_training.lab.arm import ArmRun, Record
from mxref_training.lab.calibrate import STEPS, calibrate
from mxref_training.lab.costs import Costs, Rate, cost_class
from mxref_training.lab.fingerprint import fingerprint
from mxref_training.lab.forecast import forecast
from mxref_training.lab.fresh import train_afresh
from mxref_training.lab.study import run_ladder
from mxref_training.lab.tally import Tally, one_by_one
from mxref_training.model.llama import flops_per_token, parameter_count
from mxref_training.progress import ProgressSink
from training_setup import CONFIG as LONG
from training_setup import CORPUS

CONFIG = tiny("run.steps=100", "run.eval_every=30", "run.keep=2")


def a_run(arm: str, seed: int = 0, out: Path = Path("nowhere"), **more: Any) -> ArmRun:
    found = ladder().named(arm)
    return ArmRun(out, found, seed, CONFIG, ladder().resolve(found), {"run": {}}, **more)


def name(arm: str) -> str:
    return cost_class(a_run(arm).recipe)


def test_a_forecast_adds_up() -> None:
    costs = Costs({name("fp8"): 10.0, name("h16"): 30.0})
    runs = [a_run("fp8"), a_run("h16"), a_run("bad"), a_run("fp8", 1), a_run("h16", 1)]
    found = forecast(CONFIG, runs, costs, 2)
    # "bad" was never timed, so it counts as the slowest. Each run has a tenth to spare.
    assert [(arm.name, arm.runs, arm.seconds, arm.timed) for arm in found.arms] == [
        ("fp8", 2, 10.0, True), ("h16", 2, 30.0, True), ("bad", 1, 30.0, False),
    ]  # fmt: skip
    assert found.busy == pytest.approx(1.1 * 110)
    # One place has fp8, bad and the last h16, the other h16 and fp8.
    assert found.wall == pytest.approx(1.1 * 70)
    assert found.parameters == parameter_count(CONFIG.model)
    assert found.tokens == 100 * CONFIG.run.step_tokens
    assert found.flops == 5 * found.tokens * flops_per_token(CONFIG.model, CONFIG.run.seq_len)
    checkpoint = 12 * found.parameters
    assert found.disk == 5 * 2 * checkpoint + 5 * 400_000
    gone = [replace(run, keep_checkpoints=False) for run in runs]
    assert forecast(CONFIG, gone, costs, 2).disk == 2 * 3 * checkpoint + 5 * 400_000


def test_nothing_is_foreseen_of_what_was_never_timed() -> None:
    found = forecast(CONFIG, [a_run("fp8")], Costs(), 1)
    assert (found.busy, found.wall, found.arms[0].seconds) == (None, None, None)
    assert forecast(CONFIG, [], Costs(), 3).wall == 0


def test_a_rate_gives_the_time_of_a_run_or_of_a_part() -> None:
    rate = Rate(start=7.0, step=0.5, evaluation=2.0)
    assert rate.of(a_run("fp8")) == 7 + 100 * 0.5 + 4 * 2  # after steps 30, 60, 90 and 100
    assert rate.of(a_run("fp8", stops=(10, 60))) == 7 + 60 * 0.5 + 2 * 2
    costs = Costs(rates={name("fp8"): rate})
    assert costs.whole(a_run("fp8")) == costs.whole(a_run("bad")) == 65.0
    costs.learn(a_run("fp8"), 80.0)  # what a whole run took counts more than its calibration
    assert costs.whole(a_run("fp8")) == 80.0


def planned(**overlay: Any) -> ArmRun:
    arms = [table()["arm"][0], {"name": "x", "label": "x", "recipe": {"all": {"format": "mxfp4"}, **overlay}}]
    found = ladder(arm=arms)
    return replace(a_run("fp8"), arm=found.arm[1], recipe=found.resolve(found.arm[1]))


def test_the_shares_of_layers_and_steps_count() -> None:
    def layers(blocks: str) -> ArmRun:
        return planned(layers=[{"blocks": blocks, "recipe": {"all": {"format": "bf16"}}}])

    costs = Costs({cost_class(layers("-1:").recipe): 30.0})
    assert costs.known(layers("-1:"))
    assert not costs.known(layers("-2:"))
    tail = planned(schedule=[{"name": "tail", "start": "75%", "recipe": {"all": {"format": "fp8"}}}])
    rates = {cost_class(tail.recipe): Rate(5.0, 1.0, 0.0)}  # of its first phase
    assert Costs(rates=rates).whole(tail) == 5 + 100
    assert Costs(rates=rates | {name("fp8"): Rate(9.0, 0.2, 0.0)}).whole(tail) == pytest.approx(5 + 75 + 5)
    # Where the recipe itself was not calibrated, those of its phases are.
    alone = {name("bad"): Rate(5.0, 1.0, 0.0), name("fp8"): Rate(9.0, 0.2, 0.0)}
    assert Costs(rates=alone).whole(tail) == pytest.approx(5 + 75 + 5)


def test_results_are_written_less_often_the_more_runs_have_finished() -> None:
    """At fixed runs, not at times: the files that a ladder writes are the same on every machine."""
    written: list[int] = []
    runs = [a_run("fp8", seed) for seed in range(40)]
    tally = Tally(runs, runs, lambda records: written.append(len(records)), lambda line: None)
    for run in runs:
        tally.done(run, {"diverged": True, "reason": "of no interest"})
    assert written == [*range(1, 11), 12, 14, 16, 18, 20, 23, 26, 29, 33, 37]


def test_rates_are_kept_in_the_directory_and_damaged_ones_refused(tmp_path: Path) -> None:
    assert Costs.load(tmp_path) == (Costs(), {})
    costs = Costs({"a": 3.0}, {"x": Rate(1.0, 2.0, 3.0)})
    costs.save(tmp_path, {"device": "fast", "places": 4})
    assert Costs.load(tmp_path) == (Costs(rates=costs.rates), {"device": "fast", "places": 4})
    for text in ("{}", "no", '{"format": "mxref-costs/1", "rates": {"x": {"start": 1}}}'):
        (tmp_path / "costs.json").write_text(text)
        with pytest.raises(FileFormatError, match=r"costs\.json is damaged .*--calibrate makes it again"):
            Costs.load(tmp_path)


def test_a_calibration_times_each_class_as_often_as_there_are_places(tmp_path: Path) -> None:
    trained: list[ArmRun] = []
    said: list[str] = []

    def runner(runs: Any, watch: Any, corpus: Any, then: str) -> None:
        assert then == "the ladder"  # a signal in the last of these stops the ladder too
        for number, run in enumerate(runs):
            watch.begin(run)
            trained.append(run)
            ms = 0.5 if run.arm.name == "fp8" else 0.001 * (number + 1)
            # The first half compiles.
            seconds = [9.0] * (STEPS // 2) + [ms] * (STEPS // 2)
            lines = [f'{{"step": {i}, "seconds": {s}}}' for i, s in enumerate(seconds, 1)]
            lines.append('{"step": 16, "eval_seconds": 0.25}')
            kept = lines[:3] if run.arm.name == "bad" else lines
            (run.folder / "timing.jsonl").write_text("".join(line + "\n" for line in kept))
            record: Record = {"reason": "the loss is not finite" if run.arm.name == "bad" else ""}
            watch.done(run, record)

    runs = [a_run("fp8"), a_run("h16"), a_run("fp8-seed2"), a_run("bad"), a_run("h16", 1)]
    costs = calibrate(runs, 4, tmp_path, runner, FakeCorpus(), said.append)
    first = [(run.arm.name, run.seed) for run in trained[:4]]
    assert first == [("fp8", 0), ("h16", 0), ("bad", 0), ("fp8", 1)]
    assert len(trained) == 6  # three classes in four places
    assert {run.title for run in trained} == {
        f"calibration of {name}" for name in ("fp8", "h16", "bad", "fp8.seed1", "h16.seed1", "bad.seed1")
    }
    assert all(run.span == (0, STEPS) and run.config.run.eval_every == STEPS for run in trained)
    assert costs.rates[name("h16")].step == pytest.approx(0.005)  # the slower of two
    assert costs.rates[name("h16")].evaluation == 0.25
    assert name("bad") not in costs.rates
    assert "calibration of bad: not timed, because it ended early: the loss is not finite" in said
    assert not (tmp_path / "calibration").exists()


def test_a_calibration_times_real_steps(tmp_path: Path) -> None:
    config = replace(LONG, run=replace(LONG.run, steps=40))
    backend, recipe = mxref.get_backend("numba"), ladder().resolve(ladder().arm[0])
    key = fingerprint(config, recipe, backend, CORPUS, "code")
    run = ArmRun(tmp_path, ladder().arm[0], 0, config, recipe, key)
    train = one_by_one(train_afresh, backend, ProgressSink())
    rate = calibrate([run], 1, tmp_path, train, CORPUS, lambda line: None).rates[name("fp8")]
    assert min(rate.step, rate.evaluation) > 0
    assert rate.start >= 0


def test_all_runs_are_announced_before_the_first_trains(tmp_path: Path) -> None:
    announced: list[list[str]] = []
    trainer = FakeTrainer()
    costs = Costs()

    def before(runs: Any, corpus: Any) -> None:
        assert trainer.calls == []
        announced.append([run.name for run in runs])

    options: dict[str, Any] = {
        "backend": mxref.get_backend("reference"), "trainer": trainer, "corpus": FakeCorpus, "costs": costs,
        "say": lambda line: None,
    }  # fmt: skip
    run_ladder(ladder(), tiny(), tmp_path, before=before, arms=["h16"], **options)
    trainer.calls.clear()
    run_ladder(ladder(), tiny(), tmp_path, before=before, **options)
    assert announced == [["fp8", "h16"], ["fp8-seed2", "bad"]]
    assert costs.seconds == {name("fp8"): 2.0, name("h16"): 2.0}  # what their records say


def estimate(tmp_path: Path, *more: str) -> str:
    sizes = ("model.vocab=300", "run.steps=20", "data.max_documents=30")
    sets = [part for size in sizes for part in ("--set", size)]
    out = ["--out", str(tmp_path / "out"), "--backend", "numba", "--arms", "all-h16", "--seeds", "2"]
    found = CliRunner().invoke(
        main, ["ablate", "paper", "--config", "tiny", *sets, *out, "--estimate", *more]
    )
    assert found.exit_code == 0, found.output
    return " ".join(found.stdout.split())


def test_the_command_estimates_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxref_training.data.corpus.prepare_corpus", lambda config: FakeCorpus())
    said = estimate(tmp_path)
    assert "parameters, 10,240 tokens a run" in said  # tiny, and not the ladder's own demo
    assert "in 4 runs" in said
    assert "time: unknown, because no run has been timed: --calibrate times a few steps" in said
    (tmp_path / "out").mkdir(exist_ok=True)
    Costs(rates={"other": Rate(1.0, 0.5, 1.0)}).save(
        tmp_path / "out", {"device": "fast", "places": 1, "per_device": 1}
    )
    said = estimate(tmp_path)
    assert "fp8 2 0:13 0:26 as the slowest" in said
    assert "time: about 0:57 in 1 place on cpu, 0:57 of one place" in said
    assert "The calibration was made elsewhere: device fast -> cpu. --calibrate repeats it." in said
    assert not (tmp_path / "out" / "arms").exists()
