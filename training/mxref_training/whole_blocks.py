"""Whether blocks and Hadamard groups along the tokens lie in one forward pass of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mxref.formats import BlockFormat, BlockShape
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.rounding import Rounding
from mxref_training.config import TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.parallel import Axes
from mxref_training.wording import counted


def require_whole_blocks(config: TrainConfig, recipe: Recipe, axes: Axes, linears: Sequence[str]) -> None:
    """Raise ConfigError if a block or a Hadamard group would lie in two micro-batches or on two ranks.

    Under SR a block along the tokens has one place in the optimizer step, at which its random bits are counted. Other
    roundings have no such place: each micro-batch of each rank is then filled up with zeros. A tile needs 32 tokens
    under any rounding, because only the block axis is filled up.
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
    elif spec.block is BlockShape.TILE:
        return spec.format.k, f"{role.value} reads tiles of {spec.format.k} x {spec.format.k} elements"
    return 1, ""
