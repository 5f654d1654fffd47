"""Layers that the backward pass computes again: the bits of a run stay, and its memory is less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mxref.recipe import Recipe
from mxref_training.config import Axes, Compile, Recompute
from mxref_training.config_files import load_config
from mxref_training.errors import ConfigError
from mxref_training.forecast import memory
from mxref_training.model.llama import Llama
from training_setup import CONFIG, SR, change, metrics, run, weights


@pytest.mark.parametrize("recipe", [SR, "fp8"], ids=["sr", "fp8"])
def test_a_run_keeps_its_bits(whole: Callable[..., Any], recipe: Recipe | str) -> None:
    found = [metrics(whole(recipe, change(CONFIG, recompute=how))[0]) for how in Recompute]
    assert found[0] == found[1] == found[2]


def test_a_run_goes_on_with_layers_computed_again(tmp_path: Path, whole: Callable[..., Any]) -> None:
    """So a run goes on where there is less memory."""
    run(tmp_path / "parts", SR, stop_after=3)
    run(tmp_path / "parts", SR, change(CONFIG, recompute=Recompute.FULL))
    unbroken, _ = whole(SR, CONFIG)
    assert metrics(tmp_path / "parts") == metrics(unbroken)
    assert weights(tmp_path / "parts") == weights(unbroken)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recipe", [SR, "fp8", "bf16"], ids=["sr", "fp8", "bf16"])
def test_a_run_compiled_by_inductor_keeps_its_bits(tmp_path: Path, recipe: Recipe | str) -> None:
    """A compiled layer runs as a whole when it is computed again, so it has the same kernels."""
    torch._dynamo.reset()
    found = []
    for how in (Recompute.NONE, Recompute.FULL):
        config = change(CONFIG, recompute=how, compile=Compile.BLOCK, steps=3)
        run(tmp_path / how, recipe, config)
        found.append(metrics(tmp_path / how))
    assert found[0] == found[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def test_less_is_kept_for_the_backward_pass() -> None:
    """What autograd holds of a forward pass, in bytes."""
    config = replace(CONFIG.model, layers=4)
    tokens = torch.arange(32).reshape(1, 32)
    held = {}
    for how in (Recompute.NONE, Recompute.FULL):
        model = Llama(config, compute_dtype=torch.float32)
        model.model.recompute = how
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens).sum()
        loss.backward()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held[how] = sum(size for key, size in storages.items() if key not in weights)
    assert held[Recompute.FULL] < held[Recompute.NONE] / 2


def test_the_dry_run_knows() -> None:
    config = load_config("llama31_8b")
    need = {
        how: memory(change(config, recompute=how), Recipe(), Axes(1, 8, 1)).activations for how in Recompute
    }
    assert need[Recompute.FULL] < need[Recompute.SELECTIVE] < need[Recompute.NONE] / 1.5


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"capture": True}, "run.capture"),
        ({"compile": Compile.MODEL}, "run.compile"),
        ({"recompute": Recompute.SELECTIVE, "compile": Compile.BLOCK}, "'full'"),
    ],
)
def test_what_does_not_go_together(setting: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        change(CONFIG, **({"recompute": Recompute.FULL} | setting))
