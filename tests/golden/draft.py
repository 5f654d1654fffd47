"""Drafts of golden vectors, that is, records without results, and the float32 words that they are made of.

Words are chosen one by one or drawn from Philox, never from a library's generator, which may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.formats import MXFP4
from mxref.steps.random import Stream, random_integers
from mxref.steps.scale import EXPONENT_RULES
from mxref.vectors import KEYS, Record, RecordOp, Source
from mxref.vectors.data import InputRule, digits_text, generated_bits, input_words, words_text

Words = NDArray[np.uint32]

SIGN = 0x80000000
FLT_MAX = 0x7F7FFFFF
INFINITIES = (0x7F800000, 0xFF800000)
NANS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001)
RULES = tuple(rule.value for rule in EXPONENT_RULES)
NEAREST_AND_DOWN = ("rne", "rna", "rtz")
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TURNS = (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x7FFFFF)
"""Mantissas of a power of two and of the turns of the scale rules, each with its neighbours."""


def draft(
    op: RecordOp,
    id: str,
    clauses: Iterable[str],
    note: str,
    *,
    source: Source = Source.ORACLE,
    expected: dict[str, str] | None = None,
    **inputs: Any,
) -> Record:
    """Return a record whose inputs stand in the order of its operation's keys; inputs that are None are left out."""
    keys = KEYS[op]
    order = [*keys.required, *keys.optional, *(name for names in keys.data for name in names.split("|"))]
    ordered = {key: inputs[key] for key in dict.fromkeys(order) if inputs.get(key) is not None}
    assert len(ordered) == sum(v is not None for v in inputs.values()), f"{id}: {set(inputs) - set(order)}"
    return Record(id, op, tuple(dict.fromkeys(clauses)), source, note, ordered, expected or {})


def quantization(
    id: str,
    clauses: Iterable[str],
    note: str,
    words: Words | None = None,
    *,
    rule: str = "floor",
    rounding: str = "rne",
    **inputs: Any,
) -> Record:
    """Return a draft of op quantize: `clauses`, then those that its treatment names."""
    names = [*clauses, f"scale.rule.{rule}", f"rounding.{rounding}"]
    if rounding == "sr":
        names += ["random.elements", "random.stream"]
    if inputs.get("prescale"):
        names.append("rounding.prescale")
    if inputs.get("hadamard"):
        names += ["hadamard.size", "hadamard.order", "hadamard.factor", "quantize.order"]
    if inputs.get("signs"):
        names += ["hadamard.signs", "hadamard.policy"]
    if inputs.get("block"):
        names.append("scale.block.tile")
    x = None if words is None else words_text(words)
    return draft(RecordOp.QUANTIZE, id, names, note, rule=rule, rounding=rounding, x=x, **inputs)


def hex64(value: int) -> str:
    """Return a seed as 16 hex digits."""
    return f"{value:016x}"


def stream_inputs(stream: Stream) -> dict[str, Any]:
    """Return a stream as the four keys of a record."""
    return {
        "seed": hex64(stream.seed),
        "step": stream.step,
        "layer": stream.layer,
        "operand": stream.operand,
    }


def bits_of(values: Sequence[float] | NDArray[np.float64], exponent: int = 0) -> Words:
    """Return the float32 bits of values times 2^exponent; the drafts choose values for which this is exact."""
    scaled = np.ldexp(np.asarray(values, np.float64), exponent)
    narrow = scaled.astype(np.float32)
    assert np.array_equal(narrow.astype(np.float64), scaled)
    return narrow.view(np.uint32)


def around(bits: Words, distance: int) -> Words:
    """Return positive words with all their neighbours up to `distance` units in the last place away."""
    steps = np.arange(-distance, distance + 1)
    near = bits.astype(np.int64)[:, None] + steps
    out: Words = np.clip(near, 0, FLT_MAX).astype(np.uint32).reshape(-1)
    return out


def mixed(words: Words, seed: int) -> Words:
    """Return the words in another order and with signs, both drawn from `seed`."""
    order = np.argsort(input_words(seed, 1, words.size), kind="stable")
    signs = input_words(seed, 2, words.size) & np.uint32(SIGN)
    out: Words = words[order] | signs
    return out


def window(seed: int, base: int, count: int) -> Words:
    """Return `count` words of random signs and mantissas, in the eight binades from exponent field `base` up."""
    return generated_bits(InputRule.WINDOW, base, seed, count)


def row(fill: int, *placed: tuple[int, int]) -> Words:
    """Return a block of `fill` with other words at given positions."""
    words = np.full(MXFP4.k, fill, np.uint32)
    for at, word in placed:
        words[at] = word
    return words


def thresholds(
    stream: Stream, bits: int, rows: Sequence[int], first: int, count: int, length: int
) -> tuple[Words, Words]:
    """Return rows whose every element is the least that SR rounds up, and the same one unit in the last place below.

    Element i lies in gap i mod 7 of the grid, at the scale 1 that FLOOR gives any row with an element in [4, 8),
    so a single wrong bit of a random integer, or of the fraction, changes a code.

    Returns:
        Two arrays of words [len(rows), count]. Each is to be quantized at the place that it was made for.
    """
    integers = random_integers(np.array(rows, np.int64), first, count, length, stream, bits)
    gap = np.arange(count) % (len(GRID) - 1)
    low = np.array(GRID)[gap]
    width = np.diff(GRID)[gap]
    at = low + width * np.ldexp((1 << bits) - integers.astype(np.float64), -bits)
    up = bits_of(at).reshape(at.shape)
    # A threshold above a grid point by a whole gap (r = 0) leaves nothing to step below but that point.
    return up, up - np.uint32(1)


def codes_block(*placed: tuple[int, int]) -> str:
    """Return the code digits of a block of zeros with other codes at given positions."""
    codes = [0] * MXFP4.k
    for at, code in placed:
        codes[at] = code
    return digits_text(codes, 1)


def float_halves(dtype: str, seed: int, count: int) -> Words:
    """Return float32 words that bfloat16 or float16 holds exactly: blocks of normals, then one of subnormals."""
    words = input_words(seed, 0, count)
    signs, low = words & np.uint32(SIGN), words >> np.uint32(8) & np.uint32(0x7FFF)
    if dtype == "bfloat16":
        high = np.where(np.arange(count) < count - MXFP4.k, 0x3E00 + (low & 0x1FF), low & 0x7F)
        return signs | high.astype(np.uint32) << np.uint32(16)
    halves = np.where(np.arange(count) < count - MXFP4.k, 0x3000 + (low & 0x1FFF), low & 0x3FF)
    exact: Words = halves.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    return signs | exact
