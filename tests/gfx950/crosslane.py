"""Vector instructions that move data between lanes, and between lanes and scalar registers."""

from __future__ import annotations

import numpy as np

from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.registers import Group
from gfx950.sources import Handler, Sources, check_modifiers
from gfx950.valu_tables import U32


def read_first_lane(group: Group, instruction: Instruction) -> None:
    """v_readfirstlane: the lowest enabled lane, lane 0 if there is none."""
    destination, source = instruction.operands
    values = np.broadcast_to(group.vector32(source), group.lanes.shape)
    group.write_scalar(destination, values[np.arange(group.count), group.lanes.argmax(axis=1)])


def read_lane(group: Group, instruction: Instruction) -> None:
    """v_readlane: a lane named by a scalar, enabled or not."""
    destination, source, lane = instruction.operands
    group.write_scalar(
        destination, group.vector32(source)[np.arange(group.count), group.scalar32(lane) % U32(64)]
    )


def write_lane(group: Group, instruction: Instruction) -> None:
    """v_writelane: a scalar into one lane, enabled or not."""
    destination, source, lane = instruction.operands
    mask = np.arange(64) == (group.scalar32(lane) % U32(64))[:, None]
    group.write_vector(destination, 0, group.scalar32(source)[:, None], mask)


def swap_lanes(size: int) -> Handler:
    """Return v_permlane16_swap or v_permlane32_swap: odd rows of the first against even rows of the second."""
    odd = np.flatnonzero(np.arange(64) // size % 2)

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset())
        if not group.all_on:
            raise Gfx950Error("a lane swap with disabled lanes is not modelled")
        first, second = instruction.operands
        a, b = group.vector32(first).copy(), group.vector32(second).copy()
        a[:, odd], b[:, odd - size] = b[:, odd - size], a[:, odd]
        group.write_vector(first, 0, a, None)
        group.write_vector(second, 0, b, None)

    return run


def swap_registers(group: Group, instruction: Instruction) -> None:
    """v_swap_b32."""
    first, second = instruction.operands
    a, b = group.vector32(first).copy(), group.vector32(second).copy()
    group.write_vector(first, 0, b, None)
    group.write_vector(second, 0, a, None)


def lanes_before(high: bool) -> Handler:
    """Return v_mbcnt: the ones of a mask below this lane, plus a start."""
    lane = np.arange(64)
    below = np.array([((1 << int(n)) - 1) >> (32 if high else 0) & 0xFFFFFFFF for n in lane], U32)

    def run(group: Group, instruction: Instruction) -> None:
        destination, mask, start = instruction.operands
        sources = Sources(group, instruction)
        ones = np.bitwise_count(sources.read(0, mask, "u32") & below).astype(U32)
        sources.write(destination, ones + sources.read(1, start, "u32"), "u32")

    return run


HANDLERS: dict[str, Handler] = {
    "v_readfirstlane_b32": read_first_lane,
    "v_readlane_b32": read_lane,
    "v_writelane_b32": write_lane,
    "v_permlane16_swap_b32": swap_lanes(16),
    "v_permlane32_swap_b32": swap_lanes(32),
    "v_swap_b32": swap_registers,
    "v_mbcnt_lo_u32_b32": lanes_before(high=False),
    "v_mbcnt_hi_u32_b32": lanes_before(high=True),
}
