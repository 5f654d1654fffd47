"""Drafts of golden vectors about whole tensors: Hadamard transforms and quantization."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from golden.draft import (
    FLT_MAX,
    INFINITIES,
    NEAREST_AND_DOWN,
    RULES,
    SIGN,
    TURNS,
    Words,
    draft,
    float_halves,
    hex64,
    mixed,
    quantization,
    row,
    stream_inputs,
    window,
)
from mxref.dialects import dialects_of
from mxref.formats import MXFP4
from mxref.steps.hadamard import SIZES
from mxref.steps.random import Stream
from mxref.vectors import Record, RecordOp
from mxref.vectors.data import InputRule, generated_bits, input_words, words_text

_LARGE = [256, 1024]
_ODD = [37, 160]


def hadamard() -> Iterator[Record]:
    """Yield the drafts of the chapter hadamard."""
    order = ["hadamard.order", "hadamard.size", "hadamard.factor", "hadamard.float32"]
    for n in SIZES:
        signs = int(words_text(input_words(n, 9, 8)).replace(" ", ""), 16) & (1 << n) - 1
        digits = max(1, n // 4)
        plain, drawn, last = f"{0:0{digits}x}", f"{signs:0{digits}x}", f"{1 << n - 1:0{digits}x}"
        wide = generated_bits(InputRule.LADDER, 0, n, n * 5)[4 * n :]
        huge = mixed(np.full(n, FLT_MAX, np.uint32), n)
        tiny = (input_words(n, 3, n) & np.uint32(0x800000FF)) | np.uint32(1)
        impulse = np.zeros(n, np.uint32)
        impulse[n - 1] = 0x3F800000
        cases: list[tuple[str, list[str], str, str, Words]] = [
            ("plain", order, "one operation at a time, in order", plain, window(n, 120, n)),
            ("signs", ["hadamard.signs", *order], "signs first", drawn, window(n + 1, 100, n)),
            ("wide", order, "magnitudes far apart: the order of operations shows", last, wide),
            ("impulse", order, "the last column of the matrix", plain, impulse),
            ("zeros", order, "zeros of both signs", drawn, row(SIGN)[:1].repeat(n)),
            ("overflow", ["hadamard.nonfinite"], "overflow on the way", plain, huge),
            ("tiny", ["hadamard.float32"], "subnormals are kept", drawn, tiny),
        ]
        for name, clauses, note, text, words in cases:
            yield draft(
                RecordOp.HADAMARD,
                f"hadamard.{n:03}.{name}",
                clauses,
                note,
                n=n,
                signs=text,
                x=words_text(words),
            )
    for n, word in itertools.product((2, 16, 64), (0x7FC00000, *INFINITIES)):
        words = window(n, 120, 3 * n)
        words[n + n // 2] = word
        yield draft(
            RecordOp.HADAMARD, f"hadamard.{n:03}.spoiled.{word:08x}", ["hadamard.nonfinite"],
            "NaN or Inf spoils its group and no other", n=n, signs="0" * max(1, n // 4), x=words_text(words),
        )  # fmt: skip
    for axis, shape in ((0, [32, 3]), (1, [2, 16, 3])):
        yield draft(
            RecordOp.HADAMARD, f"hadamard.016.axis{axis}", order, "along another axis", n=16, signs="8421",
            shape=shape, axis=axis, x=words_text(window(axis, 120, 96)),
        )  # fmt: skip
    for n, rule in ((16, "ladder"), (64, "window"), (256, "finite")):
        yield draft(
            RecordOp.HADAMARD, f"hadamard.{n:03}.digest.{rule}", order, "a large tensor", n=n, signs="5a" * (n // 8),
            shape=[48, 512], x_rule=rule, x_base=118 if rule == "window" else None, x_seed=hex64(n),
        )  # fmt: skip
    policies = ("none", "fixed", "per_step", "per_step_layer")
    for n, policy in itertools.product(SIZES, policies):
        stream = Stream(0xFEDCBA9876543210, 0x01020304 + n, 0x0A0B0C, n.bit_length() % 6)
        yield draft(
            RecordOp.SIGNS, f"hadamard.drawn.{n:03}.{policy}", ["hadamard.signs", "hadamard.policy", "linear.rotation"],
            "the signs of a GEMM's role", n=n, policy=policy, **stream_inputs(stream),
        )  # fmt: skip


def quantize() -> Iterator[Record]:
    """Yield the drafts of the chapter quantize."""
    yield from _plain_blocks()
    yield from _places()
    yield from _compositions()
    yield from _digests()


def _plain_blocks() -> Iterator[Record]:
    normal = window(3, 122, 32)
    blocks = {
        "least": row(1),
        "subnormal": row(SIGN | 1, (3, 0x00400001), (4, 0x007FFFFF), (20, 2)),
        "least_normal": row(0x80800000, (0, 0x00800001), (31, 0x007FFFFF)),
        "bottom": mixed(np.arange(1, 33, dtype=np.uint32) << np.uint32(19), 1),
        "bottom_binades": mixed(np.arange(32, dtype=np.uint32) << np.uint32(21), 2),
        "one_least_in_zeros": row(SIGN, (17, 1)),
        "one_largest_in_zeros": row(0, (30, FLT_MAX | SIGN)),
        "one_largest_in_normals": np.where(np.arange(32) == 11, np.uint32(FLT_MAX), normal),
        "largest": row(FLT_MAX),
        "every_magnitude": np.linspace(0, 254, 32).astype(np.uint32) << np.uint32(23) | np.uint32(0x2AAAAA),
        "powers": np.array([0x3F800000 - (at << 23) | (at & 1) << 31 for at in range(32)], np.uint32),
        "normal": normal,
    }  # fmt: skip
    for (name, words), rule in itertools.product(blocks.items(), RULES):
        clauses = [f"scale.rule.{rule}", "scale.block.row", "rounding.scaled"]
        yield quantization(f"quantize.{name}.{rule}", clauses, name.replace("_", " "), words, rule=rule)
    for exponent, rule in itertools.product((0, 1, 2, 3, 4, 127, 200, 252, 253, 254), RULES):
        yield quantization(
            f"quantize.turns.{exponent:03}.{rule}", ["scale.clamp"] if exponent < 3 else [],
            "the turns of the rules, with elements over six binades", _turn_blocks(exponent), rule=rule,
        )  # fmt: skip
    for rule, mode in itertools.product(RULES, NEAREST_AND_DOWN):
        yield quantization(
            f"quantize.mixed.{rule}.{mode}", [f"rounding.{mode}", "rounding.scaled"], "every rule with every rounding",
            np.concatenate([window(21, 121, 32), window(22, 1, 32)]), rule=rule, rounding=mode,
        )  # fmt: skip


def _turn_blocks(exponent: int) -> Words:
    """Return a block per turning mantissa, its amax at this exponent field, the rest up to six binades below."""
    blocks = []
    for number, mantissa in enumerate(TURNS):
        amax = exponent << 23 | mantissa
        drop = input_words(exponent, number, 32).astype(np.int64) % (6 << 23)
        words = np.maximum(amax - drop, 0).astype(np.uint32)
        words[number * 4] = amax
        blocks.append(mixed(words, exponent * 16 + number))
    return np.concatenate(blocks)


def _places() -> Iterator[Record]:
    shapes: list[tuple[str, list[int], int, bool]] = [
        ("axis0", [64, 3], 0, False),
        ("axis1", [2, 32, 3], 1, False),
        ("axis0_of_3", [32, 2, 2], 0, False),
        ("vector", [64], 0, False),
        ("pad", [3, 33], 1, True),
        ("pad_short", [2, 1], 1, True),
        ("pad_axis0", [5, 3], 0, True),
        ("no_rows", [0, 64], 1, False),
        ("no_blocks", [3, 0], 1, False),
    ]
    for (name, shape, axis, pad), rule in itertools.product(shapes, ("floor", "even")):
        clauses = [
            "quantize.axis",
            *(["quantize.padding"] if pad else []),
            *(["quantize.strides"] if 0 in shape else []),
        ]
        yield quantization(
            f"quantize.place.{name}.{rule}", clauses, "the block axis is stored last",
            window(31, 120, int(np.prod(shape))), rule=rule, shape=shape, axis=axis, pad=pad or None,
        )  # fmt: skip
    yield quantization(
        "quantize.place.pad_h64", ["quantize.padding", "quantize.length"],
        "zeros up to a multiple of 64, before the transform", window(33, 120, 140),
        shape=[2, 70], axis=1, hadamard=64, pad=True,
    )  # fmt: skip
    yield from _random_places()
    for dtype in ("bfloat16", "float16"):
        for rule in RULES:
            yield quantization(
                f"quantize.dtype.{dtype}.{rule}", ["conventions.inputs"], "the exact values of a narrower type",
                float_halves(dtype, 41, 96), rule=rule, dtype=dtype,
            )  # fmt: skip


def _random_places() -> Iterator[Record]:
    """Yield parts of padded tensors whose lengths are multiples of 32 and not of the Hadamard size, under SR."""
    places: list[tuple[str, list[int], int, int, list[int] | None, list[int] | None]] = [
        ("whole", [2, 96], 1, 64, None, None),
        ("whole_axis0", [96, 2], 0, 64, None, None),
        ("shard", [2, 32], 1, 64, [1, 64], [4, 96]),
        ("shard_axis0", [32, 2], 0, 64, [64, 1], [96, 5]),
        ("shard_h256", [2, 32], 1, 256, [1, 256], [4, 288]),
        ("shard_axis0_h256", [32, 2], 0, 256, [256, 1], [288, 5]),
        ("batch", [2, 2, 32], 2, 64, [2, 1, 64], [5, 3, 96]),
        ("batch_axis0", [32, 2, 2], 0, 64, [64, 1, 1], [96, 3, 5]),
    ]
    for number, (name, shape, axis, n, origin, whole) in enumerate(places):
        yield quantization(
            f"quantize.place.sr.{name}", ["quantize.padding", "random.index"],
            "rows of the whole are as long as they are when padded to whole groups",
            window(60 + number, 121, int(np.prod(shape))), rounding="sr", hadamard=n, shape=shape, axis=axis,
            origin=origin, global_shape=whole, pad=True, **stream_inputs(Stream(0xFEED, 9, 8, 3)),
        )  # fmt: skip


def _compositions() -> Iterator[Record]:
    for name, spec in dialects_of(MXFP4).items():
        words = np.concatenate(
            [row(SIGN), row(SIGN | 1, (8, FLT_MAX)), _turn_blocks(127)[:64], window(51, 120, 64)]
        )
        yield quantization(
            f"quantize.dialect.{name}", [f"dialect.{name}"], "a dialect, whole", words,
            rule=spec.scale_rule.value, rounding=spec.rounding.value, **_changed(spec),
            shape=[3, 64], **(stream_inputs(Stream(5, 6, 7, 2)) if name == "tseng" else {}),
        )  # fmt: skip
    for n, rule in itertools.product((2, 16, 32, 64), RULES):
        yield quantization(
            f"quantize.h{n:03}.{rule}", [], "transform, then scale, in float32", window(52, 121, 128), rule=rule,
            hadamard=n, shape=[2, 64],
        )  # fmt: skip
    for n, policy in itertools.product((16, 32, 64, 256), ("fixed", "per_step", "per_step_layer")):
        yield quantization(
            f"quantize.rht{n:03}.{policy}", ["linear.rotation"], "random signs of the operand's role",
            window(53, 121, max(n, 64)), rule="even", hadamard=n, signs=policy, shape=[1, max(n, 64)],
            **stream_inputs(Stream(0xC0FFEE, 3, 2, n.bit_length() % 6)),
        )  # fmt: skip
    spoiled = window(54, 121, 256)
    spoiled[40] = 0x7FC00000
    spoiled[200] = INFINITIES[1]
    overflowing = mixed(np.full(128, FLT_MAX, np.uint32), 1)
    for n in (16, 64):
        yield quantization(
            f"quantize.h{n:03}.spoiled", ["hadamard.nonfinite", "scale.nonfinite"],
            "a group spoils every block that it touches", spoiled, hadamard=n, shape=[2, 128],
        )  # fmt: skip
        yield quantization(
            f"quantize.h{n:03}.overflow", ["hadamard.nonfinite", "scale.nonfinite"],
            "finite inputs that overflow in the transform", overflowing, hadamard=n, shape=[2, 64],
        )  # fmt: skip
    yield quantization(
        "quantize.all", ["quantize.order"], "signs, transform, tile, prescale and SR at once", window(55, 121, 2048),
        rule="ceil", rounding="sr", sr_bits=11, block="32x32", prescale=True, hadamard=64, signs="per_step_layer",
        shape=[32, 64], origin=[64, 128], global_shape=[96, 256], **stream_inputs(Stream(0xBEEF, 11, 12, 4)),
    )  # fmt: skip


def _changed(spec: Any) -> dict[str, Any]:
    """Return the treatment's other keys where they differ from the defaults."""
    values = {
        "zero_scale": spec.zero_scale,
        "prescale": spec.prescale,
        "hadamard": spec.hadamard,
        "signs": "" if spec.signs.value == "none" else spec.signs.value,
    }
    return {name: value or None for name, value in values.items()}


def _digests() -> Iterator[Record]:
    sr = stream_inputs(Stream(0x123456789, 40, 5, 2))
    tile = {"block": "32x32"}
    cases: list[tuple[str, list[int], dict[str, Any]]] = [
        ("large.floor.rne", _LARGE, {"x_rule": "raw"}),
        ("large.even.rne.tile", _LARGE, {"x_rule": "grid", "x_base": 1, "rule": "even", **tile}),
        ("large.rceil.rne.h016", _LARGE, {"x_rule": "ladder", "rule": "rceil", "hadamard": 16}),
        ("large.floor.sr.prescale.rht064", _LARGE, {
            "x_rule": "window", "x_base": 120, "rounding": "sr", "prescale": True, "hadamard": 64,
            "signs": "per_step_layer", **sr,
        }),
        *((f"odd.{rule}.{mode}", _ODD, {"x_rule": "grid", "x_base": 246, "rule": rule, "rounding": mode})
          for rule in RULES for mode in NEAREST_AND_DOWN),
        *((f"odd.{rule}.sr", _ODD, {"x_rule": "window", "x_base": 3, "rule": rule, "rounding": "sr", **sr})
          for rule in RULES),
        ("odd.floor.sr.22", _ODD, {"x_rule": "window", "x_base": 90, "rounding": "sr", "sr_bits": 22, **sr}),
        ("odd.axis0", [160, 37], {"x_rule": "finite", "rule": "ceil", "axis": 0}),
        ("odd.axis0.sr.shard", [64, 37], {
            "x_rule": "window", "x_base": 64, "rounding": "sr", "axis": 0, "origin": [96, 11],
            "global_shape": [224, 50], **sr,
        }),
        ("odd.pad.h032", [37, 150], {"x_rule": "window", "x_base": 200, "hadamard": 32, "pad": True}),
        ("odd.rht256", [9, 512], {"x_rule": "ladder", "rule": "even", "hadamard": 256, "signs": "per_step", **sr}),
        ("odd.tile.sr", [96, 160], {"x_rule": "window", "x_base": 110, "rule": "even", "rounding": "sr", **tile, **sr}),
        ("odd.tile.axis0", [64, 96], {"x_rule": "finite", "rule": "rceil", "axis": 0, **tile}),
    ]  # fmt: skip
    for number, (name, shape, inputs) in enumerate(cases):
        yield quantization(
            f"quantize.digest.{name}",
            [],
            "a tensor made from a seed",
            shape=shape,
            x_seed=hex64(number),
            **inputs,
        )
