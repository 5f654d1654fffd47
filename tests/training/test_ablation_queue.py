"""The queue of a ladder: its order, one process for several runs, places on GPUs, and an end in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, ladder, run_branches, run_ladder, table, tiny
from mxref.capabilities import Capabilities
from mxref_training.data.corpus import TokenCorpus, prepare_corpus
from mxref_training.errors import ConfigError, DataError
from mxref_training.interrupt import Interrupted
from mxref_training.lab import queue
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.costs import Costs
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.queue import Queue, Slot, _Batch, make_slots, on_share
from mxref_training.lab.study import planned

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
    return [run.name for run in planned(lad, tiny(), Path(), seeds)]


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
    out: Path,
    config: Any,
    corpus: Any,
    places: list[Slot],
    arms: list[str] | None = None,
    keep: list[str] | None = None,
    **more: Any,
) -> list[str]:
    said: list[str] = []
    sr = {"name": "sr", "label": "SR", "recipe": {"all": {"format": "mxfp4", "rounding": "sr"}}}
    arms_of_it = [*(arm for arm in table()["arm"] if arm["name"] in ("fp8", "h16")), sr]
    lad = ladder(arm=arms_of_it, last={"keep": keep} if keep is not None else {})
    runner = Queue(places, "numba", **more.pop("queue", {}))
    run_ladder(
        lad, config, out, backend=mxref.get_backend("numba"), corpus=lambda: corpus,
        arms=arms, runner=runner, say=said.append, **more,
    )  # fmt: skip
    return said


def pid(out: Path, name: str) -> str:
    return (out / "arms" / name / "log.txt").read_text().partition("process ")[2].partition(",")[0]


def test_each_run_has_a_process_of_its_own_which_sees_its_gpu(
    tmp_path: Path, config: Any, corpus: Any
) -> None:
    in_processes(tmp_path, config, corpus, [Slot("7")])
    assert len({pid(tmp_path, name) for name in ("fp8", "h16", "sr")}) == 3
    assert ", GPU 7\n" in (tmp_path / "arms" / "sr" / "log.txt").read_text()


def test_checkpoints_of_finished_runs_go_except_those_that_are_kept(
    tmp_path: Path, config: Any, corpus: Any
) -> None:
    in_processes(tmp_path, config, corpus, [Slot()], ["h16"], keep=["fp8"])
    kept = {path.parts[-3] for path in (tmp_path / "arms").glob("*/checkpoints/*")}
    assert kept == {"fp8"}
    said = in_processes(tmp_path, config, corpus, [Slot()], ["h16"], keep=[])
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
        in_processes(tmp_path, config, corpus, [Slot()], keep=["h61"])


def test_branches_run_in_processes_too(tmp_path: Path, config: Any, corpus: Any) -> None:
    arms = [arm for arm in table()["arm"] if arm["name"] in ("fp8", "h16")]
    lad = ladder(arm=arms, branch={"moments": ["2"], "updates": 2})
    results = run_branches(
        lad, config, tmp_path, backend=mxref.get_backend("numba"), corpus=lambda: corpus,
        runner=Queue([Slot()], "numba"), say=lambda line: None,
    )  # fmt: skip
    assert [arm["name"] for arm in results["moments"][0]["arms"]] == ["fp8", "h16"]
    assert results["moments"][0]["arms"][1]["validation_last"]["mean"] != 0


def test_a_corpus_reaches_another_process_by_its_files(corpus: Any) -> None:
    sent = json.loads(json.dumps(corpus.to_table()))
    got = TokenCorpus.from_table(sent)
    assert got.hashes == corpus.hashes
    assert got.report == corpus.report
    assert (got.train.ids == corpus.train.ids).all()
    assert got.tokenizer.vocab_size == corpus.tokenizer.vocab_size
    with pytest.raises(DataError, match=r"tokens\.bin is gone: give the same command again"):
        TokenCorpus.from_table({**sent, "train": {**sent["train"], "path": "/nowhere/tokens.bin"}})


# --- places --------------------------------------------------------------------------------------------


class _OnGpu:
    name = "fast"
    capabilities = replace(Capabilities(), devices=frozenset({"cuda"}))


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(queue, "cores", lambda: 64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def places(jobs: int | None, gpus: int = 1, runs: int = 40, *overrides: str) -> list[str]:
    return [slot.devices for slot in make_slots(jobs, gpus, tiny(*overrides), _OnGpu(), runs)]  # type: ignore[arg-type]


def test_runs_spread_over_gpus_before_they_share_one(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places(2) == ["0", "1", "2", "3"] * 2
    assert places(None) == ["0", "1", "2", "3"] * 4
    assert places(4, runs=6) == ["0", "1", "2", "3", "0", "1"]
    assert places(3, 1, 40, "run.device=cuda:1") == ["", "", ""]  # the user's own choice
    assert places(1, 2) == ["0,1", "2,3"]
    assert places(None, 4) == ["0,1,2,3"]
    assert places(1, 3) == ["0,1,2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc,6,7")
    assert places(1) == ["4", "GPU-abc", "6", "7"]
    assert places(1, 2) == ["4,GPU-abc", "6,7"]


def test_a_run_cannot_take_more_gpus_than_there_are(four: None) -> None:
    with pytest.raises(ConfigError, match="--gpus-per-run 8, but PyTorch sees 4 GPUs here: give fewer"):
        places(1, 8)


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "runs", "expected"),
    [(1, 4, 1, 13, 1), (3, 4, 1, 13, 3), (30, 4, 1, 13, 13), (None, 4, 1, 13, 4), (None, 64, 1, 13, 8),
     (None, 64, 1, 3, 3), (None, 8, 4, 13, 2), (None, 2, 4, 13, 1)],
)  # fmt: skip
def test_number_of_places_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, cores: int, ranks: int, runs: int, expected: int
) -> None:
    monkeypatch.setattr(queue, "cores", lambda: cores)
    found = make_slots(asked, ranks, tiny(), mxref.get_backend("reference"), runs)
    assert found == [Slot(ranks=ranks)] * expected


def test_threads_are_a_share_of_the_cores_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "cores", lambda: 8)
    assert [on_share(tiny(), [Slot()] * jobs).run.threads for jobs in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert on_share(tiny(), [Slot(ranks=2)] * 2).run.threads == 2
    assert on_share(tiny("run.threads=5"), [Slot()] * 2).run.threads == 5
    assert on_share(tiny(), [Slot()] * 2).optim == tiny().optim


# --- time ----------------------------------------------------------------------------------------------


def a_run(arm: str, out: Path = Path("nowhere"), steps: int = 100) -> ArmRun:
    found = ladder().named(arm)
    return ArmRun(out, found, 0, tiny(f"run.steps={steps}"), ladder().resolve(found), {})


def test_no_run_starts_that_would_not_end_in_time() -> None:
    now = [0.0]
    own = Queue([Slot()], "numba", deadline=100.0, clock=lambda: now[0])
    fast, slow = a_run("fp8"), a_run("bad")
    assert own.allows(slow)  # nothing is known yet
    own.costs.learn("fp8", fast.tokens, 20.0)
    own.costs.learn("bad", slow.tokens, 50.0)
    now[0] = 44.0
    assert own.allows(slow)
    now[0] = 46.0
    assert not own.allows(slow)
    assert own.allows(fast)
    assert not own.is_over()
    now[0] = 100.0
    assert own.is_over()
    assert not own.allows(fast)
    assert Queue([Slot()], "numba").allows(slow)


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
        in_processes(tmp_path, long, corpus, [Slot()], ["h16"], queue={"deadline": 50.0, "clock": clock})
    assert [path.name for path in (tmp_path / "arms").glob("*/checkpoints/step-*")]
    assert "interrupted: SIGINT after step" in (tmp_path / "arms" / "fp8" / "log.txt").read_text()
    costs = Costs()
    costs.learn("fp8", long.run.steps * long.run.step_tokens, 60.0)
    short = {"deadline": 50.0, "clock": lambda: 0.0, "costs": costs}
    with pytest.raises(Interrupted, match=r"too little time is left for another run: 0 of 2 runs finished"):
        in_processes(tmp_path, long, corpus, [Slot()], ["h16"], queue=short)


@pytest.mark.parametrize("why", ["SIGTERM", "the time is up"])
def test_a_signal_behind_the_last_report_of_the_last_child_stops_what_follows(why: str) -> None:
    request = SimpleNamespace(signal=why if why == "SIGTERM" else "")
    batch = _Batch(Queue([], ""), [a_run("fp8")], None, request, None)  # type: ignore[arg-type]
    batch.waiting.clear()
    batch.why = "" if request.signal else why
    with pytest.raises(
        Interrupted, match=f"{why}: 1 of 1 runs finished; the same command goes on from there"
    ):
        batch.conclude()


def test_the_reference_of_a_seed_starts_first_and_then_the_longest_runs() -> None:
    seconds = {"fp8": 3.0, "bf16": 1.0, "h16": 5.0}
    runs = [SimpleNamespace(arm=SimpleNamespace(name=n), seed=seed) for seed in (0, 1) for n in seconds]
    known: dict[str, float] = {}
    own = SimpleNamespace(
        allows=lambda run: True, costs=SimpleNamespace(expected=lambda run: known.get(run.arm.name))
    )
    batch = _Batch(own, runs, None, SimpleNamespace(signal=""), None)  # type: ignore[arg-type]
    started = []
    while (run := batch._next()) is not None:
        started.append((run.arm.name, run.seed))
        known[run.arm.name] = seconds[run.arm.name]
    assert started == [("fp8", 0), ("bf16", 0), ("h16", 0), ("fp8", 1), ("h16", 1), ("bf16", 1)]


def test_the_remaining_time_is_that_of_the_steps_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(queue.time, "monotonic", lambda: now)
    left = queue.Remaining(30)
    left.left -= 10  # of a resumed run
    assert left.seconds == 0
    now = 8.0
    left.left -= 4
    left.done += 4
    assert left.seconds == 16 * 8 / 4
