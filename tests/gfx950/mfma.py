"""Matrix instructions, where their result does not depend on the order and the width of the hardware's sums.

Those are not documented. So a result is given only if every partial sum in any order is a float32: all products
and the addend are multiples of some 2^q, q >= -149, and their magnitudes add up to at most 2^(q + 24). Anything
else is refused, or is a number that a launch names: a kernel that throws such a sum away is right, and one that stores
it is seen. Subnormal sources count with their value (MFMA flushes none since CDNA3).

Lane l of 64 holds row (of A) or column (of B) l % N, N = 16 or 32, and neighbouring elements along K, first those of
lanes 0 .. N-1, and so on. Elements of 8 bits in scaled instructions come in two runs of 16 (see `runs_of_16`).
Register r of the result holds, for 16x16, row 4 * (l / 16) + r of column l % 16; for 32x32, row
8 * (r / 4) + 4 * (l / 32) + r % 4 of column l % 32.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from gfx950 import fp4, fp6
from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.operands import Operand
from gfx950.registers import LANES, Group
from gfx950.sources import Handler, check_modifiers
from gfx950.valu_tables import U32

Elements = Callable[[np.ndarray], np.ndarray]


def words(group: Group, operand: Operand) -> np.ndarray:
    """Return all registers of an operand, uint32 [n, 64, registers]."""
    return np.stack([group.vector32(operand, part) for part in range(operand.count)], axis=-1)


def halves(data: np.ndarray) -> np.ndarray:
    """Return the 16-bit halves of words, low first, as uint16 [..., 2 * registers]."""
    return np.ascontiguousarray(data).view(np.uint16)


def from_f32(data: np.ndarray) -> np.ndarray:
    """Return float32 elements in float64."""
    return data.view(np.float32).astype(np.float64)


def from_f16(data: np.ndarray) -> np.ndarray:
    """Return float16 elements in float64."""
    return halves(data).view(np.float16).astype(np.float64)


def from_bf16(data: np.ndarray) -> np.ndarray:
    """Return bfloat16 elements in float64."""
    return (halves(data).astype(U32) << U32(16)).view(np.float32).astype(np.float64)


def from_fp8(data: np.ndarray) -> np.ndarray:
    """Return OCP E4M3 elements, four to a word, low byte first, in float64."""
    return np.ascontiguousarray(data).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def from_bf8(data: np.ndarray) -> np.ndarray:
    """Return E5M2 elements, four to a word, low byte first, in float64."""
    return np.ascontiguousarray(data).view(ml_dtypes.float8_e5m2).astype(np.float64)


def from_fp4(data: np.ndarray) -> np.ndarray:
    """Return E2M1 elements, eight to a word, low nibble first, in float64."""
    return fp4.decode((data[..., None] >> (U32(4) * np.arange(8, dtype=U32))) & U32(15)).reshape(
        *data.shape[:-1], -1
    )


def from_sixes(kind: str) -> Elements:
    """Return what gives elements of 6 bits, 16 to three words, in float64."""

    def elements(data: np.ndarray) -> np.ndarray:
        return fp6.decode(fp6.codes_of(data), fp6.GRIDS[kind])

    return elements


def matrix(elements: np.ndarray, n: int) -> np.ndarray:
    """Return [waves, n, K] from what the lanes hold, [waves, 64, K / groups]."""
    waves, _, each = elements.shape
    return elements.reshape(waves, LANES // n, n, each).transpose(0, 2, 1, 3).reshape(waves, n, -1)


def runs_of_16(elements: np.ndarray, n: int) -> np.ndarray:
    """Return [waves, n, K] where a lane holds two runs of 16 elements, half of K apart.

    So scaled instructions read elements of 8 bits: AMD's "CDNA4" ISA, 7.1.5.1.
    """
    waves = elements.shape[0]
    runs = elements.reshape(waves, LANES // n, n, 2, 16).transpose(0, 2, 3, 1, 4)
    return runs.reshape(waves, n, -1)


def rows_and_columns(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of every result, [64, registers]."""
    lane, register = np.arange(LANES)[:, None], np.arange(n * n // LANES)[None, :]
    row = 4 * (lane // n) + register if n == 16 else 8 * (register // 4) + 4 * (lane // n) + register % 4
    return row, np.broadcast_to(lane % n, row.shape)


def exact_sum(products: np.ndarray, addend: np.ndarray, unknown: float | None, bits: int = 24) -> np.ndarray:
    """Return addend + products summed over the last axis, float64; where an order could matter, `unknown` or an error.

    Sums have a significand of `bits` bits: 24, and no unit below 2^-149, or 52 of float64's 53, since the magnitudes
    are added up in float64 too.
    """
    with np.errstate(invalid="ignore"):
        total = products.sum(axis=-1) + addend
        size = np.abs(products).sum(axis=-1) + np.abs(addend)
        special = ~np.isfinite(size)
        fraction, exponent = np.frexp(np.where(special, 0, size))
        # The least power of two, from the format's own on, of which 2^bits are no less than the magnitudes together.
        q = np.maximum(exponent - (fraction == 0.5) - bits, -149 if bits == 24 else -1022)
        unit, inverse = np.ldexp(1.0, q), np.ldexp(1.0, -q)
        whole = (np.rint(products * inverse[..., None]) * unit[..., None] == products).all(axis=-1)
        whole &= np.rint(addend * inverse) * unit == addend
    fits = special | (whole & (size < 2.0 ** (128 if bits == 24 else 1023)))
    if unknown is not None:
        total = np.where(fits, total, unknown)
    elif not fits.all():
        raise Gfx950Error("a sum that may depend on the hardware's order or width is not modelled")
    zero = size == 0
    if zero.any():
        # -0 only if all terms are: the order cannot matter, but NumPy starts at +0.
        negative = np.signbit(products[zero]).all(axis=-1) & np.signbit(addend[zero])
        total[zero] = np.where(negative, -0.0, 0.0)
    return np.asarray(total)


def check_overlap(instruction: Instruction) -> None:
    """Raise if a result of more than four registers lies over a source: it is written while that is still read.

    The addend may be the very same registers.
    """
    result, *sources = instruction.operands
    for number, operand in enumerate(sources):
        if number == 2 and operand.index == result.index:
            continue
        if result.count > 4 and operand.overlaps(result):
            raise Gfx950Error("a result of more than four registers lies over a source")


def multiply(group: Group, instruction: Instruction, a: np.ndarray, b: np.ndarray, n: int) -> None:
    """Write A B + C for A [waves, n, K] and B transposed, [waves, n, K]."""
    destination, _, _, third, *_ = instruction.operands
    if not group.all_on:
        raise Gfx950Error("a matrix instruction with disabled lanes is not modelled")
    row, column = rows_and_columns(n)
    count = n * n // LANES
    constant = third.kind in ("int", "float")
    if destination.count != count or not (constant or third.count == count):
        raise Gfx950Error(f"the result takes {count} registers")
    check_overlap(instruction)
    # All of C is read before any register is written: it may share some with the result.
    totals = []
    for register in range(count):
        bits = group.vector32(third, register)
        addend = np.broadcast_to(bits, (group.count, LANES)).view(np.float32).astype(np.float64)
        products = a[:, row[:, register]] * b[:, column[:, register]]
        totals.append(exact_sum(products, addend, group.state.choices.unknown_sums))
    for register, total in enumerate(totals):
        group.write_vector(destination, register, total.astype(np.float32).view(U32), None)


def plain(n: int, k: int, elements: Elements) -> Handler:
    """Return v_mfma_f32_<n>x<n>x<k>_<type>."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset())
        a, b = (matrix(elements(words(group, o)), n) for o in instruction.operands[1:3])
        if a.shape[2] != k or b.shape[2] != k:
            raise Gfx950Error(f"{a.shape[2]} and {b.shape[2]} elements along K, not {k}")
        multiply(group, instruction, a, b, n)

    return run


def multiply_f64(group: Group, instruction: Instruction) -> None:
    """v_mfma_f64_16x16x4_f64: pairs of registers, and pair p of the result holds row 4 * p + l / 16.

    Factors have at most 24 significant bits in the range of float32, so that every product is exact.
    """
    check_modifiers(instruction, frozenset())
    destination, first, second, third = instruction.operands
    if not group.all_on:
        raise Gfx950Error("a matrix instruction with disabled lanes is not modelled")
    if (destination.count, first.count, second.count) != (8, 2, 2) or (
        third.kind in "va" and third.count != 8
    ):
        raise Gfx950Error("the result takes 8 registers, and a factor 2")
    check_overlap(instruction)
    factors = []
    for operand in (first, second):
        values = np.ascontiguousarray(words(group, operand)).view(np.float64)
        with np.errstate(over="ignore"):
            if not ((values.astype(np.float32) == values) | np.isnan(values)).all():
                raise Gfx950Error("a factor that is no float32 is not modelled")
        factors.append(matrix(values, 16))
    lane = np.arange(LANES)
    totals = []
    for pair in range(4):
        bits = words(group, third) if third.kind in "va" else None
        addend = np.zeros((group.count, LANES))
        if bits is not None:
            addend = np.ascontiguousarray(bits).view(np.float64)[..., pair]
        elif third.value != 0:
            raise Gfx950Error("a constant addend other than 0 is not modelled")
        with np.errstate(invalid="ignore"):
            products = factors[0][:, 4 * pair + lane // 16] * factors[1][:, lane % 16]
        totals.append(exact_sum(products, addend, group.state.choices.unknown_sums, 52))
    for pair, total in enumerate(totals):
        halves_of = np.ascontiguousarray(total).view(U32).reshape(*total.shape, 2)
        for part in range(2):
            group.write_vector(destination, 2 * pair + part, halves_of[..., part], None)


SCALED_FORMATS: dict[int, tuple[Elements, int, Callable[[np.ndarray, int], np.ndarray]]] = {
    0: (from_fp8, 8, runs_of_16),
    1: (from_bf8, 8, runs_of_16),
    2: (from_sixes("fp6"), 6, matrix),
    3: (from_sixes("bf6"), 6, matrix),
    4: (from_fp4, 4, matrix),
}
"""Element formats of scaled instructions by code, cbsz of the first operand and blgp of the second.

They are E4M3, E5M2, E2M3, E3M2 and E2M1, each with the registers that an operand has, and how its elements lie.
"""


def scaled(n: int, k: int) -> Handler:
    """Return v_mfma_scale_f32_<n>x<n>x<k>_f8f6f4."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset({"op_sel", "op_sel_hi", "cbsz", "blgp"}))
        formats = [instruction.modifiers.get(name, 0) for name in ("cbsz", "blgp")]
        if any(f not in SCALED_FORMATS for f in formats):
            raise Gfx950Error("there is no element format of this number")
        first, second, _, *scales = instruction.operands[1:]
        low = instruction.modifiers.get("op_sel", (0, 0, 0))
        if "op_sel_hi" not in instruction.modifiers:
            raise Gfx950Error("without op_sel_hi an assembler takes ones: write the bytes of the scales out")
        high = instruction.modifiers["op_sel_hi"]
        assert isinstance(low, tuple)
        assert isinstance(high, tuple)
        factors = []
        for number, (operand, scale) in enumerate(zip((first, second), scales, strict=True)):
            decode, registers, placed = SCALED_FORMATS[formats[number]]  # type: ignore[index]
            if operand.count != registers:
                raise Gfx950Error(
                    f"an operand of {operand.count} registers, and its format takes {registers}"
                )
            elements = decode(words(group, operand))
            byte = low[number] + 2 * high[number]
            code = (np.broadcast_to(group.vector32(scale), (group.count, LANES)) >> U32(8 * byte)) & U32(0xFF)
            power = np.ldexp(1.0, code.astype(np.int64) - 127)
            if group.state.choices.nan_scales:
                power = np.where(code == 255, np.nan, power)
            # A scale is that of a row and of 32 elements along K, in the order of the lanes.
            scales_of = np.repeat(matrix(power[..., None], n), 32, axis=2)
            with np.errstate(invalid="ignore"):
                factors.append(placed(elements, n) * scales_of)
        if any(f.shape[2] != k for f in factors):
            raise Gfx950Error(f"{factors[0].shape[2]} elements along K, not {k}")
        multiply(group, instruction, factors[0], factors[1], n)

    return run


KINDS: dict[str, tuple[Elements, tuple[tuple[int, int], ...]]] = {
    "f32": (from_f32, ((16, 4), (32, 2))),
    "f16": (from_f16, ((16, 16), (32, 8), (16, 32), (32, 16))),
    "bf16": (from_bf16, ((16, 16), (32, 8), (16, 32), (32, 16))),
    "fp8_fp8": (from_fp8, ((16, 32), (32, 16))),
}
HANDLERS: dict[str, Handler] = {
    f"v_mfma_f32_{n}x{n}x{k}_{kind}": plain(n, k, elements)
    for kind, (elements, shapes) in KINDS.items()
    for n, k in shapes
}
HANDLERS["v_mfma_f64_16x16x4_f64"] = multiply_f64
HANDLERS |= {f"v_mfma_scale_f32_{n}x{n}x{k}_f8f6f4": scaled(n, k) for n, k in ((16, 128), (32, 64))}
