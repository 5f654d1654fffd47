"""The branch design: every recipe goes on from one run's checkpoints, on the same batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import mxref
from ablation_fakes import FakeTrainer, in_process, ladder, run_branches, run_ladder, tiny
from mxref.cli import main
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.tomlio import to_table
from mxref_training.branch_start import begin_branch
from mxref_training.errors import ConfigError
from mxref_training.interrupt import Interrupted
from mxref_training.lab.branches import assemble_branches
from mxref_training.lab.branches import moments as branch_moments
from mxref_training.lab.ladder import Branch, Ladder
from mxref_training.lab.last_checkpoint import Extra
from mxref_training.lab.study import summary
from mxref_training.progress import ProgressSink
from mxref_training.report.branches import branch_tables
from mxref_training.trainer import train
from training_setup import CORPUS, change, lines, metrics, run, weights

pytestmark = pytest.mark.usefixtures("warm_children")

FP8 = {"dialect": "amd", "all": {"format": "fp8"}}
ARMS = {
    "fp8": {},
    "h16": {"all": {"format": "mxfp4", "hadamard": 16}},
    "fprop": {"fprop": {"format": "mxfp4"}},
    "sr": {"all": {"format": "mxfp4", "rounding": "sr"}},
}
LONG = change(steps=10, eval_every=2)


def design(**branch: Any) -> Ladder:
    arms = [{"name": name, "label": name.upper(), "recipe": recipe} for name, recipe in ARMS.items()]
    again = {"name": "fp8-again", "label": "again", "seed_offset": 5}
    return ladder(arm=[*arms, again], branch={"moments": ["4", "6"], "updates": 4, "eval_every": 2, **branch})


def branches(out: Path, lad: Ladder | None = None, **options: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    given: dict[str, Any] = {
        "backend": mxref.get_backend("numba"), "trainer": train, "corpus": lambda: CORPUS,
        "progress": ProgressSink(), **options,
    }  # fmt: skip
    return run_branches(lad or design(), given.pop("config", LONG), out, say=said.append, **given), said


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("branches")
    branches(out)
    return out


def by_name(results: dict[str, Any], moment: int) -> dict[str, Any]:
    return {arm["name"]: arm for arm in results["moments"][moment]["arms"]}


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(folder) if "lr" in line]


@pytest.mark.parametrize("arm", ["fp8", "h16", "sr"])
def test_a_branch_is_a_run_whose_recipe_changes_at_the_moment(done: Path, tmp_path: Path, arm: str) -> None:
    """A schedule, FP8 until the moment and then the arm's recipe, is another way to the same bits."""
    recipe = recipe_from_table(FP8)
    if arm != "fp8":
        phases = {"schedule": [{"name": "trunk", "until": 4, "recipe": FP8}]}
        recipe = recipe_from_table({**FP8, **ARMS[arm], **phases})
    run(tmp_path, recipe, LONG, backend=mxref.get_backend("numba"), stop_after=8)
    expected = [point for point in losses(tmp_path) if point[0] > 4]
    assert len(expected) == 4
    assert losses(done / "branch" / "step-4" / "arms" / arm) == expected


def test_the_history_of_fp8_goes_on_in_layers_that_stay_in_it(done: Path, tmp_path: Path) -> None:
    """A schedule forgets it where a layer's recipe changes; a branch goes on as if its recipe had been there before."""
    trunk = done / "branch" / "trunk" / "arms" / "fp8"
    given: dict[str, Any] = {
        "backend": mxref.get_backend("numba"),
        "corpus": CORPUS,
        "label": "",
        "trunk": trunk,
    }
    held = {}
    for arm in ("fprop", "h16"):
        begin_branch(LONG, recipe_from_table({**FP8, **ARMS[arm]}), tmp_path / arm, step=4, **given)
        held[arm] = load_file(tmp_path / arm / "checkpoints" / "step-4" / "model.safetensors")
    before = load_file(trunk / "checkpoints" / "step-4" / "model.safetensors")
    assert sum(".fp8." in name for name in before) == 14
    assert held["fprop"].keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held["fprop"].items())
    assert held["h16"].keys() == {name for name in before if ".fp8." not in name}


def test_results_are_differences_from_the_trunks_own_branch(done: Path) -> None:
    results = json.loads((done / "branch.json").read_text())
    assert [moment["step"] for moment in results["moments"]] == [4, 6]
    assert results["design"]["trunk"] == "fp8"
    assert list(by_name(results, 0)) == list(ARMS)  # no arm with other seeds
    for moment in (0, 1):
        arms, step = by_name(results, moment), results["moments"][moment]["step"]
        assert {value for _, value in arms["fp8"]["difference"]["train"]} == {0.0}
        mine, theirs = (losses(done / "branch" / f"step-{step}" / "arms" / name) for name in ("h16", "fp8"))
        expected = [[at, a - b] for (at, a), (_, b) in zip(mine, theirs, strict=True)]
        assert arms["h16"]["difference"]["train"] == expected
        assert arms["h16"]["train_last"]["mean"] == expected[-1][1]  # the last quarter of four
        assert [at for at, _ in arms["h16"]["difference"]["validation"]] == [step + 2, step + 4]
        assert arms["h16"]["validation_last"]["mean"] == arms["h16"]["difference"]["validation"][-1][1] != 0


def test_the_pace_of_a_branch_is_that_of_its_own_updates(done: Path) -> None:
    """Its tokens are counted from step 0, as its steps are; the trunk's are none of its own time."""
    step = LONG.run.step_tokens
    for moment in (4, 6):
        file = done / "branch" / f"step-{moment}" / "arms" / "h16" / "result.json"
        record = json.loads(file.read_text())["record"]
        assert record["tokens"] == (moment + 4) * step
        pace = 4 * step / record["seconds"]
        assert record["tokens_per_second"] == pace
        assert summary(record).endswith(f" after {record['tokens']:,} tokens, {pace:,.0f} tokens/s")


def test_finished_branches_are_kept_without_checkpoints_and_the_trunk_with_them(
    done: Path, tmp_path: Path
) -> None:
    shutil.copytree(done, tmp_path / "out")
    trunk = tmp_path / "out" / "branch" / "trunk" / "arms" / "fp8"
    assert {path.name for path in (trunk / "checkpoints").iterdir()} == {"latest", "step-4", "step-6"}
    assert not list((tmp_path / "out" / "branch").glob("step-*/arms/*/checkpoints/*"))
    before = json.loads((done / "branch.json").read_text())
    results, said = branches(tmp_path / "out", trainer=FakeTrainer())
    assert results == before
    assert said[0] == "[1/8] fp8 from step 4: finished before, kept"
    assert len(said) == 8


def test_a_branch_that_is_gone_goes_on_from_the_trunk_and_a_lost_trunk_is_trained_again(
    done: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    gone = out / "branch" / "step-6" / "arms" / "sr"
    before = metrics(gone)
    shutil.rmtree(gone)
    _, said = branches(out)
    assert "[8/8] sr from step 6: starts" in said
    assert metrics(gone) == before
    shutil.rmtree(gone)
    shutil.rmtree(out / "branch" / "trunk" / "arms" / "fp8" / "checkpoints")
    _, said = branches(out)
    assert said[0] == "fp8: its checkpoints are gone, so it is trained again"
    assert metrics(gone) == before


@pytest.mark.parametrize("at", ["trunk", "branch"])
def test_an_interrupted_design_goes_on(done: Path, tmp_path: Path, at: str) -> None:
    calls: list[int] = []

    def trainer(*arguments: Any, stop_after: int, **options: Any) -> Any:
        calls.append(stop_after)
        if len(calls) == {"trunk": 2, "branch": 5}[at]:
            train(*arguments, stop_after=stop_after - 1, **options)
            raise Interrupted("SIGINT")
        return train(*arguments, stop_after=stop_after, **options)

    with pytest.raises(Interrupted):
        branches(tmp_path, trainer=trainer)
    results, said = branches(tmp_path)
    assert any("resumes where it stopped" in line for line in said)
    assert [arm["difference"] for moment in (0, 1) for arm in by_name(results, moment).values()] == [
        arm["difference"]
        for moment in (0, 1)
        for arm in by_name(json.loads((done / "branch.json").read_text()), moment).values()
    ]


def test_the_ladders_own_run_is_the_trunk_where_it_kept_its_checkpoints(done: Path, tmp_path: Path) -> None:
    lad, config = design(), replace(LONG, run=replace(LONG.run, checkpoint_every=2, keep=9))
    run_ladder(
        lad, config, tmp_path, backend=mxref.get_backend("numba"), trainer=train, corpus=lambda: CORPUS,
        progress=ProgressSink(), arms=["fp8"], say=lambda line: None,
    )  # fmt: skip
    branches(tmp_path, config=config, arms=["h16"])
    assert not (tmp_path / "branch" / "trunk").exists()
    for step in (4, 6):
        folder = Path("branch") / f"step-{step}" / "arms" / "h16"
        assert metrics(tmp_path / folder) == metrics(done / folder)


def test_the_history_of_fp8_begins_anew_where_the_trunk_had_none(tmp_path: Path) -> None:
    """Weights in BF16 up to the moment: the FP8 layers of the branch use their own first amax, and then theirs."""
    options: dict[str, Any] = {"backend": mxref.get_backend("numba")}
    run(tmp_path / "trunk", "bf16", LONG, stop_after=4, **options)
    given = {"corpus": CORPUS, "label": "branch", "trunk": tmp_path / "trunk", "step": 4, **options}
    begin_branch(LONG, recipe_from_table(FP8), tmp_path / "branch", **given)
    begun = weights(tmp_path / "branch")
    begin_branch(LONG, recipe_from_table(FP8), tmp_path / "branch", **given)  # again: nothing happens
    assert weights(tmp_path / "branch") == begun
    run(tmp_path / "branch", recipe_from_table(FP8), LONG, stop_after=8, **options)
    phases = {"schedule": [{"name": "trunk", "until": 4, "recipe": {"all": {"format": "bf16"}}}]}
    run(tmp_path / "phases", recipe_from_table({**FP8, **phases}), LONG, stop_after=8, **options)
    assert losses(tmp_path / "branch") == [point for point in losses(tmp_path / "phases") if point[0] > 4]


def test_pairs_and_intervals_over_seeds() -> None:
    lad = design(moments=["4"])

    def record(arm: str, seed: int, last: float) -> dict[str, Any]:
        # Eight points, so that the last quarter is not the last point.
        points = [[step, 5.0 if step < 12 else last] for step in range(5, 13)]
        facts = {"arm": arm, "pair": seed, "seed": 0, "diverged": False, "reason": "", "environment": {}}
        return {**facts, "train_curve": points, "losses": points}

    def assembled(found: list[Any]) -> dict[str, Any]:
        return assemble_branches(lad, tiny(), found, data={}, backend="numba")

    ends = {"fp8": (4.0, 4.1, 4.2), "h16": (4.1, 4.3, 4.3)}
    found = [(4, record(arm, seed, last)) for arm, values in ends.items() for seed, last in enumerate(values)]
    results = assembled(found)
    h16 = by_name(results, 0)["h16"]
    assert h16["validation_last"]["mean"] == pytest.approx((0.1 + 0.2 + 0.1) / 3)
    # Student's t at 95 % with two degrees of freedom, times the standard error.
    assert h16["validation_last"]["half_width"] == pytest.approx(4.30265 * 0.057735 / 3**0.5, rel=1e-4)
    assert h16["train_last"]["mean"] == pytest.approx((0.1 + 0.2 + 0.1) / 3 / 2)
    assert h16["difference"]["train"][0] == [5, 0.0]
    backwards = assembled(found[::-1])
    assert [arm["name"] for arm in backwards["moments"][0]["arms"]] == ["fp8", "h16"]
    assert by_name(backwards, 0)["h16"]["validation_last"] == h16["validation_last"]
    # A seed without the trunk's own branch has no partner; the others keep theirs.
    last = by_name(assembled(found[1:]), 0)["h16"]["validation_last"]
    assert (last["pairs"], last["mean"]) == (2, pytest.approx((0.2 + 0.1) / 2))
    # Before the trunk's own branch has ended there is nothing to compare with.
    alone = assembled(found[3:])
    assert by_name(alone, 0)["h16"]["validation_last"] is None


@pytest.mark.parametrize(
    ("branch", "said"),
    [
        ({"updates": 0}, "branch.updates = 0 is below 1"),
        ({"updates": 6, "eval_every": 4}, "branch.updates = 6 is not a multiple of branch.eval_every = 4"),
        ({"moments": []}, "branch.moments is empty"),
        ({"trunk": "fp9"}, "branch.trunk = 'fp9' is no arm"),
        ({"trunk": "fp8-again"}, "branch.trunk = 'fp8-again' has a seed_offset"),
    ],
)
def test_designs_that_cannot_run_are_refused(branch: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        design(**branch)


@pytest.mark.parametrize(
    ("moments", "said"),
    [
        (("soon",), "'soon' is neither a step nor a share"),
        (("1.5",), "'1.5' is neither"),
        (("30",), "step 30 is not a multiple of 50"),
        (("900",), "900 is step 900, which is not from 1 to 800: a branch takes 200 of the 1000 steps"),
        (("1%",), "1% is step 0"),
        (("49%", "51%"), "names step 500 twice"),
    ],
)
def test_moments_that_do_not_fit_are_refused(moments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        branch_moments(Branch(moments=moments), 1000)


def test_a_list_without_moments_is_refused_and_not_replaced() -> None:
    with pytest.raises(ConfigError, match="branch.moments is empty"):
        Branch(moments=())


def test_shares_are_rounded_to_evaluations() -> None:
    assert branch_moments(Branch(), 3680) == (900, 1850, 2750)
    assert branch_moments(Branch(moments=("200", "10%"), updates=40), 1000) == (100, 200)
    assert Branch(updates=30).interval == 30
    assert Branch(updates=200).interval == 50


def test_the_command_branches_and_prints_the_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lad = tmp_path / "small.toml"
    lad.write_text(
        'title = "t"\ntrain.preset = "tiny"\ntarget.high_precision = ""\n'
        'recipe = { dialect = "amd", all.format = "fp8" }\n'
        '[[arm]]\nname = "fp8"\nlabel = "FP8"\n[[arm]]\nname = "h16"\nlabel = "H16"\n'
        'recipe.all = { format = "mxfp4", hadamard = 16 }\n'
    )
    monkeypatch.setattr("mxref_training.data.corpus.prepare_corpus", lambda config: CORPUS)
    here = in_process(train, mxref.get_backend("numba"))
    monkeypatch.setattr(
        "mxref_training.lab.queue.Queue.__call__", lambda queue, *given, **more: here(*given, **more)
    )
    sizes = (
        "model.layers=1", "model.width=64", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=64",
        "model.max_seq=32", "run.seq_len=32", "run.batch=4", "run.micro_batch=2", "run.eval_tokens=64", "run.threads=1",
    )  # fmt: skip
    sets = [part for size in sizes for part in ("--set", size)]
    out = ["--out", str(tmp_path / "out"), "--backend", "numba", "--set", "run.steps=8"]
    found = CliRunner().invoke(
        main,
        [
            "ablate",
            str(lad),
            *sets,
            *out,
            "--branch",
            "--set",
            'branch.moments=["4"]',
            "--set",
            "branch.updates=2",
        ],
    )
    assert found.exit_code == 0, found.output
    assert "Loss less that of fp8 after 2 updates" in " ".join(found.stdout.split())
    assert (tmp_path / "out" / "branch" / "branch_train.csv").read_text().count("\n") == 5


def test_annealed_branches_end_at_a_rate_of_0_and_are_evaluated_with_another_recipe(tmp_path: Path) -> None:
    backend = mxref.get_backend("numba")
    asked = Extra({}, {"bf16": to_table(load_recipe("bf16"))})
    results, _ = branches(
        tmp_path / "a",
        design(anneal=True, moments=["4"]),
        arms=["sr"],
        extra=lambda corpus: asked,
        backend=backend,
    )
    folder = tmp_path / "a" / "branch" / "step-4" / "arms"
    rates = [line["lr"] / LONG.optim.lr for line in lines(folder / "sr") if "lr" in line and line["step"] > 4]
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25])
    records = {
        name: json.loads((folder / name / "result.json").read_text())["record"]["last"]["losses"]
        for name in ("fp8", "sr")
    }
    found = by_name(results, 0)["sr"]["evaluated"]
    for recipe in ("own", "bf16"):
        less = records["sr"][recipe]["validation"] - records["fp8"][recipe]["validation"]
        assert found[recipe] == {"mean": less, "half_width": None, "pairs": 1}
    assert found["own"]["mean"] == by_name(results, 0)["sr"]["validation_last"]["mean"]
    head, row = branch_tables(results)[0].columns, branch_tables(results)[0].rows[-1]
    assert row[[column.title for column in head].index("in bf16")] == found["bf16"]["mean"]


def test_a_branch_goes_on_with_the_trunks_model(tmp_path: Path) -> None:
    lad = design()
    other = replace(lad.named("sr"), train={"model": {"layers": 1}})
    with pytest.raises(ConfigError, match=r"arm 'sr' sets keys of train\.model"):
        branches(tmp_path, replace(lad, arm=tuple(other if a.name == "sr" else a for a in lad.arm)))
