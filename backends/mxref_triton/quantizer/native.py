"""Compares each conversion of gfx950 with the reference on the device itself, before it is used.

The inputs are all 2^16 bfloat16 patterns, and float32 values on, beside and between the grid's points and midpoints,
each under divisors from 2^-127 to 2^126. If one bit differs, the conversion is refused.
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
from mxref.formats import E2M1, ElementFormat
from mxref.layouts.packed import unpack
from mxref.steps.rounding import Rounding, round_magnitude
from mxref_triton.lane.gfx950 import (
    NEAREST,
    Conversion,
    is_gfx950,
    library,
    nearest_word,
    nearest_words_of_block,
    stochastic_word,
)
from mxref_triton.lane.registers import floats_of, load_words, store_unit
from mxref_triton.launch import INTERPRETED, launch

Convert = Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.uint32]]
"""Words of packed codes [n, words] from values [n, together] times factors [n], which are powers of two."""

DIVISORS = (0, 1, 2, 3, 64, 100, 125, 126, 127, 128, 129, 154, 190, 226, 252, 253)
"""Exponent fields of the divisors: 127 is 1. They are scale codes, or a Hadamard norm above them."""

_RANDOM_VALUES = 4096
_GROUPS = 256


@triton.jit
def _convert(
    values, factors, random, out, groups, E: tl.constexpr, STOCHASTIC: tl.constexpr, GROUPS: tl.constexpr
):
    """Convert GROUPS groups of float32, given as bits, to E: eight each, or 32 for six bits."""
    TOGETHER: tl.constexpr = 8 if E.bits == 4 else 32
    i = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    mask = i < groups
    bits = load_words(values, i * TOGETHER, mask, TOGETHER)
    factor = tl.load(factors + i, mask, 1.0)
    floats = floats_of(bits, TOGETHER, "float32")
    if STOCHASTIC:
        seeds = load_words(random, i * 4, mask, 4)
        words = (stochastic_word(floats, factor, seeds),)
    elif TOGETHER == 8:
        words = (nearest_word(floats, factor),)
    else:
        words = nearest_words_of_block(floats, factor, tl.full(factor.shape, 0xFFFFFFFF, tl.uint32), E)
    store_unit(out, i * len(words), mask, words, len(words), 1)


def launch_conversion(
    values: torch.Tensor, factors: torch.Tensor, random: torch.Tensor, out: torch.Tensor, made: Conversion
) -> None:
    """Convert a group of values at a time on the device that holds them.

    Args:
        values: bits of float32, int32 [n, together]; see `together`.
        factors: float32 [n].
        random: int32 [n, 4], read if the conversion is stochastic.
        out: words to write, int32 [n, words].
        made: the conversion.
    """
    element, rounding = made
    n = len(out)
    launch(
        _convert, (triton.cdiv(n, _GROUPS),), values, factors, random, out, n,
        E=element, STOCHASTIC=rounding is Rounding.SR, GROUPS=_GROUPS,
        **({} if element is E2M1 else library()),
    )  # fmt: skip


def together(element: ElementFormat) -> int:
    """Return how many values fill whole words by one conversion or a few."""
    return 8 if element is E2M1 else 32


def on_device(device: torch.device, made: Conversion, seed: int = 0) -> Convert:
    """Return a conversion of a device; `seed` is that of a stochastic one."""
    element, rounding = made

    def convert(values: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.uint32]:
        n = len(values)
        random = np.zeros((n, 4), np.int32)
        if rounding is Rounding.SR:
            random = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (n, 4), np.int32)
        bits, scales, words = (
            torch.from_numpy(a).to(device) for a in (values.view(np.int32), factors, random)
        )
        out = torch.empty((n, values.shape[1] * element.bits // 32), dtype=torch.int32, device=device)
        launch_conversion(bits, scales, words, out, made)
        got: NDArray[np.int32] = out.cpu().numpy()
        return got.view(np.uint32)

    return convert


@dataclass(frozen=True)
class WrongConversion:
    """A value that was converted wrongly."""

    element: ElementFormat
    bits: int
    """Of the float32 value."""
    divisor: int
    """Exponent field of its divisor."""
    got: int
    """A code of the element."""
    wanted: tuple[int, ...]
    """Correct codes."""

    def __str__(self) -> str:
        wanted = " or ".join(map(str, self.wanted))
        return f"{self.bits:#010x} / 2^{self.divisor - 127} became code {self.got} of {self.element.name}, not {wanted}"


@lru_cache(maxsize=1)
def _patterns() -> NDArray[np.float32]:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def _inputs(element: ElementFormat) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield a divisor's exponent field and values, a multiple of 32 of them."""
    grid, beyond = np.array(element.magnitudes), _beyond(element)
    ends = [beyond * 7 / 8, beyond * 127 / 128, beyond, 1e-3]
    corners = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, ends]).astype(np.float32)
    near = np.concatenate([np.nextafter(corners, np.float32(s)) for s in (-np.inf, np.inf)] + [corners])
    between = np.random.default_rng(0).uniform(0, beyond, _RANDOM_VALUES).astype(np.float32)
    scaled = np.concatenate([near, -near, between, -between])
    scaled = np.resize(scaled, -(-len(scaled) // 32) * 32)
    for divisor in DIVISORS:
        with np.errstate(over="ignore", under="ignore"):
            values = np.ldexp(scaled, divisor - 127)
        yield divisor, np.concatenate([_patterns(), values])


def _beyond(element: ElementFormat) -> float:
    """Return the power of two above the largest magnitude."""
    return float(2.0 ** (element.max_exponent + 1))


def first_difference(convert: Convert, made: Conversion) -> WrongConversion | None:
    """Return the first value that is not converted to the reference's bits, or None.

    Args:
        convert: the conversion under test.
        made: which it is; SR has to give one of the neighbours on the grid of a value between two.
    """
    element, rounding = made
    for divisor, values in _inputs(element):
        factor = np.ldexp(np.float32(1), 127 - divisor)
        groups = values.reshape(-1, together(element))
        words = convert(groups, np.full(len(groups), factor, np.float32))
        got = unpack(words.view(np.uint8), element).reshape(-1)
        # A block with NaN or Inf in it is not made of its elements' codes.
        finite = np.isfinite(values)
        sizes = np.abs(np.where(finite, values, 0)).astype(np.float64)
        wide = np.minimum(np.ldexp(sizes, 127 - divisor), _beyond(element))
        # A value below float32's range gets code 0 or, under SR, 0 or 1.
        magnitude = wide.astype(np.float32)
        sign = np.signbit(values).astype(np.uint8) << (element.bits - 1)
        if rounding is Rounding.SR:
            below = round_magnitude(magnitude, Rounding.RTZ, element)
            inexact = wide > np.array(element.magnitudes)[below]
            above = np.minimum(below + inexact, element.max_code).astype(np.uint8)
            wanted = np.stack([below | sign, above | sign])
        else:
            wanted = (round_magnitude(magnitude, Rounding.RNE, element) | sign)[None]
        wrong = np.flatnonzero(finite & (got != wanted).all(0))
        if len(wrong):
            i = int(wrong[0])
            codes = tuple(sorted({int(code) for code in wanted[:, i]}))
            bits = int(values[i : i + 1].view(np.uint32)[0])
            return WrongConversion(element, bits, divisor, int(got[i]), codes)
    return None


def native_conversions(conversions: str) -> tuple[frozenset[Conversion], str]:
    """Return which conversions of this GPU are used, and what to say about it.

    Args:
        conversions: `portable`, `native`, or `auto`, which on a gfx950 takes those whose bits are the reference's.

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
    found = {made: first_difference(on_device(gpu, made), made) for made in NEAREST}
    right = frozenset(made for made, wrong in found.items() if wrong is None)
    differences = "; ".join(str(wrong) for wrong in found.values() if wrong is not None)
    if differences and conversions == "native":
        raise BackendError(
            f"the conversions of this gfx950 differ from the reference: {differences}; take 'portable'"
        )
    if not right:
        return right, f"portable conversions: those of this gfx950 are not the reference's, {differences}"
    said = "gfx950's conversions for RNE, which gave the reference's bits at start-up"
    if differences:
        names = ", ".join(made[0].name for made in found if made in right)
        said += f", to {names} only: {differences}"
    return right, said
