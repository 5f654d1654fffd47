"""Whether ranks can share a run: their axes, and whole blocks in the forward passes of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mxref.formats import BlockFormat
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.rounding import Rounding
from mxref_training.config import Axes, Compile, TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.wording import counted


def check_layout(config: TrainConfig, ranks: int) -> Axes:
    """Return the axes of a run of so many ranks.

    Raises:
        ConfigError: the axes do not make that number, a micro-batch does not split into equal parts, or several ranks
            are to do what one process alone does.
    """
    run, axes = config.run, config.axes(ranks)
    if ranks == 1:
        return axes
    if run.sequences % axes.data:
        key = "run.micro_batch" if run.micro_batch else "run.batch"
        raise ConfigError(
            f"{key} = {run.sequences} sequences do not split over {axes.data} ranks (parallel.replicate = "
            f"{axes.replicate} * parallel.shard = {axes.shard}): take a multiple of {axes.data}, or fewer ranks"
        )
    for key, size in (
        ("heads", config.model.heads),
        ("kv_heads", config.model.kv_heads),
        ("ffn", config.model.ffn),
    ):
        if size % axes.tensor:
            raise ConfigError(
                f"model.{key} = {size} does not split over parallel.tensor = {axes.tensor} ranks: take a divisor of "
                f"{math.gcd(config.model.kv_heads, config.model.ffn)}"
            )
    if run.capture and axes.tensor > 1:
        raise ConfigError(
            f"run.capture = true with parallel.tensor = {axes.tensor}: ranks that compute a layer together take no "
            "CUDA graph; set run.capture = false, or parallel.tensor = 1"
        )
    if config.keeps_gathered and axes.shard == 1:
        raise ConfigError(
            "parallel.keep_gathered = true with parallel.shard = 1: no rank gathers weights; set "
            "parallel.keep_gathered = false, or parallel.shard = 2 or more"
        )
    for key, wanted in (
        ("run.compile = 'model'", run.compile is Compile.MODEL),
        ("run.shadow", bool(run.shadow)),
        ("run.telemetry_every", bool(run.telemetry_every)),
    ):
        if wanted:
            raise ConfigError(
                f"{key} works in one process only, and there are {ranks} ranks: switch it off"
                + (", or take run.compile = 'block'" if "compile" in key else "")
            )
    return axes


def require_whole_blocks(config: TrainConfig, recipe: Recipe, axes: Axes, linears: Sequence[str]) -> None:
    """Raise ConfigError if a block or a Hadamard group would lie in two micro-batches or on two ranks.

    Under SR a block along the tokens has one place in the optimizer step, at which its random bits are counted. Other
    roundings have no such place: each micro-batch of each rank is then filled up with zeros. A tile needs its
    tokens under any rounding, because only the block axis is filled up.
    """
    run = config.run
    own = run.sequences // axes.data
    parts, last = run.micro_batches * axes.data, run.eval_tokens // run.seq_len % own
    for spec, role in _token_operands(recipe, linears, run.steps):
        unit, why = _unit(spec, role, parts)
        # An evaluation runs Fprop alone, and its last batch may be smaller.
        for sequences in (own, last) if role is GemmRole.FPROP else (own,):
            if sequences * run.seq_len % unit:
                raise ConfigError(
                    f"run.seq_len = {run.seq_len}: a forward pass of {counted(sequences, 'sequence')} on a rank has "
                    f"{sequences * run.seq_len:,} tokens, not a multiple of {unit}, but {why}: take a multiple of "
                    f"{unit // math.gcd(unit, sequences)} for run.seq_len, or "
                    f"{unit // math.gcd(unit, run.seq_len)} sequences or a multiple of them on each rank "
                    f"({'run.micro_batch' if sequences == own else 'run.eval_tokens'})"
                )


def _token_operands(
    recipe: Recipe, linears: Sequence[str], steps: int
) -> Iterator[tuple[OperandSpec, GemmRole]]:
    """Yield the block formats of X and dY that any linear layer has at any step, with the GEMM that reads them."""
    for span in recipe.spans(steps):
        for own in dict.fromkeys(span.recipe.by_layer(linears).values()):
            for role in GemmRole:
                if own.kind(role) == "block":
                    operands = zip(OPERANDS[role], own.operands(role), strict=True)
                    yield from ((spec, role) for operand, spec in operands if operand.tensor != "w")


def _unit(spec: OperandSpec, role: GemmRole, parts: int) -> tuple[int, str]:
    """Return the number of which a forward pass's tokens must be a multiple, and the reason."""
    assert isinstance(spec.format, BlockFormat)
    if role is GemmRole.WGRAD:
        if spec.rounding is Rounding.SR and parts > 1:
            groups = f" and Hadamard groups of {spec.hadamard}" if spec.hadamard else ""
            return math.lcm(spec.format.k, spec.hadamard or 1), (
                f"under stochastic rounding blocks of {spec.format.k}{groups} along the tokens must not lie in two "
                "micro-batches or on two ranks"
            )
    elif spec.block.is_tile:
        return spec.block.rows, f"{role.value} reads tiles of {spec.block.rows} x {spec.format.k} elements"
    return 1, ""
