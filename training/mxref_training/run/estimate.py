"""What a run needs, estimated without data and without allocating the model (`mxref train --dry-run`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mxref_torch
from mxref.backend import Backend
from mxref.formats import BF16
from mxref.recipe import Recipe, Span
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.layer.kinds import KINDS
from mxref_torch.operators import Census
from mxref_training.config import Compile, ModelConfig, TrainConfig
from mxref_training.data.described import described
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.share import check_layout
from mxref_training.errors import ConfigError
from mxref_training.model.llama import Llama, flops_per_token, parameter_count
from mxref_training.run.device import choose_device, device_name, memory_limit
from mxref_training.run.optim import learning_rate
from mxref_training.run.treatment import describe
from mxref_training.wording import counted

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")

Section = tuple[str, list[tuple[str, str]]]
"""A heading and its lines, each a name and a text."""


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds at its peak; activations are an estimate, the rest is exact."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    tables: int
    """The rotary table, and the token ids of one step's batch."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.logits, self.tables)
        return sum(parts)


def memory(config: TrainConfig, recipe: Recipe) -> Memory:
    """Return the memory of one micro-batch's forward and backward pass.

    Activations are what the backward pass reads: the residual stream at both norms (float32), queries, keys,
    values and output of the attention (float32), gate, its SiLU and up (BF16), and the operand that each linear layer
    keeps for Wgrad, in the recipe's format. BF16 layers with the same input share it.
    """
    m, tokens = config.model, config.run.sequences * config.run.seq_len
    attention = 2 * m.width + 2 * m.kv_heads * m.head_dim
    layer = 4 * (2 * m.width + attention) + 2 * 3 * m.ffn
    kept = max(_kept(m, span.recipe) for span in recipe.spans(config.run.steps))
    parameters = parameter_count(m)
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=round(tokens * (m.layers * layer + kept)),
        logits=tokens * m.vocab * _bytes_of_logit(config.run.compile),
        tables=2 * 4 * m.max_seq * m.head_dim + 2 * 8 * config.run.step_tokens,
    )


def _bytes_of_logit(compiled: Compile) -> int:
    """Return the bytes that a forward and a backward pass hold for each logit."""
    if compiled is Compile.NONE:
        return 2 + 4 + 4 + 4  # in BF16 and float32, their log-softmax, its gradient
    return 2 + 2  # in BF16, and their gradient


_INPUTS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj"), "width"),
    ("self_attn", ("o_proj",), "width"),
    ("mlp", ("gate_proj", "up_proj"), "width"),
    ("mlp", ("down_proj",), "ffn"),
)
"""The inputs of a block's linear layers: the layers that read each, and its width in `ModelConfig`."""


def _kept(m: ModelConfig, recipe: Recipe) -> float:
    """Return the bytes per token of the operands that all linear layers keep for Wgrad at one moment."""
    names = [
        f"model.layers.{i}.{part}.{name}"
        for i in range(m.layers)
        for part, group, _ in _INPUTS
        for name in group
    ]
    formats = {
        name: own.formats(GemmRole.WGRAD)[1] for name, own in recipe.by_layer([*names, "lm_head"]).items()
    }
    total = 0.0
    for i in range(m.layers):
        for part, group, width in _INPUTS:
            kept = [formats[f"model.layers.{i}.{part}.{name}"] for name in group]
            once = [*(f for f in kept if f is not BF16), *([BF16] if BF16 in kept else [])]
            total += getattr(m, width) * sum(KINDS[f.kind].element_bytes(f) for f in once)
    return total


def require_memory(config: TrainConfig, recipe: Recipe, available: int, runs: int = 1) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        available: bytes of the device, as `mxref_training.run.device.memory_limit` returns.
        runs: how many such runs share this memory.

    Raises:
        ConfigError: the estimate is above the available memory; the message gives both.
    """
    need = memory(config, recipe)
    if need.total * runs <= available:
        return
    state, pass_ = need.weights + need.gradients + need.optimizer, need.activations + need.logits
    if state * runs > available:
        way_out = "lower model.layers, model.width, model.ffn or model.vocab"
    elif need.tables * runs > available:
        way_out = "lower run.batch or model.max_seq"
    else:
        way_out = "lower run.micro_batch or run.seq_len"
    each = " in each" if runs > 1 else ""
    who = f"{runs} runs at a time need" if runs > 1 else "the run needs"
    raise ConfigError(
        f"{who} about {si(need.total * runs)}B of memory and there are {si(available)}B: {si(state)}B for weights, "
        f"gradients and moments of {parameter_count(config.model):,} parameters, {si(pass_)}B for a micro-batch of "
        f"{config.run.sequences:,} x {config.run.seq_len:,} tokens and a vocabulary of {config.model.vocab:,}, "
        f"{si(need.tables)}B for tables{each}; {way_out}"
    )


def preflight(
    config: TrainConfig, recipe: Recipe, backend: Backend, runs: int = 1, ranks: Ranks = SOLE
) -> torch.device:
    """Return a run's device after checking that it exists and that the run fits into its memory.

    Commands call this before they read data. `runs` runs share the device at the same time.

    Raises:
        ConfigError: no such device, the backend does not compute on it, too little memory, or ranks that cannot
            share the run as the configuration says.
    """
    device = choose_device(config.run.device, backend, ranks)
    check_layout(config, ranks.world)
    available = memory_limit(device)
    if device.type == "cpu":
        available //= ranks.local_world
    require_memory(config, recipe, available, runs)
    return device


def on_device(config: TrainConfig, backend: Backend) -> str:
    """Return the name of the device on which a run computes; ConfigError if there is none."""
    return device_name(choose_device(config.run.device, backend))


def dry_run(config: TrainConfig, recipe: Recipe, backend: Backend, why: str) -> list[Section]:
    """Return a summary of a run and of what it needs, in sections for people to read.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        backend: computes the block formats.
        why: the reason why this backend was chosen.

    Raises:
        ConfigError: the recipe does not fit the model's widths, or its stochastic rounding does not work.
        UnsupportedError: the backend does not declare what the recipe asks for.
    """
    mxref_torch.check_stochastic_rounding(backend, recipe)
    model = Llama(config.model, device="meta")
    mxref_torch.convert(model, recipe, backend=backend, seed=config.run.seed, steps=config.run.steps)
    spans = recipe.spans(config.run.steps)
    m, run, need = config.model, config.run, memory(config, recipe)
    flops = flops_per_token(m, run.seq_len)
    tokens = run.steps * run.step_tokens
    end = learning_rate(config.optim, run.steps - 1, run.steps)
    warmup, schedule = config.optim.warmup, config.optim.schedule.value
    rate = f"{config.optim.lr:g} after {counted(warmup, 'step')} of warm-up, {schedule}, {end:.3g} at the end"
    heads = f"{counted(m.heads, 'head')} over {m.kv_heads}"
    data, tokenizer = described(config.data, m.vocab)
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
        (
            "Memory",
            [
                ("weights", f"{si(need.weights)}B, float32"),
                ("gradients", f"{si(need.gradients)}B, float32"),
                ("AdamW moments", f"{si(need.optimizer)}B, float32"),
                ("activations", f"about {si(need.activations)}B for one micro-batch"),
                ("logits", f"{si(need.logits)}B"),
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


def _gemms(model: Llama, span: Span, micro_batches: int, several: bool) -> Section:
    """Return the GEMMs of a step in one phase, with its name and steps if there are several."""
    census = mxref_torch.expected_census(model, span.recipe, micro_batches)
    steps = [("steps", f"{span.first + 1} to {span.end}")] if several else []
    return (
        f"GEMMs per step, {span.name}" if several else "GEMMs per step",
        [*steps, *((f"{role.value.capitalize()}", _counts(role, census)) for role in GemmRole)],
    )


def si(value: float) -> str:
    """Return a number with three digits, a space and its SI prefix, as in `8.03 G`."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_PREFIXES[power]}"


def _counts(role: GemmRole, census: Census) -> str:
    gemms = [gemm for gemm in operators.in_order(+census) if gemm[0] is role]
    return ", ".join(f"{census[gemm]} in {operators.formats_text(*gemm[1:])}" for gemm in gemms) or "none"
