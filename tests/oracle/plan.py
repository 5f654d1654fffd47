"""The scalar oracle's plan of a quantization: what is refused, where each stored element comes from, its random index.

As all of `oracle`, it shares no code with the package under test. It is written from the chapters on quantization and
on random bits of the specification, one element at a time, and counts where the package multiplies and divides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Position = tuple[int, ...]


class Refused(ValueError):
    """A request that the specification refuses; the text names the clause."""


def padded(length: int, n: int, k: int = 32) -> int:
    """The first length, from `length` on, that is a multiple of the block length `k` and of `n`.

    `n` is the size of a Hadamard transform, 0 for none.
    """
    while length % k or (n and length % n):
        length += 1
    return length


def sign_id(operand: int) -> int:
    """The operand id of the stream from which the signs of an operand's GEMM are drawn."""
    if operand not in range(6):
        raise Refused(f"random.stream: {operand} is the id of no operand")
    return {0: 6, 1: 6, 2: 7, 3: 7, 4: 8, 5: 8}[operand]


@dataclass(frozen=True)
class Place:
    """An input of a quantization, in the larger tensor of which it is a part. Positions follow the axis order."""

    shape: Position
    axis: int
    n: int
    k: int
    origin: Position
    whole: Position

    @property
    def stored(self) -> int:
        """Length of the block axis as stored."""
        return padded(self.shape[self.axis], self.n, self.k)

    def others(self, position: Sequence[int]) -> Position:
        """A position without its entry for the block axis."""
        return tuple(at for i, at in enumerate(position) if i != self.axis)

    def rows(self) -> Iterator[Position]:
        """The places of the stored rows among the other axes, in the order of storage: the last axis runs fastest."""
        yield from product(*(range(length) for length in self.others(self.shape)))

    def source(self, row: Position, column: int) -> Position | None:
        """The position in the input of a stored element, None for one that padding appended."""
        if column >= self.shape[self.axis]:
            return None
        position = list(row)
        position.insert(self.axis, column)
        return tuple(position)

    def row_index(self, row: Position) -> int:
        """How many rows of the whole tensor come before a stored row of this part."""
        totals = self.others(self.whole)
        places = [start + at for start, at in zip(self.others(self.origin), row, strict=True)]
        return sum(at * prod(totals[i + 1 :]) for i, at in enumerate(places))

    def index(self, row: Position, column: int) -> int:
        """The index of a stored element in the whole tensor, its rows as long as they are when padded."""
        length = padded(self.whole[self.axis], self.n, self.k)
        return self.row_index(row) * length + self.origin[self.axis] + column


def place(
    shape: Position,
    axis: int,
    n: int = 0,
    *,
    k: int = 32,
    height: int = 1,
    origin: Position | None = None,
    whole: Position | None = None,
    pad: bool = False,
) -> Place:
    """The place of an input in blocks of `k` elements, or from a height of 2 on in tiles of `height` rows of them.

    Raises:
        Refused: the specification refuses the request.
    """
    if axis not in range(-len(shape), len(shape)):
        raise Refused("quantize.axis: no such axis")
    axis = list(range(len(shape)))[axis]
    if padded(shape[axis], n, k) != shape[axis] and not pad:
        raise Refused("quantize.length: a block or group is not whole, and padding is not asked for")
    if whole is None:
        if origin is not None and set(origin) - {0}:
            raise Refused("quantize.parts: a part of what?")
        whole = shape
    origin = (0,) * len(shape) if origin is None else origin
    if not len(origin) == len(whole) == len(shape):
        raise Refused("random.index: another number of axes")
    for start, length, total in zip(origin, shape, whole, strict=True):
        if start < 0 or total < start + length:
            raise Refused("random.index: the part does not lie within the whole")
    last = origin[axis] + shape[axis] == whole[axis]
    if padded(origin[axis], n, k) != origin[axis] or (padded(shape[axis], n, k) != shape[axis] and not last):
        raise Refused("quantize.parts: the part cuts a block or a group")
    if height > 1:
        before = [i for i in range(len(shape)) if i != axis][-1:]
        if not before:
            raise Refused("scale.block.tile: one axis holds no tile")
        if shape[before[0]] % height or origin[before[0]] % height:
            raise Refused("scale.block.tile: a tile is not whole")
    return Place(shape, axis, n, k, origin, whole)
