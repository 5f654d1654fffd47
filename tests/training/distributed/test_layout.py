"""The table `[parallel]`, what it refuses, and the dry run of ranks that do not exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from mxref.cli import main
from mxref.recipe_files import load_recipe
from mxref.tomlio import to_table
from mxref_training.config import Axes, Compile, ParallelConfig
from mxref_training.config_files import load_config
from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.share import Share, added
from mxref_training.errors import ConfigError
from mxref_training.forecast import memory
from mxref_training.huggingface.config_json import config_json
from mxref_training.layout import check_layout
from mxref_training.model.llama import Llama, parameter_count


@pytest.mark.parametrize(
    ("table", "ranks", "axes"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 6, (1, 6, 1)),
        ({"replicate": 2}, 8, (2, 4, 1)),
        ({"tensor": 4, "shard": -1}, 8, (1, 2, 4)),
        ({"replicate": 0, "shard": 2}, 8, (4, 2, 1)),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 8, (2, 2, 2)),
        ({"shard": 1, "tensor": 0}, 3, (1, 1, 3)),
    ],
)
def test_axes_take_the_ranks_that_are_left(table: dict[str, int], ranks: int, axes: tuple[int, ...]) -> None:
    found = ParallelConfig(**table).axes(ranks)
    assert found == axes
    assert found.ranks == ranks
    assert found.data == axes[0] * axes[1]


@pytest.mark.parametrize(
    ("table", "ranks", "message"),
    [
        ({"shard": 8}, 1, "replicate 1 \\* shard 8 \\* tensor 1 does not make 1 rank: start 8 by torchrun"),
        ({"replicate": 2}, 3, "shard rest \\* tensor 1 does not make 3 ranks: start a multiple of 2"),
        ({"shard": 2, "tensor": 2}, 8, "does not make 8 ranks: start 4"),
        ({"shard": 0, "tensor": -1}, 2, "parallel.shard and parallel.tensor are 0 or -1, and only one"),
        ({"shard": -2}, 2, "parallel.shard = -2 is below -1"),
        ({"tensor": 2**21}, 2, "parallel.tensor = 2097152 is above 1,048,576"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(table: dict[str, int], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**table).axes(ranks)


def test_what_several_ranks_cannot_do_is_refused() -> None:
    config = load_config("tiny")
    assert check_layout(config, 1) == (1, 1, 1)
    assert check_layout(config, 4) == (1, 4, 1)
    with pytest.raises(ConfigError, match="run.micro_batch = 4 sequences do not split over 8 ranks"):
        check_layout(config, 8)
    whole = replace(config, run=replace(config.run, micro_batch=0))
    assert check_layout(whole, 8).shard == 8
    with pytest.raises(ConfigError, match="run.batch = 8 sequences do not split over 3 ranks"):
        check_layout(whole, 3)
    for change, message in (
        ({"compile": Compile.MODEL}, "run.compile = 'block'"),
        ({"shadow": 0.5}, "run.shadow works in one process only"),
        ({"telemetry_every": 2}, "run.telemetry_every works in one process only"),
    ):
        wanted = replace(config, run=replace(config.run, **change))
        assert check_layout(wanted, 1).ranks == 1
        with pytest.raises(ConfigError, match=message):
            check_layout(wanted, 2)
    captured = replace(config, run=replace(config.run, capture=True))
    assert check_layout(captured, 2).shard == 2
    assert check_layout(replace(captured, parallel=ParallelConfig(replicate=2, shard=1)), 2).whole
    with pytest.raises(ConfigError, match="run.capture = true with parallel.tensor = 2"):
        check_layout(replace(captured, parallel=ParallelConfig(tensor=2)), 2)
    whole = replace(config, parallel=ParallelConfig(replicate=2, shard=1, keep_gathered=True))
    with pytest.raises(
        ConfigError, match="keep_gathered = true with parallel.shard = 1: no rank gathers weights"
    ):
        check_layout(whole, 2)


def test_the_shares_of_all_ranks_are_the_batch() -> None:
    run = load_config("tiny").run
    shares = [Share(Ranks(rank, 4), Axes(1, 2, 2)) for rank in range(4)]
    assert [share.index for share in shares] == [0, 0, 1, 1]
    for number in range(run.micro_batches):
        rows = [shares[rank].rows(run, number) for rank in (0, 2)]
        held = [row for each in rows for row in range(each.start, each.stop)]
        assert held == list(range(number * run.sequences, (number + 1) * run.sequences))


def test_sums_do_not_depend_on_the_version_of_python() -> None:
    assert added([1e16, 1.0, 1.0, -1e16]) == 0.0


@pytest.mark.parametrize(
    ("preset", "parameters"), [("llama31_8b", 8_030_261_248), ("llama31_70b", 70_553_706_496)]
)
def test_full_sizes_are_exact(preset: str, parameters: int) -> None:
    config = load_config(preset)
    assert "parallel" not in to_table(config)
    assert parameter_count(config.model) == parameters
    model = Llama(config.model, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("preset", "layers", "width", "heads", "ffn"),
    [("llama31_8b", 32, 4096, 32, 14336), ("llama31_70b", 80, 8192, 64, 28672)],
)
def test_full_shapes_are_those_of_the_release(
    preset: str, layers: int, width: int, heads: int, ffn: int
) -> None:
    """config.json of Llama 3.1 8B and 70B, for sequences of 8,192 tokens; the rest are defaults of the release."""
    found = config_json(to_table(load_config(preset).model), "bfloat16", None)
    assert found["num_hidden_layers"] == layers
    assert (found["hidden_size"], found["intermediate_size"]) == (width, ffn)
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (heads, 8, 128)
    assert (found["vocab_size"], found["max_position_embeddings"]) == (128256, 8192)
    assert (found["rope_theta"], found["rms_norm_eps"]) == (500000.0, 1e-5)
    assert found["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    flags = ("tie_word_embeddings", "attention_bias", "mlp_bias")
    assert [found[name] for name in flags] == [False] * 3
    assert found["hidden_act"] == "silu"


def test_the_preset_of_the_benchmark_has_its_numbers() -> None:
    """MLPerf Training, llama31_8b: evaluation every 12,288 sequences on the first 1,024, cosine over 1.2M steps."""
    config = load_config("llama31_8b")
    run, optim, model = config.run, config.optim, config.model
    assert (model.vocab, model.ffn, model.heads, model.kv_heads) == (128256, 14336, 32, 8)
    assert (model.init_std, model.rope_theta, run.seq_len) == (0.02, 500000.0, 8192)
    assert (run.batch, run.batch * run.eval_every) == (32, 12_288)
    assert run.eval_tokens == 1024 * run.seq_len
    assert (optim.beta1, optim.beta2, optim.eps, optim.weight_decay, optim.clip) == (
        0.9,
        0.95,
        1e-5,
        0.1,
        1.0,
    )
    assert (optim.lr, optim.warmup, optim.decay_steps, optim.min_lr_ratio) == (8e-4, 128, 1_200_000, 0.1)


def test_the_memory_of_a_rank_is_its_part() -> None:
    recipe, config = load_recipe("mxfp4_h16"), load_config("llama31_8b", ["run.micro_batch=8"])
    alone, eight = memory(config, recipe), memory(config, recipe, Axes(1, 8, 1))
    assert alone.gathered == 0
    assert alone.total - alone.tables == pytest.approx(8 * (eight.total - eight.tables - eight.gathered))
    assert eight.weights * 8 == alone.weights == 4 * parameter_count(config.model)
    assert memory(config, recipe, Axes(2, 4, 1)).weights == 2 * eight.weights
    kept = replace(config, parallel=ParallelConfig(keep_gathered=True))
    layers = 30 * (parameter_count(config.model) - 2 * 128256 * 4096 - 4096) // 32
    assert memory(kept, recipe, Axes(1, 8, 1)).gathered == eight.gathered + 4 * layers
    whole = memory(config, recipe, Axes(8, 1, 1))
    assert (whole.weights, whole.gathered) == (alone.weights, 0)
    together = memory(config, recipe, Axes(1, 1, 8))
    outside = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    assert together.weights == 4 * ((parameter_count(config.model) - outside) // 8 + outside)
    assert 2 * alone.activations / 8 < together.activations < alone.activations


def test_the_dry_run_of_ranks_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked = ["train", "llama31_8b", "--dry-run", "--ranks", "8", "--set", "run.micro_batch=8"]
    text = CliRunner().invoke(main, asked, catch_exceptions=False).output
    for said in (
        "8,030,261,248", "8: replicate 1, shard 8, tensor 1", "1 sequence of every micro-batch", "Memory of each rank",
        "4.02 GB, float32", "40% of 989 TFLOP/s, both assumed; no communication is in it",
        "about 337 GB received by each rank in a step",
    ):  # fmt: skip
        assert said in text
    kept = CliRunner().invoke(main, [*asked, "--set", "parallel.keep_gathered=true"]).output
    assert "about 225 GB received by each rank in a step" in kept
    faster = CliRunner().invoke(main, [*asked, "--peak-tflops", "2000", "--utilisation", "0.5"]).output
    assert "50% of 2000 TFLOP/s" in faster
    refused = CliRunner().invoke(main, [*asked, "--utilisation", "1.5"])
    assert (refused.exit_code, "1.5 is not in the range 0<x<=1" in refused.output) == (
        2,
        True,
    )
    alone = CliRunner().invoke(main, ["train", "tiny", "--ranks", "2"])
    assert (alone.exit_code, "--ranks is an option of --dry-run" in alone.output) == (2, True)
    plain = CliRunner().invoke(main, ["train", "tiny", "--dry-run"]).output
    assert "TFLOP/s" not in plain


def test_the_dry_run_refuses_blocks_that_would_lie_on_two_ranks() -> None:
    asked = [
        "train",
        "tiny",
        "--dry-run",
        "--ranks",
        "2",
        "--recipe",
        "mxfp4_h16",
        "--set",
        "parallel.tensor=2",
    ]
    fits = CliRunner().invoke(main, [*asked, "--set", "model.ffn=128"])
    assert fits.exit_code == 0, fits.output
    refused = CliRunner().invoke(main, [*asked, "--set", "model.ffn=96"])
    assert refused.exit_code == 2
    assert (
        "mlp.gate_proj has 96 outputs, and 2 ranks would have 48 each, not a multiple of 32" in refused.output
    )
