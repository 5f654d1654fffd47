"""Loads and stores: scalar, global (64-bit addresses) and buffer (a descriptor with bounds)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.memory import Lds, Memory
from gfx950.operands import M0, Operand
from gfx950.registers import LANES, Group
from gfx950.valu_tables import U32, U64

Handler = Callable[[Group, Instruction, Memory, Lds], None]
CACHE = frozenset({"nt", "sc0", "sc1", "glc", "slc"})
"""Cache policies, which change no value."""

# width of an access by the end of a name: (bytes, sign-extended)
LOADS = {
    "ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True),
    "dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False),
}  # fmt: skip
# name: (bytes, which half of the register they begin in)
STORES = {
    "byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16),
    "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
}  # fmt: skip


def allow(instruction: Instruction, *names: str) -> None:
    """Raise unless the modifiers are cache policies or among `names`."""
    for name in instruction.modifiers:
        if name not in CACHE and name not in names:
            raise Gfx950Error(f"modifier {name} on {instruction.name} is not modelled")


def offset_of(instruction: Instruction, name: str = "offset") -> int:
    """Return an immediate offset."""
    value = instruction.modifiers.get(name, 0)
    assert isinstance(value, int)
    return value


def to_registers(data: np.ndarray, *, sext: bool) -> list[np.ndarray]:
    """Return loaded bytes [n, size] as 32-bit registers [n] each."""
    if data.shape[1] < 4:
        padded = np.zeros((len(data), 4), np.uint8)
        padded[:, : data.shape[1]] = data
        shift = 32 - 8 * data.shape[1]
        bits = padded.view(U32)[:, 0]
        return [((bits << U32(shift)).view(np.int32) >> shift).view(U32) if sext else bits]
    return list(np.ascontiguousarray(data).view(U32).T)


def write_loaded(group: Group, operand: Operand, data: np.ndarray, *, sext: bool = False) -> None:
    """Write bytes of the enabled lanes, [enabled, size], to consecutive registers."""
    words = to_registers(data, sext=sext)
    if operand.count != len(words):
        raise Gfx950Error(f"{operand.count} registers for {len(words)} words")
    for part, word in enumerate(words):
        values = np.zeros((group.count, LANES), U32)
        values[group.lanes] = word
        group.write_vector(operand, part, values, None)


def read_stored(group: Group, operand: Operand, size: int, shift: int) -> np.ndarray:
    """Return the bytes that the enabled lanes store, [enabled, size]."""
    if operand.count != max(1, size // 4):
        raise Gfx950Error(f"{operand.count} registers for {size} bytes")
    words = [group.vector32(operand, part)[group.lanes] >> U32(shift) for part in range(operand.count)]
    return np.ascontiguousarray(np.stack(words, axis=1)).view(np.uint8)[:, :size]


def enabled(group: Group, values: np.ndarray) -> np.ndarray:
    """Return per-lane values of the enabled lanes, [enabled]."""
    return np.broadcast_to(values, (group.count, LANES))[group.lanes]


# --- scalar loads


def scalar_load(words: int) -> Handler:
    """Return s_load_dword*: one address per wave."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset")
        destination, base, *rest = instruction.operands
        address = group.scalar64(base) + U64(offset_of(instruction))
        for operand in rest:
            address = address + group.scalar32(operand).astype(U64)
        data = memory.load(address & ~U64(3), 4 * words).copy().view(U32)
        for part in range(words):
            group.write_scalar(destination, data[:, part], part)

    return run


# --- global


def global_address(
    group: Group, instruction: Instruction, address: Operand, base: Operand | None
) -> np.ndarray:
    """Return the addresses of the enabled lanes: a pair, or a scalar base and a 32-bit offset without sign."""
    offset = U64(offset_of(instruction) & 0xFFFFFFFFFFFFFFFF)
    if base is None or base.value == "off":
        return enabled(group, group.vector64(address)) + offset
    return enabled(group, group.scalar64(base)[:, None] + group.vector32(address).astype(U64)) + offset


def global_load(size: int, sext: bool) -> Handler:
    """Return global_load_* or flat_load_* (no LDS or scratch address is modelled)."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset", "off")
        destination, address, *base = instruction.operands
        addresses = global_address(group, instruction, address, base[0] if base else None)
        write_loaded(group, destination, memory.load(addresses, size), sext=sext)

    return run


def global_store(size: int, shift: int) -> Handler:
    """Return global_store_* or flat_store_*."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset", "off")
        address, data, *base = instruction.operands
        addresses = global_address(group, instruction, address, base[0] if base else None)
        memory.store(addresses, read_stored(group, data, size, shift))

    return run


def global_atomic(combine: np.ufunc, kind: type) -> Handler:
    """Return global_atomic_*: combine 32-bit integers, the lanes one after another.

    With sc0 each gets what was there before it.
    """

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset", "off")
        returns = bool(instruction.modifiers.get("sc0"))
        address, data, *base = instruction.operands[int(returns) :]
        addresses = global_address(group, instruction, address, base[0] if base else None)
        before = np.empty((len(addresses), 1), kind)
        for i, own in enumerate(enabled(group, group.vector32(data)).view(kind)):
            before[i] = memory.load(addresses[i : i + 1], 4).view(kind)
            memory.store(addresses[i : i + 1], combine(before[i : i + 1], own).view(np.uint8))
        if returns:
            write_loaded(group, instruction.operands[0], before.view(np.uint8))

    return run


# --- buffers


class Buffers:
    """The addresses of a buffer instruction, and which 32-bit parts of it lie inside the descriptor's bounds."""

    def __init__(
        self, group: Group, instruction: Instruction, operands: tuple[Operand, ...], size: int
    ) -> None:
        allow(instruction, "offset", "offen", "off", "lds")
        if instruction.modifiers.get("offen"):
            vector, descriptor, scalar = operands
            offsets = group.vector32(vector).astype(np.int64)
        else:
            descriptor, scalar = operands[-2:]
            offsets = np.zeros((1, 1), np.int64)
        words = [group.scalar32(descriptor, part) for part in range(4)]
        if ((words[1] >> U32(16)) != 0).any():
            raise Gfx950Error("a descriptor with a stride or swizzling is not modelled")
        base = words[0].astype(np.int64) | (words[1].astype(np.int64) << 32)
        soffset = group.scalar32(scalar).astype(np.int64)
        room = words[2].astype(np.int64) - soffset
        offset = enabled(group, offsets + offset_of(instruction))
        self.step = min(size, 4)
        self.parts = size // self.step
        place = offset[:, None] + self.step * np.arange(self.parts)
        limit = enabled(group, room[:, None])[:, None]
        self.inside = place + self.step <= limit
        if (~self.inside & (place < limit)).any():
            raise Gfx950Error("an access across the end of a descriptor's range is not modelled")
        self.addresses = (enabled(group, (base + soffset)[:, None])[:, None] + place).astype(U64)


def buffer_load(size: int, sext: bool) -> Handler:
    """Return buffer_load_*: parts out of bounds give 0. With `lds` the data go into the LDS and into no register."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        into_lds = bool(instruction.modifiers.get("lds"))
        where = Buffers(group, instruction, instruction.operands[0 if into_lds else 1 :], size)
        data = np.zeros((*where.inside.shape, where.step), np.uint8)
        data[where.inside] = memory.load(where.addresses[where.inside], where.step)
        if into_lds:
            lds.store(*lanes_in_lds(group, instruction, size), data.reshape(-1, size))
        else:
            write_loaded(group, instruction.operands[0], data.reshape(-1, size), sext=sext)

    return run


def lanes_in_lds(group: Group, instruction: Instruction, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (workgroup, byte offset) of what the enabled lanes of a wave load into the LDS, side by side.

    LDS address = M0 + instruction offset + lane * size: the ISA documents of CDNA 3, and of CDNA 4 for 3 and 4 words.
    """
    if size not in (4, 12, 16):
        raise Gfx950Error("a load of less than a word into the LDS is not modelled")
    start = group.scalar32(Operand("s", M0)).astype(np.int64)[:, None] + offset_of(instruction)
    workgroups = enabled(group, group.state.workgroup[group.chosen][:, None])
    return workgroups, enabled(group, start + size * np.arange(LANES))


def buffer_store(size: int, shift: int) -> Handler:
    """Return buffer_store_*: parts out of bounds are dropped."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset", "offen", "off")
        data, *rest = instruction.operands
        where = Buffers(group, instruction, tuple(rest), size)
        stored = read_stored(group, data, size, shift).reshape(*where.inside.shape, where.step)
        memory.store(where.addresses[where.inside], stored[where.inside])

    return run


HANDLERS: dict[str, Handler] = {
    "global_atomic_add": global_atomic(np.add, U32),
    "global_atomic_smax": global_atomic(np.maximum, np.int32),
}
HANDLERS |= {
    "s_load_dword" + (f"x{words}" if words > 1 else ""): scalar_load(words) for words in (1, 2, 4, 8, 16)
}
for _name, (_size, _sext) in LOADS.items():
    HANDLERS[f"global_load_{_name}"] = HANDLERS[f"flat_load_{_name}"] = global_load(_size, _sext)
    HANDLERS[f"buffer_load_{_name}"] = buffer_load(_size, _sext)
for _name, (_size, _shift) in STORES.items():
    HANDLERS[f"global_store_{_name}"] = HANDLERS[f"flat_store_{_name}"] = global_store(_size, _shift)
    HANDLERS[f"buffer_store_{_name}"] = buffer_store(_size, _shift)
