"""What a run needs, estimated without data and without allocating the model (`mxref train --dry-run`)."""

from __future__ import annotations

from dataclasses import dataclass

import mxref_torch
from mxref.backend import Backend
from mxref.recipe import Recipe, Span
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.operators import Census
from mxref_training import limits
from mxref_training.config import TrainConfig
from mxref_training.data.described import described
from mxref_training.data.readable import require_readable
from mxref_training.distributed.share import check_layout
from mxref_training.limits import require
from mxref_training.model.llama import Llama, flops_per_token, parameter_count
from mxref_training.optim import learning_rate
from mxref_training.parallel import Axes
from mxref_training.run.memory import keeps_gathered, memory
from mxref_training.run.shape import converted_shape
from mxref_training.treatment import describe
from mxref_training.wording import counted, si

Section = tuple[str, list[tuple[str, str]]]
"""A heading and its lines, each a name and a text."""


PEAK_TFLOPS = 989.0
"""Largest BF16 rate of an H200 without sparsity (NVIDIA's data sheet), by which the dry run estimates times."""
UTILISATION = 0.4
"""The share of the largest rate that the dry run assumes."""


@dataclass(frozen=True)
class Mesh:
    """The assumptions of a dry run."""

    ranks: int = 1
    peak_tflops: float = PEAK_TFLOPS
    """Largest rate of one rank, in 10^12 floating-point operations per second."""
    utilisation: float = UTILISATION
    """The share of that rate that training reaches."""

    def __post_init__(self) -> None:
        for name, value, high in (
            ("--ranks", self.ranks, limits.MAX_RANKS),
            ("--peak-tflops", self.peak_tflops, limits.LARGEST),
            ("--utilisation", self.utilisation, 1),
        ):
            require(0 < value <= high, f"{name} {value} must be above 0 and at most {high:,}")


ONE_RANK = Mesh()


def dry_run(
    config: TrainConfig, recipe: Recipe, backend: Backend, why: str, mesh: Mesh = ONE_RANK
) -> list[Section]:
    """Return a summary of a run and of what it needs, in sections for people to read.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        backend: computes the block formats.
        why: the reason why this backend was chosen.
        mesh: the ranks that it is made for, none of which needs to exist.

    Raises:
        ConfigError: the ranks cannot share the run, its stochastic rounding does not work, or as of
            `converted_shape`.
        LayerError, HuggingFaceError: as of `converted_shape`.
        DataError: as of `require_readable`.
        UnsupportedError: the backend does not declare what the recipe asks for.
    """
    axes = check_layout(config, mesh.ranks)
    model = converted_shape(config, recipe, backend, axes)
    require_readable(config.data, config.model.vocab)
    mxref_torch.check_stochastic_rounding(backend, recipe)
    spans = recipe.spans(config.run.steps)
    m, run, need = config.model, config.run, memory(config, recipe, axes)
    flops = flops_per_token(m, run.seq_len)
    tokens = run.steps * run.step_tokens
    end = learning_rate(config.optim, run.steps - 1, run.steps)
    warmup, schedule = config.optim.warmup, config.optim.schedule.value
    rate = f"{config.optim.lr:g} after {counted(warmup, 'step')} of warm-up, {schedule}, {end:.3g} at the end"
    heads = f"{counted(m.heads, 'head')} over {m.kv_heads}"
    data, tokenizer = described(config.data, m.vocab)
    held = _what_is_gathered(config)
    return [
        (
            "Model",
            [
                ("parameters", f"{parameter_count(m):,}"),
                (
                    "shape",
                    f"{counted(m.layers, 'layer')}, width {m.width}, {heads}, SwiGLU {m.ffn}, vocabulary {m.vocab:,}",
                ),
            ],
        ),
        (
            "Run",
            [
                ("tokens", f"{tokens:,} in {counted(run.steps, 'step')} of {run.batch} x {run.seq_len}"),
                ("micro-batches", f"{run.micro_batches} of {counted(run.sequences, 'sequence')}"),
                ("operations", f"{si(flops)}FLOP per token, {si(flops * tokens)}FLOP in all"),
                ("learning rate", rate),
                ("evaluation", f"every {counted(run.eval_every, 'step')} on {run.eval_tokens:,} tokens"),
                ("data", data),
                ("tokenizer", tokenizer),
            ],
        ),
        *([] if mesh == ONE_RANK else [_time(config, axes, mesh)]),
        (
            "Memory" if mesh.ranks == 1 else "Memory of each rank",
            [
                ("weights", f"{si(need.weights)}B, float32"),
                ("gradients", f"{si(need.gradients)}B, float32"),
                ("AdamW moments", f"{si(need.optimizer)}B, float32"),
                ("activations", f"about {si(need.activations)}B for one micro-batch"),
                ("logits", f"{si(need.logits)}B"),
                *([("gathered", f"{si(need.gathered)}B, {held}")] if need.gathered else []),
                ("tables", f"{si(need.tables)}B, rotary embedding and token ids"),
                ("in all", f"about {si(need.total)}B"),
            ],
        ),
        (
            f"Recipe {recipe.digest}",
            [*describe(recipe), ("in BF16", ", ".join(recipe.keep_bf16) or "nothing")],
        ),
        *(_gemms(model, span, config.run.micro_batches, len(spans) > 1) for span in spans),
        ("Backend", [(backend.name, why)]),
    ]


def _what_is_gathered(config: TrainConfig) -> str:
    if keeps_gathered(config):
        return "all layers, embedding and lm_head, gradients of two layers and of these, float32"
    return "two layers, embedding and lm_head, and their gradients, float32"


def _time(config: TrainConfig, axes: Axes, mesh: Mesh) -> Section:
    """Return the layout of the ranks and an estimate of a step's time."""
    run = config.run
    own = flops_per_token(config.model, run.seq_len) * run.step_tokens / mesh.ranks
    seconds = own / (mesh.peak_tflops * 1e12 * mesh.utilisation)
    lines = [
        (
            "estimate",
            f"{seconds:.3g} s per step, {run.step_tokens / seconds / mesh.ranks:,.0f} tokens/s on each rank, at "
            f"{mesh.utilisation:.0%} of {mesh.peak_tflops:g} TFLOP/s, both assumed; no communication is in it",
        )
    ]
    if mesh.ranks > 1:
        layout = ", ".join(f"{name} {count}" for name, count in axes._asdict().items())
        own_sequences = run.sequences // axes.data
        size = 4 * parameter_count(config.model, axes.tensor)
        moved = run.micro_batches * (2 if keeps_gathered(config) else 3) * size * (1 - 1 / axes.shard)
        if axes.whole:
            moved = 2 * size * (1 - 1 / axes.replicate)
        lines = [
            ("ranks", f"{mesh.ranks}: {layout}"),
            ("each rank", f"{counted(own_sequences, 'sequence')} of every micro-batch"),
            ("weights and gradients", f"about {si(moved)}B received by each rank in a step"),
            *lines,
        ]
    return "Time", lines


def _gemms(model: Llama, span: Span, micro_batches: int, several: bool) -> Section:
    """Return the GEMMs of a step in one phase, with its name and steps if there are several."""
    census = mxref_torch.expected_census(model, span.recipe, micro_batches)
    steps = [("steps", f"{span.first + 1} to {span.end}")] if several else []
    return (
        f"GEMMs per step, {span.name}" if several else "GEMMs per step",
        [*steps, *((f"{role.value.capitalize()}", _counts(role, census)) for role in GemmRole)],
    )


def _counts(role: GemmRole, census: Census) -> str:
    gemms = [gemm for gemm in operators.in_order(+census) if gemm[0] is role]
    return ", ".join(f"{census[gemm]} in {operators.formats_text(*gemm[1:])}" for gemm in gemms) or "none"
