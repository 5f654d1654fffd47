"""Layers that the backward pass computes again on a GPU, eager and compiled by inductor: the bits of a run stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref import get_backend
from mxref.recipe import Recipe
from mxref_training.config import Compile, Recompute
from training_setup import CONFIG, SR, change, metrics, run, weights


@pytest.mark.parametrize("recipe", [SR, "fp8", "bf16"], ids=["sr", "fp8", "bf16"])
@pytest.mark.parametrize("compiler", list(Compile)[:2])
def test_a_run_keeps_its_bits(
    tmp_path: Path, recipe: Recipe | str, compiler: Compile, cases: Callable[[int], None]
) -> None:
    torch._dynamo.reset()
    hows = [how for how in Recompute if how is not Recompute.SELECTIVE or compiler is Compile.NONE]
    for how in hows:
        config = change(CONFIG, recompute=how, compile=compiler, device="cuda")
        run(tmp_path / how, recipe, config, backend=get_backend("triton"))
    found = [(metrics(tmp_path / how), weights(tmp_path / how)) for how in hows]
    assert all(other == found[0] for other in found)
    cases(len(hows) * CONFIG.run.steps)
