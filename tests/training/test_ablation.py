"""Running a ladder: its results, what resumes, what runs again and why, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, ladder, run_ladder, table, tiny
from mxref.capabilities import every_gemm
from mxref.errors import FileFormatError, UnsupportedError
from mxref.formats import MXFP4
from mxref.recipe import GemmProfile
from mxref.reference import ReferenceBackend
from mxref_training import sources
from mxref_training.data.corpus import prepare_corpus
from mxref_training.errors import ConfigError
from mxref_training.interrupt import Interrupted
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.study import load_results
from mxref_training.report.ladder.page import headline
from mxref_training.trainer import train


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
    assert results["noise"]["half_width"] == pytest.approx(12.706 * noise, rel=1e-4)
    assert load_results(tmp_path) == results


def test_where_every_arm_gives_only_a_bound_the_noise_is_that_of_the_losses(tmp_path: Path) -> None:
    """The contrasts have intervals there, so the noise is not unknown beside them."""
    contrast = {"name": "h16", "arm": "h16", "against": "fp8", "question": "?"}
    arms = [arm for arm in table()["arm"] if arm["name"] in ("fp8", "h16")]
    target = {"high_precision": "", "loss": 6.0}  # the first evaluation lies below it
    results, _ = run(
        tmp_path, FakeTrainer({"H16": 0.1}), ladder(arm=arms, contrast=[contrast], target=target), seeds=3
    )
    loss = results["contrasts"][0]["loss"]
    assert loss["high"] > loss["low"]
    slope = results["exploratory"]["reference_slope"]
    one_pair = math.sqrt(3) * (loss["high"] - loss["low"]) / 2
    assert results["noise"]["half_width"] == pytest.approx(-100 * one_pair / slope)


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
    assert load_results(tmp_path)["runs"] == {"planned": 4, "finished": 2}
    assert "Not final: 2 of 4 planned runs have ended." in headline(load_results(tmp_path))
    (tmp_path / "arms" / "h16" / "checkpoint").touch()  # stands for what the trainer left
    trainer = FakeTrainer()
    results, said = run(tmp_path, trainer)
    assert [label for label, _ in trainer.calls] == ["H16", "bad"]
    assert "[1/4] fp8: finished before, kept" in said
    assert "[3/4] h16: resumes where it stopped" in said
    assert (tmp_path / "arms" / "h16" / "checkpoint").exists()
    assert results["unfinished"] == []
    assert "Not final" not in headline(results)


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
        ("report/ladder/plots", False),
        ("cli/train", False),
    ],
)
def test_code_digest_sees_what_can_change_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, counts: bool
) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    before = sources.code_digest()
    file = tmp_path / f"{module}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x = 1\n")
    after = sources.code_digest()
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


def test_a_single_run_trains_without_the_reference_and_waits_for_it(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    results, _ = run(tmp_path, trainer, seeds=2, single=["h16.seed1", "bad.seed0"])
    assert trainer.calls == [("bad", 0), ("H16", 1)]
    assert list(by_name(results)) == ["h16", "bad"]
    assert not (tmp_path / "results.json").exists()
    with pytest.raises(
        ConfigError, match=r"no run is named 'h16\.seed2' .did you mean 'h16\.seed1'.*--seeds"
    ):
        run(tmp_path, trainer, seeds=2, single=["h16.seed2"])


class _Limited(ReferenceBackend):
    def __init__(self, **capabilities: Any) -> None:
        self.capabilities = replace(ReferenceBackend.capabilities, **capabilities)


def test_nothing_is_written_when_the_ladder_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.eval_every = 80 .* set run\.eval_every = 10"):
        run(tmp_path, FakeTrainer(), config=tiny("run.eval_every=80"))
    with pytest.raises(UnsupportedError, match="does not declare 16 in hadamard_sizes"):
        run(tmp_path, FakeTrainer(), backend=_Limited(hadamard_sizes=frozenset({32})))
    with pytest.raises(UnsupportedError, match="does not declare ordered of mxfp4 in gemms.*--arms=-"):
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
