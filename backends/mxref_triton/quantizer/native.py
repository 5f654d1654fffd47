"""Compares the conversions of gfx950 with the reference on the device itself, before they are used.

The inputs are all 2^16 bfloat16 patterns, and float32 values on, beside and between the grid's points and midpoints,
each under divisors from 2^-127 to 2^126. If one bit differs, the conversions are refused.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from mxref.errors import BackendError, RecipeError
from mxref.formats import E2M1
from mxref.steps.rounding import Rounding, round_magnitude
from mxref_triton.lane.gfx950 import is_gfx950, nearest_word, stochastic_word
from mxref_triton.lane.registers import floats_of, load_words
from mxref_triton.launch import INTERPRETED, launch

Convert = Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.uint32]]
"""Words of eight codes from values [n, 8] times factors [n], which are powers of two."""

DIVISORS = (0, 1, 2, 3, 64, 100, 125, 126, 127, 128, 129, 154, 190, 226, 252, 253)
"""Exponent fields of the divisors: 127 is 1. They are scale codes, or a Hadamard norm above them."""

_GRID = np.array(E2M1.magnitudes)
_RANDOM_VALUES = 4096
_WORDS = 256


@triton.jit
def _convert(values, factors, random, out, words, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr):
    """Convert WORDS words of eight float32 each, given as bits."""
    i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = i < words
    bits = load_words(values, i * 8, mask, 8)
    factor = tl.load(factors + i, mask, 1.0)
    floats = floats_of(bits, 8, "float32")
    if STOCHASTIC:
        seeds = load_words(random, i * 4, mask, 4)
        word = stochastic_word(floats, factor, seeds)
    else:
        word = nearest_word(floats, factor)
    tl.store(out + i, word.to(tl.int32, bitcast=True), mask)


def launch_conversion(
    values: torch.Tensor, factors: torch.Tensor, random: torch.Tensor, out: torch.Tensor, stochastic: bool
) -> None:
    """Convert eight values at a time on the device that holds them.

    Args:
        values: bits of float32, int32 [n, 8].
        factors: float32 [n].
        random: int32 [n, 4], read if `stochastic`.
        out: words to write, int32 [n].
        stochastic: whether to round stochastically.
    """
    n = len(out)
    launch(
        _convert, (triton.cdiv(n, _WORDS),), values, factors, random, out, n, STOCHASTIC=stochastic, WORDS=_WORDS
    )  # fmt: skip


def on_device(device: torch.device, seed: int | None = None) -> Convert:
    """Return the conversions of a device: to nearest, or stochastic ones from a seed."""

    def convert(values: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.uint32]:
        n = len(values)
        random = np.zeros((n, 4), np.int32)
        if seed is not None:
            random = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (n, 4), np.int32)
        bits, scales, words = (
            torch.from_numpy(a).to(device) for a in (values.view(np.int32), factors, random)
        )
        out = torch.empty(n, dtype=torch.int32, device=device)
        launch_conversion(bits, scales, words, out, seed is not None)
        got: NDArray[np.int32] = out.cpu().numpy()
        return got.view(np.uint32)

    return convert


@dataclass(frozen=True)
class WrongConversion:
    """A value that was converted wrongly."""

    bits: int
    """Of the float32 value."""
    divisor: int
    """Exponent field of its divisor."""
    got: int
    """Code of four bits."""
    wanted: tuple[int, ...]
    """Correct codes."""

    def __str__(self) -> str:
        wanted = " or ".join(map(str, self.wanted))
        return f"{self.bits:#010x} / 2^{self.divisor - 127} became code {self.got}, not {wanted}"


@lru_cache(maxsize=1)
def _patterns() -> NDArray[np.float32]:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def _inputs() -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield a divisor's exponent field and values, a multiple of eight of them."""
    corners = np.concatenate([_GRID, (_GRID[1:] + _GRID[:-1]) / 2, [7, 7.9375, 8, 1e-3]]).astype(np.float32)
    near = np.concatenate([np.nextafter(corners, np.float32(s)) for s in (-np.inf, np.inf)] + [corners])
    between = np.random.default_rng(0).uniform(0, 8, _RANDOM_VALUES).astype(np.float32)
    scaled = np.concatenate([near, -near, between, -between])
    scaled = np.resize(scaled, -(-len(scaled) // 8) * 8)
    for divisor in DIVISORS:
        with np.errstate(over="ignore", under="ignore"):
            values = np.ldexp(scaled, divisor - 127)
        yield divisor, np.concatenate([_patterns(), values])


def first_difference(convert: Convert, stochastic: bool = False) -> WrongConversion | None:
    """Return the first value that is not converted to the reference's bits, or None.

    Args:
        convert: the conversions under test.
        stochastic: accept both neighbours on the grid of a value between two, as SR has to give.
    """
    for divisor, values in _inputs():
        factor = np.ldexp(np.float32(1), 127 - divisor)
        words = convert(values.reshape(-1, 8), np.full(len(values) // 8, factor, np.float32))
        got = (words[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(-1)
        # A block with NaN or Inf in it is not made of its elements' codes.
        finite = np.isfinite(values)
        wide = np.minimum(np.ldexp(np.abs(np.where(finite, values, 0)).astype(np.float64), 127 - divisor), 8)
        # A value below float32's range gets code 0 or, under SR, 0 or 1.
        magnitude = wide.astype(np.float32)
        sign = np.signbit(values).astype(np.uint8) << 3
        if stochastic:
            below = round_magnitude(magnitude, Rounding.RTZ, E2M1)
            above = np.minimum(below + (wide > _GRID[below]), 7).astype(np.uint8)
            wanted = np.stack([below | sign, above | sign])
        else:
            wanted = (round_magnitude(magnitude, Rounding.RNE, E2M1) | sign)[None]
        wrong = np.flatnonzero(finite & (got != wanted).all(0))
        if len(wrong):
            i = int(wrong[0])
            codes = tuple(sorted({int(code) for code in wanted[:, i]}))
            return WrongConversion(int(values[i : i + 1].view(np.uint32)[0]), divisor, int(got[i]), codes)
    return None


def native_roundings(conversions: str) -> tuple[frozenset[Rounding], str]:
    """Return the roundings for which the conversions of this GPU are used, and what to say about it.

    Args:
        conversions: `portable`, `native`, or `auto`, which is `native` on a gfx950 whose bits are the reference's.

    Raises:
        RecipeError: another name. BackendError: `native` on another GPU, or on a gfx950 with other bits.
    """
    if conversions not in ("auto", "native", "portable"):
        raise RecipeError(f"conversions = {conversions!r} is not one of auto, native, portable")
    gpu = torch.device("cuda")
    if conversions == "portable" or INTERPRETED or not is_gfx950(gpu):
        if conversions == "native":
            raise BackendError("conversions = 'native' needs a gfx950 GPU, and this is none; take 'auto'")
        return frozenset(), "portable conversions"
    if (wrong := first_difference(on_device(gpu))) is None:
        return frozenset(
            {Rounding.RNE}
        ), "gfx950's conversions for RNE, which gave the reference's bits at start-up"
    if conversions == "native":
        raise BackendError(
            f"the conversions of this gfx950 differ from the reference: {wrong}; take 'portable'"
        )
    return frozenset(), f"portable conversions: those of this gfx950 are not the reference's, {wrong}"
