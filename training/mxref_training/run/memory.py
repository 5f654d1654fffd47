"""The memory that a run takes, computed from its configuration before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from mxref.formats import BF16
from mxref.recipe import OperandSource, Recipe
from mxref.roles import GemmRole
from mxref_torch.layer.operands import KINDS
from mxref_training.config import Compile, Recompute, TrainConfig
from mxref_training.dimensions import ModelConfig
from mxref_training.distributed.share import ONE
from mxref_training.errors import ConfigError
from mxref_training.model.llama import layer_matmul_parameters, parameter_count
from mxref_training.parallel import Axes
from mxref_training.wording import si


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
    weights = (config.model.layers if keeps_gathered(config) else 2) * block + rest
    return 4 * weights + 4 * (2 * block + rest)


def keeps_gathered(config: TrainConfig) -> bool:
    """Return whether the layers that a forward pass gathers stay until the backward pass."""
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
        # X is kept as Wgrad reads it, or as Fprop does where Wgrad is made of that.
        name: own.formats(GemmRole.FPROP)[0]
        if own.source(GemmRole.WGRAD) is OperandSource.FPROP
        else own.formats(GemmRole.WGRAD)[1]
        for name, own in recipe.by_layer([*names, "lm_head"]).items()
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
        available: bytes of the device, as `mxref_training.device.memory_limit` returns.
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


def less_memory(config: TrainConfig) -> str:
    """Return what a user can change about a run that has run out of memory."""
    run, ways = config.run, []
    if run.recompute is not Recompute.FULL:
        needs = ["run.capture = false"] if run.capture else []
        needs += ["run.compile = 'block'"] if run.compile is Compile.MODEL else []
        ways.append(" and ".join(["set run.recompute = 'full'", *needs]))
    ways.append("lower run.micro_batch" if run.sequences > 1 else "lower run.seq_len")
    return f"{', '.join(ways)}, or take a smaller model; see --dry-run"
