"""Checks of the scaled GEMM in every declared profile and output type, of one block format and of two.

Each question is a pair of operands that shows one fault: sums that cancel, that are ties, that no float32 holds. A new
one goes to the end of its function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product as combinations

import numpy as np

from mxref.conformance.checking import Asked, Check, Op, Plan, Subject
from mxref.conformance.finding import product_check
from mxref.conformance.requests.decoding import LAYOUTS, drawn_array, drawn_codes, given, no_tensor_scale
from mxref.conformance.requests.multiplying import Product
from mxref.errors import ShapeError
from mxref.formats import BLOCK_FORMATS, BlockFormat, ElementFormat, Negatives
from mxref.gemm import OUT_DTYPES
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile
from mxref.steps.hadamard import Rotation

Row = list[tuple[int, list[float]]]
"""Blocks of a row: a scale code, and the first elements; the rest are zero."""
Question = tuple[str, str, MXArray, MXArray]
"""A clause, a title, and the operands."""
_HALF_FLOAT32 = 12
"""Half the bits of a float32's significand: products of elements that span more do not fit in one."""


def _edges(made: BlockFormat) -> tuple[int, ...]:
    """Return scale codes at both ends, around that of 1, and between."""
    one, most = made.scale.one_code, made.scale.max_code
    return (0, 1, 2, one // 2, one - 1, one, one + 1, (one + most) // 2, most - 3, most - 2, most - 1, most)


def _power(made: BlockFormat, exponent: int) -> int:
    """Return the code of the scale 2^exponent."""
    return made.scale.values.index(2.0**exponent)


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of gemm.*."""
    rng = np.random.default_rng(plan.seed)
    made = plan.format
    for profile in (GemmProfile.ORDERED, GemmProfile.EXACT, GemmProfile.BOUNDED):
        for title, a, b in _narrowed(rng, made):
            # `exact` rounds the real sum once, to either type: it narrows nothing.
            clause = "gemm.exact" if profile is GemmProfile.EXACT else "gemm.output"
            yield product_check(clause, f"{profile.value}: {title}", Product(a, b, profile, "bfloat16"))
        a, b = (drawn_array(rng, (rows, plan.long), 1, plan.long, (-1, 2), made=made) for rows in (3, 2))
        yield product_check("gemm.operands", f"{profile.value}: K = {plan.long}", Product(a, b, profile))
        if plan.full and profile is not GemmProfile.EXACT:  # beyond 4 Mi results, and beyond 512 rows of both
            a, b = (drawn_array(rng, (rows, 64), 1, 64, (-1, 2), made=made) for rows in (2051, 2049))
            yield product_check("gemm.operands", f"{profile.value}: 4 Mi results", Product(a, b, profile))
        for out in OUT_DTYPES:
            yield from _asked(profile, out, _questions(rng, plan))
    for out in OUT_DTYPES:
        most = made.scale.max_code
        prescales = (False, True) if made.scale.powers else (False,)
        for top, k, prescale in combinations((most - 2, most), (512, 4096), prescales):
            a, b = (replace(tailed(rng, rows, k, top, made), prescale=prescale) for rows in (9, 11))
            name = f"bounded, {out}: heavy tails, K = {k}, scales to {top}{', prescaled' if prescale else ''}"
            yield product_check("gemm.bounded", name, Product(a, b, GemmProfile.BOUNDED, out))
    yield from _refused(made)


def _asked(profile: GemmProfile, out: str, questions: Iterable[Question], end: str = "") -> Iterator[Check]:
    """Yield the checks of questions under a profile; those of how a sum is rounded are about its own clause."""
    for clause, title, a, b in questions:
        own = clause in ("gemm.exact", "gemm.ordered")
        product = Product(a, b, profile, out, title if title in LAYOUTS else "")
        name = f"{profile.value}, {out}: {title}{end}"
        yield product_check(f"gemm.{profile.value}" if own else clause, name, product)


def _nearest(value: float, element: ElementFormat) -> float:
    """Return the value, or the nearest value of the element: a format without mantissa has neither 1.5 nor 3."""
    if value in element.values:
        return value
    return math.copysign(min(element.magnitudes, key=lambda m: abs(m - abs(value))), value)


def matrix(rows: list[Row], made: BlockFormat, prescale: bool = False) -> MXArray:
    """Return the MXArray [len(rows), k * blocks] of rows of blocks."""
    element, k = made.element, made.k
    values = [[v for _, block in row for v in (block + [0.0] * k)[:k]] for row in rows]
    codes = np.array([[_code(_nearest(v, element), element) for v in row] for row in values], np.uint8)
    scales = np.array([[scale for scale, _ in row] for row in rows], np.uint8)
    shape = (len(rows), k * len(rows[0]))
    packed = pack(codes.reshape(shape), element)
    return MXArray(
        packed, scales.reshape(len(rows), -1), shape, 1, prescale=prescale, format=made,
        tensor_scale=no_tensor_scale(made),
    )  # fmt: skip


def _code(value: float, element: ElementFormat) -> int:
    """Return the code of a value that the element has; -0 has its own, where there is one."""
    minus = value == 0 and math.copysign(1.0, value) < 0 and element.negatives is Negatives.SIGN
    return element.sign if minus else element.values.index(value)


def every_code(made: BlockFormat, special: bool = False) -> MXArray:
    """Return a row of blocks of one code for each code that is a number, or for each that is none."""
    element = made.element
    codes = np.flatnonzero(np.isfinite(element.values) != special).astype(np.uint8)
    rows = pack(np.repeat(codes[:, None], made.k, axis=1), element)
    scales = np.full((len(codes), 1), made.scale.one_code, np.uint8)
    return MXArray(rows, scales, (len(codes), made.k), 1, format=made, tensor_scale=no_tensor_scale(made))


def _questions(rng: np.random.Generator, plan: Plan) -> list[Question]:
    made = plan.format
    hostile = _hostile if made.scale.powers else _hostile_mantissas
    asked = [*_structure(rng, plan.full, made), *hostile(rng, plan.full, made)]
    tensors = _tensor_scales(rng, made) if made.tensor_scale else ()
    return [*asked, *special(made), *_wide(made), *tensors]


def _structure(rng: np.random.Generator, full: bool, made: BlockFormat) -> Iterator[Question]:
    """Which numbers are multiplied: shapes, axes, padding, strides; every pair of codes; NaN blocks."""

    def operand(shape: tuple[int, int], axis: int, length: int) -> MXArray:
        return drawn_array(rng, shape, axis, length, (-1, 2), made=made)

    sizes = (
        ((1, 1, 32), (3, 5, 64), (33, 17, 96), (130, 65, 32), (2, 300, 160), (1030, 3, 64), (3, 1030, 64))
        if full
        else ((1, 1, 32), (3, 5, 64), (33, 17, 96))
    )
    for m, n, k in sizes:
        yield "gemm.operands", f"M, N, K = {m}, {n}, {k}", operand((m, k), 1, k), operand((n, k), 1, k)
    yield "gemm.operands", "both along axis 0", operand((64, 5), 0, 64), operand((64, 3), 0, 64)
    yield "gemm.operands", "along axis 0 and axis 1", operand((64, 5), 0, 64), operand((3, 64), 1, 64)
    yield "gemm.operands", "padded", operand((4, 40), 1, 64), operand((40, 6), 0, 64)
    for layout in LAYOUTS:
        yield "gemm.operands", layout, operand((8, 64), 1, 64), operand((6, 64), 1, 64)
    for shape in ((0, 3), (3, 0), (0, 0)):
        a, b = (operand((rows, 64), 1, 64) for rows in shape)
        yield "gemm.operands", f"empty {shape}", a, b
    yield "gemm.operands", "K = 0", operand((2, 0), 1, 0), operand((3, 0), 1, 0)
    pairs = every_code(made)
    yield "gemm.block_dot", "every pair of codes", pairs, pairs
    largest, k = made.element.max_value, made.k
    rows = matrix([[(scale, [largest])] for scale in _edges(made)], made)
    columns = matrix([[(scale, [largest, -0.5])] for scale in _edges(made)], made)
    yield "gemm.block_dot", "every pair of extreme scales", rows, columns
    x, nan, ones = made.scale.one_code, made.scale.nan_code, [1.0] * k
    spoiled = matrix([[(x, ones), (nan, [0])], [(x, ones), (x, ones)], [(nan, ones), (x, ones)]], made)
    plain = matrix([[(x, ones), (x, ones)], [(x, [0]), (0, [0])], [(nan, [0]), (x, ones)]], made)
    yield "gemm.nan", "NaN blocks in A and B, zeros against them", spoiled, plain
    full_block = (made.scale.max_code, [largest] * k)
    huge = matrix([[(nan, [0]), full_block], [full_block, (x, [1])]], made)
    yield "gemm.nan", "NaN block before an overflow", huge, matrix([[full_block] * 2], made)


def _narrowed(rng: np.random.Generator, made: BlockFormat) -> Iterator[tuple[str, MXArray, MXArray]]:
    """Sums that float32 holds and bfloat16 does not: 257 and 259 are ties."""
    one, two, high = (_power(made, e) for e in (0, 1, 8))
    unit: Row = [(one, [1])] * 2
    sums: list[Row] = [[(one, [1]), (high, [1])], [(two, [1.5]), (high, [1])]]
    yield "257 and 259", matrix(sums, made), matrix([unit], made)
    a, b = (drawn_array(rng, (rows, 96), 1, 96, (-1, 2), made=made) for rows in (33, 17))
    yield "drawn sums", a, b


def _hostile(rng: np.random.Generator, full: bool, made: BlockFormat) -> Iterator[Question]:
    """Sums that show how they were rounded, under the clause of the profile: gemm.exact or gemm.ordered.

    For scales that are powers of two, whose range is that of float32.
    """
    unit: Row = [(127, [1])]
    largest, k = made.element.max_value, made.k

    one, plus, minus, small, half_ulp = ((scale, [value]) for scale, value in (
        (127, 1.0), (157, 1.0), (157, -1.0), (117, 1.0), (103, 1.0)
    ))  # fmt: skip
    for clause, title, blocks in (
        ("gemm.ordered", "2^30 - 2^30 + 2^-10", (plus, minus, small)),
        ("gemm.ordered", "2^30 + 2^-10 - 2^30", (plus, small, minus)),
        ("gemm.ordered", "2^-10 + 2^30 - 2^30", (small, plus, minus)),
        ("gemm.ordered", "1 and sixteen half ulps", (one, *[half_ulp] * 16)),
        ("gemm.ordered", "3 half ulps and 1, both ways", (*[half_ulp] * 3, one, (127, [-1.0]))),
        ("gemm.exact", "double rounding: 257 + 2^-40", ((135, [1.0]), one, (87, [1.0]))),
        ("gemm.exact", "double rounding: 2^24 + 1 + 2^-40", ((151, [1.0]), one, (87, [1.0]))),
    ):
        yield clause, title, matrix([list(blocks)], made), matrix([unit * len(blocks)], made)
    top, bottom = (254, [largest] * k), (254, [-largest] * k)
    pairs: dict[str, tuple[list[Row], list[Row]]] = {
        "overflow stays Inf": ([[top, bottom, bottom], [top, top, bottom]], [[top] * 3]),
        "negative underflow": ([[(0, [-0.5])]], [[(0, [0.5])]]),
        "zero after a negative underflow": (
            [[(0, [-0.5]), (127, [-0.0] * k)]], [[(0, [0.5]), (127, [1.0] * k)]],
        ),
        "subnormal sums": (
            [[(0, [0.5, -0.5, 1.5])] * 3], [[(0, [largest]), (1, [largest]), (2, [3.0])]],
        ),
    }  # fmt: skip
    for title, (left, right) in pairs.items():
        yield "gemm.ordered", title, matrix(left, made), matrix(right, made)
    for name, lowest in (("float32", -149), ("bfloat16", -133)):
        # Half units of the last place and a little more or less: rounded to the precision of normal numbers first,
        # each is a tie. B's scale is 2^-75.
        low = lowest - 1 + 127 + 75
        for half, elements, little in ((1, [1.0], 1.0), (3, [3.0], -1.0), (5, [4.0, 1.0], 1.0)):
            a = matrix([[(low, elements), (low - 30, [little])]], made)
            b = matrix([[(52, [1.0] * 2)] * 2], made)
            yield "gemm.exact", f"double rounding: {half} halves of {name}'s least, and a little", a, b
    for prescaled in ((True, False), (False, True), (True, True)):
        a, b = (
            replace(tailed(rng, rows, 256, 140, made), prescale=p)
            for rows, p in zip((7, 6), prescaled, strict=True)
        )
        yield "gemm.prescale", f"prescaled {prescaled}", a, b
        exact = matrix([[(127, [1, 1.5])], [(127, [3])], [(254, [largest] * k)]], made, prescaled[0])
        short = matrix([unit, [(128, [3.0])]], made, prescaled[1])
        yield "gemm.prescale", f"prescaled {prescaled}, short sums", exact, short
    for i in range(6 if full else 2):
        a, b = (tailed(rng, rows, k * (3 + 5 * i), 160, made) for rows in (8, 9))
        yield "gemm.ordered", f"heavy tails {i}", a, b
        a, b = (adversarial(rng, rows, 4 + i, made) for rows in (6, 7))
        yield "gemm.ordered", f"adversarial scales {i}", a, b


def _hostile_mantissas(rng: np.random.Generator, full: bool, made: BlockFormat) -> Iterator[Question]:
    """The same for scales with a mantissa: small and large terms need both operands' scales, and nothing overflows."""
    low, high = made.scale.min_exponent, made.scale.max_exponent

    def pair(a: int, b: int, value: float, count: int = 1) -> tuple[int, int, list[float], float]:
        return _power(made, a), _power(made, b), [value] * count, abs(value)

    small, plus, minus, one = (
        pair(low, low, 1.0), pair(high, high, 1.0), pair(high, high, -1.0), pair(0, 0, 1.0)
    )  # fmt: skip
    # 2^(2 low) is half a unit of 2^(2 low + 24) in the last place.
    base = pair(low + 12, low + 12, 1.0)
    many = pair(high, high, 4.0, made.k)
    for clause, title, terms in (
        ("gemm.ordered", "large, minus large, small", (plus, minus, small)),
        ("gemm.ordered", "large, small, minus large", (plus, small, minus)),
        ("gemm.ordered", "small, large, minus large", (small, plus, minus)),
        ("gemm.ordered", "one term and sixteen half ulps", (base, *[small] * 16)),
        ("gemm.ordered", "sixteen half ulps and one term", (*[small] * 16, base)),
        ("gemm.exact", "double rounding: 257 and a little", (pair(high, 0, 1.0), one, small)),
        ("gemm.exact", "double rounding: a tie of float32 and a little", (many, one, small)),
    ):
        left: Row = [(a, values) for a, _, values, _ in terms]
        right: Row = [(b, [size] * made.k) for _, b, _, size in terms]
        yield clause, title, matrix([left], made), matrix([right], made)
    significand = [1 << made.scale.mantissa_bits | bits for bits in range(1 << made.scale.mantissa_bits)]
    codes = [made.scale.one_code + each - significand[0] for each in significand]
    rows: list[Row] = [[(code, [1.0, 0.5])] for code in codes]
    yield "gemm.block_dot", "every pair of significands", matrix(rows, made), matrix(rows, made)
    for i in range(6 if full else 2):
        a, b = (tailed(rng, rows, made.k * (3 + 5 * i), made.scale.max_code, made) for rows in (8, 9))
        yield "gemm.ordered", f"heavy tails {i}", a, b
        a, b = (adversarial(rng, rows, 4 + i, made) for rows in (6, 7))
        yield "gemm.ordered", f"adversarial scales {i}", a, b


TENSOR_SCALES = (
    (1 / 2688, 260 / 2688), (3.7, 1 / 3), (2.0**-149, 2.0**100), (2.0**100, 2.0**-149), (1e30, 1e30), (3e38, 1e-30),
    (1e-30, 3e38), (1e-25, 1e-20), (2.0**-140, 1.1),
)  # fmt: skip
"""Scales of the tensors of A and B: each rounds, overflows or underflows, before the other or after it."""


def _tensor_scales(rng: np.random.Generator, made: BlockFormat) -> Iterator[Question]:
    left, right = (drawn_array(rng, (rows, 6 * made.k), 1, 6 * made.k, made=made) for rows in (7, 9))
    for of_a, of_b in TENSOR_SCALES:
        a, b = (
            replace(q, tensor_scale=np.array([scale], np.float32))
            for q, scale in ((left, of_a), (right, of_b))
        )
        yield "gemm.tensor_scale", f"tensor scales {of_a:g} and {of_b:g}", a, b


def special(made: BlockFormat, other: BlockFormat | None = None) -> Iterator[Question]:
    """NaN and Inf codes, which quantization never makes, times every number and times each other."""
    element = made.element
    if np.isfinite(element.values).all():
        return
    codes = every_code(made, special=True)
    yield "gemm.special", "codes of NaN and Inf against every number", codes, every_code(other or made)
    others = every_code(other or made, special=True)
    if len(others.codes):
        yield "gemm.special", "codes of NaN and Inf against each other", codes, others
    infinity = element.values.index(np.inf) if np.inf in element.values else None
    nan = int(np.flatnonzero(np.isnan(element.values))[0])
    one = _code(1.0, element)
    rows = [[nan, one, one], [one, one, nan]]
    if infinity is not None:
        minus = infinity | element.sign
        rows += [[infinity, one, one], [one, minus, one], [infinity, minus, one], [infinity, one, infinity]]
    blocks = np.zeros((len(rows), 3, made.k), np.uint8)
    blocks[:, :, 5] = rows  # a special code among zeros
    packed = pack(blocks.reshape(len(rows), -1), element)
    scales = np.full((len(rows), 3), made.scale.one_code, np.uint8)
    shape = (len(rows), 3 * made.k)
    a = MXArray(packed, scales, shape, 1, format=made, tensor_scale=no_tensor_scale(made))
    x = (other or made).scale.one_code
    units: list[Row] = [[(x, [1.0] * made.k)] * 3, [(x, [-1.0] * made.k)] * 3, [(0, [1.0] * made.k)] * 3]
    yield "gemm.special", "one code of NaN or Inf in a row", a, matrix(units, other or made)


def _wide(made: BlockFormat) -> Iterator[Question]:
    """Dot products that no float32, and for the widest elements no float64, holds: each is rounded once."""
    element = made.element
    least, largest = element.magnitudes[1], element.max_value
    if element.max_exponent + 1 - element.unit_exponent <= _HALF_FLOAT32:
        return
    x = made.scale.one_code
    a: list[Row] = [[(x, [largest, least, -largest])], [(x, [-largest, largest, least])]]
    b: list[Row] = [[(x, [largest, least, largest])], [(x, [largest, largest, -least])]]
    yield "gemm.block_dot", "a small product between large ones that cancel", matrix(a, made), matrix(b, made)
    power = min(_HALF_FLOAT32, element.max_exponent)
    high, low = 2.0**power, 2.0 ** (power - _HALF_FLOAT32)
    a = [[(x, [high, low, sign * least])] for sign in (1, -1)]
    b = [[(x, [high, odd * low, least])] for odd in (1, 3)]
    yield "gemm.block_dot", "half a unit, and a little more or less", matrix(a, made), matrix(b, made)
    for left, right in spanning(49, made, made):
        yield "gemm.block_dot", "a unit after sums of 54 bits that cancel", left, right


def spanning(bits: int, made: BlockFormat, other: BlockFormat) -> Iterator[tuple[MXArray, MXArray]]:
    """Yield rows of A and B whose sum is 1 unit in the last place if no product is lost.

    There are none if no two elements span that many bits. The elements of their blocks span `bits` bits together, and
    all products but one are as large as that allows. With 49 bits, the 32 products of a block have a sum of 54 bits,
    which no float64 holds.
    """

    def largest(element: ElementFormat) -> dict[int, float]:
        """Return the largest magnitude of each span of bits."""
        return {int(math.ldexp(m, -element.unit_exponent)).bit_length(): m for m in element.magnitudes[1:]}

    a, b = largest(made.element), largest(other.element)
    pairs = [(value, b[bits - span]) for span, value in a.items() if bits - span in b]
    if not pairs:
        return
    left, right = max(pairs, key=math.prod)
    units = [math.ldexp(1, f.element.unit_exponent) for f in (made, other)]
    many = made.k - 1
    x, y = made.scale.one_code, other.scale.one_code
    first: Row = [(x, [-left] * many), (x, [left] * many + units[:1])]
    yield matrix([first], made), matrix([[(y, [right] * many), (y, [right] * many + units[1:])]], other)


def tailed(rng: np.random.Generator, rows: int, k: int, top: int, made: BlockFormat) -> MXArray:
    """Return drawn codes under scales whose logarithms have heavy tails, none above `top`."""
    codes, one = drawn_codes(rng, (rows,), k, made), made.scale.one_code
    scales = np.clip(one - 7 + rng.standard_t(2, (rows, k // made.k)) * 4, 0, min(top, one + 33))
    scales[rng.random(scales.shape) < 0.02] = top
    return MXArray(
        codes, scales.astype(np.uint8), (rows, k), 1, format=made, tensor_scale=no_tensor_scale(made)
    )


def adversarial(rng: np.random.Generator, rows: int, blocks: int, made: BlockFormat) -> MXArray:
    """Return drawn codes under extreme scales, a twentieth of them NaN."""
    codes = drawn_codes(rng, (rows,), made.k * blocks, made)
    scales = rng.choice(_edges(made), (rows, blocks)).astype(np.uint8)
    scales[rng.random(scales.shape) < 0.05] = made.scale.nan_code
    shape = (rows, made.k * blocks)
    return MXArray(codes, scales, shape, 1, format=made, tensor_scale=no_tensor_scale(made))


def _refused(made: BlockFormat) -> Iterator[Check]:
    one, k = made.scale.one_code, made.k
    row, other = matrix([[(one, [1.0])]], made), matrix([[(one, [1.0])] * 2], made)
    turned = replace(row, rotation=Rotation(16))

    def call(profile: GemmProfile, operands: tuple[MXArray, MXArray], subject: Subject) -> object:
        a, b = (given(subject, q) for q in operands)
        return subject.backend.scaled_gemm(a, b, profile=profile, out_dtype=out_dtype(subject))

    for profile in GemmProfile:
        asked = Asked(Op.GEMM, (("gemms", (profile, made, made)),))
        for what, operands in (
            (f"contraction lengths {k} and {2 * k}", (row, other)), ("different Hadamard transforms", (row, turned)),
        ):  # fmt: skip
            title = f"{profile.value}: {what}"
            made_call = partial(call, profile, operands)
            yield Check.refused("gemm.operands", title, asked, made_call, ShapeError, f"{what}: accepted")


def out_dtype(subject: Subject) -> str:
    """Return an output type that the backend declares."""
    return next((out for out in OUT_DTYPES if out in subject.capabilities.gemm_dtypes), OUT_DTYPES[0])


def mixed_checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of gemm.* for an operand of the plan's format and one of every other format."""
    a = plan.format
    for b in BLOCK_FORMATS.values():
        if b is a or a.k != b.k:
            continue
        rng = np.random.default_rng(plan.seed)
        for profile in GemmProfile:
            for out in OUT_DTYPES if plan.full else OUT_DTYPES[:1]:
                yield from _asked(profile, out, _mixed_questions(rng, a, b), f", {a} x {b}")


def _mixed_questions(rng: np.random.Generator, a: BlockFormat, b: BlockFormat) -> Iterator[Question]:
    yield "gemm.block_dot", "every pair of codes", every_code(a), every_code(b)
    left, right = (drawn_array(rng, (rows, 96), 1, 96, (-1, 2), made=made) for rows, made in ((5, a), (7, b)))
    yield "gemm.operands", "M, N, K = 5, 7, 96", left, right
    for prescaled in ((True, False), (False, True), (True, True)):
        first, second = (replace(q, prescale=p) for q, p in zip((left, right), prescaled, strict=True))
        yield "gemm.prescale", f"prescaled {prescaled}", first, second
    yield "gemm.ordered", "heavy tails", tailed(rng, 8, 5 * a.k, 160, a), tailed(rng, 9, 5 * b.k, 160, b)
    yield "gemm.ordered", "adversarial scales", adversarial(rng, 6, 5, a), adversarial(rng, 7, 5, b)
    for first, second in spanning(49, a, b):
        yield "gemm.block_dot", "a unit after sums of 54 bits that cancel", first, second
    yield from special(a, b)
