"""The presets for comparing recipes are as long, as often evaluated and as friendly to blocks as their pages say."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from mxref_training.config import Compile, Schedule
from mxref_training.config_files import PRESETS, load_config, names
from mxref_training.model.llama import parameter_count
from mxref_training.optim import learning_rate


@pytest.mark.parametrize(("name", "parameters", "tokens"), [("lab_20m", 21.5, 60.3), ("lab_50m", 46.9, 65.5)])
def test_laboratory_presets(name: str, parameters: float, tokens: float) -> None:
    config = load_config(name)
    model, run, optim = config.model, config.run, config.optim
    assert round(parameter_count(model) / 1e6, 1) == parameters
    assert round(run.steps * run.step_tokens / 1e6, 1) == tokens
    assert run.step_tokens == 16384
    # A last batch that is shorter would be compiled for itself.
    assert run.eval_tokens % run.step_tokens == 0
    assert 30 <= run.steps / run.eval_every <= 40
    assert optim.schedule is Schedule.CONSTANT
    assert run.capture
    assert run.compile is Compile.BLOCK
    lengths = {model.width, model.kv_heads * model.head_dim, model.ffn, run.step_tokens}
    assert all(length % 64 == 0 for length in lengths), "whole groups of every Hadamard size that recipes use"
    # On a Hopper, shorter products are not multiplied in FP8 (`mxref_triton.products.bounded.SHORTEST_FP8`).
    assert min(lengths) >= 512


@pytest.mark.parametrize(
    ("name", "warmup"),
    [
        ("tiny", 4),
        ("demo", 60),
        ("lab_20m", 200),
        ("lab_50m", 200),
        ("llama31_8b", 128),
        ("llama31_70b", 128),
    ],
)
def test_the_warm_up_of_a_preset_is_what_its_steps_take(name: str, warmup: int) -> None:
    config = load_config(name)
    rates = [learning_rate(config.optim, step, config.run.steps) for step in range(warmup)]
    assert config.optim.warmup == warmup
    assert rates[0] == config.optim.lr / warmup
    assert rates[-1] == config.optim.lr
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("name", "warmup", "lr"),
    [
        ("demo", 60, 2e-3), ("tiny", 4, 2e-3), ("lab_20m", 200, 2e-3), ("lab_50m", 200, 1.5e-3),
        ("llama31_8b", 128, 8e-4), ("llama31_70b", 128, 1.5e-4),
    ],
)  # fmt: skip
def test_a_preset_warms_up_over_its_first_steps(name: str, warmup: int, lr: float) -> None:
    config = load_config(name)
    rates = [learning_rate(config.optim, step, config.run.steps) for step in range(warmup + 1)]
    assert rates == pytest.approx([lr * (step + 1) / warmup for step in range(warmup)] + [lr], rel=1e-12)


def test_every_preset_has_its_warm_up_here() -> None:
    (mark,) = test_a_preset_warms_up_over_its_first_steps.pytestmark  # type: ignore[attr-defined]
    assert sorted(case[0] for case in mark.args[1]) == names(PRESETS)
