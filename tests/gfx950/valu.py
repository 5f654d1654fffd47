"""Vector arithmetic: the tables' instructions, comparisons, carries, selections."""

from __future__ import annotations

import numpy as np

from gfx950 import floats
from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.operands import VCC, Operand
from gfx950.registers import Group
from gfx950.sources import Handler, Sources, check_modifiers, typed
from gfx950.valu_tables import COMPARE, TABLE, U32, U64, Op

VCC_PAIR = Operand("s", VCC, 2)
FLOAT_OUT = frozenset({"clamp", "mul", "div"})


def simple(op: Op) -> Handler:
    """Return the handler of a table entry."""
    own = frozenset({"op_sel"}) | FLOAT_OUT if "16" in op.result + "".join(op.sources) else FLOAT_OUT

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, own)
        destination, *operands = instruction.operands
        if len(operands) != len(op.sources):
            raise Gfx950Error(f"{len(operands)} sources, not {len(op.sources)}")
        sources = Sources(group, instruction)
        values = [sources.read(i, o, k) for i, (o, k) in enumerate(zip(operands, op.sources, strict=True))]
        if op.partial:
            values = [np.where(group.lanes, v, v.dtype.type(1)) for v in values]
        saturated = op.saturates and bool(instruction.modifiers.get("clamp"))
        if saturated:
            limits = np.iinfo(values[0].dtype)
            exact = op.function(*(v.astype(np.int64) for v in values))
            result = np.clip(exact, limits.min, limits.max).astype(values[0].dtype)
        else:
            result = op.function(*values)
        sources.write(destination, result, op.result, keeps_high=op.keeps_high, clamped=saturated)

    return run


def reciprocal(group: Group, instruction: Instruction) -> None:
    """v_rcp_f32 and v_rcp_iflag_f32, as inexact as the launch asks for."""
    check_modifiers(instruction, FLOAT_OUT)
    destination, operand = instruction.operands
    sources = Sources(group, instruction)
    value = np.where(group.lanes, sources.read(0, operand, "f32"), np.float32(1))
    choices = group.state.choices
    sources.write(destination, floats.reciprocal(value, choices.rcp_side, choices.rcp_flushes), "f32")


def accumulate(kind: str) -> Handler:
    """Return v_fmac: the destination is the addend."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, FLOAT_OUT)
        destination, first, second = instruction.operands
        sources = Sources(group, instruction)
        a, b = sources.read(0, first, kind), sources.read(1, second, kind)
        c = sources.flushed(typed(group.vector32(destination), kind), kind)
        sources.write(destination, floats.fma(a, b, c), kind)

    return run


def fma_with_literal(literal: int) -> Handler:
    """Return v_fmamk (the literal is the second factor) or v_fmaak (the addend); all are plain operands here."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset())
        if instruction.operands[1 + literal].kind not in ("int", "float"):
            raise Gfx950Error("the literal is missing")
        destination, *operands = instruction.operands
        sources = Sources(group, instruction)
        a, b, c = (sources.read(i, o, "f32") for i, o in enumerate(operands))
        sources.write(destination, floats.fma(a, b, c), "f32")

    return run


def compare(test: str, *, to_exec: bool) -> Handler:
    """Return v_cmp or v_cmpx of one comparison."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset({"op_sel"}))
        destination, first, second = instruction.operands
        sources = Sources(group, instruction)
        if test == "class_f32":
            result = classes(sources.read(0, first, "f32"), sources.read(1, second, "u32"))
        else:
            kind, function = COMPARE[test]
            result = function(sources.read(0, first, kind), sources.read(1, second, kind))
        if sources.write_mask is not None:
            raise Gfx950Error("a comparison under DPP is not modelled")
        group.write_mask(destination, result)
        if to_exec:
            group.write_mask(Operand("s", 126, 2), result)

    return run


def classes(x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether x is of one of the classes whose bits are set: sNaN, qNaN, -Inf .. -0, +0 .. +Inf."""
    negative, size = np.signbit(x), np.abs(x)
    kind = np.where(size == 0, 5, np.where(size < np.finfo(np.float32).tiny, 4, np.where(np.isinf(x), 2, 3)))
    kind = np.where(negative, kind, 11 - kind)
    kind = np.where(np.isnan(x), np.where(floats.is_signalling(x), 0, 1), kind)
    return (wanted >> kind.astype(U32)) & U32(1) != 0


def select_by_mask(group: Group, instruction: Instruction) -> None:
    """v_cndmask: the second source where the mask is set."""
    check_modifiers(instruction, frozenset())
    destination, first, second, *rest = instruction.operands
    mask = group.mask(rest[0] if rest else VCC_PAIR)
    sources = Sources(group, instruction)
    kind = "f32" if first.neg or first.absolute or second.neg or second.absolute else "b32"
    a, b = sources.read(0, first, kind), sources.read(1, second, kind)
    sources.write(destination, np.where(mask, b, a), kind)


def with_carry(*, subtract: bool, reverse: bool, carry_in: bool) -> Handler:
    """Return the additions and subtractions that give, and may take, a carry in a lane mask."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset())
        destination, carry_out, first, second, *rest = instruction.operands
        sources = Sources(group, instruction)
        a, b = (sources.read(i, o, "u32").astype(np.int64) for i, o in enumerate((first, second)))
        a, b = (b, a) if reverse else (a, b)
        carry = group.mask(rest[0]).astype(np.int64) if carry_in else 0
        exact = a - b - carry if subtract else a + b + carry
        if sources.write_mask is not None:
            raise Gfx950Error("a carry under DPP is not modelled")
        sources.write(destination, (exact & 0xFFFFFFFF).astype(U32), "u32")
        group.write_mask(carry_out, (exact < 0) | (exact > 0xFFFFFFFF))

    return run


def multiply_add_64(signed: bool) -> Handler:
    """Return v_mad_u64_u32 or v_mad_i64_i32, with the carry in a lane mask."""
    kind = "i32" if signed else "u32"

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset())
        destination, carry_out, first, second, third = instruction.operands
        sources = Sources(group, instruction)
        a, b = sources.read(0, first, kind), sources.read(1, second, kind)
        c = sources.read(2, third, "u64")
        product = (
            (a.astype(np.int64) * b.astype(np.int64)).view(U64) if signed else a.astype(U64) * b.astype(U64)
        )
        total = product + c
        sources.write(destination, total, "u64")
        if signed:
            # Bit 64 of the sum of both numbers, each sign-extended by one bit.
            signs = (product.view(np.int64) < 0) ^ (c.view(np.int64) < 0)
            group.write_mask(carry_out, signs ^ (total < product))
        else:
            group.write_mask(carry_out, total < product)

    return run


def truth_table(bits: int) -> Handler:
    """Return v_bitop3 on 32 or 16 bits: the table's bit {a, b, c} for every bit position."""
    kind = f"u{bits}"

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset({"bitop3", "op_sel"} if bits == 16 else {"bitop3"}))
        destination, *operands = instruction.operands
        sources = Sources(group, instruction)
        a, b, c = (sources.read(i, o, kind) for i, o in enumerate(operands))
        table = instruction.modifiers.get("bitop3", 0)
        assert isinstance(table, int)
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        sources.write(destination, result, kind, keeps_high=True)

    return run


HANDLERS: dict[str, Handler] = {name: simple(op) for name, op in TABLE.items()}
HANDLERS |= {f"v_cmp_{test}": compare(test, to_exec=False) for test in [*COMPARE, "class_f32"]}
HANDLERS |= {f"v_cmpx_{test}": compare(test, to_exec=True) for test in [*COMPARE, "class_f32"]}
HANDLERS |= {
    "v_rcp_f32": reciprocal,
    "v_rcp_iflag_f32": reciprocal,
    "v_fmac_f32": accumulate("f32"),
    "v_fmamk_f32": fma_with_literal(1),
    "v_fmaak_f32": fma_with_literal(2),
    "v_cndmask_b32": select_by_mask,
    "v_add_co_u32": with_carry(subtract=False, reverse=False, carry_in=False),
    "v_sub_co_u32": with_carry(subtract=True, reverse=False, carry_in=False),
    "v_subrev_co_u32": with_carry(subtract=True, reverse=True, carry_in=False),
    "v_addc_co_u32": with_carry(subtract=False, reverse=False, carry_in=True),
    "v_subb_co_u32": with_carry(subtract=True, reverse=False, carry_in=True),
    "v_subbrev_co_u32": with_carry(subtract=True, reverse=True, carry_in=True),
    "v_mad_u64_u32": multiply_add_64(signed=False),
    "v_mad_i64_i32": multiply_add_64(signed=True),
    "v_bitop3_b32": truth_table(32),
    "v_bitop3_b16": truth_table(16),
}
