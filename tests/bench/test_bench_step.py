"""The benchmarks of a step run training's own step, its parts add up, and the page shows the record."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch
from click.testing import CliRunner
from torch.autograd import DeviceType

import mxref_torch
from bench import bench_gpu_step, bench_step, render_gpu, render_gpu_step, step
from bench.plot import chart
from bench.records import newest
from mxref import get_backend
from mxref.errors import RecipeError
from mxref.recipe import GemmProfile
from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.operators import blocks, dense
from mxref_training.config import OptimConfig, RunConfig, TrainConfig, find_recipe
from mxref_training.dimensions import ModelConfig
from mxref_training.errors import ConfigError, DivergedError
from mxref_training.model.llama import Llama

CONFIG = TrainConfig(
    model=ModelConfig(layers=1, width=32, heads=2, kv_heads=2, ffn=32, vocab=32, max_seq=32),
    optim=OptimConfig(lr=1e-3),
    run=RunConfig(steps=4, batch=4, micro_batch=2, seq_len=32, eval_every=4, eval_tokens=32),
)


def steps_of(recipe: str, config: TrainConfig = CONFIG) -> step.Steps:
    model = Llama(config.model, config.run.seed)
    return step.Steps(model, find_recipe(recipe), config, get_backend("reference"))


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


def test_phases_add_up_to_the_step() -> None:
    row = bench_gpu_step.timed_steps(steps_of("fp8"), 1)  # of more, the medians may be of different steps
    assert row["forward"] > 0
    assert row["backward"] > 0
    assert row["optimizer"] > 0
    assert 0.5 * row["ms"] < sum(row[phase] for phase in step.PHASES) <= row["ms"]
    assert row["fastest_ms"] <= row["ms"]
    assert row["tokens_per_s"] == pytest.approx(1e3 * 4 * 32 / row["ms"])


def event(key: str, device: str, ms: float, count: int = 1, annotation: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        key=key,
        device_type=getattr(DeviceType, device),
        device_time_total=1e3 * ms,
        count=count,
        is_user_annotation=annotation,
    )


def test_the_gpu_s_time_is_that_of_kernels_counted_once() -> None:
    seen = [
        event("part gemm", "CPU", 5.0, 24),
        event("part optimizer", "CPU", 2.0),
        event("part of something else", "CPU", 99.0),
        event("gemm", "CPU", 99.0),
        event("mxref::scaled_gemm", "CPU", 5.0),
        event("cudaStreamSynchronize", "CPU", 0.0, 4),
        event("cudaDeviceSynchronize", "CPU", 0.0, 1),
        event("part gemm", "CUDA", 7.0, annotation=True),
        event("nvjet", "CUDA", 5.0, 24),
        event("adam", "CUDA", 2.0, 3),
        event("softmax", "CUDA", 4.0, 2),
    ]
    row = bench_gpu_step.gpu_time(seen)
    assert row["kernel_ms"] == 11.0
    assert row["launches"] == 29
    assert row["waits"] == 5
    assert row["parts"] == {"quantize": 0.0, "gemm": 5.0, "optimizer": 2.0, "rest": 4.0}
    assert [kernel["name"] for kernel in row["kernels"]] == ["nvjet", "softmax", "adam"]


def test_recipes_may_name_a_profile() -> None:
    assert bench_gpu_step.find("mxfp4_h16:bounded").gemm is GemmProfile.BOUNDED
    assert bench_gpu_step.find("mxfp4_h16") == find_recipe("mxfp4_h16")
    with pytest.raises(RecipeError, match="GEMM profile 'fast' is not one of"):
        bench_gpu_step.find("mxfp4:fast")
    with pytest.raises(ConfigError, match="did you mean 'mxfp4_h16'"):
        bench_gpu_step.find("mxfp4_h17:bounded")


@pytest.mark.parametrize("name", step.SIZES)
def test_sizes_fit(name: str) -> None:
    config = step.config_of(name)
    assert (
        config.model.width == {"wide": 512, "llama-50m": 512, "llama-1b": 2048, "llama-8b-slice": 4096}[name]
    )
    assert config.run.batch % config.run.sequences == 0


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--recipe=mxfp5", "unknown recipe"),
        ("--layers=0", "is not in the range"),
        ("--backend=cudnn", "cudnn"),
    ],
)
def test_the_command_refuses_before_it_trains(option: str, message: str) -> None:
    result = run(option)
    assert result.exit_code
    assert message in result.output


def test_the_cpu_benchmark_splits_the_same_step() -> None:
    clock = bench_step.Clock()
    with step.timed_parts(clock.timed):
        row = bench_step.steps_of(CONFIG, "mxfp4", get_backend("reference"), 1, clock)
    assert row["ms"] == pytest.approx(sum(row[phase] for phase in step.PHASES))
    assert row["ms"] == pytest.approx(row["optimizer"] + row["quantize"] + row["gemm"] + row["rest"])
    assert min(row["quantize"], row["gemm"]) > 0


def record() -> dict[str, Any]:
    def row(recipe: str, ms: float, kernel_ms: float, **parts: float) -> dict[str, Any]:
        rest = kernel_ms - sum(parts.values())
        return {
            "recipe": recipe, "ms": ms, "forward": ms * 0.3, "backward": ms * 0.6, "optimizer": ms * 0.1,
            "tokens_per_s": 16384e3 / ms, "kernel_ms": kernel_ms, "busy": kernel_ms / ms, "launches": 4321,
            "peak_gib": 61.25, "repeated": int("bounded" in recipe), "parts": parts | {"rest": rest},
            "kernels": [{"name": "void at::(anonymous namespace)::adam<4, float>(int)", "ms": 12.5, "count": 3}],
        }  # fmt: skip

    machine = {"gpu": "NVIDIA H200", "date": "2026-11-20", "torch": "2.11", "triton": "3.6", "driver": "1"}
    model = {
        "layers": 16, "width": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192, "vocab": 4096, "seq_len": 2048,
        "parameters": 1023410176, "micro_batch": 8, "micro_batches": 1,
    }  # fmt: skip
    rows = [
        row("bf16", 250.0, 240.0, quantize=0.0, gemm=150.0, optimizer=20.0),
        row("mxfp4_h16:bounded", 200.0, 190.0, quantize=30.0, gemm=80.0, optimizer=20.0)
        | {"deterministic_ms": 208.4},
    ]
    return {"machine": machine, "backend": "triton", "model": model, "steps": rows}


def test_the_section_says_what_the_record_says() -> None:
    text = render_gpu_step.section(record(), render_gpu.table_text)
    cells = [line.strip(" *-") for line in text.splitlines()]
    at = cells.index("`mxfp4_h16:bounded`")
    assert cells[at + 1 : at + 8] == ["81,920", "1.25", "200.0", "208.4", "0.95", "4,321", "61.2"]
    at = cells.index("`mxfp4_h16:bounded`", at + 1)
    assert cells[at + 1 : at + 6] == ["30.0", "80.0", "20.0", "60.0", "`adam` 12.5"]
    assert "1.02 billion parameters" in text
    assert "16,384 tokens" in text
    assert "repeated steps under `mxfp4_h16:bounded`:" in text
    assert "baseline of accuracy" not in text
    found = record()
    found["steps"][0]["recipe"] = "fp8"
    assert "baseline of accuracy" in render_gpu_step.section(found, render_gpu.table_text)
    assert "activations" not in text
    for row, gib in zip(found["steps"], (20.04, 9.96), strict=True):
        row["activations_gib"] = gib
    cells = [line.strip(" *-") for line in render_gpu_step.section(found, render_gpu.table_text).splitlines()]
    assert cells[cells.index("`mxfp4_h16:bounded`") + 7 :][:2] == ["61.2", "10.0"]


def test_held_memory_is_that_of_weights_gradients_and_moments() -> None:
    taken = steps_of("mxfp4")
    taken.take(lambda _: None)
    weights = sum(p.numel() for p in taken.model.parameters())
    steps_of_adam = 4 * len(list(taken.model.parameters()))
    assert taken.held_bytes() == 4 * 4 * weights + steps_of_adam
    assert all(p.grad is None for p in taken.model.parameters())


def test_the_bars_add_up_to_the_step() -> None:
    found = record()
    for row in found["steps"]:
        assert sum(render_gpu_step._ms(row, part) for part in render_gpu_step.LABELS) == pytest.approx(
            row["ms"]
        )
    svg = chart("test", partial(render_gpu_step.plot, found))
    assert svg == chart("test", partial(render_gpu_step.plot, found))
    texts = re.findall(r">([^<>]+)</text>", svg)
    assert {"bf16", "mxfp4_h16:bounded", "250", "200", "waiting for Python"} <= set(texts)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("_ordered_folded", "_ordered_folded"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::F<float>, Array<char*, 2ul>>(int, F)",
         "vectorized_elementwise_ke…"),
        ("void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<128, 64, true>, false>(Params)",
         "flash_bwd_kernel"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN_and_a_name_that_goes_on",
         "nvjet_sm90_tst_128x256_64…"),
    ],
)  # fmt: skip
def test_kernels_are_shown_by_short_names(name: str, shown: str) -> None:
    assert render_gpu_step.short(name) == shown


def test_a_record_is_kept_by_its_kind_and_the_page_made_from_it(tmp_path: Path) -> None:
    source = tmp_path / "step.json"
    source.write_text(json.dumps(record()))
    records = tmp_path / "records"
    bench = newest("bench_gpu")
    for path in (source, bench):
        render_gpu.keep(render_gpu.kind_of(json.loads(path.read_text())), path, records)
    assert newest("step_gpu", records).name == "step_gpu_nvidia-h200_2026-11-20.json"
    parts = render_gpu.parts(records)
    assert set(parts) == {
        render_gpu.TABLES,
        *(f"{render_gpu_step.PLOT}{end}" for end in (".svg", ".narrow.svg")),
    }
    assert "\nA training step\n---------------\n" in parts[render_gpu.TABLES]
    with pytest.raises(SystemExit, match="no record of"):
        render_gpu.kind_of({"machine": {}})
