"""The LDS: reads and writes of all widths, and the cross-lane moves that go through it without memory."""

from __future__ import annotations

import numpy as np

from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.lanes import swizzle_map
from gfx950.memory import Lds, Memory
from gfx950.operands import Operand
from gfx950.registers import LANES, Group
from gfx950.valu_tables import U32
from gfx950.vmem import Handler, allow, enabled, offset_of, read_stored, write_loaded

READS = {
    "u8": (1, False), "i8": (1, True), "u16": (2, False), "i16": (2, True),
    "b32": (4, False), "b64": (8, False), "b96": (12, False), "b128": (16, False),
}  # fmt: skip
WRITES = {
    "b8": (1, 0), "b8_d16_hi": (1, 16), "b16": (2, 0), "b16_d16_hi": (2, 16),
    "b32": (4, 0), "b64": (8, 0), "b96": (12, 0), "b128": (16, 0),
}  # fmt: skip


def places(group: Group, address: Operand, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (workgroup, byte offset) of the enabled lanes."""
    workgroups = enabled(group, group.state.workgroup[group.chosen][:, None])
    return workgroups, enabled(group, group.vector32(address)).astype(np.int64) + offset


def read(size: int, sext: bool) -> Handler:
    """Return ds_read_*."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset")
        destination, address = instruction.operands
        write_loaded(
            group, destination, lds.load(*places(group, address, offset_of(instruction)), size), sext=sext
        )

    return run


def read_transposed(size: int) -> Handler:
    """Return ds_read_b64_tr_*: 16 lanes read rows of 16 elements of `size` bytes, and each gets a column.

    A lane reads 8 bytes, wherever its address is: of bytes, lane l of the 16 reads half a row, the bytes 8 * (l % 2) ..
    of row l / 2. There are as many rows as a lane reads elements, and lane l gets column l.
    """
    count = 8 // size

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset")
        if not group.all_on:
            raise Gfx950Error("a transposed read with disabled lanes is not modelled")
        destination, address = instruction.operands
        workgroups, offsets = places(group, address, offset_of(instruction))
        if (offsets % 8).any():
            raise Gfx950Error("a transposed read takes addresses that are multiples of 8")
        rows = lds.load(workgroups, offsets, 8).reshape(-1, count, 16, size)
        write_loaded(group, destination, np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1, 8))

    return run


def write(size: int, shift: int) -> Handler:
    """Return ds_write_*."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset")
        address, data = instruction.operands
        stored = read_stored(group, data, size, shift)
        lds.store(*places(group, address, offset_of(instruction)), stored)

    return run


def read_two(size: int, unit: int) -> Handler:
    """Return ds_read2_* (`unit` is the size) or ds_read2st64_* (64 sizes)."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset0", "offset1")
        destination, address = instruction.operands
        both = [
            lds.load(*places(group, address, offset_of(instruction, name) * unit), size)
            for name in ("offset0", "offset1")
        ]
        write_loaded(group, destination, np.concatenate(both, axis=1))

    return run


def write_two(size: int, unit: int) -> Handler:
    """Return ds_write2_* or ds_write2st64_*."""

    def run(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
        allow(instruction, "offset0", "offset1")
        address, *data = instruction.operands
        for name, operand in zip(("offset0", "offset1"), data, strict=True):
            stored = read_stored(group, operand, size, 0)
            lds.store(*places(group, address, offset_of(instruction, name) * unit), stored)

    return run


def moved(group: Group, source: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return values[source] per lane, 0 from lanes that EXEC disables."""
    rows = np.arange(group.count)[:, None]
    source = np.broadcast_to(source, (group.count, LANES))
    values = np.broadcast_to(values, (group.count, LANES))
    return np.where(group.lanes[rows, source], values[rows, source], U32(0))


def pull(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
    """ds_bpermute_b32: each lane names the lane that it reads, times four."""
    allow(instruction, "offset")
    destination, address, data = instruction.operands
    source = ((group.vector32(address) + U32(offset_of(instruction))) >> U32(2)) % U32(LANES)
    group.write_vector(destination, 0, moved(group, source, group.vector32(data)), None)


def push(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
    """ds_permute_b32: each lane names the lane that it writes, times four; the highest source wins."""
    allow(instruction, "offset")
    destination, address, data = instruction.operands
    target = np.broadcast_to(
        ((group.vector32(address) + U32(offset_of(instruction))) >> U32(2)) % U32(LANES), group.lanes.shape
    )
    values = np.broadcast_to(group.vector32(data), group.lanes.shape)
    result = np.zeros_like(values)
    rows = np.arange(group.count)
    for lane in range(LANES):
        on = group.lanes[:, lane]
        result[rows[on], target[on, lane]] = values[on, lane]
    group.write_vector(destination, 0, result, None)


def swizzle(group: Group, instruction: Instruction, memory: Memory, lds: Lds) -> None:
    """ds_swizzle_b32 in the modes that the assembly names."""
    allow(instruction, "swizzle")
    if "swizzle" not in instruction.modifiers:
        raise Gfx950Error("ds_swizzle with a bare offset is not modelled")
    destination, data = instruction.operands
    source = swizzle_map(str(instruction.modifiers["swizzle"]))
    group.write_vector(destination, 0, moved(group, source, group.vector32(data)), None)


HANDLERS: dict[str, Handler] = {f"ds_read_{name}": read(*what) for name, what in READS.items()}
HANDLERS |= {f"ds_write_{name}": write(*what) for name, what in WRITES.items()}
for _size in (4, 8):
    HANDLERS |= {
        f"ds_read2_b{8 * _size}": read_two(_size, _size),
        f"ds_read2st64_b{8 * _size}": read_two(_size, 64 * _size),
        f"ds_write2_b{8 * _size}": write_two(_size, _size),
        f"ds_write2st64_b{8 * _size}": write_two(_size, 64 * _size),
    }
HANDLERS |= {f"ds_read_b64_tr_b{8 * size}": read_transposed(size) for size in (1, 2)}
HANDLERS |= {"ds_bpermute_b32": pull, "ds_permute_b32": push, "ds_swizzle_b32": swizzle}
