"""Packed and mixed instructions (VOP3P): results from halves of their sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gfx950 import floats
from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.operands import Operand
from gfx950.registers import Group
from gfx950.sources import Handler, Sources, check_modifiers, typed, untyped
from gfx950.valu_tables import U32, low, shift_left, shift_right


def packed(kind: str, function: Callable[..., np.ndarray]) -> Handler:
    """Return a VOP3P instruction on two 32-bit (register pairs) or two 16-bit halves."""
    wide = kind == "f32"

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset({"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"}))
        destination, *operands = instruction.operands
        sources = Sources(group, instruction)
        halves = []
        for half, select_name, negate_name in ((0, "op_sel", "neg_lo"), (1, "op_sel_hi", "neg_hi")):
            default = (half,) * len(operands)
            chosen = instruction.modifiers.get(select_name, default)
            negated = instruction.modifiers.get(negate_name, (0,) * len(operands))
            assert isinstance(chosen, tuple)
            assert isinstance(negated, tuple)
            values = []
            for operand, part, negative in zip(operands, chosen, negated, strict=True):
                bits = packed_half(group, operand, part, wide)
                value = sources.flushed(typed(bits, kind), kind)
                if negative and not kind.startswith("f"):
                    raise Gfx950Error("neg on packed integers is not modelled")
                values.append(-value if negative else value)
            result = sources.flushed(function(*values), kind, output=True)
            if instruction.modifiers.get("clamp"):
                if not kind.startswith("f"):
                    raise Gfx950Error("clamp on packed integers is not modelled")
                result = floats.clamp(result)
            halves.append(untyped(result, kind))
        if wide:
            group.write_vector(destination, 0, halves[0], None)
            group.write_vector(destination, 1, halves[1], None)
        else:
            group.write_vector(destination, 0, halves[0] | (halves[1] << U32(16)), None)

    return run


def packed_half(group: Group, operand: Operand, part: int, wide: bool) -> np.ndarray:
    """Return the low (part 0) or high half of a packed source."""
    if operand.neg or operand.absolute or operand.sext:
        raise Gfx950Error("input modifiers of packed sources are written neg_lo, neg_hi")
    if wide:
        if operand.kind in ("int", "float"):
            if part:
                raise Gfx950Error("the high half of a constant is not modelled")
            return group.vector32(operand)
        if operand.count != 2:
            raise Gfx950Error("a packed 32-bit source is no register pair")
        return group.vector32(operand, part)
    if operand.kind == "float":
        # A constant fills the low half only.
        value = operand.constant(16)
        return np.array([[0 if part else value]], U32)
    return (group.vector32(operand) >> U32(16 * part)) & U32(0xFFFF)


def packed_move(group: Group, instruction: Instruction) -> None:
    """v_pk_mov_b32: op_sel picks one register of each pair."""
    check_modifiers(instruction, frozenset({"op_sel", "op_sel_hi"}))
    destination, first, second = instruction.operands
    chosen = instruction.modifiers.get("op_sel", (0, 0))
    assert isinstance(chosen, tuple)
    values = [packed_half(group, o, p, True).copy() for o, p in zip((first, second), chosen, strict=True)]
    group.write_vector(destination, 0, values[0], None)
    group.write_vector(destination, 1, values[1], None)


def mixed(group: Group, instruction: Instruction) -> np.ndarray:
    """Return a * b + c in float32, rounded once; op_sel_hi tells float16 sources, op_sel which half they are."""
    check_modifiers(instruction, frozenset({"op_sel", "op_sel_hi", "clamp"}))
    operands = instruction.operands[1:]
    is_half = instruction.modifiers.get("op_sel_hi", (0, 0, 0))
    part = instruction.modifiers.get("op_sel", (0, 0, 0))
    assert isinstance(is_half, tuple)
    assert isinstance(part, tuple)
    sources = Sources(group, instruction)
    values = []
    for operand, narrow, high in zip(operands, is_half, part, strict=True):
        if narrow:
            plain = replace(operand, neg=False, absolute=False)
            value = sources.flushed(typed(packed_half(group, plain, high, False), "f16"), "f16").astype(
                np.float32
            )
        else:
            value = sources.flushed(typed(group.vector32(operand), "f32"), "f32")
        value = np.abs(value) if operand.absolute else value
        values.append(-value if operand.neg else value)
    result = sources.flushed(floats.fma(*values), "f32", output=True)
    return floats.clamp(result) if instruction.modifiers.get("clamp") else result


def mix_to_float(group: Group, instruction: Instruction) -> None:
    """v_fma_mix_f32."""
    group.write_vector(instruction.operands[0], 0, mixed(group, instruction).view(U32), None)


HANDLERS: dict[str, Handler] = {
    f"v_pk_{name}_{kind}": packed(kind, function)
    for kind in ("f32", "f16")
    for name, function in (("add", np.add), ("mul", np.multiply), ("fma", floats.fma))
}
HANDLERS |= {"v_pk_min_f16": packed("f16", floats.minimum), "v_pk_max_f16": packed("f16", floats.maximum)}
for _kind in ("u16", "i16"):
    HANDLERS |= {
        f"v_pk_add_{_kind}": packed(_kind, np.add),
        f"v_pk_sub_{_kind}": packed(_kind, np.subtract),
        f"v_pk_min_{_kind}": packed(_kind, np.minimum),
        f"v_pk_max_{_kind}": packed(_kind, np.maximum),
        f"v_pk_mad_{_kind}": packed(_kind, lambda a, b, c: a * b + c),
    }
HANDLERS |= {
    "v_pk_mul_lo_u16": packed("u16", np.multiply),
    "v_pk_lshlrev_b16": packed("u16", shift_left(16)),
    "v_pk_lshrrev_b16": packed("u16", shift_right(16)),
    "v_pk_ashrrev_i16": packed("i16", lambda a, v: v >> low(16, a)),
    "v_pk_mov_b32": packed_move,
    "v_fma_mix_f32": mix_to_float,
}
