"""The scaled conversions to and from E2M1.

The divisor (or factor) is a float32 of which only the exponent field E counts, read as an E8M0 code: 2^(E - 127),
E = 0 included. E = 255, NaN, is refused. Stochastic rounding is not there: public models of it disagree.
"""

from __future__ import annotations

import numpy as np

from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.operands import Operand
from gfx950.registers import Group
from gfx950.sources import Handler, check_modifiers
from gfx950.valu_tables import U32

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BETWEEN = (VALUES[:-1] + VALUES[1:]) / 2
EVEN_ABOVE = np.arange(7) % 2 == 1
"""Whether a tie between codes i and i + 1 goes up, to the even one."""


def decode(codes: np.ndarray) -> np.ndarray:
    """Return the values of E2M1 codes in float64."""
    return np.where(codes & 8, -1.0, 1.0) * VALUES[codes & 7]


def encode(x: np.ndarray) -> np.ndarray:
    """Return float64 as E2M1 codes: RNE, saturating; a NaN gives the largest code, which nothing may rely on."""
    size = np.abs(x)[..., None]
    code = ((size > BETWEEN) | ((size == BETWEEN) & EVEN_ABOVE)).sum(axis=-1)
    return np.where(np.isnan(x), 7, code).astype(U32) | (np.signbit(x).astype(U32) << U32(3))


def exponents(group: Group, operand: Operand) -> np.ndarray:
    """Return the exponent of the scale, -127 to 127, checked in enabled lanes."""
    field = (group.vector32(operand) >> U32(23)) & U32(0xFF)
    if (np.broadcast_to(field == 255, group.lanes.shape) & group.lanes).any():
        raise Gfx950Error("a scale with the exponent field 255, which is NaN, is not modelled")
    return field.astype(np.int64) - 127


def selected_byte(instruction: Instruction, first: int) -> int:
    """Return which byte op_sel[first] (low bit) and op_sel[first + 1] name."""
    halves = instruction.modifiers.get("op_sel", (0,) * (first + 2))
    assert isinstance(halves, tuple)
    return halves[first] + 2 * halves[first + 1]


def to_fp4(kind: str) -> Handler:
    """Return v_cvt_scalef32_pk_fp4_<kind>: two numbers to one byte of the destination."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset({"op_sel"}))
        destination, *operands = instruction.operands
        scale = exponents(group, operands[-1])
        if kind == "f32":
            pair = [group.vector32(o).view(np.float32) for o in operands[:2]]
        else:
            bits = group.vector32(operands[0])
            halves = [bits & U32(0xFFFF), bits >> U32(16)]
            pair = [
                (h << U32(16)).view(np.float32) if kind == "bf16" else h.astype(np.uint16).view(np.float16)
                for h in halves
            ]
        low, high = (encode(np.ldexp(x.astype(np.float64), -scale)) for x in pair)
        shift = U32(8 * selected_byte(instruction, 2))
        rest = group.vector32(destination) & ~(U32(0xFF) << shift)
        group.write_vector(destination, 0, rest | ((low | (high << U32(4))) << shift), None)

    return run


def from_fp4(kind: str) -> Handler:
    """Return v_cvt_scalef32_pk_<kind>_fp4: one byte of the source to two numbers."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset({"op_sel"}))
        destination, source, scale_operand = instruction.operands
        scale = exponents(group, scale_operand)
        byte = (group.vector32(source) >> U32(8 * selected_byte(instruction, 0))) & U32(0xFF)
        values = [np.ldexp(decode(c), scale) for c in (byte & U32(15), byte >> U32(4))]
        exact = [v.astype(np.float16 if kind == "f16" else np.float32) for v in values]
        if any(
            (np.broadcast_to(e != v, group.lanes.shape) & group.lanes).any()
            for e, v in zip(exact, values, strict=True)
        ):
            raise Gfx950Error("a value outside the range of the result is not modelled")
        if kind == "f32":
            for part in range(2):
                group.write_vector(destination, part, exact[part].view(U32), None)
            return
        bits = [e.view(np.uint16).astype(U32) if kind == "f16" else e.view(U32) >> U32(16) for e in exact]
        group.write_vector(destination, 0, bits[0] | (bits[1] << U32(16)), None)

    return run


HANDLERS: dict[str, Handler] = {
    f"v_cvt_scalef32_pk_fp4_{kind}": to_fp4(kind) for kind in ("f32", "f16", "bf16")
}
HANDLERS |= {f"v_cvt_scalef32_pk_{kind}_fp4": from_fp4(kind) for kind in ("f32", "f16", "bf16")}
