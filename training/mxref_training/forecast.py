"""What a run needs: one table of its memory, for the check before it begins and for `mxref train --dry-run`.

Nothing here reads data or allocates the model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import mxref_torch
from mxref.backend import Backend
from mxref.formats import BF16, BlockFormat, OperandFormat
from mxref.recipe import OperandSource, Recipe, Span
from mxref.roles import GemmRole
from mxref_training.config import LARGEST, MAX_RANKS, ONE, Axes, Compile, Recompute, TrainConfig, require
from mxref_training.model import llama
from mxref_training.optim import learning_rate
from mxref_training.treatment import describe
from mxref_training.wording import counted, si

Section = tuple[str, list[tuple[str, str]]]
"""A heading and its lines, each a name and a text."""


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
    gathered: int
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
    keeps for Wgrad, in the recipe's format. Ranks of a tensor-parallel group have the same tokens, and split what lies
    between the first and the last linear layer of attention and MLP. A layer that is computed again keeps its input
    alone, or beside it what its GEMMs and attention return (BF16); all of the above is then held for one layer at a
    time.
    """
    m, run, tensor = config.model, config.run, axes.tensor
    tokens = run.sequences * run.seq_len // axes.data
    attention = 2 * m.width + 2 * m.kv_heads * m.head_dim
    operands = max(_operands(config, span.recipe, tensor) for span in recipe.spans(run.steps))
    layer = 4 * (2 * m.width + attention / tensor) + 2 * 3 * m.ffn / tensor + operands / m.layers
    if run.recompute is Recompute.NONE:
        activations = m.layers * layer
    elif run.recompute is Recompute.FULL:
        activations = m.layers * 4.0 * m.width + layer
    else:
        results = 2 * (2 * m.width + (attention + 2 * m.ffn) / tensor)
        activations = m.layers * (4.0 * m.width + results) + layer
    block = llama.layer_matmul_parameters(m) // tensor + 2 * m.width
    rest = llama.parameter_count(m, tensor) - m.layers * block
    parameters = -(-(m.layers * block + rest) // axes.shard)
    gathered = (m.layers if _keeps_gathered(config) else 2) * block + rest
    # Of each logit: in BF16 and float32, their log-softmax, its gradient; compiled, BF16 and its gradient alone.
    logit = 2 + 4 + 4 + 4 if run.compile is Compile.NONE else 2 + 2
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=round(tokens * activations),
        logits=tokens * m.vocab * logit,
        tables=2 * 4 * m.max_seq * m.head_dim + 2 * 8 * run.step_tokens,
        gathered=0 if axes.whole else 4 * gathered + 4 * (2 * block + rest),
    )


def _keeps_gathered(config: TrainConfig) -> bool:
    """Return whether the layers that a forward pass gathers stay until the backward pass."""
    return config.parallel is not None and config.parallel.keep_gathered


def _operands(config: TrainConfig, recipe: Recipe, tensor: int) -> float:
    """Return the bytes per token of what a rank's linear layers keep for Wgrad; layers with one input share its BF16.

    Of `tensor` ranks that compute a layer together, each keeps all of an input that the layer's rows share, and a part
    of the input of `o_proj` and `down_proj`.
    """
    m = config.model
    inputs = {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): m.width,
        ("self_attn.o_proj",): m.width / tensor,
        ("mlp.gate_proj", "mlp.up_proj"): m.width,
        ("mlp.down_proj",): m.ffn / tensor,
    }
    groups = [
        ([f"model.layers.{i}.{name}" for name in names], size)
        for i in range(m.layers)
        for names, size in inputs.items()
    ]
    layers = recipe.by_layer([*(name for names, _ in groups for name in names), "lm_head"])
    total = 0.0
    for names, size in groups:
        kept = [_format_of_x(layers[name]) for name in names]
        once = [*(f for f in kept if f is not BF16), *([BF16] if BF16 in kept else [])]
        total += size * sum(_element_bytes(f) for f in once)
    return total


def _element_bytes(format: OperandFormat) -> float:
    """Return the bytes that an element of a format takes, with its share of a block's scale."""
    if isinstance(format, BlockFormat):
        return format.element.bits / 8 + 1 / format.k
    return 2.0 if format is BF16 else 1.0


def _format_of_x(recipe: Recipe) -> OperandFormat:
    """Return the format in which a layer keeps X: as Wgrad reads it, or as Fprop does where Wgrad is made of that."""
    if recipe.source(GemmRole.WGRAD) is OperandSource.FPROP:
        return recipe.formats(GemmRole.FPROP)[0]
    return recipe.formats(GemmRole.WGRAD)[1]


def require_memory(
    config: TrainConfig, recipe: Recipe, available: int, runs: int = 1, axes: Axes = ONE
) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        available: bytes of the device, as `mxref_training.device.memory_limit` returns.
        runs: how many such runs share this memory.
        axes: the ranks of the run; the memory is that of one of them.

    Raises:
        ConfigError: the estimate is above the available memory; the message gives both.
    """
    need = memory(config, recipe, axes)
    state = need.weights + need.gradients + need.optimizer + need.gathered
    if state * runs > available:
        way_out = "lower model.layers, model.width, model.ffn or model.vocab"
    elif need.tables * runs > available:
        way_out = "lower run.batch or model.max_seq"
    else:
        way_out = less_memory(config)
    who = f"{runs} runs at a time need" if runs > 1 else "the run needs"
    who = f"each of {axes.ranks} ranks needs" if axes.ranks > 1 else who
    require(
        need.total * runs <= available,
        f"{who} about {si(need.total * runs)}B of memory and there are {si(available)}B: {si(state)}B for weights, "
        f"gradients and moments of {llama.parameter_count(config.model):,} parameters, "
        f"{si(need.activations + need.logits)}B for a micro-batch of {config.run.sequences:,} x "
        f"{config.run.seq_len:,} tokens and a vocabulary of {config.model.vocab:,}, {si(need.tables)}B for tables"
        f"{' in each' if runs > 1 else ''}; {way_out}",
    )


def less_memory(config: TrainConfig) -> str:
    """Return what a user can change about a run that does not fit, or has run out of memory."""
    run, ways = config.run, []
    if run.recompute is not Recompute.FULL:
        needs = ["run.capture = false"] if run.capture else []
        needs += ["run.compile = 'block'"] if run.compile is Compile.MODEL else []
        ways.append(" and ".join(["set run.recompute = 'full'", *needs]))
    ways.append("lower run.micro_batch" if run.sequences > 1 else "lower run.seq_len")
    return f"{', '.join(ways)}, or take a smaller model; see --dry-run"


@dataclass(frozen=True)
class Mesh:
    """The assumptions of a dry run."""

    ranks: int = 1
    peak_tflops: float = 989.0
    """Largest rate of one rank, in 10^12 floating-point operations per second; that of an H200 in BF16 without sparsity
    (NVIDIA's data sheet)."""
    utilisation: float = 0.4
    """The share of that rate that training reaches."""

    def __post_init__(self) -> None:
        for name, value, high in (
            ("--ranks", self.ranks, MAX_RANKS),
            ("--peak-tflops", self.peak_tflops, LARGEST),
            ("--utilisation", self.utilisation, 1),
        ):
            require(0 < value <= high, f"{name} {value} must be above 0 and at most {high:,}")


def dry_run(
    config: TrainConfig,
    recipe: Recipe,
    backend: Backend,
    why: str,
    model: llama.Llama,
    axes: Axes,
    mesh: Mesh,
) -> list[Section]:
    """Return a summary of a run and of what it needs, in sections for people to read.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        backend: computes the block formats.
        why: the reason why this backend was chosen.
        model: the converted model, as `mxref_training.preflight.converted_shape` returns it.
        axes: of the ranks.
        mesh: the assumptions.
    """
    spans = recipe.spans(config.run.steps)
    m, run, o, data, need = config.model, config.run, config.optim, config.data, memory(config, recipe, axes)
    flops, tokens = llama.flops_per_token(m, run.seq_len), run.steps * run.step_tokens
    rate = f"{o.lr:g} after {counted(o.warmup, 'step')} of warm-up, {o.schedule.value}"
    heads = f"{counted(m.heads, 'head')} over {m.kv_heads}"
    shape = f"{counted(m.layers, 'layer')}, width {m.width}, {heads}, SwiGLU {m.ffn}, vocabulary {m.vocab:,}"
    gathered = "two layers, embedding and lm_head, and their gradients, float32"
    if _keeps_gathered(config):
        gathered = "all layers, embedding and lm_head, gradients of two layers and of these, float32"
    return [
        ("Model", [("parameters", f"{llama.parameter_count(m):,}"), ("shape", shape)]),
        (
            "Run",
            [
                ("tokens", f"{tokens:,} in {counted(run.steps, 'step')} of {run.batch} x {run.seq_len}"),
                ("micro-batches", f"{run.micro_batches} of {counted(run.sequences, 'sequence')}"),
                ("operations", f"{si(flops)}FLOP per token, {si(flops * tokens)}FLOP in all"),
                ("learning rate", f"{rate}, {learning_rate(o, run.steps - 1, run.steps):.3g} at the end"),
                ("evaluation", f"every {counted(run.eval_every, 'step')} on {run.eval_tokens:,} tokens"),
                (
                    "data",
                    f"{data.train}, validated on {data.val or 'its own validation side, or documents held out'}",
                ),
                (
                    "tokenizer",
                    data.tokenizer or f"BPE of {m.vocab:,} tokens, trained on the data if it is text",
                ),
            ],
        ),
        *([] if mesh == Mesh() else [("Time", _time(config, axes, mesh))]),
        (
            "Memory" if mesh.ranks == 1 else "Memory of each rank",
            [
                ("weights", f"{si(need.weights)}B, float32"),
                ("gradients", f"{si(need.gradients)}B, float32"),
                ("AdamW moments", f"{si(need.optimizer)}B, float32"),
                ("activations", f"about {si(need.activations)}B for one micro-batch"),
                ("logits", f"{si(need.logits)}B"),
                *([("gathered", f"{si(need.gathered)}B, {gathered}")] if need.gathered else []),
                ("tables", f"{si(need.tables)}B, rotary embedding and token ids"),
                ("in all", f"about {si(need.total)}B"),
            ],
        ),
        (
            f"Recipe {recipe.digest}",
            [*describe(recipe), ("in BF16", ", ".join(recipe.keep_bf16) or "nothing")],
        ),
        *(_gemms(model, span, run.micro_batches, len(spans) > 1) for span in spans),
        ("Backend", [(backend.name, why)]),
    ]


def _time(config: TrainConfig, axes: Axes, mesh: Mesh) -> list[tuple[str, str]]:
    """Return the layout of the ranks and an estimate of a step's time."""
    run, lines = config.run, []
    if mesh.ranks > 1:
        layout = ", ".join(f"{name} {count}" for name, count in axes._asdict().items())
        size = 4 * llama.parameter_count(config.model, axes.tensor)
        moved = run.micro_batches * (2 if _keeps_gathered(config) else 3) * size * (1 - 1 / axes.shard)
        if axes.whole:
            moved = 2 * size * (1 - 1 / axes.replicate)
        lines = [
            ("ranks", f"{mesh.ranks}: {layout}"),
            ("each rank", f"{counted(run.sequences // axes.data, 'sequence')} of every micro-batch"),
            ("weights and gradients", f"about {si(moved)}B received by each rank in a step"),
        ]
    own = llama.flops_per_token(config.model, run.seq_len) * run.step_tokens / mesh.ranks
    seconds = own / (mesh.peak_tflops * 1e12 * mesh.utilisation)
    estimate = (
        f"{seconds:.3g} s per step, {run.step_tokens / seconds / mesh.ranks:,.0f} tokens/s on each rank, at "
        f"{mesh.utilisation:.0%} of {mesh.peak_tflops:g} TFLOP/s, both assumed; no communication is in it"
    )
    return [*lines, ("estimate", estimate)]


def _gemms(model: llama.Llama, span: Span, micro_batches: int, several: bool) -> Section:
    """Return the GEMMs of a step in one phase, with its name and steps if there are several."""
    census = mxref_torch.expected_census(model, span.recipe, micro_batches)
    lines = [("steps", f"{span.first + 1} to {span.end}")] if several else []
    for role in GemmRole:
        gemms = [gemm for gemm in mxref_torch.operators.in_order(+census) if gemm[0] is role]
        texts = [f"{census[gemm]} in {mxref_torch.operators.formats_text(*gemm[1:])}" for gemm in gemms]
        lines.append((role.value.capitalize(), ", ".join(texts) or "none"))
    return f"GEMMs per step, {span.name}" if several else "GEMMs per step", lines
