"""Drafts of golden vectors of a block format under scales with a mantissa, with or without a scale of the tensor.

The turns are those of two divisions: amax by the largest element and the tensor's scale, and an element by both scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.draft import (
    FLT_MAX,
    INFINITIES,
    NANS,
    NEAREST_AND_DOWN,
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
from golden.formats import blocks_of, packing, scaled
from golden.products import dequantize, products
from mxref.dialects import dialects_of
from mxref.formats import BlockFormat
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.quotient import Arithmetic
from mxref.steps.random import Stream, random_integers
from mxref.vectors import Record, RecordOp
from mxref.vectors.data import words_text

_STREAM = Stream(0x0123456789ABCDEF, 7, 3, 2)
_RULE = "nearest"


def drafts(made: BlockFormat) -> Iterator[Record]:
    """Yield the drafts of the file of a block format."""
    yield from _scales(made)
    yield from _special_blocks(made)
    yield from _rounding(made)
    yield from _stochastic(made)
    yield from _whole(made)
    if made.tensor_scale:
        yield from _orders(made)
        yield from _four_over_six(made)
    yield from dequantize(made)
    yield from products(made, made)
    yield from packing(made)


def _quantization(
    made: BlockFormat,
    id: str,
    clauses: list[str],
    note: str,
    words: Words | None,
    amax: int | None = None,
    **inputs: Any,
) -> Record:
    """Return a draft of op quantize; `amax` is the tensor's, None for that of the words."""
    named = [*clauses, *_tensor_clauses(made, amax)]
    word = None if amax is None else words_text([amax])
    return quantization(
        f"{made.name}.{id}", named, note, words, format=made.name, rule=_RULE, tensor_amax=word, **inputs
    )


def _tensor_clauses(made: BlockFormat, amax: int | None) -> list[str]:
    """Return the clauses of the tensor's scale that a draft asks for; none for a format without one."""
    return ["scale.tensor"] * made.tensor_scale + ["scale.tensor.amax"] * (amax is not None)


def _unit(made: BlockFormat) -> int:
    """Return the amax of a tensor whose scale is 1."""
    return int(bits_of([made.element.max_value * made.scale.max_value])[0])


def _given(made: BlockFormat, *amaxes: int) -> list[int | None]:
    """Return amaxes of tensors; None alone for a format without a scale of the tensor."""
    return list(amaxes) if made.tensor_scale else [None]


def _named(amax: int | None) -> str:
    """Return the name of an amax in the id of a record."""
    return "one" if amax is None else f"{amax:08x}"


def _amaxes(made: BlockFormat) -> list[int | None]:
    """Return amaxes of tensors: of a scale of 1, of powers of two and others, and at both ends."""
    unit = _unit(made)
    others = (0x3F800000, 0x43820000, 0x42F6E979, FLT_MAX, 0x00A80000, 5000, 1)
    return _given(made, unit, unit - (100 << 23), *others)


def _tensor_scale(made: BlockFormat, amax: int | None) -> float:
    """Return the scale of a tensor, which only chooses inputs here."""
    if amax is None:
        return 1.0
    number = float(np.array([amax], np.uint32).view(np.float32)[0])
    narrow = np.float32(number / (made.element.max_value * made.scale.max_value))
    return float(max(narrow, np.float32(2.0**-149)))


def _scales(made: BlockFormat) -> Iterator[Record]:
    """Amax where the quotient lies between two scales, under tensors of several amaxes; then scales of tensors."""
    numbers = np.array(made.scale.values[: made.scale.nan_code])
    between = np.concatenate([(numbers[:-1] + numbers[1:]) / 2, [made.scale.max_value]])
    for amax in _amaxes(made):
        turns = around(scaled(between * made.element.max_value * _tensor_scale(made, amax), 0), 1)
        beyond = np.array([1, amax or FLT_MAX, FLT_MAX], np.uint32)
        words = np.unique(np.concatenate([turns, beyond]))
        yield draft(
            RecordOp.SCALE, f"{made.name}.scale.{_named(amax)}",
            [f"scale.rule.{_RULE}", *_tensor_clauses(made, amax), "scale.amax", "formats.scale"],
            "between every two scales, with both neighbours", rule=_RULE, format=made.name,
            tensor_amax=None if amax is None else words_text([amax]), amax=words_text(words[words > 0]),
        )  # fmt: skip
    for seed, base in enumerate((0, 1, 20, 60, 100, 119, 127, 140, 180, 230, 247)):
        yield draft(
            RecordOp.SCALE, f"{made.name}.scale.own.{base:03}",
            [f"scale.rule.{_RULE}", *_tensor_clauses(made, None)],
            "the tensor's own amax", rule=_RULE, format=made.name,
            amax=words_text(window(80 + seed, base, 64) & np.uint32(0x7FFFFFFF)),
        )  # fmt: skip
    if not made.tensor_scale:
        return
    steps = int(made.element.max_value * made.scale.max_value)
    small = sorted({1, steps // 2, steps // 2 + 1, steps, 3 * steps // 2, 3 * steps // 2 + 1, 5 * steps // 2})
    for amax in (*small, 0x43C00001, 0x447A0000, 0x4B189680, 0x7F7FFFFE):
        yield draft(
            RecordOp.SCALE, f"{made.name}.scale.tensor.{amax:08x}", ["scale.tensor", f"scale.rule.{_RULE}"],
            "a scale of the tensor that is rounded, a subnormal too", rule=_RULE, format=made.name,
            amax=words_text([amax, amax // 2 + 1]),
        )  # fmt: skip
    yield _quantization(
        made, "scale.orders", [], "where orders of float32 operations part",
        np.full(made.k, bits_of([1.5234375])[0]), amax=0x43820000,
    )  # fmt: skip


def _special_blocks(made: BlockFormat) -> Iterator[Record]:
    k, unit = made.k, _unit(made)
    normal = window(1, 122, k)
    zeros = (("plus", np.zeros(k, np.uint32)), ("minus", np.full(k, SIGN, np.uint32)))
    for (name, words), code in product(zeros, (0, made.scale.one_code)):
        yield _quantization(
            made, f"zero.{name}.{code}", ["scale.zero", "rounding.sign"], "a tensor of zeros", words,
            zero_scale=code or None,
        )  # fmt: skip
        yield _quantization(
            made, f"zero.{name}.{code}.beside", ["scale.zero", "rounding.sign"], "an all-zero block beside another",
            np.concatenate([normal, words]), zero_scale=code or None,
        )  # fmt: skip
    for at, word in zip((0, 9, k - 1, 5), (*NANS[:2], *INFINITIES), strict=True):
        spoiled = window(2, 125, k)  # above all of the other block
        spoiled[at] = word
        words = np.concatenate([normal, spoiled])
        for amax in dict.fromkeys((None, *_given(made, unit))):
            yield _quantization(
                made, f"nonfinite.{word:08x}" + ".given" * (amax is not None),
                ["scale.nonfinite", "conventions.inputs"],
                "a NaN or Inf spoils its whole block, whose other elements count in the tensor's amax", words, amax,
            )  # fmt: skip
        yield _quantization(
            made, f"nonfinite.{word:08x}.raise", ["scale.nonfinite"], "refused where the policy says so", words,
            nonfinite="raise",
        )  # fmt: skip
    least = made.scale.values[1]
    under = around(bits_of([made.element.max_value * least / 2]), 2)  # at X = 0 or the least X
    rows = np.array([[word, SIGN | word, SIGN, 0, *(under[:1] | SIGN), *[1] * (k - 5)] for word in under])
    for mode in (*NEAREST_AND_DOWN, "sr"):
        given = stream_inputs(_STREAM) if mode == "sr" else {}
        for name, amax in zip(("one", "given"), _given(made, unit, 0x42F6E979), strict=False):
            words = rows.astype(np.uint32).reshape(-1)
            if name == "given":
                words = _times(words, _tensor_scale(made, amax))
            yield _quantization(
                made, f"underflow.{name}.{mode}", ["scale.underflow", "rounding.sign"],
                "under a scale of zero no magnitude is left, and signs are", words, amax, rounding=mode, **given,
            )  # fmt: skip


def _times(words: Words, factor: float) -> Words:
    """Return the float32 words of values times a factor, rounded."""
    return scaled(words.view(np.float32).astype(np.float64) * factor, 0)


def _rounding(made: BlockFormat) -> Iterator[Record]:
    """Every tie of the quotient and its neighbours, under several scales of blocks and tensors, and saturation."""
    grid = np.array(made.element.magnitudes)
    ties = (grid[:-1] + grid[1:]) / 2
    largest, codes = made.element.max_value, [1, 2, 3, 5, 7, 8, 9, 13, 31, 54, 56, 57, 63, 90, 119, 126]
    for amax, mode in product(_amaxes(made), NEAREST_AND_DOWN):
        if mode == "rna" and amax not in (None, _unit(made), FLT_MAX):
            continue
        tensor = _tensor_scale(made, amax)
        factors = [made.scale.values[code] * tensor for code in codes]
        parts = [
            blocks_of(made, around(scaled(ties * f, 0), 1), largest * f, 0, 3 + at)
            for at, f in enumerate(factors)
        ]
        yield _quantization(
            made, f"ties.{mode}.{_named(amax)}", [f"rounding.{mode}", "rounding.quotient"],
            "every tie of the quotient and its neighbours", np.concatenate(parts), amax, rounding=mode,
        )  # fmt: skip
    above = np.array([made.scale.values[code] for code in (8, 56, 60, 118)]) * largest
    for mode in NEAREST_AND_DOWN:
        blocks = [mixed(np.resize(around(scaled([a * 1.03125, a], 0), 2), made.k), 7) for a in above]
        far = np.full(made.k, FLT_MAX, np.uint32)
        yield _quantization(
            made, f"saturate.{mode}", ["rounding.saturate"], "above M where the scale was rounded down, and far above",
            np.concatenate([*blocks, far]), _given(made, _unit(made))[0], rounding=mode,
        )  # fmt: skip


def _stochastic(made: BlockFormat) -> Iterator[Record]:
    """Elements that SR rounds up at the least, and the same one unit in the last place below."""
    element, k = made.element, made.k
    grid = np.array(element.magnitudes)
    under = zip(("one", "given"), _given(made, _unit(made), 0x42F6E979), (56, 45), strict=False)
    for bits, (name, amax, code) in product((1, 8, 16, 17, 22), list(under)):
        integers = random_integers(np.arange(2, dtype=np.int64), 0, 2 * k, 2 * k, _STREAM, bits)
        gap = np.arange(2 * k) * 5 % (len(grid) - 1)
        at = grid[gap] + np.diff(grid)[gap] * np.ldexp((1 << bits) - integers.astype(np.float64), -bits)
        factor = made.scale.values[code] * _tensor_scale(made, amax)
        up = scaled(at * factor, 0)
        for side, words in (("up", up), ("down", up - np.uint32(1))):
            words = words.copy()
            words[:, ::k] = scaled([element.max_value * factor], 0)
            yield _quantization(
                made, f"sr.{bits:02}.{name}.{side}", ["rounding.quotient", "random.elements"],
                "the thresholds of SR", words.reshape(-1), amax, rounding="sr",
                sr_bits=bits if bits != 16 else None, shape=[2, 2 * k], **stream_inputs(_STREAM),
            )  # fmt: skip


def _orders(made: BlockFormat) -> Iterator[Record]:
    """Each order of float32 operations at ties of scales and elements, of zeros, and over the whole of float32."""
    numbers = np.array(made.scale.values[: made.scale.nan_code])
    between = np.concatenate([(numbers[:-1] + numbers[1:]) / 2, [made.scale.max_value, numbers[1] / 4]])
    grid, amax = np.array(made.element.magnitudes), 0x43820000
    largest, names = made.element.max_value, {spec: name for name, spec in dialects_of(made).items()}
    for number, order in enumerate(list(Arithmetic)[1:]):
        t = 1.0 if order is Arithmetic.GGML else _tensor_scale(made, amax)
        ends = [*between[number:-2:14], *between[-2:]]
        tops = np.unique(around(scaled(np.array(ends) * largest * t, 0), 1))
        blocks = [np.zeros(made.k, np.uint32), np.full(made.k, SIGN, np.uint32)]
        blocks += [_under(top, made.k, 40 + at) for at, top in enumerate(tops)]
        for code in (1, 9, 57):
            factor = made.scale.values[code] * t
            ties = around(scaled((grid[:-1] + grid[1:]) / 2 * factor, 0), 1)
            blocks.append(blocks_of(made, ties, largest * factor, 0, 3 + code))
        dialect = names.get(OperandSpec(made, arithmetic=order))
        clauses = ["scale.arithmetic", *([f"dialect.{dialect}"] if dialect else [])]
        yield _quantization(
            made, f"orders.{order.value}", clauses, "an order of float32 operations", np.concatenate(blocks), amax,
            arithmetic=order.value,
        )  # fmt: skip
        for base, given in ((118, None), (30, 0x42F6E979), (1, 5000), (230, FLT_MAX)):
            yield _quantization(
                made, f"orders.{order.value}.digest.{base:03}", clauses[:1], "a tensor made from a seed", None, given,
                arithmetic=order.value, rounding="rtz" if base == 30 else "rne", shape=[9, 10 * made.k],
                x_rule="window", x_base=base, x_seed=hex64(100 + number),
            )  # fmt: skip


def _four_over_six(made: BlockFormat) -> Iterator[Record]:
    """Blocks that take either scale, of equal errors too, for each error; a tile; and the tensor's own amax."""
    k = made.k
    equal = np.zeros(2 * k)  # what both scales hold exactly, and errors that are equal under both
    equal[:5], equal[k : k + 3] = (4, 2, 1, 0.5, -3), (6, 0.25, 0.25)
    for by, (name, amax) in product(list(FourOverSix)[1:], (("one", _unit(made)), ("given", 0x42F6E979))):
        t = _tensor_scale(made, amax)
        near = _times(bits_of(equal), t) if name == "given" else bits_of(equal)
        turns = [
            _under(top, k, 60 + at) for at, top in enumerate(around(scaled(np.array([60.0, 0.5]) * t, 0), 1))
        ]
        yield _quantization(
            made, f"four_over_six.{by.value}.{name}", ["scale.four_over_six"], "two scales, the one that errs less",
            np.concatenate([near, window(90, 118, 6 * k), *turns]), amax, four_over_six=by.value,
        )  # fmt: skip
    for by, (rounding, base) in product(list(FourOverSix)[1:], (("rne", 118), ("rtz", 30))):
        where: dict[str, Any] = {
            "x_rule": "window",
            "x_base": base,
            "rounding": rounding,
            "four_over_six": by.value,
        }
        yield _quantization(
            made, f"four_over_six.{by.value}.digest.{base:03}", ["scale.four_over_six"], "the tensor's own amax", None,
            shape=[9, 10 * k], x_seed=hex64(110), **where,
        )  # fmt: skip
        yield _quantization(
            made, f"four_over_six.{by.value}.tile.{base:03}", ["scale.four_over_six"], "the errors of a whole tile",
            None, block=made.tile, shape=[2 * k, 4 * k], x_seed=hex64(111), **where,
        )  # fmt: skip


def _under(top: int, k: int, seed: int) -> Words:
    """Return a block with this largest magnitude."""
    row = np.minimum(
        window(seed, min(max(int(top) >> 23, 1) - 1, 247), k) & np.uint32(SIGN - 1), np.uint32(top)
    )
    row[seed % k] = top
    return mixed(row, seed)


def _whole(made: BlockFormat) -> Iterator[Record]:
    """Axes, padding, tiles, parts, narrow inputs, transforms, and digests of larger tensors."""
    k = made.k
    for mode, base in product(NEAREST_AND_DOWN, (0, 60, 121, 240)):
        yield _quantization(
            made, f"drawn.{mode}.{base:03}", [f"rounding.{mode}", "rounding.quotient"], "the tensor's own amax",
            window(21 + base, base, 4 * k), rounding=mode,
        )  # fmt: skip
    for name, shape, axis, pad in (("axis0", [2 * k, 3], 0, None), ("pad", [3, k + 1], 1, True)):
        clauses = ["quantize.axis", *(["quantize.padding"] if pad else [])]
        yield _quantization(
            made, f"place.{name}", clauses, "the block axis is stored last",
            window(31, 120, int(np.prod(shape))), shape=shape, axis=axis, pad=pad,
        )  # fmt: skip
    part = {"shape": [2, 2 * k], "origin": [3, k], "global_shape": [8, 5 * k]}
    for mode in ("rne", "sr"):
        given = stream_inputs(_STREAM) if mode == "sr" else {}
        yield _quantization(
            made, f"part.{mode}", [], "a part takes the amax of the whole tensor",
            window(33, 120, 4 * k), _given(made, 0x42F6E979)[0], rounding=mode, **part, **given,
        )  # fmt: skip
    tile: NDArray[np.uint32] = window(17, 119, k * 2 * k)
    for mode in NEAREST_AND_DOWN:
        yield _quantization(
            made, f"tile.{mode}", ["scale.amax"], "one byte for a tile, stored in each row", tile, rounding=mode,
            block=made.tile, shape=[k, 2 * k],
        )  # fmt: skip
    yield _quantization(
        made, "rht064", ["linear.rotation"], "the tensor's amax is taken after signs and transform",
        window(53, 121, 128), hadamard=64, signs="per_step_layer", shape=[2, 64], **stream_inputs(_STREAM),
    )  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        yield _quantization(
            made, f"dtype.{dtype}", ["conventions.inputs"], "inputs of a narrower type",
            window(41, 120, 4 * k) & np.uint32(0xFFFF0000), dtype=dtype,
        )  # fmt: skip
    large: list[tuple[str, dict[str, Any]]] = [
        ("rne", {"shape": [9, 10 * k]}), ("rna", {"shape": [10 * k, 9], "axis": 0}),
        ("sr", {"shape": [9, 10 * k], **stream_inputs(_STREAM)}),
        ("rtz", {"shape": [4 * k, 6 * k], "block": made.tile}),
    ]  # fmt: skip
    for number, (mode, where) in enumerate(large):
        for rule, base in (("window", 118), ("grid", 30)):
            yield _quantization(
                made, f"digest.{rule}.{mode}", [], "a tensor made from a seed", None, rounding=mode,
                x_rule=rule, x_base=base, x_seed=hex64(number), **where,
            )  # fmt: skip
