"""Faults of stochastic rounding: random bits of another element, step, layer or shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mutants.mutant import Mutant
from mutants.staged import GRID, Staged, staged
from mxref import Rounding
from mxref.steps.random import random_integers


def sr_with(compare: Callable[[Any, Any, int], Any]):
    def round_(self, v, spec, random):
        if spec.rounding is not Rounding.SR:
            return Staged.round(self, v, spec, random)
        lower = np.minimum(np.searchsorted(GRID, v, side="right") - 1, 6)
        f = np.minimum((v.astype(np.float64) - GRID[lower]) / np.diff(GRID)[lower], 1)
        up = np.where(v >= 6, True, compare(f, random.astype(np.int64), spec.sr_bits))
        return lower + up

    return round_


def shared_random(self, plan):
    r = random_integers(
        plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, plan.spec.sr_bits
    )
    return np.repeat(r[:, ::4], 4, axis=1)


def low_bits(self, plan):
    bits = plan.spec.sr_bits
    full = 16 if bits <= 16 else 22
    return np.asarray(
        random_integers(plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, full)
    ) & ((1 << bits) - 1)


def halves_swapped(self, plan):
    r = Staged.integers(self, plan)
    return r.reshape(len(r), -1, 2)[:, :, ::-1].reshape(r.shape) if plan.spec.sr_bits <= 16 else r


def stream_without(**fields: int):
    def stream(self, plan):
        return replace(plan.stream, **fields)

    return stream


def seed_low_word(self, plan):
    return replace(plan.stream, seed=plan.stream.seed & 0xFFFFFFFF)


def local_rows(self, plan):
    return np.arange(plan.rows, dtype=np.int64)


def local_integers(self, plan):
    return random_integers(plan.global_rows(), 0, plan.length, plan.length, plan.stream, plan.spec.sr_bits)


def unpadded_length(self, plan):
    length = -(-plan.global_shape[plan.axis] // 8) * 8
    return random_integers(
        plan.global_rows(), plan.first, plan.length, length, plan.stream, plan.spec.sr_bits
    )


def rows_in_32_bits(self, plan):
    return plan.global_rows() & 0x0FFFFFFF


def launch_counter():
    """Random bits that depend on how often the kernel ran."""
    calls = iter(range(1 << 30))

    def stream(self, plan):
        return replace(plan.stream, step=next(calls) % 2)

    return staged(stream=stream)()


RANDOM_MUTANTS = (
    Mutant("launch counter", "conformance.protocol", "Primus-Turbo: a hash of the launch counter",
           launch_counter, first=False),
    Mutant("one word for four values", "random.elements", "Primus-Turbo reuses one hash word for 4 values",
           staged(integers=shared_random), first=False),
    Mutant("halves swapped", "random.elements", "the word's two halves in the other order",
           staged(integers=halves_swapped)),
    Mutant("low bits of the half", "random.elements", "r & mask instead of r >> (16 - R)", staged(integers=low_bits)),
    Mutant("seed ignored", "random.counter", "Primus-Turbo 365, Quartet: not the user's seed",
           staged(stream=stream_without(seed=0))),
    Mutant("seed cut to 32 bits", "random.counter", "a kernel argument of 32 bits", staged(stream=seed_low_word)),
    Mutant("32-bit row index", "random.counter", "int32 offsets", staged(rows_index=rows_in_32_bits)),
    Mutant("step ignored", "random.stream", "the same noise at every step", staged(stream=stream_without(step=0))),
    Mutant("layer ignored", "random.stream", "the same noise in every layer", staged(stream=stream_without(layer=0))),
    Mutant("operand ignored", "random.stream", "TransformerEngine until 2487: row and column share noise",
           staged(stream=stream_without(operand=0))),
    Mutant("local rows", "random.index", "counted over the shard", staged(rows_index=local_rows), first=False),
    Mutant("local columns", "random.index", "counted over the shard's block axis",
           staged(integers=local_integers), first=False),
    Mutant("unpadded length", "random.index", "row stride without the padding", staged(integers=unpadded_length)),
    Mutant("SR up when above", "rounding.sr", "T + r > 2^R",
           staged(round=sr_with(lambda f, r, R: np.floor(np.ldexp(f, R)) + r > 1 << R))),
    Mutant("SR without floor", "rounding.sr", "fraction added unrounded, then rounded to nearest",
           staged(round=sr_with(lambda f, r, R: np.rint(np.ldexp(f, R)) + r >= 1 << R))),
    Mutant("SR never up", "random.philox", "TransformerEngine 3281 on sm_120",
           staged(round=sr_with(lambda f, r, R: f >= 1))),
)  # fmt: skip
