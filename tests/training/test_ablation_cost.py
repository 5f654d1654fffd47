"""What a ladder will cost: by the tokens per second of its finished runs, or by the peak of a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, ladder, run_ladder, tiny
from mxref.cli import main
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.branches import branch_runs
from mxref_training.lab.costs import GPUS, UTILISATION, Costs, Estimate, estimate, wall
from mxref_training.lab.study import Tally, planned
from mxref_training.model.llama import flops_per_token, parameter_count

CONFIG = tiny("run.steps=100", "run.eval_every=10", "run.keep=2")
TOKENS = 100 * CONFIG.run.step_tokens


def a_run(arm: str, out: Path = Path("nowhere"), **more: Any) -> ArmRun:
    found = ladder().named(arm)
    return ArmRun(out, found, 0, CONFIG, ladder().resolve(found), {"run": {}}, **more)


def test_an_unknown_arm_costs_what_the_slowest_known_does_and_a_begun_run_its_rest(tmp_path: Path) -> None:
    costs = Costs()
    assert costs.expected(a_run("fp8")) is None
    costs.learn("fp8", TOKENS, 20.0)
    costs.learn("bad", TOKENS, 50.0)
    costs.learn("bad", TOKENS, 40.0)
    assert costs.expected(a_run("fp8")) == pytest.approx(22.0)
    assert costs.expected(a_run("h16")) == pytest.approx(55.0)
    assert costs.expected(a_run("fp8", stops=(10, 50))) == pytest.approx(11.0)
    begun = a_run("fp8", tmp_path)
    (begun.folder / "checkpoints" / "step-75").mkdir(parents=True)
    assert costs.expected(begun) == pytest.approx(5.5)


def test_evaluations_count_and_a_branch_counts_its_own_tokens() -> None:
    costs = Costs()
    costs.learn_record({"arm": "a", "seconds": 8.0, "evaluation_seconds": 2.0, "tokens_per_second": 50.0})
    assert costs.rates == {"a": 40.0}
    costs.learn_record({"arm": "b", "diverged": True})
    assert costs.rates == {"a": 40.0}


def test_runs_start_in_the_place_that_is_free_first() -> None:
    assert wall([10, 30, 30, 10, 30], 2) == 70
    assert wall([], 3) == 0


def estimated(out: Path, places: int = 2, gpus: int = 1, **changes: Any) -> Estimate:
    lad = ladder(**changes)
    return estimate(CONFIG, planned(lad, CONFIG, out, 2), places, gpus)


def test_an_estimate_adds_up_from_the_finished_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": mxref.get_backend("reference"), "corpus": FakeCorpus}
    run_ladder(
        ladder(), CONFIG, tmp_path, trainer=FakeTrainer(), arms=["h16"], say=lambda line: None, **options
    )
    found = estimated(tmp_path)
    # FakeTrainer says 2 s for each of fp8 and h16; "bad" was never timed, so it counts as the slowest.
    assert [(arm.name, arm.runs, arm.seconds, arm.timed) for arm in found.arms] == [
        ("fp8-seed2", 1, 2.0, False), ("bad", 2, 2.0, False), ("fp8", 1, 2.0, True), ("h16", 1, 2.0, True),
    ]  # fmt: skip
    assert found.wall == pytest.approx(1.1 * 6)
    assert found.parameters == parameter_count(CONFIG.model)
    assert found.tokens == 5 * TOKENS
    assert found.flops == 5 * TOKENS * flops_per_token(CONFIG.model, CONFIG.run.seq_len)
    checkpoint = 12 * found.parameters
    assert found.disk == (5 * 2 + 2 * 3) * checkpoint + 5 * 400_000
    assert estimated(tmp_path, last={"keep": []}).disk == 2 * 3 * checkpoint + 5 * 400_000


def test_an_estimate_of_branches_has_the_trunk_with_a_checkpoint_of_each_moment(tmp_path: Path) -> None:
    lad = ladder(branch={"moments": ["40", "60"], "updates": 20, "eval_every": 20})
    found = estimate(CONFIG, branch_runs(lad, CONFIG, tmp_path, 1), 1, 1)
    # The trunk up to its last moment, and three arms from both: the repetition of the reference has no branch.
    assert [(arm.name, arm.runs, arm.steps) for arm in found.arms] == [
        ("fp8", 1, 60), ("fp8", 2, 20), ("h16", 2, 20), ("bad", 2, 20),
    ]  # fmt: skip
    assert found.tokens == (60 + 6 * 20) * CONFIG.run.step_tokens
    assert found.disk == (2 + 3) * 12 * found.parameters + 7 * 400_000


def test_without_a_finished_run_the_peak_of_a_gpu_counts_and_its_memory(tmp_path: Path) -> None:
    found = estimated(tmp_path)
    assert (found.wall, found.arms[0].seconds) == (None, None)
    h100 = next(gpu for gpu in GPUS if gpu.name == "H100 SXM")
    assert found.seconds_on(h100, 2) == pytest.approx(found.flops / (2 * 989e12 * UTILISATION))
    assert replace(found, memory=81 * 10**9).seconds_on(h100, 2) is None
    assert 0 < estimated(tmp_path, gpus=2).memory < found.memory  # two ranks split the model


def test_results_are_written_less_often_the_more_runs_have_finished() -> None:
    """At fixed runs, not at times: the files that a ladder writes are the same on every machine."""
    written: list[int] = []
    runs = [replace(a_run("fp8"), seed=seed) for seed in range(40)]
    study: Any = SimpleNamespace(costs=Costs(), say=lambda line: None)
    tally = Tally(study, runs, runs, lambda records: written.append(len(records)))
    for run in runs:
        tally.done(run, {"diverged": True, "reason": "of no interest"})
    assert written == [*range(1, 11), 12, 14, 16, 18, 20, 23, 26, 29, 33, 37]


def test_a_size_that_no_machine_here_has_is_estimated(tmp_path: Path) -> None:
    """Neither its tokens nor a GPU nor the memory of an 8B model is needed."""
    command = [
        "ablate",
        "paper_8b",
        "--estimate",
        "--gpus-per-run",
        "8",
        "--set",
        "run.micro_batch=8",
        "--out",
        str(tmp_path),
    ]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, found.output
    said = " ".join(found.stdout.split())
    assert "in 45 runs" in said
    assert "no run has finished here. At 20% of the BF16 peak, which is assumed" in said
    assert "RTX 4090 165 24 too little memory" in said
    assert not list(tmp_path.iterdir())
