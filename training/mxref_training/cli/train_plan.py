"""What `mxref train --dry-run` prints: a run and what it needs, computed from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

import mxref_torch
from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref.terminal import HEAD, QUIET, console
from mxref_training.config import Axes, TrainConfig
from mxref_training.forecast import Mesh, memory
from mxref_training.model.llama import Llama, flops_per_token, parameter_count
from mxref_training.optim import learning_rate
from mxref_training.preflight import planned
from mxref_training.treatment import describe
from mxref_training.wording import counted, si

Section = tuple[str, list[tuple[str, str]]]
"""A heading and its lines, each a name and a text."""


def print_plan(config: TrainConfig, recipe: Recipe, backend: Backend, why: str, mesh: Mesh) -> None:
    """Print what a run would do and need on the ranks of a mesh, and why it would take the backend."""
    model, axes = planned(config, recipe, backend, mesh.ranks)
    sections = [
        *_run(config),
        *([] if mesh == Mesh() else [("Time", _time(config, axes, mesh))]),
        ("Memory" if mesh.ranks == 1 else "Memory of each rank", _memory(config, recipe, axes)),
        (
            f"Recipe {recipe.digest}",
            [*describe(recipe), ("in BF16", ", ".join(recipe.keep_bf16) or "nothing")],
        ),
        *_gemms(config, recipe, model),
        ("Backend", [(backend.name, why)]),
    ]
    table = Table.grid(padding=(0, 2))
    for heading, lines in sections:
        table.add_row(Text(heading, style=HEAD), Text(""))
        for key, text in lines:
            table.add_row(Text(f"  {key}", style=QUIET), Text(text))
    console().print(table)


def _run(config: TrainConfig) -> Iterator[Section]:
    m, run, o, data = config.model, config.run, config.optim, config.data
    shape = f"{counted(m.layers, 'layer')}, width {m.width}, {counted(m.heads, 'head')} over {m.kv_heads}"
    shape += f", SwiGLU {m.ffn}, vocabulary {m.vocab:,}"
    yield "Model", [("parameters", f"{parameter_count(m):,}"), ("shape", shape)]
    flops, tokens = flops_per_token(m, run.seq_len), run.steps * run.step_tokens
    rate = f"{o.lr:g} after {counted(o.warmup, 'step')} of warm-up, {o.schedule.value}"
    val = data.val or "its own validation side, or documents held out"
    yield (
        "Run",
        [
            ("tokens", f"{tokens:,} in {counted(run.steps, 'step')} of {run.batch} x {run.seq_len}"),
            ("micro-batches", f"{run.micro_batches} of {counted(run.sequences, 'sequence')}"),
            ("operations", f"{si(flops)}FLOP per token, {si(flops * tokens)}FLOP in all"),
            ("learning rate", f"{rate}, {learning_rate(o, run.steps - 1, run.steps):.3g} at the end"),
            ("evaluation", f"every {counted(run.eval_every, 'step')} on {run.eval_tokens:,} tokens"),
            ("data", f"{data.train}, validated on {val}"),
            ("tokenizer", data.tokenizer or f"BPE of {m.vocab:,} tokens, trained on the data if it is text"),
        ],
    )


def _time(config: TrainConfig, axes: Axes, mesh: Mesh) -> list[tuple[str, str]]:
    """Return the layout of the ranks and an estimate of a step's time."""
    run, lines = config.run, []
    if mesh.ranks > 1:
        layout = ", ".join(f"{name} {count}" for name, count in axes._asdict().items())
        size = 4 * parameter_count(config.model, axes.tensor)
        moved = run.micro_batches * (2 if config.keeps_gathered else 3) * size * (1 - 1 / axes.shard)
        if axes.whole:
            moved = 2 * size * (1 - 1 / axes.replicate)
        lines = [
            ("ranks", f"{mesh.ranks}: {layout}"),
            ("each rank", f"{counted(run.sequences // axes.data, 'sequence')} of every micro-batch"),
            ("weights and gradients", f"about {si(moved)}B received by each rank in a step"),
        ]
    own = flops_per_token(config.model, run.seq_len) * run.step_tokens / mesh.ranks
    seconds = own / (mesh.peak_tflops * 1e12 * mesh.utilisation)
    estimate = (
        f"{seconds:.3g} s per step, {run.step_tokens / seconds / mesh.ranks:,.0f} tokens/s on each rank, at "
        f"{mesh.utilisation:.0%} of {mesh.peak_tflops:g} TFLOP/s, both assumed; no communication is in it"
    )
    return [*lines, ("estimate", estimate)]


def _memory(config: TrainConfig, recipe: Recipe, axes: Axes) -> list[tuple[str, str]]:
    need = memory(config, recipe, axes)
    gathered = "two layers, embedding and lm_head, and their gradients, float32"
    if config.keeps_gathered:
        gathered = "all layers, embedding and lm_head, gradients of two layers and of these, float32"
    return [
        ("weights", f"{si(need.weights)}B, float32"),
        ("gradients", f"{si(need.gradients)}B, float32"),
        ("AdamW moments", f"{si(need.optimizer)}B, float32"),
        ("activations", f"about {si(need.activations)}B for one micro-batch"),
        ("logits", f"{si(need.logits)}B"),
        *([("gathered", f"{si(need.gathered)}B, {gathered}")] if need.gathered else []),
        ("tables", f"{si(need.tables)}B, rotary embedding and token ids"),
        ("in all", f"about {si(need.total)}B"),
    ]


def _gemms(config: TrainConfig, recipe: Recipe, model: Llama) -> Iterator[Section]:
    """Yield the GEMMs of a step in each phase, with the phase's name and steps if there are several."""
    spans = recipe.spans(config.run.steps)
    for span in spans:
        census = mxref_torch.expected_census(model, span.recipe, config.run.micro_batches)
        heading, lines = "GEMMs per step", []
        if len(spans) > 1:
            heading, lines = f"{heading}, {span.name}", [("steps", f"{span.first + 1} to {span.end}")]
        for role in GemmRole:
            gemms = [gemm for gemm in mxref_torch.operators.in_order(+census) if gemm[0] is role]
            texts = [f"{census[gemm]} in {mxref_torch.operators.formats_text(*gemm[1:])}" for gemm in gemms]
            lines.append((role.value.capitalize(), ", ".join(texts) or "none"))
        yield heading, lines
