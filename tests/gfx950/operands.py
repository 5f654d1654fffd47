"""Operands of instructions: registers, constants, and the input modifiers written around them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

VCC, M0, EXEC = 106, 124, 126
SPECIAL = {
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "flat_scratch": (102, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "vcc": (VCC, 2),
    "m0": (M0, 1),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "exec": (EXEC, 2),
}
STATUS = frozenset({"src_scc", "scc", "src_vccz", "vccz", "src_execz", "execz"})

FLOATS = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494", "0.15915494309189532"}
INVERSE_TWO_PI = {16: 0x3118, 32: 0x3E22F983, 64: 0x3FC45F306DC9C882}


@dataclass(frozen=True)
class Operand:
    """kind is v, a (vector registers), s (scalar), status, int, float (inline constants) or text (label, name).

    A 32-bit literal is an int outside -16..64: whether it may stand for a 64-bit number is checked on reading.
    """

    kind: str
    index: int = 0
    count: int = 1
    value: int | str = 0
    neg: bool = False
    absolute: bool = False
    sext: bool = False

    def overlaps(self, other: Operand) -> bool:
        """Return whether both name a register."""
        apart = self.index >= other.index + other.count or other.index >= self.index + self.count
        return self.kind == other.kind and not apart

    def constant(self, bits: int) -> int | None:
        """Return the pattern of `bits` bits that this constant is for an operand of that width, None if none."""
        mask = (1 << bits) - 1
        if self.kind == "float":
            if str(self.value).startswith("0.1591"):
                return INVERSE_TWO_PI[bits]
            code = {16: "<e", 32: "<f", 64: "<d"}[bits]
            return int.from_bytes(struct.pack(code, float(self.value)), "little")
        value = int(self.value)
        if bits == 64 and not -16 <= value <= 64 and not 0 <= value < 1 << 31:
            return None
        if not -(1 << 31) <= value < 1 << 32:
            return None
        return value & mask


REGISTER = re.compile(r"^([vsa])(\d+)$")
RANGE = re.compile(r"^([vsa])\[(\d+)(?::(\d+))?\]$")
NUMBER = re.compile(r"^-?(0x[0-9a-fA-F]+|\d+)$")
INPUT_MODIFIERS = (
    ("-", "", "neg"), ("neg(", ")", "neg"), ("|", "|", "absolute"), ("abs(", ")", "absolute"), ("sext(", ")", "sext"),
)  # fmt: skip
TEXT = re.compile(r"^(\.L\w+|hwreg\(.*\)|off)$")


@cache
def parse_operand(text: str) -> Operand | None:
    """Return the operand that `text` names, None if it is none that is modelled."""
    if NUMBER.match(text):
        return Operand("int", value=int(text, 0))
    if text in FLOATS:
        return Operand("float", value=text)
    if match := REGISTER.match(text):
        return Operand(match[1], int(match[2]))
    if match := RANGE.match(text):
        first = int(match[2])
        return Operand(match[1], first, int(match[3] or first) - first + 1)
    if text in SPECIAL:
        return Operand("s", *SPECIAL[text])
    if text in STATUS:
        return Operand("status", value=text.removeprefix("src_"))
    if TEXT.match(text):
        return Operand("text", value=text)
    for prefix, suffix, field in INPUT_MODIFIERS:
        if text.startswith(prefix) and text.endswith(suffix) and len(text) > len(prefix) + len(suffix):
            inner = parse_operand(text[len(prefix) : len(text) - len(suffix)])
            if inner is not None and inner.kind in ("v", "s", "a", "int", "float"):
                return replace(inner, **{field: True})
    return None


def unsigned(bits: int) -> type[np.unsignedinteger]:
    """Return NumPy's unsigned type of that many bits."""
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
