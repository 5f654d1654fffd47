"""What a run needs, estimated without data and without allocating the model (`mxref train --dry-run`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import mxref_torch
from mxref.backend import Backend
from mxref.formats import BF16
from mxref.recipe import Recipe, Span
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.layer.kinds import KINDS
from mxref_torch.operators import Census
from mxref_training import limits
from mxref_training.config import Compile, Recompute, TrainConfig
from mxref_training.data.described import described
from mxref_training.data.readable import require_readable
from mxref_training.dimensions import ModelConfig
from mxref_training.distributed.share import ONE, check_layout
from mxref_training.errors import ConfigError
from mxref_training.limits import require
from mxref_training.model.llama import Llama, flops_per_token, layer_matmul_parameters, parameter_count
from mxref_training.parallel import Axes
from mxref_training.run.optim import learning_rate
from mxref_training.run.shape import converted_shape
from mxref_training.run.treatment import describe
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


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds at its peak on a rank; activations are an estimate, the rest is exact."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    tables: int
    """The rotary table, and the token ids of one step's batch."""
    gathered: int = 0
    """Weights that several ranks gather, and their gradients before they are added: of two decoder layers, and of the
    embedding, the last norm and `lm_head`; with `parallel.keep_gathered` the weights of all layers."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory(config: TrainConfig, recipe: Recipe, axes: Axes = ONE) -> Memory:
    """Return the memory that one micro-batch's forward and backward pass takes on a rank.

    Activations are what the backward pass reads: the residual stream at both norms (float32), queries, keys,
    values and output of the attention (float32), gate, its SiLU and up (BF16), and the operand that each linear layer
    keeps for Wgrad, in the recipe's format. BF16 layers with the same input share it. Ranks of a tensor-parallel group
    have the same tokens, and split what lies between the first and the last linear layer of attention and MLP.
    A layer that is computed again keeps its input alone, or beside it what its GEMMs and attention return (BF16); all
    of the above is then held for one layer at a time.
    """
    m, tokens = config.model, config.run.sequences * config.run.seq_len // axes.data
    attention = 2 * m.width + 2 * m.kv_heads * m.head_dim
    layer = 4 * (2 * m.width + attention / axes.tensor) + 2 * 3 * m.ffn / axes.tensor
    kept = max(_kept(m, span.recipe, axes.tensor) for span in recipe.spans(config.run.steps))
    block = layer_matmul_parameters(m) // axes.tensor + 2 * m.width
    rest = parameter_count(m, axes.tensor) - m.layers * block
    parameters = -(-(m.layers * block + rest) // axes.shard)
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        gathered=0 if axes.whole else _gathered(config, block, rest),
        activations=round(tokens * _activations(config, layer + kept / m.layers, axes.tensor)),
        logits=tokens * m.vocab * _bytes_of_logit(config.run.compile),
        tables=2 * 4 * m.max_seq * m.head_dim + 2 * 8 * config.run.step_tokens,
    )


def _gathered(config: TrainConfig, block: int, rest: int) -> int:
    """Return the bytes of gathered weights and of their gradients: `block` parameters a layer, `rest` outside."""
    weights = (config.model.layers if _keeps(config) else 2) * block + rest
    return 4 * weights + 4 * (2 * block + rest)


def _keeps(config: TrainConfig) -> bool:
    return config.parallel is not None and config.parallel.keep_gathered


def _activations(config: TrainConfig, layer: float, tensor: int) -> float:
    """Return the bytes of a token in all layers from its bytes in one layer that is not computed again."""
    m, how = config.model, config.run.recompute
    if how is Recompute.NONE:
        return m.layers * layer
    inputs = 4.0 * m.width
    if how is Recompute.SELECTIVE:
        split = 2 * m.width + 2 * m.kv_heads * m.head_dim + 2 * m.ffn  # q, k, v, attention, gate, up
        inputs += 2 * (2 * m.width + split / tensor)
    return m.layers * inputs + layer


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


def _kept(m: ModelConfig, recipe: Recipe, tensor: int) -> float:
    """Return the bytes per token of the operands that a rank's linear layers keep for Wgrad at one moment.

    Of `tensor` ranks that compute a layer together, each keeps all of an input that the layer's rows share, and a part
    of the input of `o_proj` and `down_proj`.
    """
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
            split = tensor if group in (("o_proj",), ("down_proj",)) else 1
            total += getattr(m, width) / split * sum(KINDS[f.kind].element_bytes(f) for f in once)
    return total


def require_memory(
    config: TrainConfig, recipe: Recipe, available: int, runs: int = 1, axes: Axes = ONE
) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        available: bytes of the device, as `mxref_training.run.device.memory_limit` returns.
        runs: how many such runs share this memory.
        axes: the ranks of the run; the memory is that of one of them.

    Raises:
        ConfigError: the estimate is above the available memory; the message gives both.
    """
    need = memory(config, recipe, axes)
    if need.total * runs <= available:
        return
    state, pass_ = (
        need.weights + need.gradients + need.optimizer + need.gathered,
        need.activations + need.logits,
    )
    if state * runs > available:
        way_out = "lower model.layers, model.width, model.ffn or model.vocab"
    elif need.tables * runs > available:
        way_out = "lower run.batch or model.max_seq"
    else:
        way_out = "lower run.micro_batch or run.seq_len"
        if _recomputed(config, recipe, axes) * runs <= available:
            way_out = f"set run.recompute = 'full', also for a run that goes on, or {way_out}"
    each = " in each" if runs > 1 else ""
    who = f"{runs} runs at a time need" if runs > 1 else "the run needs"
    who = f"each of {axes.ranks} ranks needs" if axes.ranks > 1 else who
    raise ConfigError(
        f"{who} about {si(need.total * runs)}B of memory and there are {si(available)}B: {si(state)}B for weights, "
        f"gradients and moments of {parameter_count(config.model):,} parameters, {si(pass_)}B for a micro-batch of "
        f"{config.run.sequences:,} x {config.run.seq_len:,} tokens and a vocabulary of {config.model.vocab:,}, "
        f"{si(need.tables)}B for tables{each}; {way_out}"
    )


def _recomputed(config: TrainConfig, recipe: Recipe, axes: Axes) -> float:
    """Return the bytes that a run needs if layers are computed again; infinity if its settings do not allow that."""
    try:
        again = replace(config, run=replace(config.run, recompute=Recompute.FULL))
    except ConfigError:
        return math.inf
    return memory(again, recipe, axes).total


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
    if _keeps(config):
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
        moved = run.micro_batches * (2 if _keeps(config) else 3) * size * (1 - 1 / axes.shard)
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
