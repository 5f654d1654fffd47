"""Inputs that find faults: crafted blocks, one name each, and hypothesis strategies for blocks and operands.

Crafted blocks are the same on every run. `a` is a block's largest magnitude, X a power of two that is its
shared scale under at least the `floor` rule.
"""

from functools import cache

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

K = 32
SIGN = 0x80000000
FLT_MAX = 0x7F7FFFFF
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A power of two, and the turns of the scale rules at 1.5 and 1.75 times it, each with its neighbours.
AMAX_MANTISSAS = (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x7FFFFF)
NAN_PAYLOADS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FA00000, 0xFFC00000, 0xFF800001, 0xFFFFFFFF)
INFINITIES = (0x7F800000, 0xFF800000)

Bits = NDArray[np.uint32]
Block = tuple[int, list[int]]  # an E8M0 byte and the 32 codes it scales


def _bits(values: NDArray[np.float64]) -> Bits:
    bits: Bits = values.astype(np.float32).view(np.uint32)
    return bits


def _near(values: NDArray[np.float64], distance: int) -> Bits:
    """Float32 bits of positive values and of all their neighbours up to `distance` ulps away."""
    steps = np.arange(-distance, distance + 1)
    near = _bits(values).astype(np.int64)[:, None] + steps[None, :]
    bits: Bits = np.clip(near, 0, FLT_MAX).astype(np.uint32).ravel()
    return bits


def _row(rng: np.random.Generator, members: Bits, signed: bool = True) -> Bits:
    """A block of all `members`, filled up with draws from them, shuffled, with random signs."""
    row = np.concatenate([members, rng.choice(members, K - members.size)])
    rng.shuffle(row)
    return row | (rng.integers(0, 2, K).astype(np.uint32) << 31) if signed else row


def _tie_rows(rng: np.random.Generator) -> list[tuple[str, Bits]]:
    """Every element tie with its neighbours, at every shared scale that `floor` can give."""
    rows = []
    for e in range(-127, 126):
        scale = 2.0**e
        # a / X of 4 gives X under every rule, 6 under all but ceil, nearly 8 under floor alone (saturating).
        for a, label in ((4.0, "4X"), (6.0, "6X"), (8.0 - 2.0**-21, "nearly 8X")):
            ties = np.array([t for t in TIES if t <= a]) * scale
            members = np.concatenate([_near(ties, 1), _bits(np.array([0.5, 1.0, a]) * scale)])
            members = members[members <= _bits(np.array([a * scale]))[0]]
            rows.append((f"ties X=2^{e} a={label}", _row(rng, members)))
    for e in (-127, -126, -120, -10, 0, 10, 125):
        scale = 2.0**e
        grid = np.array(GRID) * scale
        rows.append((f"grid X=2^{e}", _row(rng, np.concatenate([_bits(grid), _bits(-grid)]), signed=False)))
        for tie in TIES:  # where 3/4 of the input lies at or beside a tie
            members = np.concatenate(
                [_near(np.array([tie * 4 / 3 * scale]), 3), _bits(np.array([7.5 * scale]))]
            )
            rows.append((f"three-quarter tie {tie} X=2^{e}", _row(rng, members)))
    return rows


def _amax_rows(rng: np.random.Generator) -> list[tuple[str, Bits]]:
    """Largest magnitudes at every biased exponent and every turn of a scale rule; the rest spread below."""
    rows = []
    for exponent in range(255):
        for mantissa in AMAX_MANTISSAS:
            amax = exponent << 23 | mantissa
            drop = rng.integers(0, 6 << 23, K)
            row = np.maximum(amax - drop, 0).astype(np.uint32)
            row |= rng.integers(0, 2, K).astype(np.uint32) << 31
            row[rng.integers(K)] = amax | int(rng.integers(2)) << 31
            rows.append((f"amax E={exponent} m={mantissa:#08x}", row))
    return rows


def _special_rows(rng: np.random.Generator) -> list[tuple[str, Bits]]:
    """Zeros, subnormals, NaN, infinities, the largest finite values, and huge ranges inside one block."""

    def full(value: int) -> Bits:
        return np.full(K, value, np.uint32)

    def with_one(base: Bits, position: int, value: int) -> Bits:
        row = base.copy()
        row[position] = value
        return row

    mixed_zeros = np.tile(np.array([0, SIGN], np.uint32), K // 2)
    normal = rng.standard_normal(K).astype(np.float32).view(np.uint32)
    rows = [("all +0", full(0)), ("all -0", full(SIGN)), ("zeros of both signs", mixed_zeros)]
    for value in (1, 2, 0x3FFFFF, 0x400000, 0x7FFFFF, 0x800000, 0x800001, FLT_MAX, FLT_MAX - 1, 0x7F000000):
        rows.append((f"all {value:#010x}", full(value)))
        rows.append((f"all negative {value:#010x}", full(value | SIGN)))
        rows.append((f"zeros and one {value:#010x}", with_one(mixed_zeros, 7, value)))
        rows.append((f"normals and one {value:#010x}", with_one(normal, 19, value)))
    for exponent in (0, 1, 2, 3):  # where the lower clamp of the scale acts, and just above
        row = rng.integers(1, (exponent + 1) << 23, K).astype(np.uint32)
        row[5] = (exponent << 23) + 0x7FFFFF
        rows.append(
            (f"largest biased exponent {exponent}", row | (rng.integers(0, 2, K) << 31).astype(np.uint32))
        )
    for value in (*NAN_PAYLOADS, *INFINITIES):
        rows.extend((f"{value:#010x} at {at}", with_one(normal, at, value)) for at in (0, 13, 31))
        rows.append((f"all {value:#010x}", full(value)))
        rows.append((f"zeros and one {value:#010x}", with_one(mixed_zeros, 16, value)))
    rows.append(("both infinities", with_one(with_one(normal, 3, INFINITIES[0]), 28, INFINITIES[1])))
    rows.append(("NaN and infinity", with_one(with_one(normal, 30, INFINITIES[0]), 1, NAN_PAYLOADS[0])))
    every_binade = np.linspace(0, 254, K).astype(np.uint32) << np.uint32(23) | np.uint32(0x2AAAAA)
    rows.append(("every magnitude, rising", every_binade))
    rows.append(("every magnitude, falling, signs alternate", every_binade[::-1] | mixed_zeros))
    for big in (0x3F800000, FLT_MAX):
        tiny = with_one(full(SIGN | 1), 11, big)
        rows.append((f"negative underflow below {big:#010x}", tiny))
    one = np.array([1.0])
    under = np.concatenate([_bits(one * 2.0**-e) for e in range(K)]) | np.uint32(SIGN)
    rows.append(("negative powers of two down to underflow", under))
    return rows


@cache
def _crafted() -> tuple[tuple[str, ...], NDArray[np.float32]]:
    rng = np.random.default_rng(20240229)
    rows = [*_special_rows(rng), *_tie_rows(rng), *_amax_rows(rng)]
    blocks = np.stack([row for _, row in rows]).astype(np.uint32).view(np.float32)
    blocks.flags.writeable = False
    return tuple(name for name, _ in rows), blocks


def crafted_blocks() -> NDArray[np.float32]:
    """The crafted blocks, float32 [N, 32], read-only; row i is named by `crafted_names()[i]`."""
    return _crafted()[1]


def crafted_names() -> tuple[str, ...]:
    """A name per crafted block: what it is meant to catch."""
    return _crafted()[0]


# ---- hypothesis ----


def _as_block(bits: list[int]) -> NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def raw_bit_blocks(n: int = K, *, finite: bool = False) -> st.SearchStrategy[NDArray[np.float32]]:
    """n float32 values drawn by bit pattern, so every exponent, subnormal and payload is as likely as any."""
    word = st.integers(0, 0xFFFFFFFF)
    if finite:
        word = st.builds(lambda m, s: m | s << 31, st.integers(0, FLT_MAX), st.integers(0, 1))
    return st.lists(word, min_size=n, max_size=n).map(_as_block)


@st.composite
def common_exponent_blocks(draw: st.DrawFn, n: int = K, spread: int = 4) -> NDArray[np.float32]:
    """n finite float32 values within `spread` binades of a common one, so that few elements underflow.

    Half the mantissas lie on or beside element ties and the turns of the scale rules.
    """
    centre = draw(st.integers(0, 254))
    exponent = st.integers(max(centre - spread, 0), min(centre + spread, 254))
    turns = st.sampled_from((*AMAX_MANTISSAS, 0x200000, 0x600001, 0x7FFFFE))
    mantissa = st.one_of(turns, st.integers(0, 0x7FFFFF))
    word = st.builds(lambda e, m, s: e << 23 | m | s << 31, exponent, mantissa, st.integers(0, 1))
    return _as_block(draw(st.lists(word, min_size=n, max_size=n)))


@st.composite
def heavy_tailed_blocks(draw: st.DrawFn, n: int = K) -> NDArray[np.float32]:
    """n float32 values: Student-t of 1 to 3 degrees of freedom, times a lognormal, at a random scale."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 2.0 ** draw(st.integers(-140, 110))
    draws = rng.standard_t(draw(st.integers(1, 3)), n) * np.exp(rng.standard_normal(n)) * scale
    largest = float(np.finfo(np.float32).max)
    return np.clip(draws, -largest, largest).astype(np.float32)


def finite_blocks(n: int = K) -> st.SearchStrategy[NDArray[np.float32]]:
    """Finite float32 [n] of every kind above."""
    return st.one_of(common_exponent_blocks(n), heavy_tailed_blocks(n), raw_bit_blocks(n, finite=True))


def any_blocks(n: int = K) -> st.SearchStrategy[NDArray[np.float32]]:
    """Float32 [n] of every kind above, NaN and infinities among them."""
    return st.one_of(finite_blocks(n), raw_bit_blocks(n))


def scale_bytes_adversarial(*, nan: bool = True) -> st.SearchStrategy[int]:
    """E8M0 bytes, mostly where products underflow or overflow; 255 (NaN) is rare, and absent if not `nan`."""
    edges = (0, 1, 2, 22, 63, 64, 126, 127, 128, 190, 191, 251, 252, 253, 254)
    finite = st.one_of(st.sampled_from(edges), st.integers(110, 140), st.integers(0, 254))
    if not nan:
        return finite
    return st.integers(0, 19).flatmap(lambda i: st.just(255) if i == 19 else finite)


def code_blocks(n: int = K) -> st.SearchStrategy[list[int]]:
    """n element codes: any, all of the largest magnitude, zeros of both signs, or sums that cancel."""
    any_code = st.lists(st.integers(0, 15), min_size=n, max_size=n)
    largest = st.lists(st.sampled_from((7, 15)), min_size=n, max_size=n)
    zeros = st.lists(st.sampled_from((0, 8)), min_size=n, max_size=n)
    half = st.lists(st.integers(0, 15), min_size=n // 2, max_size=n // 2)
    cancelling = half.map(lambda h: h + [c ^ 8 for c in h])
    return st.one_of(any_code, largest, st.just([7] * n), zeros, cancelling)


@st.composite
def gemm_operands(
    draw: st.DrawFn, max_blocks: int = 6, *, nan: bool = True
) -> tuple[list[Block], list[Block]]:
    """The blocks of one row of A and of one row of B that meet in a GEMM: equally many, possibly none.

    In half the draws the two bytes of every block add up to nearly the same sum, so that blocks matter to
    each other and sums cancel; in the others every byte is adversarial on its own.
    """
    count = draw(st.integers(0, max_blocks))
    byte = scale_bytes_adversarial(nan=nan)
    centre = draw(st.one_of(st.none(), st.integers(0, 508)))
    a, b = [], []
    for _ in range(count):
        byte_a, byte_b = draw(byte), draw(byte)
        if centre is not None and byte_a != 255 and byte_b != 255:
            total = centre + draw(st.integers(-12, 12))
            byte_a = min(max(byte_a, total - 254, 0), max(min(total, 254), 0))
            byte_b = min(max(total - byte_a, 0), 254)
        a.append((byte_a, draw(code_blocks())))
        b.append((byte_b, draw(code_blocks())))
    return a, b
