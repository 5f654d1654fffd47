"""The ranks that a dry run assumes, and the memory that a run needs, which is checked before it begins too.

Nothing here reads data or allocates the model.
"""

from __future__ import annotations

from typing import NamedTuple

from mxref.formats import BF16, BlockFormat, OperandFormat
from mxref.recipe import OperandSource, Recipe
from mxref.roles import GemmRole
from mxref_training.config import ONE, Axes, Compile, Recompute, TrainConfig, require
from mxref_training.model import llama
from mxref_training.wording import si


class Mesh(NamedTuple):
    """The assumptions of a dry run."""

    ranks: int = 1
    peak_tflops: float = 989.0
    """Largest rate of one rank, in 10^12 floating-point operations per second; that of an H200 in BF16 without sparsity
    (NVIDIA's data sheet)."""
    utilisation: float = 0.4
    """The share of that rate that training reaches."""


class Memory(NamedTuple):
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
        return sum(self)


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
    gathered = (m.layers if config.keeps_gathered else 2) * block + rest
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


def _operands(config: TrainConfig, recipe: Recipe, tensor: int) -> float:
    """Return the bytes per token of what a rank's linear layers keep for Wgrad.

    Layers with one input share its BF16. Of `tensor` ranks that compute a layer together, each keeps all of an input
    that the layer's rows share, and a part of the input of `o_proj` and `down_proj`.
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
        once = [format for format in kept if format is not BF16] + [BF16] * (BF16 in kept)
        total += size * sum(map(_element_bytes, once))
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
