"""Crafted blocks: inputs at which quantizers are known to go wrong, the same on every run.

Drawn data hits a tie once in millions of elements. These blocks hold every tie and its neighbours at many
shared scales, every exponent of amax with the mantissas at which a scale rule turns (zero and subnormals among
them), what saturates, NaN, Inf and the largest finite value. Without any one of these classes some faulty backend
passes: `tests/mxref/conformance/test_crafted.py` removes each and shows it. A new class needs such a backend too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat, ElementFormat
from mxref.steps.quotient import tensor_scale
from mxref.steps.scale import EXPONENT_RULES, INFINITY_BITS, MANTISSA_MASK, ScaleRule, bump_above

SIGN = 0x80000000
FLT_MAX = 0x7F7FFFFF
NAN_PAYLOADS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF)

Bits = NDArray[np.uint32]
Rows = list[tuple[str, Bits]]


@dataclass(frozen=True)
class Crafted:
    """Named blocks."""

    names: tuple[str, ...]
    x: NDArray[np.float32]
    """[N, k], read-only."""
    amax: float | None = None
    """The largest magnitude of their tensor; None where it is their own, or the format needs none."""
    where: str = ""
    """What a check's name says of that."""


@cache
def turns(element: ElementFormat) -> tuple[int, ...]:
    """Return the mantissas of amax at or beside which a scale rule turns, in ascending order.

    At 0x7ffff0 a float32 log2 still rounds up.
    """
    bounds = {rule: bump_above(rule, element) for rule in EXPONENT_RULES}
    found = {m for bound in bounds.values() for m in (bound, bound + 1)} | {
        bounds[ScaleRule.RCEIL] - 1,
        0x7FFFF0,
    }
    return tuple(sorted(m for m in found if 0 <= m <= MANTISSA_MASK))


@cache
def ties(element: ElementFormat) -> tuple[float, ...]:
    """Return the midpoints of the grid, in ascending order."""
    grid = np.array(element.magnitudes)
    return tuple(((grid[:-1] + grid[1:]) / 2).tolist())


@cache
def crafted_blocks(made: BlockFormat, full: bool = True) -> Crafted:
    """Return the crafted blocks; without `full`, those at every sixteenth exponent and at all the edges."""
    rng = np.random.default_rng(31)
    last = 127 - made.element.max_exponent  # of a scale under which the largest elements are still finite
    few = (-127, -126, -125, -110, -64, -1, 0, 1, 64, 100, last - 1, last)
    exponents = range(-127, last + 1) if full else few
    biased = (
        range(255) if full else sorted({*range(4), *range(7, 255, 16), 126, 127, 128, 129, 252, 253, 254})
    )
    rows = [
        *_special(rng, made.k), *_ties(rng, made, exponents), *_saturating(rng, made, exponents),
        *_amax(rng, made, biased, turns(made.element)),
    ]  # fmt: skip
    return _crafted(rows)


_TENSORS = (
    # of the tensor: a scale of 1, one that rounds, the same from the other side, a large and a small one
    (2688.0, ", tensor 2688"), (1.0, ", tensor 1"), (260.0, ", tensor 260"), (3e38, ", tensor 3e38"),
    # subnormal scales, and the least, which is held up
    (2.0**-130, ", tensor 2^-130"), (2.0**-149, ", tensor 2^-149"),
    # a tensor that says it is all zeros
    (0.0, ", tensor 0"),
)  # fmt: skip
"""Largest magnitudes of tensors, and what a check's name says of them."""
_OWN, _LARGER = 260.0, 26000.0


@cache
def crafted_tensors(made: BlockFormat, full: bool = True) -> tuple[Crafted, ...]:
    """Return the crafted blocks, for a format with a scale of the tensor under several of them.

    Where a format's scales are powers of two, they are those of `crafted_blocks`.
    """
    if made.scale.powers:
        return (crafted_blocks(made, full),)
    if not made.tensor_scale:
        return (_crafted(_under(made, np.float32(1), full)),)
    found = [
        replace(_crafted(_under(made, _tensor_scale(amax, made), full)), amax=amax, where=where)
        for amax, where in _TENSORS
    ]
    rows = _under(made, _tensor_scale(_OWN, made), full)
    rows = [(name, bits) for name, bits in rows if _largest(bits) < _OWN]
    largest = np.full(made.k, np.float32(_OWN)).view(np.uint32)
    # A NaN block counts too.
    rows.append(("the largest of the tensor, and a NaN", _with(largest, 0, NAN_PAYLOADS[0])))
    found.append(replace(_crafted(rows), where=", tensor of its own"))
    found.append(replace(_crafted(rows), amax=_LARGER, where=", tensor larger than its own"))
    return tuple(found)


def _tensor_scale(amax: float, made: BlockFormat) -> np.float32:
    return tensor_scale(np.float32(amax), made).scale


def _largest(bits: Bits) -> float:
    """Return the largest finite magnitude of a block."""
    magnitudes = bits & np.uint32(SIGN - 1)
    return float(magnitudes[magnitudes < INFINITY_BITS].max(initial=0).astype(np.uint32).view(np.float32))


def _under(made: BlockFormat, tensor: np.float32, full: bool) -> Rows:
    """Return the blocks for scales with a mantissa, at a scale of the tensor.

    They hold what is special; the largest magnitude at and beside every tie of two scales, the ends among them; and
    the ties and points of the elements under every scale, with their neighbours. Without `full`, a tenth of them.
    """
    rng = np.random.default_rng(33)
    scale, k = made.scale, made.k
    values = np.array(scale.values[: scale.max_code + 1])
    unit = float(tensor)
    few = {0, 1, 2, 7, 8, 9, scale.one_code, scale.max_code - 1}
    codes = range(scale.max_code) if full else sorted({*few, *range(5, scale.max_code, 12)})
    turns = [
        (f"between scales {code} and {code + 1}", (values[code] + values[code + 1]) / 2) for code in codes
    ]
    step = values[-1] - values[-2]
    turns += [
        ("at the largest scale", values[-1]), ("half a step above it", values[-1] + step / 2),
        ("far above it", 99 * values[-1]), ("far below the least", values[1] / 64),
    ]  # fmt: skip
    rows = _special(rng, k)
    for name, turn in turns:
        for amax in np.unique(near(np.array([turn * made.element.max_value * unit]), 1)).tolist():
            row = np.maximum(amax - rng.integers(0, 6 << 23, k), 0).astype(np.uint32)
            row |= rng.integers(0, 2, k).astype(np.uint32) << np.uint32(31)
            row[rng.integers(k)] = amax | int(rng.integers(2)) << 31
            rows.append((f"amax {name}, {amax:#010x}", row))
    middles = np.array([*ties(made.element), *made.element.magnitudes[1:-1]])
    parts = _parts(middles, (k - 1) // 3)
    for code in (*codes, scale.max_code):
        shared = values[code] * unit
        amax = near(np.array([made.element.max_value * shared]), 0)
        for number, some in enumerate(parts):
            members = np.minimum(near(some * shared), amax[0])
            rows.append((f"elements under scale {code}, {number}", fill(rng, np.append(members, amax), k)))
    return rows


@cache
def threshold_blocks(made: BlockFormat, bound: int) -> Crafted:
    """Return blocks whose amax has a mantissa at or beside the bound of a threshold, where no scale is clamped."""
    mantissas = tuple(m for m in range(bound - 1, bound + 3) if 0 <= m <= MANTISSA_MASK)
    biased = range(max(2, made.element.max_exponent), 255, 8)
    return _crafted(_amax(np.random.default_rng(32), made, biased, mantissas))


def _crafted(rows: Rows) -> Crafted:
    x = np.stack([bits for _, bits in rows]).view(np.float32)
    x.flags.writeable = False
    return Crafted(tuple(name for name, _ in rows), x)


def near(values: NDArray[np.float64], distance: int = 1) -> Bits:
    """Return the float32 bits of positive values and of their neighbours up to `distance` ulps away."""
    steps = np.arange(-distance, distance + 1)
    with np.errstate(over="ignore"):  # Inf, whose neighbour below is the largest finite value
        bits = values.astype(np.float32).view(np.uint32).astype(np.int64)[:, None] + steps
    out: Bits = np.clip(bits, 0, FLT_MAX).astype(np.uint32).ravel()
    return out


def fill(rng: np.random.Generator, members: Bits, k: int) -> Bits:
    """Return a block of all `members` (k at most) and draws from them, shuffled, with random signs."""
    row = np.concatenate([members, rng.choice(members, k - members.size)])
    rng.shuffle(row)
    out: Bits = row | rng.integers(0, 2, k).astype(np.uint32) << np.uint32(31)
    return out


def _with(base: Bits, position: int, value: int) -> Bits:
    row = base.copy()
    row[position] = value
    return row


def _special(rng: np.random.Generator, k: int) -> Rows:
    zeros = np.tile(np.array([0, SIGN], np.uint32), k // 2)
    normal = rng.standard_normal(k).astype(np.float32).view(np.uint32)
    rows: Rows = []
    for value in (*NAN_PAYLOADS, INFINITY_BITS, INFINITY_BITS | SIGN):
        rows += [(f"{value:#010x} at {at}", _with(normal, at, value)) for at in (0, 13, k - 1)]
    # A maximum that leaves out NaN is 0 here.
    rows += [(f"zeros and one {value:#010x}", _with(zeros, k // 2, value)) for value in NAN_PAYLOADS]
    # Their sum is NaN and not Inf.
    rows.append(("both infinities", _with(_with(normal, 3, INFINITY_BITS), k - 4, INFINITY_BITS | SIGN)))
    rows += [
        (f"negative underflow below {big:#010x}", _with(np.full(k, SIGN | 1, np.uint32), 11, big))
        for big in (0x3F800000, FLT_MAX)
    ]
    return rows


def _ties(rng: np.random.Generator, made: BlockFormat, exponents: Sequence[int]) -> Rows:
    """Ties and their neighbours under amax = 2^emax X and M X, of which every rule but CEIL makes X.

    Where the grid has more ties than a block holds, an exponent has some of them, and the next has the next.
    """
    rows: Rows = []
    element, k = made.element, made.k
    largest, middles = element.max_value, np.array(ties(element))
    power = 2.0**element.max_exponent
    tied = _parts(middles, k // 3 - 1)
    for number in range(max(len(exponents), len(tied))):
        e = exponents[number % len(exponents)]
        scale, where = 2.0**e, f"X=2^{e}" + (" again" if number >= len(exponents) else "")
        some = tied[number % len(tied)]
        for top in (power, largest):
            members = near(some[some < top] * scale)
            members = np.append(members, near(np.array([top]) * scale, 0))
            rows.append((f"ties {where} amax={top:g}X", fill(rng, members, k)))
        undone = near(some / element.prescale * scale)
        rows.append((f"ties of {Fraction(element.prescale)} {where}",
                     fill(rng, np.concatenate([undone, near(np.array([largest]) * scale, 0)]), k)))  # fmt: skip
    return rows


def _parts(values: NDArray[np.float64], most: int) -> list[NDArray[np.float64]]:
    """Return ascending values in groups of at most `most`, each group from the whole range."""
    count = -(-len(values) // most)
    return [values[i::count] for i in range(count)]


def _saturating(rng: np.random.Generator, made: BlockFormat, exponents: Sequence[int]) -> Rows:
    """Amax just below 2^(emax + 1) X: what lies above M X saturates under FLOOR and EVEN."""
    rows: Rows = []
    element = made.element
    largest, turn = element.max_value, 2.0 ** (element.max_exponent + 1)
    step = largest - element.magnitudes[-2]
    # Half a step above M, rounding to nearest would leave the grid; a whole step above it is the first code beyond.
    beyond = sorted({largest + step / 2, (largest + turn) / 2, (largest + 3 * turn) / 4})
    members = np.array([ties(element)[-1], largest, *beyond])
    for e in exponents:
        scale = 2.0**e
        bits = np.concatenate([near(members * scale), near(np.array([turn]) * scale)[:1]])
        rows.append((f"saturating X=2^{e}", fill(rng, bits, made.k)))
    return rows


def _amax(
    rng: np.random.Generator, made: BlockFormat, biased: range | list[int], mantissas: Sequence[int]
) -> Rows:
    """Amax of each mantissa, the rest spread over six binades below."""
    k = made.k
    rows: Rows = []
    for exponent in biased:
        for mantissa in mantissas:
            amax = exponent << 23 | mantissa
            row = np.maximum(amax - rng.integers(0, 6 << 23, k), 0).astype(np.uint32)
            row |= rng.integers(0, 2, k).astype(np.uint32) << np.uint32(31)
            row[rng.integers(k)] = amax | int(rng.integers(2)) << 31
            rows.append((f"amax E={exponent} m={mantissa:#08x}", row))
    return rows


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return Student-t draws of 2 degrees of freedom, their rows spread over many binades."""
    spread = np.exp2(rng.integers(-30, 30, (*shape[:-1], 1)))
    x: NDArray[np.float32] = (rng.standard_t(2, shape) * spread).astype(np.float32)
    return x


def any_bits(
    rng: np.random.Generator, shape: tuple[int, ...], finite: bool = False, *, element: ElementFormat
) -> NDArray[np.float32]:
    """Return float32 drawn by bit pattern within 8 binades of one exponent per row, rarely NaN or Inf."""
    centre = rng.integers(0, 255, (*shape[:-1], 1))
    exponent = np.clip(centre + rng.integers(-8, 9, shape), 0, 254)
    mantissa = np.where(
        rng.random(shape) < 0.5, rng.choice(turns(element), shape), rng.integers(0, 1 << 23, shape)
    )
    bits = exponent << 23 | mantissa | rng.integers(0, 2, shape) << 31
    if not finite:
        bits = np.where(rng.random(shape) < 0.002, rng.choice(NAN_PAYLOADS, shape), bits)
        bits = np.where(rng.random(shape) < 0.002, INFINITY_BITS | rng.integers(0, 2, shape) << 31, bits)
    x: NDArray[np.float32] = bits.astype(np.uint32).view(np.float32)
    return x


def cancelling(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return values whose sums cancel to their last bits, so that the order of additions shows."""
    x = rng.standard_normal(shape).astype(np.float32)
    even = x[..., 0::2][..., : shape[-1] // 2]
    x[..., 1::2] = -even * (1 + rng.integers(-4, 5, even.shape).astype(np.float32) * 2.0**-22)
    out: NDArray[np.float32] = (x * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)
    return out


def tame(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int = -1, *, made: BlockFormat
) -> NDArray[np.float32]:
    """Return grid points, 4 the largest of each block along `axis`, each block times a power of two.

    Where scales have a mantissa, the largest is that of the element, and the scale of the tensor is to be 1. Every
    scale rule and every rounding keeps them, so a wrong rule or rounding does not show here, only a wrong place.
    The scale makes the 4 the largest power of two on the grid, and no value is less than a 64th of it, so that narrow
    input types hold them all.
    """
    lengths = [*shape]
    length = lengths.pop(axis)
    power = 2.0**made.element.max_exponent
    points = [4 * m / power for m in made.element.magnitudes if power / 64 <= m <= power]
    largest, lowest, highest = 4.0, -9, 9
    if not made.scale.powers:
        points = [m for m in made.element.magnitudes if m >= power / 64]
        largest = made.element.max_value
        lowest, highest = max(lowest, made.scale.min_exponent), min(highest, made.scale.max_exponent)
    x = rng.choice(points, (*lengths, length))
    x *= rng.choice([-1.0, 1.0], x.shape)
    x[..., ::8] = largest
    blocks = -(-length // made.k)
    x *= np.repeat(np.exp2(rng.integers(lowest, highest + 1, (*lengths, blocks))), made.k, axis=-1)[
        ..., :length
    ]
    return np.ascontiguousarray(np.moveaxis(x, -1, axis), np.float32)
