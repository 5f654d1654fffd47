"""How vector instructions read their sources and write their destination, in all encodings.

Types of operands are written u32, i32, f32, b32 (no arithmetic: no flushing), u16, i16, f16, u64, i64, f64,
u24 and i24. The order of the input steps is: lane movement (DPP), byte or word selection (SDWA, op_sel),
then |x| and -x, then the flushing of subnormals where the mode asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950 import floats
from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.lanes import DPP, dpp_map
from gfx950.operands import Operand
from gfx950.registers import LANES, Group

Handler = Callable[[Group, Instruction], None]

WIDTH = {
    **{"u32": 32, "i32": 32, "f32": 32, "b32": 32, "u24": 32, "i24": 32},
    **{"u16": 16, "i16": 16, "f16": 16, "b16": 16, "u64": 64, "i64": 64, "f64": 64, "b64": 64},
}
VIEWS = {
    "u32": np.uint32, "b32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u16": np.uint16, "b16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u64": np.uint64, "b64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
SELECTIONS = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
}  # fmt: skip


def select(bits: np.ndarray, selection: str, sext: bool) -> np.ndarray:
    """Return the selected byte or word of uint32 values, extended to 32 bits."""
    shift, size = SELECTIONS[selection]
    if sext:
        return ((bits << np.uint32(32 - size - shift)).view(np.int32) >> (32 - size)).view(np.uint32)
    return (bits >> np.uint32(shift)) & np.uint32((1 << size) - 1)


def typed(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return patterns (uint32, or uint64 for 64-bit types) as numbers of a type."""
    if kind == "u24":
        return bits & np.uint32(0xFFFFFF)
    if kind == "i24":
        return (bits << np.uint32(8)).view(np.int32) >> 8
    if WIDTH[kind] == 16:
        bits = bits.astype(np.uint16)
    return bits.view(VIEWS[kind])


def untyped(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the patterns of numbers: uint32, or uint64 for 64-bit types."""
    values = np.asarray(values)
    if values.dtype != VIEWS[kind]:
        raise Gfx950Error(f"the model's own result has type {values.dtype}, not {kind}")
    bits = values.view(f"u{values.dtype.itemsize}")
    return bits.astype(np.uint32) if WIDTH[kind] == 16 else bits


class Sources:
    """Reads the sources of one instruction; `write_mask` collects which lanes DPP lets it write."""

    def __init__(self, group: Group, instruction: Instruction) -> None:
        self.group = group
        self.instruction = instruction
        self.write_mask: np.ndarray | None = None

    def _raw(self, operand: Operand, kind: str) -> np.ndarray:
        if WIDTH[kind] == 64:
            return self.group.vector64(operand)
        if operand.kind in ("int", "float") and WIDTH[kind] == 16:
            value = operand.constant(16)
            if value is None:
                raise Gfx950Error(f"literal {operand.value} in a 16-bit instruction is not modelled")
            return np.array([[value]], np.uint32)
        if operand.count != 1:
            raise Gfx950Error("a register tuple for a 32-bit operand")
        return self.group.vector32(operand)

    def moved(self, bits: np.ndarray) -> np.ndarray:
        """Return the first source after DPP, and remember the lanes that may be written."""
        source, exists, written, bound = dpp_map(tuple(self.instruction.modifiers.items()))
        bits = np.broadcast_to(bits, (self.group.count, LANES))[:, source]
        valid = exists & self.group.lanes[:, source]
        self.write_mask = self.group.lanes & written & (bound | valid)
        return np.where(valid, bits, np.zeros((), bits.dtype))

    def read(self, number: int, operand: Operand, kind: str) -> np.ndarray:
        """Return source `number` (0 is the first) as numbers of `kind`."""
        modifiers = self.instruction.modifiers
        bits = self._raw(operand, kind)
        if number == 0 and self.instruction.form == "dpp":
            bits = self.moved(bits)
        if self.instruction.form == "sdwa" and number < 2:
            bits = select(bits, str(modifiers[f"src{number}_sel"]), operand.sext)
        elif operand.sext:
            raise Gfx950Error("sext() outside SDWA")
        halves = modifiers.get("op_sel")
        if isinstance(halves, tuple) and number < len(halves) and halves[number]:
            if WIDTH[kind] != 16 or operand.kind not in "va":
                raise Gfx950Error("op_sel on this source is not modelled")
            bits = bits >> np.uint32(16)
        values = typed(bits, kind)
        if operand.neg or operand.absolute:
            if not kind.startswith("f"):
                raise Gfx950Error(f"-x or |x| on an operand of type {kind} is not modelled")
            values = np.abs(values) if operand.absolute else values
            values = -values if operand.neg else values
        return self.flushed(values, kind)

    def flushed(self, values: np.ndarray, kind: str, *, output: bool = False) -> np.ndarray:
        """Return numbers with subnormals flushed as the mode says."""
        if not kind.startswith("f"):
            return values
        mode = self.group.state.denorm32 if kind == "f32" else self.group.state.denorm16
        # 0 flushes both, 1 flushes results, 2 flushes sources, 3 flushes nothing.
        if mode == 3 or mode == (2 if output else 1):
            return values
        return floats.flush(values)

    def write(
        self,
        operand: Operand,
        values: np.ndarray,
        kind: str,
        *,
        keeps_high: bool = False,
        clamped: bool = False,
    ) -> None:
        """Write numbers of `kind`, after clamping, into the selected part of the destination."""
        modifiers = self.instruction.modifiers
        if modifiers.get("mul") or modifiers.get("div"):
            raise Gfx950Error("output multipliers do nothing in IEEE mode; code that has one is not modelled")
        values = self.flushed(values, kind, output=True)
        if modifiers.get("clamp") and not clamped:
            if not kind.startswith("f"):
                raise Gfx950Error(f"clamp on a result of type {kind} is not modelled")
            values = floats.clamp(values)
        bits = untyped(values, kind)
        if WIDTH[kind] == 64:
            if self.instruction.form == "sdwa":
                raise Gfx950Error("SDWA on 64 bits")
            self.group.write_vector64(operand, bits, self.write_mask)
            return
        if self.instruction.form == "sdwa":
            bits = self._placed(operand, bits)
        elif WIDTH[kind] == 16:
            bits = self._half(operand, bits, keeps_high)
        self.group.write_vector(operand, 0, bits, self.write_mask)

    def _half(self, operand: Operand, bits: np.ndarray, keeps_high: bool) -> np.ndarray:
        """Return a 16-bit result joined with the half of the destination that stays."""
        halves = self.instruction.modifiers.get("op_sel")
        sources = len(self.instruction.operands) - 1
        if isinstance(halves, tuple) and len(halves) > sources and halves[sources]:
            return (bits << np.uint32(16)) | (self.group.vector32(operand) & np.uint32(0xFFFF))
        return bits | (self.group.vector32(operand) & np.uint32(0xFFFF0000)) if keeps_high else bits

    def _placed(self, operand: Operand, bits: np.ndarray) -> np.ndarray:
        """Return an SDWA result in the selected bytes of the destination."""
        modifiers = self.instruction.modifiers
        shift, size = SELECTIONS[str(modifiers.get("dst_sel", "DWORD"))]
        if size == 32:
            return bits
        field = np.uint32(((1 << size) - 1) << shift)
        placed = (bits << np.uint32(shift)) & field
        unused = modifiers["dst_unused"]
        if unused == "UNUSED_PAD":
            return placed
        if unused == "UNUSED_PRESERVE":
            return placed | (self.group.vector32(operand) & ~field)
        raise Gfx950Error(f"dst_unused:{unused} is not modelled")


ENCODING_MODIFIERS = {
    "sdwa": frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel", "clamp", "mul", "div"}),
    "dpp": frozenset({"row_mask", "bank_mask", "bound_ctrl"}),
}


def check_modifiers(instruction: Instruction, own: frozenset[str]) -> None:
    """Raise unless every modifier belongs to the encoding or is one of the instruction's `own`."""
    allowed = own | ENCODING_MODIFIERS.get(instruction.form, frozenset())
    for name in instruction.modifiers:
        if name not in allowed and not (instruction.form == "dpp" and name in DPP):
            raise Gfx950Error(f"modifier {name} on {instruction.name} is not modelled")
