"""The training loop is deterministic, and reports every fault."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import mxref_torch
from mxref.discovery import get_backend
from mxref.errors import MxrefError
from mxref.mxarray import MXArray
from mxref.plan import QuantPlan
from mxref.recipe import GemmProfile, Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.reference import ReferenceBackend
from mxref.steps.rounding import Rounding
from mxref_torch.errors import LayerError
from mxref_torch.optimizer_step import fp8_history
from mxref_training.config import TrainConfig
from mxref_training.errors import ConfigError, DataError, DivergedError
from mxref_training.evaluate import evaluate
from mxref_training.finite import MAX_SKIPPED
from mxref_training.model.llama import Llama
from mxref_training.progress import BarProgress, PlainProgress, default_progress
from mxref_training.wording import clock
from training_setup import (
    CONFIG,
    CORPUS,
    SR,
    VOCAB,
    Saboteur,
    change,
    lines,
    run,
    weights,
)


def test_the_loss_falls_and_the_record_is_complete(tmp_path: Path) -> None:
    config = change(steps=60, eval_every=20)
    result = run(tmp_path, config=config)
    assert result.losses[0][0] == 20
    assert [step for step, _ in result.losses] == [20, 40, 60]
    assert result.train_losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert result.final_loss == result.losses[-1][1] < result.train_losses[0] - 1.0
    assert (result.tokens, result.skipped_steps, result.diverged) == (60 * 128, 0, False)
    assert result.seconds > 0
    steps = [line for line in lines(tmp_path) if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, 61))
    assert steps[4] == {
        "step": 5,
        "tokens": 5 * 128,
        "loss": result.train_losses[4],
        "lr": 5e-3,
        "grad_norm": steps[4]["grad_norm"],
    }
    assert [line["lr"] for line in steps[:3]] == [2.5e-3, 5e-3, 5e-3]
    val = next(line for line in lines(tmp_path) if "val_loss" in line)
    assert val["val_perplexity"] == pytest.approx(math.exp(val["val_loss"]))
    record = json.loads((tmp_path / "run.json").read_text())
    # The metadata of some wheels leaves the build out, such as +cu130.
    assert record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert record["hardware"]["threads"] == torch.get_num_threads()
    assert record["data"]["train"] == CORPUS.train.sha256 != record["data"]["val"]
    assert record["recipe_digest"] == load_recipe("bf16").digest
    assert load_recipe(tmp_path / "recipe.toml") == load_recipe("bf16")


def test_log_every_thins_the_steps_and_not_the_evaluations(tmp_path: Path) -> None:
    run(tmp_path, config=change(log_every=4))
    assert [line["step"] for line in lines(tmp_path) if "lr" in line] == [4, 6]
    assert [line["step"] for line in lines(tmp_path) if "val_loss" in line] == [2, 4, 6]


@pytest.mark.parametrize("recipe", ["fp8", SR], ids=["fp8", "sr"])
def test_evaluating_more_often_trains_no_differently(tmp_path: Path, recipe: Recipe | str) -> None:
    often = run(tmp_path / "often", recipe, change(eval_every=1))
    rarely = run(tmp_path / "rarely", recipe, change(eval_every=6))
    assert often.train_losses == rarely.train_losses
    assert weights(tmp_path / "often") == weights(tmp_path / "rarely")
    assert often.losses[-1] == rarely.losses[-1]


@pytest.mark.parametrize("recipe", ["fp8", SR], ids=["fp8", "sr"])
def test_evaluation_leaves_no_trace(recipe: Recipe | str) -> None:
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    model = Llama(CONFIG.model)
    context = mxref_torch.convert(model, recipe, backend=get_backend("reference"), seed=0).context
    model(torch.from_numpy(CORPUS.train.ids[:64].astype(np.int64).reshape(2, 32))).sum().backward()
    context.token_origin, context.global_tokens = 64, 128
    state = {name: tensor.clone() for name, tensor in (model.state_dict() | fp8_history(model)).items()}
    seen = context.token_origin, context.global_tokens, dict(context.census), torch.get_rng_state()
    found = evaluate(model, context, CORPUS.val.ids, seq_len=32, batch=1, limit=96)
    assert found.tokens == 96
    assert 0 < found.loss < 10
    now = model.state_dict() | fp8_history(model)
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    assert (context.token_origin, context.global_tokens, dict(context.census)) == seen[:3]
    assert torch.equal(torch.get_rng_state(), seen[3])
    assert model.training


def test_evaluation_is_on_the_first_tokens_in_order() -> None:
    model = Llama(CONFIG.model)
    context = mxref_torch.convert(
        model, load_recipe("bf16"), backend=get_backend("reference"), seed=0
    ).context
    ids = CORPUS.val.ids
    changed = ids.copy()
    changed[97:] = 0  # beyond the three windows that are read, and the target of their last token
    a, b = (evaluate(model, context, x, seq_len=32, batch=2, limit=96).loss for x in (ids, changed))
    assert a == b
    changed[96] = (changed[96] + 1) % VOCAB
    assert evaluate(model, context, changed, seq_len=32, batch=2, limit=96).loss != a


def test_micro_batches_draw_the_same_random_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", SR, change(micro_batch=0, steps=1))
    parts = run(tmp_path / "parts", SR, change(micro_batch=1, steps=1))
    # A BLAS may sum in another order for another number of rows, and BF16 then round another way.
    assert parts.train_losses == pytest.approx(whole.train_losses, rel=1e-4)
    norms = [lines(tmp_path / name)[0]["grad_norm"] for name in ("whole", "parts")]
    # Other bits would differ in the second digit; what is left is the order of float32 sums and BF16's rounding.
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_the_seed_decides(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    assert a.train_losses == b.train_losses
    assert run(tmp_path / "c", config=change(seed=4)).train_losses != a.train_losses
    assert run(tmp_path / "d", config=change(data_seed=4)).train_losses != a.train_losses


class Spoiled(ReferenceBackend):
    """Returns NaN from some of its GEMMs: those whose number, from 0 within a step, is in `which`."""

    def __init__(self, which: range, per_step: int, steps: range) -> None:
        self.which, self.per_step, self.steps, self.calls = which, per_step, steps, 0

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> NDArray[Any]:
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        step, number = divmod(self.calls, self.per_step)
        self.calls += 1
        if step in self.steps and number in self.which:
            out[0, 0] = np.nan
        return out


WGRAD = recipe_from_table({"all": {"format": "bf16"}, "wgrad": {"format": "mxfp4"}})


def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path: Path) -> None:
    # Backward meets down, up/gate, o, then v, k, q: with two micro-batches 14 Wgrads a step, the first is down_proj's.
    backend = Spoiled(range(0, 1), 14, range(1, 3))
    result = run(tmp_path, WGRAD, change(eval_every=1), backend=backend)
    assert result.skipped_steps == 2
    skipped = [line for line in lines(tmp_path) if "skipped" in line]
    assert [line["step"] for line in skipped] == [2, 3]
    assert all(line["grad_norm"] is None and line["loss"] > 0 for line in skipped)
    assert all(line["skipped"].endswith("from model.layers.0.mlp.down_proj.weight") for line in skipped)
    assert len(result.train_losses) == 4
    assert all(math.isfinite(loss) for loss in result.train_losses)
    losses = [loss for _, loss in result.losses]
    assert losses[0] == losses[1] == losses[2], "the weights stood still"
    assert len(set(losses)) == 4


def test_skipped_steps_survive_a_resume(tmp_path: Path) -> None:
    run(tmp_path, WGRAD, backend=Spoiled(range(0, 1), 14, range(0, 2)), stop_after=3)
    assert run(tmp_path, WGRAD, backend=Spoiled(range(0, 1), 14, range(0))).skipped_steps == 2


def test_a_loss_that_is_never_finite_ends_the_run_and_names_the_layer(tmp_path: Path) -> None:
    fprop = recipe_from_table({"all": {"format": "bf16"}, "fprop": {"format": "mxfp4"}})
    # Every call is an Fprop; the fifth of a forward pass is gate_proj's.
    backend = Spoiled(range(4, 5), 7, range(0, 1000))
    config = change(steps=50, eval_every=50)
    message = f"loss nan from model.layers.0.mlp.gate_proj at step 10, the {MAX_SKIPPED}th step in a row"
    with pytest.raises(DivergedError, match=message):
        run(tmp_path, fprop, config, backend=backend)
    assert [line["loss"] for line in lines(tmp_path)] == [None] * MAX_SKIPPED


def test_skipped_steps_in_a_row_are_counted_across_a_resume(tmp_path: Path) -> None:
    always = range(0, 10_000)
    run(tmp_path, WGRAD, change(steps=50), backend=Spoiled(range(0, 1), 14, always), stop_after=6)
    with pytest.raises(DivergedError, match=f"at step {MAX_SKIPPED},"):
        run(tmp_path, WGRAD, change(steps=50), backend=Spoiled(range(0, 1), 14, always))


class Watched(ReferenceBackend):
    """Notes the step of every random stream, and where in the step's tokens its rows begin."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        if plan.stream is not None:
            self.seen.add((plan.stream.step, plan.origin[0]))
        return super()._quantize(x, plan)


def test_every_step_draws_its_own_random_bits(tmp_path: Path) -> None:
    gradients = recipe_from_table(
        {"all": {"format": "bf16"}, "dgrad": {"format": "mxfp4", "dy": {"rounding": "sr"}}}
    )
    backend = Watched()
    run(tmp_path, gradients, change(steps=3), backend=backend)
    streams = {seen for seen in backend.seen if seen[0] < 3}
    assert {(step, origin) for step in range(3) for origin in (0, 64)} <= streams


def test_fp8_history_moves_on_and_is_saved(tmp_path: Path) -> None:
    for step in (1, 2):
        run(tmp_path, "fp8", stop_after=step)
    scales = [
        {
            n: t
            for n, t in load_file(tmp_path / f"checkpoints/step-{step}/model.safetensors").items()
            if "fp8" in n
        }
        for step in (1, 2)
    ]
    names = [name for name in scales[0] if name.endswith("q_proj.fp8.scale")]
    assert names
    for name in names:
        assert bool((scales[0][name] > 0).all())
        assert not torch.equal(scales[0][name], scales[1][name])


def test_a_step_that_ran_in_another_format_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mxref_torch.convert

    def forgetful(model: Any, recipe: Recipe, **options: Any) -> Any:
        return real(model, load_recipe("bf16"), **options)

    monkeypatch.setattr(mxref_torch, "convert", forgetful)
    with pytest.raises(LayerError, match=r"fprop in bf16: \d+ ran, 2 expected"):
        run(tmp_path, "fp8")


class NotStochastic(ReferenceBackend):
    """Rounds to nearest whatever it is asked for."""

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return super()._quantize(x, replace(plan, spec=replace(plan.spec, rounding=Rounding.RNE)))


def test_stochastic_rounding_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match="stochastic rounding of"):
        run(tmp_path / "run", SR, backend=NotStochastic())
    assert not (tmp_path / "run").exists()


UNFIT: dict[str, tuple[TrainConfig, type[MxrefError], str]] = {
    "width": (
        replace(CONFIG, model=replace(CONFIG.model, ffn=80)),
        MxrefError,
        "80 is not a multiple of 32",
    ),
    "validation": (
        change(eval_tokens=5000),
        ConfigError,
        "validation data has 200 tokens, this run needs 5,001",
    ),
    "vocabulary": (replace(CONFIG, model=replace(CONFIG.model, vocab=32)), DataError, "a vocabulary of 32"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_leaves_nothing_behind(tmp_path: Path, what: str) -> None:
    config, error, message = UNFIT[what]
    with pytest.raises(error, match=message):
        run(tmp_path / "run", "mxfp4", config)
    assert not (tmp_path / "run").exists()


def test_global_settings_are_given_back(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    assert not torch.are_deterministic_algorithms_enabled()
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))

    run(tmp_path, config=change(threads=1), progress=Saboteur(1, look), stop_after=1)
    assert seen == [(True, 1)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads


def test_plain_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(tmp_path / "a", progress=PlainProgress(interval=1000), label="arm")
    captured = capsys.readouterr()
    assert captured.out == ""
    (last,) = captured.err.splitlines()
    assert re.fullmatch(r"arm: step 6/6 loss \d\.\d{4} val \d\.\d{4} [\d,]+ tokens/s ETA 0:00", last)
    run(tmp_path / "b", progress=PlainProgress(interval=0))
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_the_bar_shows_loss_rate_and_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run(tmp_path, stop_after=2)
    run(tmp_path, progress=BarProgress(), label="[arm]")
    shown = capsys.readouterr().err
    assert "resumed at step 2 of 6" in shown
    last = shown.splitlines()[-1]
    assert re.match(r"\[arm\] .* 6/6 loss \d\.\d{4} val \d\.\d{4} .*tokens/s +ETA 0:00", last)


def test_where_there_is_no_terminal_there_is_no_bar() -> None:
    assert isinstance(default_progress(), PlainProgress)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3599.6, "1:00:00"), (7325, "2:02:05")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
