"""Scalar instructions: one result per wave, and SCC.

Branches are not here: they move the program counter, which is machine.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.operands import EXEC, Operand
from gfx950.registers import Group
from gfx950.sources import Handler
from gfx950.valu_tables import COMPARISONS, U32, U64, first_high, first_low, reverse_bits

EXEC_PAIR = Operand("s", EXEC, 2)
NONZERO = "nonzero"

# name -> (result bits, source bits, function, SCC): SCC is None (left alone), NONZERO (the result is not 0) or a
# function of the sources, as uint arrays.
Rule = tuple[int, tuple[int, ...], Callable[..., np.ndarray], object]


def signed(x: np.ndarray) -> np.ndarray:
    """Return unsigned patterns as signed numbers."""
    return x.view(f"i{x.dtype.itemsize}")


def unsigned(x: np.ndarray) -> np.ndarray:
    """Return signed numbers as patterns."""
    return x.view(f"u{x.dtype.itemsize}")


def amount(x: np.ndarray, bits: int) -> np.ndarray:
    """Return a shift amount, reduced to the width of what is shifted, in that width."""
    return (x & U32(bits - 1)).astype(U32 if bits == 32 else U64)


def signed_overflow(a: np.ndarray, b: np.ndarray, *, subtract: bool) -> np.ndarray:
    """Return whether a + b or a - b leaves int32."""
    exact = signed(a).astype(np.int64) + (-1 if subtract else 1) * signed(b).astype(np.int64)
    return (exact < -(1 << 31)) | (exact >= 1 << 31)


def carries(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return whether a + b leaves uint32."""
    return a.astype(U64) + b.astype(U64) > U64(0xFFFFFFFF)


def bit_field(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return s_bfe: offset in bits 4:0 (5:0) of b, width in bits 22:16; a width beyond the value takes all."""
    bits = a.dtype.itemsize * 8
    width = (b >> U32(16)) & U32(0x7F)
    whole = width >= bits
    kind = a.dtype.type
    mask = np.where(whole, ~kind(0), (kind(1) << np.where(whole, 0, width).astype(a.dtype)) - kind(1))
    return (a >> amount(b, bits)) & mask


def bit_field_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return s_bfe, sign-extended from the field's highest bit."""
    bits = a.dtype.itemsize * 8
    shifted = unsigned(signed(a) >> amount(b, bits).astype(signed(a).dtype))
    width = np.minimum((b >> U32(16)) & U32(0x7F), bits).astype(a.dtype)
    rest = np.where(width == 0, 0, bits - width).astype(a.dtype)
    extended = unsigned(signed(shifted << rest) >> rest.astype(signed(a).dtype))
    return np.where(width == 0, a.dtype.type(0), extended)


def both_widths(
    name: str, suffixes: tuple[str, str], function: Callable[..., np.ndarray], scc: object
) -> dict[str, Rule]:
    """Return a two-source rule for 32 and for 64 bits."""
    return {
        f"s_{name}_{s}": (bits, (bits, bits), function, scc)
        for s, bits in zip(suffixes, (32, 64), strict=True)
    }


LOGIC: dict[str, Callable[..., np.ndarray]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
RULES: dict[str, Rule] = {}
for _name, _function in LOGIC.items():
    RULES |= both_widths(_name, ("b32", "b64"), _function, NONZERO)
for _bits in (32, 64):
    RULES |= {
        f"s_mov_b{_bits}": (_bits, (_bits,), lambda a: a, None),
        f"s_not_b{_bits}": (_bits, (_bits,), np.invert, NONZERO),
        f"s_lshl_b{_bits}": (_bits, (_bits, 32), lambda a, b, n=_bits: a << amount(b, n), NONZERO),
        f"s_lshr_b{_bits}": (_bits, (_bits, 32), lambda a, b, n=_bits: a >> amount(b, n), NONZERO),
        f"s_ashr_i{_bits}": (
            _bits, (_bits, 32), lambda a, b, n=_bits: unsigned(signed(a) >> signed(amount(b, n))), NONZERO,
        ),
        f"s_bfe_u{_bits}": (_bits, (_bits, 32), bit_field, NONZERO),
        f"s_bfe_i{_bits}": (_bits, (_bits, 32), bit_field_signed, NONZERO),
        f"s_bfm_b{_bits}": (
            _bits, (32, 32),
            lambda a, b, n=_bits: ((amount(a, n) * 0 + 1 << amount(a, n)) - amount(a, n).dtype.type(1)) << amount(b, n),
            None,
        ),
        f"s_bcnt1_i32_b{_bits}": (32, (_bits,), lambda a: np.bitwise_count(a).astype(U32), NONZERO),
    }  # fmt: skip
RULES |= {
    "s_brev_b32": (32, (32,), reverse_bits, None),
    "s_ff1_i32_b32": (32, (32,), first_low, None),
    "s_flbit_i32_b32": (32, (32,), first_high, None),
    "s_abs_i32": (32, (32,), lambda a: unsigned(np.abs(signed(a))), NONZERO),
    "s_sext_i32_i8": (32, (32,), lambda a: unsigned(signed(a << U32(24)) >> 24), None),
    "s_sext_i32_i16": (32, (32,), lambda a: unsigned(signed(a << U32(16)) >> 16), None),
    "s_add_u32": (32, (32, 32), np.add, carries),
    "s_sub_u32": (32, (32, 32), np.subtract, lambda a, b: b > a),
    "s_add_i32": (32, (32, 32), np.add, lambda a, b: signed_overflow(a, b, subtract=False)),
    "s_sub_i32": (32, (32, 32), np.subtract, lambda a, b: signed_overflow(a, b, subtract=True)),
    "s_min_i32": (
        32, (32, 32), lambda a, b: unsigned(np.minimum(signed(a), signed(b))), lambda a, b: signed(a) < signed(b),
    ),
    "s_max_i32": (
        32, (32, 32), lambda a, b: unsigned(np.maximum(signed(a), signed(b))), lambda a, b: signed(a) >= signed(b),
    ),
    "s_min_u32": (32, (32, 32), np.minimum, lambda a, b: a < b),
    "s_max_u32": (32, (32, 32), np.maximum, lambda a, b: a >= b),
    "s_mul_i32": (32, (32, 32), np.multiply, None),
    "s_mul_hi_u32": (32, (32, 32), lambda a, b: ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32), None),
    "s_mul_hi_i32": (
        32, (32, 32),
        lambda a, b: ((signed(a).astype(np.int64) * signed(b).astype(np.int64)) >> 32).astype(np.int32).view(U32), None,
    ),
    **{
        f"s_lshl{n}_add_u32": (
            32, (32, 32), lambda a, b, n=n: (a << U32(n)) + b,
            lambda a, b, n=n: (a.astype(U64) << U64(n)) + b.astype(U64) > U64(0xFFFFFFFF),
        )
        for n in (1, 2, 3, 4)
    },
    "s_pack_ll_b32_b16": (32, (32, 32), lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), None),
    "s_pack_lh_b32_b16": (32, (32, 32), lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), None),
    "s_pack_hh_b32_b16": (32, (32, 32), lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)), None),
}  # fmt: skip


def read(group: Group, operand: Operand, bits: int) -> np.ndarray:
    """Return a scalar source."""
    return group.scalar64(operand) if bits == 64 else group.scalar32(operand)


def write(group: Group, operand: Operand, values: np.ndarray, bits: int) -> None:
    """Write a scalar result."""
    if bits == 64:
        group.write_scalar64(operand, values)
    else:
        group.write_scalar(operand, values)


def by_rule(rule: Rule) -> Handler:
    """Return the handler of a rule."""
    bits, sources, function, scc = rule

    def run(group: Group, instruction: Instruction) -> None:
        destination, *operands = instruction.operands
        values = [read(group, o, b).copy() for o, b in zip(operands, sources, strict=True)]
        result = function(*values)
        write(group, destination, result, bits)
        if scc is NONZERO:
            group.write_scc(result != 0)
        elif callable(scc):
            group.write_scc(scc(*values))

    return run


def with_scc(*, subtract: bool) -> Handler:
    """Return s_addc_u32 or s_subb_u32."""

    def run(group: Group, instruction: Instruction) -> None:
        destination, first, second = instruction.operands
        a, b = (group.scalar32(o).astype(np.int64) for o in (first, second))
        carry = group.status("scc").astype(np.int64)
        exact = a - b - carry if subtract else a + b + carry
        group.write_scalar(destination, (exact & 0xFFFFFFFF).astype(U32))
        group.write_scc((exact < 0) | (exact > 0xFFFFFFFF))

    return run


def choose(bits: int) -> Handler:
    """Return s_cselect."""

    def run(group: Group, instruction: Instruction) -> None:
        destination, first, second = instruction.operands
        picked = np.where(group.status("scc"), read(group, first, bits), read(group, second, bits))
        write(group, destination, picked, bits)

    return run


def save_exec(logic: Callable[..., np.ndarray]) -> Handler:
    """Return s_<logic>_saveexec_b64: EXEC = source <logic> EXEC, the old EXEC to the destination."""

    def run(group: Group, instruction: Instruction) -> None:
        destination, source = instruction.operands
        old, value = group.scalar64(EXEC_PAIR), group.scalar64(source)
        group.write_scalar64(EXEC_PAIR, logic(value, old))
        group.write_scalar64(destination, old)
        group.write_scc(group.scalar64(EXEC_PAIR) != 0)

    return run


def compare(function: Callable[..., np.ndarray], kind: str) -> Handler:
    """Return s_cmp of two scalars."""

    def run(group: Group, instruction: Instruction) -> None:
        a, b = (read(group, o, int(kind[1:])) for o in instruction.operands)
        group.write_scc(function(signed(a.copy()), signed(b.copy())) if kind[0] == "i" else function(a, b))

    return run


def bit_compare(wanted: int) -> Handler:
    """Return s_bitcmp0 or s_bitcmp1."""

    def run(group: Group, instruction: Instruction) -> None:
        a, b = (group.scalar32(o) for o in instruction.operands)
        group.write_scc(((a >> amount(b, 32)) & U32(1)) == wanted)

    return run


def constant_operand(instruction: Instruction, *, zero_extended: bool = False) -> int:
    """Return the 16-bit immediate of an s_*k instruction, sign-extended unless the comparison is unsigned."""
    value = int(instruction.operands[-1].value) & 0xFFFF
    return value if zero_extended or value < 0x8000 else value - 0x10000


def with_constant(name: str) -> Handler:
    """Return s_movk, s_addk, s_mulk or s_cmpk_*."""

    def run(group: Group, instruction: Instruction) -> None:
        target = instruction.operands[0]
        if instruction.operands[-1].kind != "int":
            raise Gfx950Error("the immediate is missing")
        if name.startswith("cmpk"):
            _, test, kind = name.split("_")
            value = np.int64(constant_operand(instruction, zero_extended=kind == "u32"))
            register = group.scalar32(target)
            number = (signed(register.copy()) if kind == "i32" else register).astype(np.int64)
            group.write_scc(COMPARISONS[test](number, value) if test != "lg" else number != value)
            return
        value = U32(constant_operand(instruction) & 0xFFFFFFFF)
        if name == "movk_i32":
            group.write_scalar(target, np.full(group.count, value))
        elif name == "mulk_i32":
            group.write_scalar(target, group.scalar32(target) * value)
        else:
            old = group.scalar32(target).copy()
            group.write_scc(signed_overflow(old, np.full(group.count, value), subtract=False))
            group.write_scalar(target, old + value)

    return run


MODE = re.compile(r"hwreg\(HW_REG_MODE, *4, *(2|4)\)")


def set_mode(group: Group, instruction: Instruction) -> None:
    """s_setreg_imm32_b32 on the subnormal modes: bits 5:4 of MODE for float32, 7:6 for float16 and float64."""
    place, value = instruction.operands
    match = MODE.fullmatch(str(place.value))
    if match is None or value.kind != "int" or group.count != len(group.state.pc):
        raise Gfx950Error("only the subnormal bits of MODE, set by all waves together, are modelled")
    group.state.denorm32 = int(value.value) & 3
    if match[1] == "4":
        group.state.denorm16 = (int(value.value) >> 2) & 3


HANDLERS: dict[str, Handler] = {name: by_rule(rule) for name, rule in RULES.items()}
HANDLERS |= {f"s_{name}_saveexec_b64": save_exec(function) for name, function in LOGIC.items()}
HANDLERS |= {
    "s_andn1_saveexec_b64": save_exec(lambda a, old: ~a & old),
    "s_orn1_saveexec_b64": save_exec(lambda a, old: ~a | old),
    "s_addc_u32": with_scc(subtract=False),
    "s_subb_u32": with_scc(subtract=True),
    "s_cselect_b32": choose(32),
    "s_cselect_b64": choose(64),
    "s_bitcmp0_b32": bit_compare(0),
    "s_bitcmp1_b32": bit_compare(1),
    "s_cmp_eq_u64": compare(np.equal, "u64"),
    "s_cmp_lg_u64": compare(np.not_equal, "u64"),
    "s_setreg_imm32_b32": set_mode,
}
for _kind in ("i32", "u32"):
    for _test, _function in (*COMPARISONS.items(), ("lg", np.not_equal)):
        HANDLERS[f"s_cmp_{_test}_{_kind}"] = compare(_function, _kind)
        HANDLERS[f"s_cmpk_{_test}_{_kind}"] = with_constant(f"cmpk_{_test}_{_kind}")
for _name in ("movk_i32", "addk_i32", "mulk_i32"):
    HANDLERS[f"s_{_name}"] = with_constant(_name)
