"""How a step of quantization loads its elements, by their type, and packs the codes of them."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from mxref_numba.lanes import I8, I16, I32, Lanes, load
from mxref_numba.vector.target import lanes_of

_VECTORS = range(8)
"""Those of a step."""


@dataclass(frozen=True)
class ElementType:
    """How elements of a type are loaded, and codes packed; the elements of a block are in neighbouring vectors."""

    bits: Callable[[ir.IRBuilder, Any], list[Lanes]]
    """Load a step as the bits of float32."""
    pack: Callable[..., Lanes]
    """Make the packed bytes, in order, from such vectors of four bits; `masked`, from their low four bits."""
    pack_bytes: Callable[[list[Lanes]], list[Lanes]]
    """Make two vectors of bytes, in order, from the low bytes of such vectors."""
    size: int
    """Bytes of an element."""


def _float32_bits(builder: ir.IRBuilder, source: Any) -> list[Lanes]:
    lanes = lanes_of(builder)
    return [load(builder, I32, lanes, source, 4 * lanes * j) for j in _VECTORS]


def _bfloat16_bits(builder: ir.IRBuilder, source: Any) -> list[Lanes]:
    # A word is an even element and its odd neighbour: two vectors without a conversion.
    lanes = lanes_of(builder)
    words = [load(builder, I32, lanes, source, 4 * lanes * j) for j in range(len(_VECTORS) // 2)]
    return [half for word in words for half in (word << 16, word & 0xFFFF0000)]


def _pack_consecutive(nibbles: list[Lanes], *, masked: bool = False) -> Lanes:
    """Pack eight vectors of consecutive elements."""
    # Instructions narrow two vectors within quarters: a quarter gets four elements of each of four vectors.
    bytes_ = [
        a.narrowed(b, I16).narrowed(c.narrowed(d, I16), I8) for a, b, c, d in (nibbles[:4], nibbles[4:])
    ]
    low, high = ((b & 15 if masked else b).pairs_summed((1, 16)) for b in bytes_)
    words = low.narrowed(high, I8).cast(I16)
    return words.pick([8 * quarter + j for j in _VECTORS for quarter in range(words.count // 8)])


def _pack_alternating(nibbles: list[Lanes]) -> Lanes:
    """Pack the even and the odd elements of four vectors of words: a lane holds a pair of each, in four bytes."""
    pairs = nibbles[0]
    for j, nibble in enumerate(nibbles[1:], 1):
        pairs = pairs | (nibble << 4 * j)
    return pairs.cast(I8).pick([4 * pair + word for word in range(4) for pair in range(pairs.count)])


def _joined(vectors: list[Lanes], order: Callable[[int], list[int]]) -> list[Lanes]:
    """Return two vectors of bytes from eight vectors of words, whose elements alternate between pairs of vectors."""
    bytes_ = [vector.cast(I8) for vector in vectors]
    parts = [a.pick(order(a.count), b) for a, b in zip(bytes_[::2], bytes_[1::2], strict=True)]
    while len(parts) > 2:
        parts = [a.pick(range(2 * a.count), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts


def _low_bytes_consecutive(vectors: list[Lanes]) -> list[Lanes]:
    return _joined(vectors, lambda size: [*range(0, 2 * size, 4)])


def _low_bytes_alternating(vectors: list[Lanes]) -> list[Lanes]:
    return _joined(vectors, lambda size: [byte for i in range(0, size, 4) for byte in (i, size + i)])


def _bfloat16_in_order(builder: ir.IRBuilder, source: Any) -> list[Lanes]:
    lanes = lanes_of(builder)
    halves = (load(builder, I16, lanes, source, 2 * lanes * j) for j in _VECTORS)
    return [half.convert("zext", I32) << 16 for half in halves]


FLOAT32 = ElementType(_float32_bits, _pack_consecutive, _low_bytes_consecutive, 4)
BFLOAT16 = ElementType(_bfloat16_bits, _pack_alternating, _low_bytes_alternating, 2)
BFLOAT16_IN_ORDER = ElementType(_bfloat16_in_order, _pack_consecutive, _low_bytes_consecutive, 2)
"""For blocks that are shorter than two vectors: those of even elements and of odd ones would share a block's vector."""
