"""Faults of the Hadamard transform and of its signs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import Staged, rotating, staged
from mxref import Stream
from mxref import hadamard as transform
from mxref.placement import Placement
from mxref.steps.hadamard import Rotation, norm_factor
from mxref.steps.random import stream_words


def stages_swapped(x, rotation):
    n = rotation.n
    with np.errstate(all="ignore"):
        y = x.reshape(-1, n) * rotation.vector()
        h = n // 2
        while h:
            pairs = y.reshape(-1, n // (2 * h), 2, h)
            s, t = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([s + t, s - t], axis=2)
            h //= 2
        return (y.reshape(x.shape) * norm_factor(n)).astype(np.float32)


def as_matrix(x, rotation):
    n = rotation.n
    h = np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
    with np.errstate(all="ignore"):
        y = (x.reshape(-1, n) * rotation.vector()).astype(np.float64) @ h
        return (y.astype(np.float32) * norm_factor(n)).reshape(x.shape)


def unnormalised(x, rotation):
    return transform(x, rotation) / norm_factor(rotation.n)


def bit_reversed(x, rotation):
    n, width = rotation.n, rotation.n.bit_length() - 1
    order = [int(f"{i:0{width}b}"[::-1], 2) for i in range(n)]
    return transform(x, rotation).reshape(-1, n)[:, order].reshape(x.shape)


def signs_after(x, rotation):
    y = transform(x, Rotation(rotation.n))
    return (y.reshape(-1, rotation.n) * rotation.vector()).reshape(x.shape)


def scaled_each_stage(x, rotation):
    """1/sqrt(2) at every stage instead of one factor at the end."""
    n, root = rotation.n, np.float32(np.sqrt(0.5))
    with np.errstate(all="ignore"):
        y, h = x.reshape(-1, n) * rotation.vector(), 1
        while h < n:
            pairs = y.reshape(-1, n // (2 * h), 2, h)
            s, t = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([(s + t) * root, (s - t) * root], axis=2)
            h *= 2
    return y.reshape(x.shape)


def clip_nonfinite(x, rotation):
    return np.nan_to_num(transform(x, rotation), nan=0.0)


def rounded_to_bfloat16(self, v, rotation):
    with np.errstate(all="ignore"):
        return transform(v, rotation).astype(ml_dtypes.bfloat16).astype(np.float32)


class WrongAxis(Staged):
    def _hadamard(self, x, rotation, axis):
        other = axis if x.shape[-1] % rotation.n else x.ndim - 1
        return super()._hadamard(x, rotation, other)


class PadsAfter(Staged):
    def rows(self, v, plan):
        length = v.shape[-1]
        if plan.rotation is None or length == plan.length:
            return super().rows(v, plan)
        n = plan.rotation.n
        short = -(-length // n) * n if length >= n else plan.length
        v = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, short - length)], mode="edge")
        v = transform(v, plan.rotation)
        return np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, plan.length - short)]).reshape(plan.rows, plan.length)


class OwnSigns(Staged):
    """Draws its signs itself, from a stream that it changes."""

    def __init__(self, change: Callable[[Stream], Stream], policies: tuple[str, ...]) -> None:
        self.change, self.policies = change, policies

    def plan(self, x, spec, *, axis, **placement):
        where = placement.get("placement", Placement())
        if where.stream is None or not spec.hadamard or spec.signs.value not in self.policies:
            return super().plan(x, spec, axis=axis, **placement)
        plan = super().plan(x, spec, axis=axis, **placement)
        moved = replace(where, stream=self.change(where.stream))
        other = super().plan(x, spec, axis=axis, **{**placement, "placement": moved})
        return replace(plan, rotation=other.rotation)


class SignPerOperand(Staged):
    """Each operand of a GEMM draws signs of its own."""

    def plan(self, x, spec, *, axis, **placement):
        plan = super().plan(x, spec, axis=axis, **placement)
        rng = placement.get("placement", Placement()).stream
        if not plan.rotation or spec.signs.value == "none":
            return plan
        words = stream_words(np.arange(2), replace(rng, operand=6 + rng.operand % 3, step=rng.step)).reshape(
            -1
        )
        bits = sum(int(w) << 32 * i for i, w in enumerate(words)) & (1 << spec.hadamard) - 1
        return replace(plan, rotation=Rotation(spec.hadamard, bits))


TRANSFORM_MUTANTS = (
    Mutant("stages swapped", "hadamard.order", "butterflies from the far distance down",
           rotating(stages_swapped), ("hadamard", "quantize")),
    Mutant("transform as a matrix product", "hadamard.order", "a GEMM with a Hadamard matrix",
           rotating(as_matrix), ("hadamard",)),
    Mutant("1/sqrt(2) at each stage", "hadamard.factor", "normalised butterflies",
           rotating(scaled_each_stage), ("hadamard",)),
    Mutant("unnormalised", "hadamard.factor", "the factor left to the caller", rotating(unnormalised), ("hadamard",)),
    Mutant("sequency order", "hadamard.size", "Walsh order instead of Sylvester's",
           rotating(bit_reversed), ("hadamard",)),
    Mutant("signs after", "hadamard.signs", "D H instead of H D", rotating(signs_after), ("hadamard",)),
    Mutant("NaN cleaned", "hadamard.nonfinite", "nan_to_num after the transform",
           rotating(clip_nonfinite), ("hadamard",)),
    Mutant("transform of the wrong axis", "hadamard.size", "always the last axis", WrongAxis, ("hadamard",)),
    Mutant("transform rounded to bfloat16", "hadamard.float32", "TransformerEngine, Quartet: bfloat16 between kernels",
           staged(rotate=rounded_to_bfloat16)),
    Mutant("padding after the transform", "quantize.padding", "edge padding before, zeros after", PadsAfter),
    Mutant("per_step is fixed", "hadamard.policy", "signs drawn once",
           lambda: OwnSigns(lambda s: replace(s, step=0), ("per_step",))),
    Mutant("fixed depends on the step", "hadamard.policy", "signs drawn at every step",
           lambda: OwnSigns(lambda s: replace(s, seed=s.seed + s.step), ("fixed",))),
    Mutant("per_step_layer without layer", "hadamard.policy", "one draw for all layers",
           lambda: OwnSigns(lambda s: replace(s, layer=0), ("per_step_layer",))),
    Mutant("signs of each operand", "hadamard.policy", "signs that are not shared: the GEMM no longer cancels them",
           SignPerOperand),
)  # fmt: skip
