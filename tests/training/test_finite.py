"""Non-finite values: no checkpoint holds one, and a run whose last loss is not finite ends with an error."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mxref
import mxref_torch
from ablation_fakes import run_ladder
from mxref_training import evaluate as evaluation
from mxref_training.checkpoint import CheckpointStore
from mxref_training.config import TrainConfig
from mxref_training.config_files import config_from_table
from mxref_training.data import Tokens
from mxref_training.data.corpus import TokenCorpus
from mxref_training.errors import CheckpointError, ConfigError, DivergedError
from mxref_training.evaluate import Evaluation
from mxref_training.finite import first_nonfinite
from mxref_training.lab.ladder import load_ladder
from mxref_training.model.llama import Llama
from mxref_training.trainer import train
from training_setup import CONFIG, CORPUS, Saboteur, change, lines, run

UNSEEN = 63
"""A token that the corpus below does not hold, so no gradient touches its embedding."""
EMBEDDING = "model.embed_tokens.weight"


def without(tokens: Tokens) -> Tokens:
    ids = tokens.ids % UNSEEN
    return replace(tokens, ids=ids, sha256=hashlib.sha256(ids.tobytes()).hexdigest())


NARROW = TokenCorpus(without(CORPUS.train), without(CORPUS.val), CORPUS.tokenizer, "made up")


def poison(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(EMBEDDING)[UNSEEN, 0] = math.nan


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that has NaN appear in an unused weight after a step."""

    def at(step: int) -> None:
        real, calls = mxref_torch.advance, iter(range(1, 1000))

        def advance(model: nn.Module) -> None:
            real(model)
            if next(calls) == step:
                poison(model)

        monkeypatch.setattr(mxref_torch, "advance", advance)

    return at


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that has one evaluation give NaN, the weights being sound."""

    def at(number: int) -> None:
        real, calls = evaluation.evaluate, iter(range(1, 1000))

        def evaluate(*args: Any, **named: Any) -> Evaluation:
            found = real(*args, **named)
            return replace(found, loss=math.nan) if next(calls) == number else found

        monkeypatch.setattr(evaluation, "evaluate", evaluate)

    return at


def checkpoints(out: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").glob("step-*"))


def assert_all_finite(out: Path) -> None:
    for step in checkpoints(out):
        for group in ("model", "optimizer"):
            for name, tensor in load_file(out / f"checkpoints/step-{step}/{group}.safetensors").items():
                assert bool(torch.isfinite(tensor).all()), (step, name)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found_wherever_it_is(bad: float) -> None:
    for shape, at in (((), ()), ((1,), (0,)), ((3, 70), (0, 0)), ((3, 70), (2, 69)), ((1000, 33), (500, 7))):
        tensor = torch.full(shape, 3e38)
        tensors = {"counts": torch.arange(3), "empty": torch.zeros(0), "fine": torch.ones(2), "bad": tensor}
        assert first_nonfinite(tensors) is None
        tensor[at] = bad
        assert first_nonfinite(tensors | {"worse": tensor}) == "bad"
    assert first_nonfinite({"b": torch.tensor([1.0, bad]).to(torch.bfloat16)}) == "b"
    assert first_nonfinite({}) is None


def test_nan_that_no_gradient_touches_is_never_saved(tmp_path: Path, poisoned: Callable[[int], None]) -> None:
    poisoned(3)
    config = change(checkpoint_every=2, eval_every=6, keep=5)
    message = f"{EMBEDDING} is not finite after step 4: the last checkpoint is of step 2"
    with pytest.raises(DivergedError, match=message):
        run(tmp_path, config=config, corpus=NARROW)
    assert checkpoints(tmp_path) == [2]
    assert_all_finite(tmp_path)
    logged = lines(tmp_path)
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) for line in logged), "no loss ever showed it"


def test_a_stopped_run_goes_on_from_its_last_finite_checkpoint(
    tmp_path: Path, poisoned: Callable[[int], None]
) -> None:
    config = change(checkpoint_every=2)
    whole = run(tmp_path / "whole", config=config, corpus=NARROW)
    with pytest.MonkeyPatch.context() as patch:
        real, calls = mxref_torch.advance, iter(range(1, 1000))

        def advance(model: nn.Module) -> None:
            real(model)
            if next(calls) == 3:
                poison(model)

        patch.setattr(mxref_torch, "advance", advance)
        with pytest.raises(DivergedError):
            run(tmp_path / "parts", config=config, corpus=NARROW)
    parts = run(tmp_path / "parts", config=config, corpus=NARROW)
    assert (parts.losses, parts.train_losses) == (whole.losses, whole.train_losses)


def test_an_evaluation_looks_at_the_weights(tmp_path: Path, poisoned: Callable[[int], None]) -> None:
    poisoned(1)
    with pytest.raises(
        DivergedError, match=f"{EMBEDDING} is not finite after step 2: there is no checkpoint"
    ):
        run(tmp_path, corpus=NARROW)
    assert lines(tmp_path)[-1]["val_loss"] is not None
    assert not list((tmp_path / "checkpoints").iterdir())


def test_nan_in_the_initial_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Llama.reset_parameters

    def reset(model: Llama, seed: int) -> None:
        real(model, seed)
        poison(model)

    monkeypatch.setattr(Llama, "reset_parameters", reset)
    with pytest.raises(ConfigError, match=f"the initial {EMBEDDING} is not finite"):
        run(tmp_path / "run", corpus=NARROW)
    assert not (tmp_path / "run").exists()


def test_initial_weights_beyond_float32_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, init_std=3e38))
    with pytest.raises(ConfigError, match=r"is not finite: lower model.init_std = 3e\+38"):
        run(tmp_path / "run", config=config)


def test_nan_in_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = change(checkpoint_every=2, keep=5)
    run(tmp_path, config=config, corpus=NARROW, stop_after=4)
    real = CheckpointStore.load

    def load(store: Any, step: int, **options: Any) -> Any:
        snapshot = real(store, step, **options)
        snapshot.tensors["optimizer"][f"exp_avg/{EMBEDDING}"][UNSEEN, 0] = math.inf
        return snapshot

    monkeypatch.setattr(CheckpointStore, "load", load)
    message = f"step 4 .* exp_avg/{EMBEDDING} that is not finite; delete .*step-4 to go on from step 2"
    with pytest.raises(CheckpointError, match=message):
        run(tmp_path, config=config, corpus=NARROW)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_learning_rate_that_destroys_the_weights(tmp_path: Path, recipe: str) -> None:
    config = replace(change(checkpoint_every=1, keep=9), optim=replace(CONFIG.optim, lr=3e38, warmup=0))
    with pytest.raises(DivergedError, match=r"not finite after step \d: .*lower optim.lr = 3e\+38"):
        run(tmp_path, recipe, config)
    assert_all_finite(tmp_path)
    assert len(lines(tmp_path)) <= 5, "a weight that is lost stays lost: no use in skipping ten steps"


def test_a_short_run_that_ends_without_a_finite_loss(
    tmp_path: Path, blind: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind(3)
    notes = Saboteur(0, lambda: None)
    message = "the validation loss after the last step, 6, is not finite"
    with pytest.raises(DivergedError, match=message):
        run(tmp_path, progress=notes)
    assert notes.notes == ["validation loss nan at step 6"]
    last = lines(tmp_path)[-1]
    assert (last["step"], last["val_loss"], last["val_perplexity"]) == (6, None, None)
    assert checkpoints(tmp_path) == [6], "the weights are sound"
    assert_all_finite(tmp_path)
    monkeypatch.undo()
    with pytest.raises(DivergedError, match=message):
        run(tmp_path)  # finished, and no better than before


def test_an_evaluation_that_is_not_finite_on_the_way_is_noted(
    tmp_path: Path, blind: Callable[[int], None]
) -> None:
    blind(2)
    notes = Saboteur(0, lambda: None)
    result = run(tmp_path, progress=notes)
    assert notes.notes == ["validation loss nan at step 4"]
    assert [math.isfinite(loss) for _, loss in result.losses] == [True, False, True]
    assert result.diverged, "by the rule of the report"


def test_an_arm_that_ends_without_a_finite_loss_is_a_result(
    tmp_path: Path, blind: Callable[[int], None]
) -> None:
    ladder = load_ladder("paper")
    shared = {
        "model": {key: value for key, value in vars(CONFIG.model).items() if value is not None},
        "optim": {"lr": 5e-3},
        "run": {"steps": 4, "batch": 2, "seq_len": 32, "eval_every": 1, "eval_tokens": 64},
    }
    config: TrainConfig = config_from_table(shared)
    blind(8)  # the fourth and last evaluation of the second arm
    told: list[str] = []
    results = run_ladder(
        ladder,
        config,
        tmp_path,
        backend=mxref.get_backend("reference"),
        trainer=train,
        corpus=lambda: CORPUS,
        arms=["bf16"],
        progress=Saboteur(0, lambda: None),
        say=told.append,
    )
    (fp8, bf16) = results["arms"]
    assert [arm["name"] for arm in results["arms"]] == ["fp8", "bf16"]
    assert fp8["final_loss"] is not None
    assert bf16["final_loss"] is None
    (one,) = bf16["runs"]
    assert one["diverged"] is True
    assert "not finite" in one["reason"]
    assert [loss is None for _, loss in one["curve"]] == [False, False, False, True]
    record = json.loads((tmp_path / "arms/bf16/result.json").read_text())["record"]
    assert record["diverged"] is True
    assert any("bf16: diverged: the validation loss after the last step, 4" in line for line in told)
