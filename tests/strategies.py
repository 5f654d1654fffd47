"""Inputs that find faults: crafted blocks, one name each, and hypothesis strategies for blocks and operands.

Crafted blocks are the same on every run. `a` is a block's largest magnitude, X a power of two that is its
shared scale under at least the `floor` rule. The element format is an argument, as the oracle describes it.
"""

from fractions import Fraction
from functools import cache

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracle
from oracle import E2M1, Element

K = 32
SIGN = 0x80000000
FLT_MAX = 0x7F7FFFFF
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_PAYLOADS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FA00000, 0xFFC00000, 0xFF800001, 0xFFFFFFFF)
INFINITIES = (0x7F800000, 0xFF800000)

Bits = NDArray[np.uint32]
Block = tuple[int, list[int]]  # an E8M0 byte and the 32 codes it scales


def amax_mantissas(element: Element = E2M1) -> tuple[int, ...]:
    """A power of two, and the turns of RCEIL and EVEN between two powers of two, each with its neighbours."""
    rceil = oracle.round_f32(element.largest) & 0x7FFFFF
    even = (1 << 23) - (1 << (22 - element.fraction_bits))
    return (0, 1, rceil - 1, rceil, rceil + 1, even - 1, even, 0x7FFFFF)


AMAX_MANTISSAS = amax_mantissas()


def _floats(values: list[Fraction]) -> NDArray[np.float64]:
    return np.array([float(v) for v in values])


def _grid(element: Element) -> NDArray[np.float64]:
    return _floats(element.grid)


def _ties(element: Element) -> NDArray[np.float64]:
    return _floats([(low + high) / 2 for low, high in zip(element.grid, element.grid[1:], strict=False)])


def _top(element: Element) -> float:
    """The power of two above all elements: 8 for E2M1."""
    return 2.0 ** (element.largest_exponent + 1)


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


def _tie_rows(rng: np.random.Generator, element: Element) -> list[tuple[str, Bits]]:
    """Every element tie with its neighbours; for E2M1 at every shared scale that `floor` can give.

    An element format of many ties has all of them at a few scales, and 8 drawn ones at every other.
    """
    rows = []
    ties, top, largest = _ties(element), _top(element), float(element.largest)
    highest = 127 - element.largest_exponent
    amaxes = (
        (top / 2, f"{top / 2:g}X"),
        (largest, f"{largest:g}X"),
        (top * (1 - 2.0**-24), f"nearly {top:g}X"),
    )
    for e in range(-127, highest + 1):
        scale = 2.0**e
        every = len(ties) <= 8 or e in (-127, -126, 0, highest)
        # a / X of 2^emax gives X under every rule, M under all but ceil, nearly 2^(emax + 1) under floor alone.
        for a, label in amaxes:
            within = ties[ties <= a]
            if not every:
                within = np.sort(rng.choice(within, 8, replace=False))
            for first in range(0, len(within), 8):
                chosen = within[first : first + 8] * scale
                members = np.concatenate([_near(chosen, 1), _bits(np.array([0.5, 1.0, a]) * scale)])
                members = members[members <= _bits(np.array([a * scale]))[0]]
                part = "" if first == 0 else f" from {first}"
                rows.append((f"ties X=2^{e} a={label}{part}", _row(rng, members)))
    for e in (-127, -126, -120, -10, 0, 10, highest):
        scale = 2.0**e
        for first, grid in _chunks(_grid(element) * scale, 16):
            signed = np.concatenate([_bits(grid), _bits(-grid)])
            rows.append((f"grid X=2^{e}{first}", _row(rng, signed, signed=False)))
        for first, near in _chunks(ties / float(element.prescale) * scale, 1 if len(ties) <= 8 else 4):
            # where the prescaled input lies at or beside a tie
            members = np.concatenate([_near(near, 3), _bits(np.array([top * 15 / 16 * scale]))])
            rows.append((f"prescaled ties X=2^{e}{first or ' from 0'}", _row(rng, members)))
    return rows


def _chunks(values: NDArray[np.float64], size: int) -> list[tuple[str, NDArray[np.float64]]]:
    """Parts of at most `size` values, each with a label that tells it from the others."""
    return [(f" from {i}" if i else "", values[i : i + size]) for i in range(0, len(values), size)]


def _amax_rows(rng: np.random.Generator, element: Element) -> list[tuple[str, Bits]]:
    """Largest magnitudes at every biased exponent and every turn of a scale rule; the rest spread below."""
    rows = []
    binades = element.largest_exponent + element.per_one.bit_length() + 2  # a little below the smallest tie
    for exponent in range(255):
        for mantissa in amax_mantissas(element):
            amax = exponent << 23 | mantissa
            drop = rng.integers(0, binades << 23, K)
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
def _crafted(element: Element) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    rng = np.random.default_rng(20240229)
    rows = [*_special_rows(rng), *_tie_rows(rng, element), *_amax_rows(rng, element)]
    blocks = np.stack([row for _, row in rows]).astype(np.uint32).view(np.float32)
    blocks.flags.writeable = False
    return tuple(name for name, _ in rows), blocks


def crafted_blocks(element: Element = E2M1) -> NDArray[np.float32]:
    """The crafted blocks, float32 [N, 32], read-only; row i is named by `crafted_names(element)[i]`."""
    return _crafted(element)[1]


def crafted_names(element: Element = E2M1) -> tuple[str, ...]:
    """A name per crafted block: what it is meant to catch."""
    return _crafted(element)[0]


# ---- hypothesis ----


def _bytes(n: int) -> st.SearchStrategy[NDArray[np.uint8]]:
    """n bytes in one draw: hypothesis takes far longer for n draws of one."""
    return st.binary(min_size=n, max_size=n).map(lambda drawn: np.frombuffer(drawn, np.uint8))


def _words(n: int) -> st.SearchStrategy[Bits]:
    return _bytes(4 * n).map(lambda drawn: drawn.view("<u4").astype(np.uint32))


def raw_bit_blocks(n: int = K, *, finite: bool = False) -> st.SearchStrategy[NDArray[np.float32]]:
    """n float32 values drawn by bit pattern, so every exponent, subnormal and payload is as likely as any."""
    words = _words(n)
    if finite:
        words = words.map(
            lambda w: np.minimum(w & np.uint32(SIGN - 1), np.uint32(FLT_MAX)) | w & np.uint32(SIGN)
        )
    return words.map(lambda w: w.view(np.float32))


@st.composite
def common_exponent_blocks(draw: st.DrawFn, n: int = K, element: Element = E2M1) -> NDArray[np.float32]:
    """n finite float32 values within a few binades of a common one, so that few elements underflow.

    Half the mantissas lie on or beside element ties and the turns of the scale rules.
    """
    centre = draw(st.integers(0, 254))
    spread = 4 if element == E2M1 else draw(st.integers(2, element.largest_exponent + 2))
    lowest, highest = max(centre - spread, 0), min(centre + spread, 254)
    half_steps = [i << (22 - element.fraction_bits) for i in range(2, 2 << element.fraction_bits)]
    beside = [m + d for m in half_steps for d in (-1, 0, 1)] if element != E2M1 else []
    turns = np.array((*amax_mantissas(element), 0x200000, 0x600001, 0x7FFFFE, *beside), np.uint32)
    words, at, which, beyond = draw(_words(n)), draw(_words(n)), draw(_bytes(n)), draw(_bytes(n))
    mantissa = np.where(which & 1, turns[at % len(turns)], words & np.uint32(0x7FFFFF))
    exponent = lowest + beyond.astype(np.uint32) % np.uint32(highest - lowest + 1)
    bits: Bits = words & np.uint32(SIGN) | exponent << np.uint32(23) | mantissa
    return bits.view(np.float32)


@st.composite
def heavy_tailed_blocks(draw: st.DrawFn, n: int = K) -> NDArray[np.float32]:
    """n float32 values: Student-t of 1 to 3 degrees of freedom, times a lognormal, at a random scale."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 2.0 ** draw(st.integers(-140, 110))
    draws = rng.standard_t(draw(st.integers(1, 3)), n) * np.exp(rng.standard_normal(n)) * scale
    largest = float(np.finfo(np.float32).max)
    return np.clip(draws, -largest, largest).astype(np.float32)


def finite_blocks(n: int = K, element: Element = E2M1) -> st.SearchStrategy[NDArray[np.float32]]:
    """Finite float32 [n] of every kind above."""
    common = common_exponent_blocks(n, element)
    return st.one_of(common, heavy_tailed_blocks(n), raw_bit_blocks(n, finite=True))


def any_blocks(n: int = K, element: Element = E2M1) -> st.SearchStrategy[NDArray[np.float32]]:
    """Float32 [n] of every kind above, NaN and infinities among them."""
    return st.one_of(finite_blocks(n, element), raw_bit_blocks(n))


def scale_bytes_adversarial(*, nan: bool = True) -> st.SearchStrategy[int]:
    """E8M0 bytes, mostly where products underflow or overflow; 255 (NaN) is rare, and absent if not `nan`."""
    edges = (0, 1, 2, 22, 63, 64, 126, 127, 128, 190, 191, 251, 252, 253, 254)
    finite = st.one_of(st.sampled_from(edges), st.integers(110, 140), st.integers(0, 254))
    if not nan:
        return finite
    return st.integers(0, 19).flatmap(lambda i: st.just(255) if i == 19 else finite)


def code_blocks(
    n: int = K, element: Element = E2M1, *, special: bool = False
) -> st.SearchStrategy[list[int]]:
    """n element codes: any, all of the largest magnitude, zeros of both signs, or sums that cancel.

    Codes of NaN and infinity are among them only where `special` is true, and then in one draw of four.
    """
    sign, top = element.sign, element.top

    def numbers_of(length: int) -> st.SearchStrategy[list[int]]:
        return _bytes(length).map(lambda b: (np.minimum(b & (sign - 1), top) | b & sign).tolist())

    number = st.builds(lambda m, s: m | s, st.integers(0, top), st.sampled_from((0, sign)))
    any_code, half = numbers_of(n), numbers_of(n // 2)
    zeros = _bytes(n).map(lambda b: (b & sign).tolist())
    largest = zeros.map(lambda codes: [top | code for code in codes])
    cancelling = half.map(lambda h: h + [element.negated(c) for c in h])
    numbers = st.one_of(any_code, largest, st.just([top] * n), zeros, cancelling)
    if not special or top == sign - 1:
        return numbers
    code = st.one_of(number, st.sampled_from(list(range(top + 1, sign))), st.just(sign | (top + 1)))
    mixed = st.lists(code, min_size=n, max_size=n)
    one = st.builds(
        lambda codes, at, c: [*codes[:at], c, *codes[at + 1 :]], any_code, st.integers(0, n - 1), code
    )
    return st.one_of(numbers, numbers, numbers, st.one_of(one, one, mixed))


@st.composite
def gemm_operands(
    draw: st.DrawFn,
    max_blocks: int = 6,
    *,
    nan: bool = True,
    elements: tuple[Element, Element] = (E2M1, E2M1),
    special: bool = False,
) -> tuple[list[Block], list[Block]]:
    """The blocks of one row of A and of one row of B that meet in a GEMM: equally many, possibly none.

    In half the draws the two bytes of every block add up to nearly the same sum, so that blocks matter to
    each other and sums cancel; in the others every byte is adversarial on its own. `nan` allows byte 255,
    `special` codes of NaN and infinity.
    """
    count = draw(st.integers(0, max_blocks))
    byte = scale_bytes_adversarial(nan=nan)
    centre = draw(st.one_of(st.none(), st.integers(0, 508)))
    codes = [code_blocks(element=element, special=special) for element in elements]
    a, b = [], []
    for _ in range(count):
        byte_a, byte_b = draw(byte), draw(byte)
        if centre is not None and byte_a != 255 and byte_b != 255:
            total = centre + draw(st.integers(-12, 12))
            byte_a = min(max(byte_a, total - 254, 0), max(min(total, 254), 0))
            byte_b = min(max(total - byte_a, 0), 254)
        a.append((byte_a, draw(codes[0])))
        b.append((byte_b, draw(codes[1])))
    return a, b


@st.composite
def nearly_tied_operands(
    draw: st.DrawFn, elements: tuple[Element, Element]
) -> tuple[list[Block], list[Block]]:
    """Two blocks: a power of two, then half of its last place in float32, with something small or nothing beside.

    The sum is a tie that only the small product decides: an accumulation that rounds twice goes wrong.
    """
    powers = [element.grid.index(Fraction(2) ** element.largest_exponent) for element in elements]
    sum_of_bytes = draw(st.integers(150, 400))
    below = sum_of_bytes - 24
    first_element = elements[0]

    def block(total: int, *pairs: tuple[int, int]) -> tuple[Block, Block]:
        places = draw(st.lists(st.integers(0, K - 1), min_size=len(pairs), max_size=len(pairs), unique=True))
        codes = [[0] * K, [0] * K]
        for place, pair in zip(places, pairs, strict=True):
            for side in (0, 1):
                codes[side][place] = pair[side]
        low = max(total - 254, 0)
        first = draw(st.integers(low, total - low))
        return (first, codes[0]), (total - first, codes[1])

    negative = st.booleans()
    power = first_element.code(powers[0], draw(negative))
    half = (first_element.code(powers[0], draw(negative)), powers[1])
    small = (first_element.code(draw(st.integers(0, 3)), draw(negative)), draw(st.integers(0, 3)))
    odd = draw(st.booleans())  # the power itself, or the float32 above it, whose last bit is set
    blocks = [block(sum_of_bytes, (power, powers[1]))]
    if odd:
        blocks.append(block(below + 1, (power, powers[1])))
    blocks.append(block(below, half, small))
    return [a for a, _ in blocks], [b for _, b in blocks]
