"""Drafts of golden vectors of a block format: every operation that takes one, its grid and its rules' turns as data.

The default format has files by chapter, older and longer; a file of this module holds another format whole, under
scales that are powers of two. Those with a mantissa have `nearest`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from golden.draft import (
    FLT_MAX,
    INFINITIES,
    NANS,
    NEAREST_AND_DOWN,
    RULES,
    SIGN,
    Words,
    around,
    bits_of,
    draft,
    hex64,
    mixed,
    quantization,
    stream_inputs,
    window,
)
from golden.products import dequantize, products
from mxref.formats import BLOCK_FORMATS, MXFP4_E1M2, MXFP8_E4M3, MXFP8_E5M2, MXINT8, BlockFormat
from mxref.steps.random import Stream, random_integers
from mxref.steps.rounding import MAX_SR_BITS
from mxref.steps.scale import MANTISSA_BITS, MANTISSA_MASK, ScaleRule, bump_above
from mxref.vectors import DEFAULT, Record, RecordOp
from mxref.vectors.data import code_digits, digits_text, input_words, words_text

_EXPONENTS_PER_RECORD = 12
_STREAM = Stream(0x0123456789ABCDEF, 7, 3, 2)


def drafts(made: BlockFormat) -> Iterator[Record]:
    """Yield the drafts of the file of a block format."""
    yield from _scales(made)
    yield from _special_blocks(made)
    yield from _rounding(made)
    yield from _stochastic(made)
    yield from _whole(made)
    yield from dequantize(made)
    yield from products(made, made)
    yield from packing(made)
    for other in _older(made):
        if (other.k, other.scale) == (made.k, made.scale):
            yield from products(made, other)
            if other.name == DEFAULT:  # whose own files are older
                yield from products(other, made)


def _older(made: BlockFormat) -> list[BlockFormat]:
    """Return the formats listed before this one: a new format leaves the files of older ones as they are."""
    formats = list(BLOCK_FORMATS.values())
    older = formats[: formats.index(made)]
    if made is MXFP8_E4M3:
        return [*older, MXFP8_E5M2]  # these two came together
    if made is MXFP4_E1M2:
        return [each for each in older if each is not MXINT8]  # listed before it, and newer
    return [*older, MXFP4_E1M2] if made is MXINT8 else older


def packing(made: BlockFormat) -> Iterator[Record]:
    """Every code, and bytes of any bits, where a code is no byte."""
    bits = made.element.bits
    if bits == 8:
        return
    clauses = ["packing.nibbles" if bits == 4 else "packing.sixes"]
    words = input_words(3, 0, 24)
    yield draft(
        RecordOp.PACK, f"{made.name}.pack", clauses, "every code, the first in the lowest bits", format=made.name,
        codes=digits_text(range(1 << bits), code_digits(made)),
    )  # fmt: skip
    yield draft(
        RecordOp.UNPACK, f"{made.name}.unpack", clauses, "drawn bytes", format=made.name,
        packed=digits_text(words & np.uint32(255), 2),
    )  # fmt: skip


def format_quantization(
    made: BlockFormat, id: str, clauses: list[str], note: str, words: Words | None, **inputs: Any
) -> Record:
    return quantization(f"{made.name}.{id}", clauses, note, words, format=made.name, **inputs)


def _scales(made: BlockFormat) -> Iterator[Record]:
    """Amax at the turns of every rule, at every eighth exponent and at the ends."""
    rceil, even = (bump_above(rule, made.element) for rule in (ScaleRule.RCEIL, ScaleRule.EVEN))
    turns = sorted({0, 1, max(rceil - 1, 0), rceil, rceil + 1, even, even + 1, MANTISSA_MASK})
    exponents = sorted({*range(20), *range(20, 255, 8), *range(120, 140), 252, 253, 254})
    for start in range(0, len(exponents), _EXPONENTS_PER_RECORD):
        held = exponents[start : start + _EXPONENTS_PER_RECORD]
        amax = np.array([e << MANTISSA_BITS | m for e in held for m in turns if e or m], np.uint32)
        for rule in RULES:
            clauses = [f"scale.rule.{rule}", "scale.amax", *(["scale.clamp"] if held[0] < 20 else [])]
            yield draft(
                RecordOp.SCALE, f"{made.name}.scale.{rule}.{held[0]:03}", clauses,
                f"exponent fields {held[0]} to {held[-1]} at the turns of the rules", rule=rule,
                format=made.name, amax=words_text(amax),
            )  # fmt: skip


def _special_blocks(made: BlockFormat) -> Iterator[Record]:
    k = made.k
    normal = window(1, 122, k)
    for name, words in (("plus", np.zeros(k, np.uint32)), ("minus", np.full(k, SIGN, np.uint32))):
        for code in (0, 127):
            yield format_quantization(
                made, f"zero.{name}.{code}", ["scale.zero", "rounding.sign"], "an all-zero block", words,
                zero_scale=code or None,
            )  # fmt: skip
    for at, word in zip((0, 13, k - 1, 5), (*NANS[:2], *INFINITIES), strict=True):
        spoiled = normal.copy()
        spoiled[at] = word
        words = np.concatenate([normal, spoiled, np.full(k, FLT_MAX, np.uint32)])
        yield format_quantization(
            made, f"nonfinite.{word:08x}", ["scale.nonfinite", "conventions.inputs"],
            "one NaN or Inf spoils its whole block and no other, and makes no special code", words,
        )  # fmt: skip
        yield format_quantization(
            made, f"nonfinite.{word:08x}.raise", ["scale.nonfinite"], "refused where the policy says so",
            words[: 2 * k], nonfinite="raise",
        )  # fmt: skip
    under = np.array([SIGN | 1 << at % 23 for at in range(k - 1)] + [0x3F800000], np.uint32)
    yield format_quantization(
        made, "underflow", ["rounding.sign"], "negative underflow keeps its sign", under
    )


def _rounding(made: BlockFormat) -> Iterator[Record]:
    """Every tie and its neighbours, saturation, and where the prescale meets a tie."""
    element = made.element
    grid = np.array(element.magnitudes)
    ties = (grid[:-1] + grid[1:]) / 2
    last = 127 - element.max_exponent
    for e, mode in product((-127, 0, last), NEAREST_AND_DOWN):
        if mode != "rne" and e:
            continue
        words = blocks_of(made, around(scaled(ties, e), 1), element.max_value, e, 3)
        yield format_quantization(
            made, f"ties.{mode}.x{e:+04}", [f"rounding.{mode}", "rounding.scaled"],
            f"every tie and its neighbours at X = 2^{e}", words, rounding=mode,
        )  # fmt: skip
    for e, mode in ((-127, "rne"), (0, "rne"), (0, "rna"), (last, "rtz")):
        undone = around(scaled(ties / element.prescale, e), 1)
        yield format_quantization(
            made, f"prescale.{mode}.x{e:+04}", ["rounding.prescale"], f"where the prescale meets a tie, at X = 2^{e}",
            blocks_of(made, undone, element.max_value, e, 4), rounding=mode, prescale=True,
        )  # fmt: skip
    turn = 2.0 ** (element.max_exponent + 1)
    step = element.max_value - element.magnitudes[-2]
    marks = [ties[-1], element.max_value, element.max_value + step / 2, (element.max_value + turn) / 2]
    above = around(bits_of(sorted({*marks, (element.max_value + 3 * turn) / 4})), 2)
    words = blocks_of(made, np.append(above, bits_of([turn]) - np.uint32(1)), element.max_value, 0, 5)
    for rule, mode in product(RULES, NEAREST_AND_DOWN):
        yield format_quantization(
            made, f"saturate.{rule}.{mode}", ["rounding.saturate"], "between M and 2^(emax + 1)", words,
            rule=rule, rounding=mode,
        )  # fmt: skip


def scaled(values: Any, exponent: int) -> Words:
    """Return the float32 bits of values times 2^exponent, rounded where float32 has too few bits."""
    bits: Words = np.ldexp(values, exponent).astype(np.float32).view(np.uint32)
    return bits


def blocks_of(made: BlockFormat, words: Words, largest: float, exponent: int, seed: int) -> Words:
    """Return words in blocks whose amax is `largest` times 2^exponent or more, in another order and with signs."""
    per_block = made.k - 1
    count = -(-words.size // per_block)
    top = scaled([largest], exponent)[0]
    padded = np.concatenate([words, np.full(count * per_block - words.size, top, np.uint32)])
    blocks = [np.append(part, top) for part in padded.reshape(count, per_block)]
    return np.concatenate([mixed(block, seed + at) for at, block in enumerate(blocks)])


def _stochastic(made: BlockFormat) -> Iterator[Record]:
    """Elements that SR rounds up at the least, and the same one unit in the last place below."""
    element, k = made.element, made.k
    grid = np.array(element.magnitudes)
    points = grid[(grid > 0) & (grid <= 2.0**element.max_exponent)]
    for bits in dict.fromkeys((1, 8, 16, 17, min(MANTISSA_BITS - element.precision, MAX_SR_BITS))):
        integers = random_integers(np.arange(2, dtype=np.int64), 0, 2 * k, 2 * k, _STREAM, bits)
        gap = np.arange(2 * k) * 5 % (len(points) - 1)
        at = points[gap] + np.diff(points)[gap] * np.ldexp((1 << bits) - integers.astype(np.float64), -bits)
        up = bits_of(at.reshape(-1)).reshape(at.shape)
        for name, words in (("up", up), ("down", up - np.uint32(1))):
            words = words.copy()
            words[:, ::k] = bits_of([2.0**element.max_exponent])
            yield format_quantization(
                made, f"sr.{bits:02}.{name}", ["rounding.sr", "random.elements"], "the thresholds of SR at X = 1",
                words.reshape(-1), rounding="sr", sr_bits=bits if bits != 16 else None, shape=[2, 2 * k],
                **stream_inputs(_STREAM),
            )  # fmt: skip
    yield format_quantization(
        made, "sr.prescale", ["rounding.prescale", "rounding.sr"], "SR of prescaled elements",
        window(23, 121, 4 * k), rounding="sr", prescale=True, shape=[2, 2 * k], **stream_inputs(_STREAM),
    )  # fmt: skip


def _whole(made: BlockFormat) -> Iterator[Record]:
    """Axes, padding, tiles, narrow inputs, transforms, and digests of larger tensors."""
    k = made.k
    for rule, mode in product(RULES, NEAREST_AND_DOWN):
        yield format_quantization(
            made, f"drawn.{rule}.{mode}", [f"rounding.{mode}", "rounding.scaled"], "every rule with every rounding",
            np.concatenate([window(21, 121, k), window(22, 1, k)]), rule=rule, rounding=mode,
        )  # fmt: skip
    for name, shape, axis, pad in (("axis0", [2 * k, 3], 0, None), ("pad", [3, k + 1], 1, True)):
        clauses = ["quantize.axis", *(["quantize.padding"] if pad else [])]
        yield format_quantization(
            made, f"place.{name}", clauses, "the block axis is stored last",
            window(31, 120, int(np.prod(shape))), shape=shape, axis=axis, pad=pad,
        )  # fmt: skip
    tile = window(17, 119, k * 2 * k)
    yield format_quantization(
        made, "tile.rceil", ["scale.block.tile", "scale.amax"], "one byte for a tile, stored in each row",
        tile, rule="rceil", block=made.tile, shape=[k, 2 * k],
    )  # fmt: skip
    yield format_quantization(
        made, "rht064", ["linear.rotation"], "random signs and a transform before the scale", window(53, 121, 128),
        rule="rceil", hadamard=64, signs="per_step_layer", shape=[2, 64], **stream_inputs(_STREAM),
    )  # fmt: skip
    large: list[tuple[str, str, dict[str, Any]]] = [
        ("rceil", "rne", {"shape": [9, 5 * k]}), ("even", "rna", {"shape": [5 * k, 9], "axis": 0}),
        ("floor", "sr", {"shape": [9, 5 * k], **stream_inputs(_STREAM)}),
        *((rule, "rtz", {"shape": [2 * k, 3 * k], "block": made.tile}) for rule in RULES),
    ]  # fmt: skip
    for number, (rule, mode, where) in enumerate(large):
        yield format_quantization(
            made, f"digest.{rule}.{mode}", [], "a tensor made from a seed", None, rule=rule, rounding=mode,
            x_rule="ladder", x_seed=hex64(number), **where,
        )  # fmt: skip
