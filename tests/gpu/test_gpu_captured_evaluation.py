"""An evaluation as one CUDA graph: the losses of an evaluation that runs one operation at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref import get_backend
from mxref.gemm import gemm_profile
from mxref.recipe_files import load_recipe
from mxref_training.evaluate import CapturedEvaluation, evaluate
from training_setup import CONFIG, SR, change, lines, metrics, run

MODEL = replace(CONFIG.model, layers=2, width=512, heads=8, kv_heads=8, ffn=512)
SIZES = change(replace(CONFIG, model=MODEL), steps=9, eval_every=2, eval_tokens=160, capture=True)
"""Five evaluations of five windows in batches of two."""


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp4_h16", "sr"])
def test_losses_are_those_without_a_graph(recipe, tmp_path, monkeypatch, cases):
    treatment = replace(SR if recipe == "sr" else load_recipe(recipe), gemm=gemm_profile("bounded"))
    captured, right = [], CapturedEvaluation._captured

    def counting(self):
        captured.append(self)
        return right(self)

    monkeypatch.setattr(CapturedEvaluation, "_captured", counting)
    run(tmp_path / "graph", treatment, SIZES, backend=get_backend("triton"))
    assert len(captured) == 1

    def one_by_one(self):
        return evaluate(self._model, self._context, self._tokens, **self._sizes)

    monkeypatch.setattr(CapturedEvaluation, "__call__", one_by_one)
    run(tmp_path / "plain", treatment, SIZES, backend=get_backend("triton"))
    assert metrics(tmp_path / "graph") == metrics(tmp_path / "plain")
    losses = [line["val_loss"] for line in lines(tmp_path / "graph") if "val_loss" in line]
    assert len(set(losses)) == len(losses) == 5
    cases(5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_second_gpu_evaluates_as_the_first_did(tmp_path, cases):
    """One process captures on both, one after the other."""
    for index in (0, 1):
        config = change(SIZES, device=f"cuda:{index}")
        run(tmp_path / str(index), "mxfp4_h16", config, backend=get_backend("triton"))
    losses = [
        [line["val_loss"] for line in lines(tmp_path / name) if "val_loss" in line] for name in ("0", "1")
    ]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5
    cases(5)
