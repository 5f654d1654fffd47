"""The queue of a ladder: its order, one process for several runs, places on GPUs, and an end in time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, ladder, table, tiny
from mxref.capabilities import Capabilities
from mxref_training.data import handed_over
from mxref_training.data.corpus import prepare_corpus
from mxref_training.errors import ConfigError, DataError
from mxref_training.interrupt import Interrupted
from mxref_training.lab import fresh, progress, slots
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.branches import run_branches
from mxref_training.lab.budget import Budget
from mxref_training.lab.costs import Costs, cost_class
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.processes import ChildProcesses, _Batch
from mxref_training.lab.slots import Slot, make_slots, visible
from mxref_training.lab.study import planned, run_ladder
from training_setup import CORPUS

pytestmark = pytest.mark.usefixtures("warm_children")

SIZES = (
    "model.layers=1", "model.width=64", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=300",
    "model.max_seq=32", "run.seq_len=32", "run.batch=2", "run.micro_batch=0", "run.steps=4", "run.eval_every=2",
    "run.eval_tokens=64", "run.checkpoint_every=2", "run.threads=1", "optim.warmup=0", "data.max_documents=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("text")
    words = ["scale", "block", "element", "shared", "code", "value", "round", "stochastic", "gradient"]
    for side, count in (("train", 200), ("val", 20)):
        texts = [" ".join(words[(i * j + j) % 9] for j in range(1, 60)) for i in range(count)]
        texts = [f"{text} {side} {i}" for i, text in enumerate(texts)]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tiny(*SIZES, f"data.train={folder / 'train.jsonl'}", f"data.val={folder / 'val.jsonl'}")


@pytest.fixture(scope="module")
def corpus(config: Any) -> Any:
    return prepare_corpus(config)


def order(lad: Ladder, seeds: int | None) -> list[str]:
    return [arm.name if seed == 0 else f"{arm.name}.seed{seed}" for arm, seed in planned(lad, seeds)]


def test_pairs_are_complete_early_and_the_reference_comes_first() -> None:
    arms = table()["arm"]
    lad = ladder(arm=[arms[2], arms[3], {**arms[0], "seeds": 3}, arms[1]])
    assert order(lad, 2) == ["fp8", "h16", "bad", "fp8-seed2", "fp8.seed1", "h16.seed1", "bad.seed1"]
    arms[2]["seeds"] = 2
    lad = ladder(arm=[arms[2], arms[3], {**arms[0], "seeds": 3}, arms[1]])
    assert order(lad, None) == ["fp8", "h16", "bad", "fp8-seed2", "fp8.seed1", "h16.seed1", "fp8.seed2"]


def test_each_arm_runs_as_often_as_it_asks(tmp_path: Path) -> None:
    arms = table()["arm"]
    lad = ladder(arm=[{**arms[0], "seeds": 3}, {**arms[2], "seeds": 2}, arms[3]])
    trainer = FakeTrainer()
    options: dict[str, Any] = {
        "backend": mxref.get_backend("reference"),
        "corpus": FakeCorpus,
        "trainer": trainer,
    }
    results = run_ladder(lad, tiny(), tmp_path, seeds=None, say=lambda line: None, **options)
    assert trainer.calls == [("FP8", 0), ("H16", 0), ("bad", 0), ("FP8", 1), ("H16", 1), ("FP8", 2)]
    assert results["seeds"] == 3
    assert [len(arm["runs"]) for arm in results["arms"]] == [3, 2, 1]


# --- one process, several runs -------------------------------------------------------------------------


def in_processes(
    out: Path, config: Any, corpus: Any, places: list[Slot], arms: list[str] | None = None, **more: Any
) -> list[str]:
    said: list[str] = []
    sr = {"name": "sr", "label": "SR", "recipe": {"all": {"format": "mxfp4", "rounding": "sr"}}}
    lad = ladder(arm=[*(arm for arm in table()["arm"] if arm["name"] in ("fp8", "h16")), sr])
    runner = ChildProcesses(places, "numba", more.pop("budget", None))
    run_ladder(
        lad, config, out, backend=mxref.get_backend("numba"), trainer=FakeTrainer(), corpus=lambda: corpus,
        arms=arms, runner=runner, say=said.append, **more,
    )  # fmt: skip
    return said


def bits(out: Path, name: str) -> tuple[bytes, bytes]:
    folder = out / "arms" / name
    weights = b"".join(
        (folder / "checkpoints" / "step-4" / f"{x}.safetensors").read_bytes() for x in ("model", "optimizer")
    )
    return (folder / "metrics.jsonl").read_bytes(), weights


def pid(out: Path, name: str) -> str:
    return (out / "arms" / name / "log.txt").read_text().partition("process ")[2].partition(",")[0]


def test_a_run_has_the_same_bits_as_first_or_third_of_its_process(
    tmp_path: Path, config: Any, corpus: Any
) -> None:
    in_processes(tmp_path / "one", config, corpus, [Slot()])
    assert len({pid(tmp_path / "one", name) for name in ("fp8", "h16", "sr")}) == 1
    shutil.copytree(tmp_path / "one", tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "arms" / "sr")
    in_processes(tmp_path / "alone", config, corpus, [Slot("7")])
    assert ", GPU 7\n" in (tmp_path / "alone" / "arms" / "sr" / "log.txt").read_text()
    assert bits(tmp_path / "one", "sr") == bits(tmp_path / "alone", "sr")


def test_checkpoints_of_finished_runs_go_except_those_that_are_kept(
    tmp_path: Path, config: Any, corpus: Any
) -> None:
    in_processes(tmp_path, config, corpus, [Slot()], ["h16"], keep_checkpoints=["fp8"])
    kept = {path.parts[-3] for path in (tmp_path / "arms").glob("*/checkpoints/*")}
    assert kept == {"fp8"}
    said = in_processes(tmp_path, config, corpus, [Slot()], ["h16"], keep_checkpoints=[])
    assert said == ["[1/2] fp8: finished before, kept", "[2/2] h16: finished before, kept"]
    assert not list((tmp_path / "arms").glob("*/checkpoints/*"))
    longer = replace(config, run=replace(config.run, steps=6))
    said = in_processes(tmp_path, longer, corpus, [Slot()], ["fp8"])
    assert said[0] == "[1/1] fp8: starts anew, for 6 steps: the run of 4 steps has no checkpoint here"
    assert said[1].startswith("[1/1] fp8: validation loss ")


def test_keeping_the_checkpoints_of_an_unknown_arm_is_refused(
    tmp_path: Path, config: Any, corpus: Any
) -> None:
    with pytest.raises(ConfigError, match="no arm is named 'h61' .did you mean 'h16'"):
        in_processes(tmp_path, config, corpus, [Slot()], keep_checkpoints=["h61"])


class _Held:
    """Refers to itself, as a model and its hooks do."""

    def __init__(self, freed: list[int]) -> None:
        self.me, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.append(1)


def test_branches_run_in_processes_too(tmp_path: Path, config: Any, corpus: Any) -> None:
    arms = [arm for arm in table()["arm"] if arm["name"] in ("fp8", "h16")]
    lad = ladder(arm=arms, branch={"moments": ["2"], "updates": 2})
    results = run_branches(
        lad, config, tmp_path, backend=mxref.get_backend("numba"), trainer=FakeTrainer(), corpus=lambda: corpus,
        runner=ChildProcesses([Slot()], "numba"), say=lambda line: None,
    )  # fmt: skip
    assert [arm["name"] for arm in results["moments"][0]["arms"]] == ["fp8", "h16"]
    assert results["moments"][0]["arms"][1]["validation_last"]["mean"] != 0


def test_what_a_run_leaves_is_released_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    asked: list[int] = []
    _Held(freed)
    monkeypatch.setattr(fresh, "train", lambda *_, **__: list(freed))

    class Backend:
        def range_exceeded(self) -> bool:
            asked.append(1)
            return True

    assert fresh.train_afresh(backend=Backend()) == [1]  # type: ignore[arg-type]
    assert asked == [1]


def test_a_corpus_reaches_another_process_by_its_files(corpus: Any) -> None:
    sent = json.loads(json.dumps(handed_over.to_table(corpus)))
    got = handed_over.from_table(sent)
    assert got.hashes == corpus.hashes
    assert got.report == corpus.report
    assert (got.train.ids == corpus.train.ids).all()
    assert got.tokenizer.vocab_size == corpus.tokenizer.vocab_size
    with pytest.raises(DataError, match=r"tokens\.bin is gone: give the same command again"):
        handed_over.from_table({**sent, "train": {**sent["train"], "path": "/nowhere/tokens.bin"}})
    with pytest.raises(DataError, match="not in a file"):
        handed_over.to_table(CORPUS)


# --- places --------------------------------------------------------------------------------------------


class _OnGpu:
    name = "fast"
    capabilities = replace(Capabilities(), devices=frozenset({"cuda"}))


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(slots, "cores", lambda: 64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def places(devices: str | None, jobs: int | None, runs: int = 40, *overrides: str) -> tuple[list[str], int]:
    found = make_slots(jobs, devices, tiny(*overrides), _OnGpu(), runs)  # type: ignore[arg-type]
    return [slot.device for slot in found.slots], found.per_device


def test_runs_spread_over_gpus_before_they_share_one(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places("0,2", 2) == (["0", "2", "0", "2"], 2)
    assert places("all", 1) == (["0", "1", "2", "3"], 1)
    assert places("all", None) == (["0", "1", "2", "3"] * 4, 4)
    assert places("all", 4, 6) == (["0", "1", "2", "3", "0", "1"], 2)
    assert places(None, 3) == (["", "", ""], 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc,6,7")
    assert places("1,3", 1) == (["GPU-abc", "7"], 1)
    assert Slot("GPU-abc").environment == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}
    assert Slot().environment == {}
    assert visible(2, {}) == "2"


@pytest.mark.parametrize(
    ("devices", "override", "said"),
    [
        (
            "0,4",
            "run.threads=0",
            r"'4' is no GPU that PyTorch sees here .0 to 3.; give numbers as in 0,1, or all",
        ),
        ("x", "run.threads=0", "'x' is no GPU"),
        ("1,1", "run.threads=0", "names 1 twice; --jobs sets how many"),
        ("0", "run.device=cuda:1", "run.device = 'cuda:1' and --devices 0 name devices twice"),
    ],
)
def test_wrong_gpus_are_refused(four: None, devices: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        places(devices, 1, 40, override)


def test_gpus_need_a_backend_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--devices all, but backend 'reference' computes on cpu"):
        make_slots(1, "all", tiny(), mxref.get_backend("reference"), 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="PyTorch sees no GPU here"):
        places("all", 1)


# --- time ----------------------------------------------------------------------------------------------


def a_run(arm: str, out: Path = Path("nowhere"), steps: int = 100) -> ArmRun:
    found = ladder().named(arm)
    return ArmRun(out, found, 0, tiny(f"run.steps={steps}"), ladder().resolve(found), {})


def test_no_run_starts_that_would_not_end_in_time() -> None:
    now = [0.0]
    costs = Costs()
    budget = Budget(100.0, costs.expected, costs.learn, lambda: now[0])
    fast, slow = a_run("fp8"), a_run("bad")
    assert budget.allows(slow)  # nothing is known yet
    budget.learn(fast, 20.0)
    budget.learn(slow, 50.0)
    now[0] = 44.0
    assert budget.allows(slow)
    now[0] = 46.0
    assert not budget.allows(slow)
    assert budget.allows(fast)
    assert not budget.is_spent()
    now[0] = 100.0
    assert budget.is_spent()
    assert not budget.allows(fast)
    assert Budget().allows(slow)
    assert not Budget().is_spent()


def test_an_unknown_class_costs_what_the_slowest_known_does_and_a_begun_run_its_rest(tmp_path: Path) -> None:
    costs = Costs()
    assert costs.expected(a_run("fp8")) is None
    costs.learn(a_run("fp8"), 20.0)
    costs.learn(a_run("bad"), 50.0)
    costs.learn(a_run("bad"), 40.0)
    assert costs.expected(a_run("fp8")) == pytest.approx(22.0)
    assert costs.expected(a_run("h16")) == pytest.approx(55.0)
    begun = a_run("fp8", tmp_path)
    (begun.folder / "checkpoints" / "step-75").mkdir(parents=True)
    assert costs.expected(begun) == pytest.approx(5.5)


def test_cost_classes_tell_apart_what_takes_time() -> None:
    def of(**all_three: Any) -> str:
        lad = ladder(arm=[table()["arm"][0], {"name": "x", "label": "x", "recipe": {"all": all_three}}])
        return cost_class(lad.resolve(lad.arm[1]))

    plain = of(format="mxfp4")
    assert of(format="mxfp4", scale_rule="rceil") == plain
    assert of(format="mxfp4", hadamard=16) == of(format="mxfp4", hadamard=32) != plain
    different = [
        plain, of(format="mxfp4", hadamard=16), of(format="mxfp4", hadamard=16, signs="fixed"),
        of(format="mxfp4", rounding="sr"), of(format="mxfp4", prescale=True), of(format="fp8"), of(format="bf16"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_when_the_time_is_up_runs_stop_with_a_checkpoint_and_the_next_call_goes_on(
    tmp_path: Path, config: Any, corpus: Any
) -> None:
    long = replace(config, run=replace(config.run, steps=2000, checkpoint_every=0, eval_every=500))
    log = tmp_path / "arms" / "fp8" / "metrics.jsonl"

    def clock() -> float:
        return 100.0 if log.exists() and len(log.read_bytes().splitlines()) > 2 else 0.0

    with pytest.raises(
        Interrupted, match=r"the time is up: 0 of 2 runs finished, fp8 stopped; the same command goes on"
    ):
        in_processes(tmp_path, long, corpus, [Slot()], ["h16"], budget=Budget(50.0, clock=clock))
    assert [path.name for path in (tmp_path / "arms").glob("*/checkpoints/step-*")]
    assert "interrupted: SIGINT after step" in (tmp_path / "arms" / "fp8" / "log.txt").read_text()
    known = {cost_class(a_run(arm).recipe): 60.0 for arm in ("fp8", "h16")}
    budget = Budget(50.0, Costs(known).expected, clock=lambda: 0.0)
    with pytest.raises(Interrupted, match=r"too little time is left for another run: 0 of 2 runs finished"):
        in_processes(tmp_path, long, corpus, [Slot()], ["h16"], budget=budget)


@pytest.mark.parametrize("why", ["SIGTERM", "the time is up"])
def test_a_signal_behind_the_last_report_of_the_last_child_stops_what_follows(why: str) -> None:
    request = SimpleNamespace(signal=why if why == "SIGTERM" else "")
    batch = _Batch([a_run("fp8")], None, None, request, Budget())  # type: ignore[arg-type]
    batch.waiting.clear()
    batch.why = "" if request.signal else why
    batch.conclude("")
    with pytest.raises(
        Interrupted, match=f"{why}: 1 of 1 runs finished; the same command goes on with the probe"
    ):
        batch.conclude("the probe")


def test_the_reference_of_a_seed_starts_first_and_then_the_longest_runs() -> None:
    seconds = {"fp8": 3.0, "bf16": 1.0, "h16": 5.0}
    runs = [SimpleNamespace(arm=SimpleNamespace(name=n), seed=seed) for seed in (0, 1) for n in seconds]
    known: dict[str, float] = {}
    budget = Budget(expected=lambda run: known.get(run.arm.name))
    batch = _Batch(runs, None, None, SimpleNamespace(signal=""), budget)  # type: ignore[arg-type]
    started = []
    while (run := batch._next()) is not None:
        started.append((run.arm.name, run.seed))
        known[run.arm.name] = seconds[run.arm.name]
    assert started == [("fp8", 0), ("bf16", 0), ("h16", 0), ("fp8", 1), ("h16", 1), ("bf16", 1)]


def test_the_remaining_time_is_that_of_the_speeds_and_the_runs_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    fast, slow = progress.Pace(), progress.Pace()
    assert progress.remaining([fast], []) is None  # it loads
    fast.start(0, 10)
    slow.start(5, 10)  # resumed
    assert progress.remaining([fast, slow], []) is None
    now = 8.0
    fast.step(4)
    slow.step(7)
    assert progress.remaining([fast, slow], []) == 12
    now = 9.0
    assert progress.remaining([fast, slow], []) == 11
    # Both places are free after 11 s. Unknown runs take (30 + 20 + 40) / 3 s: 30 and 30, then none.
    assert progress.remaining([fast, slow], [30, None]) == 11 + 30
    assert progress.remaining([fast, slow], [None, 30, None]) == 11 + 60
