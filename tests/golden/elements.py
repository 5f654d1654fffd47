"""Drafts of golden vectors about single blocks: shared scales, rounding, random bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from golden.draft import (
    FLT_MAX,
    GRID,
    INFINITIES,
    NANS,
    NEAREST_AND_DOWN,
    RULES,
    SIGN,
    TIES,
    TURNS,
    Words,
    around,
    bits_of,
    draft,
    mixed,
    quantization,
    row,
    stream_inputs,
    thresholds,
    window,
)
from mxref.steps.random import Stream
from mxref.vectors import Record, RecordOp, Source
from mxref.vectors.data import words_text

_EXPONENTS_PER_RECORD = 5

# Random123's kat_vectors: counter, key, result of philox4x32 with 10 rounds.
_KNOWN = (
    ("zeros", "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ones", "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("pi", "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip

_STREAMS = (
    Stream(0),
    Stream(1, 1, 1, 1),
    Stream(0xFFFFFFFF, 2, 3, 2),
    Stream(0x100000000, 0, 0, 3),
    Stream(0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xFFFFFF, 5),
    Stream(0x0123456789ABCDEF, 0x89ABCDEF, 0xABCDEF, 4),
)
"""Every field at its ends, so that a field cut, shifted or swapped shows."""


def scale() -> Iterator[Record]:
    """Yield the drafts of the chapter scale."""
    for start in range(0, 255, _EXPONENTS_PER_RECORD):
        exponents = range(start, start + _EXPONENTS_PER_RECORD)
        amax = np.array([e << 23 | m for e in exponents for m in TURNS if e or m], np.uint32)
        for rule in RULES:
            clauses = [f"scale.rule.{rule}", "scale.amax", *(["scale.clamp"] if start == 0 else [])]
            note = f"exponent fields {start} to {exponents[-1]} at the turns of the rules"
            yield draft(
                RecordOp.SCALE, f"scale.{rule}.{start:03}", clauses, note, rule=rule, amax=words_text(amax)
            )
    for rule in RULES:
        places = np.concatenate(
            [row(0x3D000000 | at << 18, (at, 0x40B00000 | (at & 1) << 31)) for at in range(32)]
        )
        yield quantization(
            f"scale.place.{rule}", ["scale.amax"], "the largest magnitude at every place", places, rule=rule
        )
    zeros = {"plus": row(0), "minus": row(SIGN), "both": row(0, *((at, SIGN) for at in range(0, 32, 3)))}
    for name, words in zeros.items():
        for code in (0, 127):
            for rule in RULES if name == "both" else ("floor",):
                yield quantization(
                    f"scale.zero.{name}.{code}.{rule}", ["scale.zero", "rounding.sign"], "an all-zero block",
                    words, rule=rule, zero_scale=code or None,
                )  # fmt: skip
    beside = np.concatenate([row(SIGN), row(SIGN, (31, 1)), row(0)])
    yield quantization(
        "scale.zero.beside", ["scale.zero"], "only a block of nothing but zeros takes code 127",
        beside, zero_scale=127, prescale=True,
    )  # fmt: skip
    normal = window(1, 122, 32)
    for at, word in zip((0, 7, 13, 24, 31, 16, 3), (*NANS, *INFINITIES), strict=True):
        spoiled, zeros_and_one = normal.copy(), row(SIGN, (31 - at, word))
        spoiled[at] = word
        words = np.concatenate([normal, spoiled, zeros_and_one, row(word), row(FLT_MAX)])
        for rule in ("floor", "even"):
            yield quantization(
                f"scale.nonfinite.{word:08x}.{rule}", ["scale.nonfinite", "conventions.inputs"],
                "one NaN or Inf spoils its whole block and no other", words, rule=rule,
            )  # fmt: skip
        yield quantization(
            f"scale.nonfinite.{word:08x}.raise", ["scale.nonfinite"], "refused where the policy says so",
            words[:64], nonfinite="raise",
        )  # fmt: skip
    yield quantization(
        "scale.nonfinite.finite.raise", ["scale.nonfinite"], "finite blocks pass", normal, nonfinite="raise"
    )
    for rule in RULES:
        yield _tile(f"scale.tile.{rule}", "one byte for 1,024 elements, stored in each row", rule, None)
    yield _tile("scale.tile.nan", "one NaN spoils its tile", "rceil", (20, 41, 0xFFC00000), width=64)
    yield _tile("scale.tile.columns", "tiles of a tensor quantized along axis 0", "even", None, axis=0)
    yield quantization(
        "scale.tile.zero", ["scale.zero"], "an all-zero tile beside one that is not",
        np.concatenate([row(SIGN | 1), row(0)] + [row(0)] * 62), block="32x32", zero_scale=127, shape=[32, 64],
    )  # fmt: skip


def _tile(
    id: str,
    note: str,
    rule: str,
    placed: tuple[int, int, int] | None,
    width: int = 32,
    axis: int | None = None,
) -> Record:
    words = window(17, 119, 32 * width).reshape(32, width)
    words[5, 9] = 0x44AAAAAA  # the tile's amax, a binade above the rest of its row and column
    if placed is not None:
        words[placed[:2]] = placed[2]
    clauses = ["scale.block.tile", "scale.amax"] + ["scale.nonfinite"] * (placed is not None)
    return quantization(
        id, clauses, note, words.reshape(-1), rule=rule, block="32x32", shape=[32, width], axis=axis
    )


def rounding() -> Iterator[Record]:
    """Yield the drafts of the chapter rounding."""
    edges = (-127, -126, -125, -110, -64, -1, 0, 1, 63, 100, 124, 125)
    for e in range(-127, 126):
        for mode in NEAREST_AND_DOWN:
            if mode == "rne" or e in edges:
                yield quantization(
                    f"rounding.ties.{mode}.x{e:+04}", [f"rounding.{mode}", "rounding.scaled"],
                    f"ties and their neighbours at X = 2^{e}",
                    _tie_block(e), rounding=mode,
                )  # fmt: skip
    for e in (-127, -126, -120, 0, 125):
        for mode in NEAREST_AND_DOWN:
            yield quantization(
                f"rounding.prescale.{mode}.x{e:+04}", ["rounding.prescale"],
                f"where three quarters meet a tie, at X = 2^{e}", _prescale_blocks(e), rounding=mode, prescale=True,
            )  # fmt: skip
    high = mixed(around(bits_of([5.0, 6.0, 7.0]), 4)[:26], 5)
    saturating = np.concatenate([high, bits_of([6.5, -6.5, 7.5, -7.5, 4.0, -4.0])])
    nearly = np.concatenate([saturating[:31], bits_of([8.0]) - np.uint32(1)])
    under = np.array([SIGN | 1 << at for at in range(31)] + [0x3F800000], np.uint32)
    under[23:31] |= np.uint32(0x00400000)
    for mode in (*NEAREST_AND_DOWN, "sr"):
        given = stream_inputs(Stream(7, 1, 2, 4)) if mode == "sr" else {}
        yield quantization(
            f"rounding.saturate.{mode}", ["rounding.saturate"], "magnitudes above 6 give 6 with their sign",
            np.concatenate([saturating, nearly]), rounding=mode, **given,
        )  # fmt: skip
        yield quantization(
            f"rounding.sign.{mode}", ["rounding.sign"], "a magnitude that underflows keeps its sign",
            np.concatenate([under, row(SIGN, (9, 0x42FE0000)), row(SIGN | 1, (0, 0xFF000000))]),
            rounding=mode, **given,
        )  # fmt: skip
    for bits in range(1, 23):
        stream = Stream(0x5EED, bits, 3, 2)
        up, _ = thresholds(stream, bits, [0], 0, 32, 32)
        _, down = thresholds(stream, bits, [1], 0, 32, 32)
        yield quantization(
            f"rounding.sr.{bits:02}", ["rounding.sr"], "the least value that rounds up, then the largest that does not",
            np.concatenate([up, down]).reshape(-1), rounding="sr", sr_bits=bits, **stream_inputs(stream),
        )  # fmt: skip
    for mode in ("floor", "rceil"):
        yield quantization(
            f"rounding.sr.prescale.{mode}", ["rounding.sr"], "SR after the prescale, as the dialect tseng",
            np.concatenate([window(71, 120, 64), _prescale_blocks(0)]), rule=mode, rounding="sr", prescale=True,
            **stream_inputs(Stream(0x5EED, 1, 0, 3)),
        )  # fmt: skip


def _tie_block(e: int) -> Words:
    """Return 32 elements: seven ties with both neighbours, the grid, the least subnormal, and just under 8 X."""
    top = bits_of([8.0], e)[0] - 1 if e < 125 else FLT_MAX
    members = np.concatenate([around(bits_of(TIES, e), 1), bits_of(GRID, e), [1, 0x00800000, top]])
    return mixed(members.astype(np.uint32), e + 1000)


def _prescale_blocks(e: int) -> Words:
    """Return two blocks whose elements times 3/4 lie at the ties or up to three units beside them."""
    near = [
        around(np.ldexp(np.array([tie * 4 / 3]), e).astype(np.float32).view(np.uint32), 3) for tie in TIES
    ]
    top = bits_of([7.5, 8.0 - 2.0**-21, 6.0, 0.0], e)
    first = np.concatenate([*near[:4], top])
    second = np.concatenate([*near[4:], bits_of(GRID[1:], e), top])
    return np.concatenate([mixed(first, e + 2000), mixed(second, e + 3000)])


def random() -> Iterator[Record]:
    """Yield the drafts of the chapter random."""
    for name, counter, key, words in _KNOWN:
        yield draft(
            RecordOp.PHILOX, f"random.philox.{name}", ["random.philox"], "Random123, kat_vectors, philox4x32 10",
            source=Source.KNOWN_ANSWER, expected={"words": words}, counter=counter, key=key,
        )  # fmt: skip
    for at in range(6):
        counter = words_text([1 << 31 if at == i else i for i in range(4)])
        key = words_text([1 if at == 4 else 0, 1 if at == 5 else 0])
        yield draft(
            RecordOp.PHILOX, f"random.philox.{at}", ["random.philox"], "each word of counter and key on its own",
            counter=counter, key=key,
        )  # fmt: skip
    for number, stream in enumerate(_STREAMS):
        for bits in (1, 8, 16, 17, 22):
            yield draft(
                RecordOp.INTEGERS, f"random.integers.{number}.{bits:02}",
                ["random.elements", "random.stream", "random.counter"], "the integers of 16 elements",
                **stream_inputs(stream), sr_bits=bits, row=3, first=16, count=16, length=96,
            )  # fmt: skip
    for bits in (16, 22):
        yield draft(
            RecordOp.INTEGERS, f"random.integers.far.{bits}", ["random.index", "random.counter"],
            "element 2^53 - 32: the call's index takes both counter words",
            **stream_inputs(_STREAMS[1]), sr_bits=bits, row=(1 << 48) - 1, first=0, count=16, length=32,
        )  # fmt: skip
    for number, stream in enumerate(_STREAMS):
        for bits in (16, 22):
            yield _threshold(f"random.stream.{number}.{bits}", "every field of the stream", stream, bits)
    far = 1 << 33
    places = (
        ("row", "a shard of rows", [2, 32], [5, 0], [64, 32], None),
        ("column", "a shard of columns", [2, 32], [0, 64], [2, 160], None),
        ("odd", "rows of a padded global length", [2, 32], [1, 32], [3, 70], None),
        ("far", "a row beyond 2^32 calls", [2, 64], [far, 64], [far + 2, 4096], None),
        ("axis0", "columns of a tensor quantized along axis 0", [32, 2], [64, 7], [128, 11], 0),
    )
    for name, note, shape, origin, whole, axis in places:
        for bits in (16, 17):
            yield _threshold(
                f"random.place.{name}.{bits}",
                note,
                Stream(0xA11CE, 9, 8, 2),
                bits,
                shape,
                origin,
                whole,
                axis,
            )


def _threshold(
    id: str,
    note: str,
    stream: Stream,
    bits: int,
    shape: list[int] | None = None,
    origin: list[int] | None = None,
    whole: list[int] | None = None,
    axis: int | None = None,
) -> Record:
    """Return a draft whose even rows just round up and whose odd rows just do not, wherever they lie."""
    block, other = (0, 1) if axis == 0 else (1, 0)
    size = shape or [2, 32]
    start, total = origin or [0, 0], whole or size
    length = -(-total[block] // 32) * 32
    rows = [start[other] + at for at in range(size[other])]
    up, down = thresholds(stream, bits, rows, start[block], size[block], length)
    up[1::2] = down[1::2]
    words = up.T if axis == 0 else up
    clauses = ["random.stream", "random.elements"]
    if origin:
        clauses.insert(0, "random.index")
    return quantization(
        id, clauses, note, words.reshape(-1), rounding="sr", sr_bits=bits if bits != 16 else None,
        **stream_inputs(stream), shape=shape, axis=axis, origin=origin, global_shape=whole,
    )  # fmt: skip
