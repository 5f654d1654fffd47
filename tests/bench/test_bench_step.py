"""The benchmark of a step runs training's own step, and refuses one that is not finite or not the recipe's."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch
from click.testing import CliRunner

import mxref_torch
from bench import bench_gpu_step, step
from mxref import get_backend
from mxref.recipe_files import load_recipe
from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.operators import blocks, dense
from mxref_training.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from mxref_training.errors import DivergedError
from mxref_training.model.llama import Llama

pytestmark = pytest.mark.study

CONFIG = TrainConfig(
    model=ModelConfig(layers=1, width=32, heads=2, kv_heads=2, ffn=32, vocab=32, max_seq=32),
    optim=OptimConfig(lr=1e-3),
    run=RunConfig(steps=4, batch=4, micro_batch=2, seq_len=32, eval_every=4, eval_tokens=32),
)


def steps_of(recipe: str, config: TrainConfig = CONFIG) -> step.Steps:
    model = Llama(config.model, config.run.seed)
    return step.Steps(model, load_recipe(recipe), config, get_backend("reference"))


def test_a_step_is_cut_at_its_phases_and_trains() -> None:
    steps, entered = steps_of("mxfp4"), []
    before = [parameter.detach().clone() for parameter in steps.model.parameters()]
    steps.take(entered.append)
    assert entered == ["forward", "backward", "forward", "backward", "optimizer", ""]
    assert steps.context.census == mxref_torch.expected_census(steps.model, steps.recipe, 2)
    assert all(not torch.equal(a, b) for a, b in zip(before, steps.model.parameters(), strict=True))
    steps.take(lambda _: None)
    assert (steps.number, steps.context.step, steps.repeated) == (2, 1, 0)


def test_a_step_that_is_not_finite_or_not_the_recipe_s_is_refused() -> None:
    steps = steps_of("bf16")
    with torch.no_grad():
        steps.model.model.embed_tokens.weight.fill_(torch.inf)
    with pytest.raises(DivergedError, match="step 0: loss nan"):
        steps.take(lambda _: None)
    steps = steps_of("mxfp4")
    layer = steps.model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight.to(x.dtype))
    with pytest.raises(LayerError, match="are not the recipe's"):
        steps.take(lambda _: None)


def test_parts_are_timed_where_training_finds_them_and_only_within() -> None:
    called = []

    def timed(part: str, function: Any) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            called.append(part)
            return function(*args, **named)

        return wrapped

    plain = blocks.quantize, dense.dense_gemm, Fp8Scales.quantize
    # Seven layers: X and dY in two micro-batches, and the weight once, which block formats prepare for two GEMMs.
    for recipe, quantized in (("bf16", 0), ("fp8", 7 * (2 * 2 + 1)), ("mxfp4", 7 * (2 * 2 + 1 + 2))):
        called.clear()
        with step.timed_parts(timed):
            steps_of(recipe).take(lambda _: None)
        assert called.count("quantize") == quantized, recipe
        assert called.count("gemm") == 2 * 3 * 8, recipe  # the head's too
    assert plain == (blocks.quantize, dense.dense_gemm, Fp8Scales.quantize)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(bench_gpu_step.main, list(arguments))


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "step.json"
    given = [
        "--model=tiny",
        "--backend=reference",
        "--layers=1",
        "--micro-batch=1",
        "--micro-batches=1",
        "--steps=1",
    ]
    result = run(*given, "--recipe=plain@captured-eager", "--recipe=mxfp4:ordered", "--json", str(out))
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert (
        record["model"] | {"layers": 1, "micro_batch": 1, "micro_batches": 1, "seq_len": 64}
        == record["model"]
    )
    assert [row["recipe"] for row in record["steps"]] == ["plain", "mxfp4:ordered"]
    for row in record["steps"]:
        assert f"{row['recipe']} {row['mode']}: {row['ms']:.1f} ms" in result.output
    assert [row.get("deterministic_ms", 0) > 0 for row in record["steps"]] == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    result = run("--quick")
    assert result.exit_code == 1
    assert "needs a GPU that torch sees, and there is none" in result.output
