"""Runs single instructions in the model: what the opcode tests are written with.

A line is a template. {d} {a} {b} {c} stand for vector registers, {D} {A} {B} {C} for pairs of them, and
{s} {t} {u} {r}, {S} {T} {U} {R} for scalar ones: s[20:21] holds the result, the others are sources.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from gfx950.assembly import Program, parse_instruction
from gfx950.machine import Machine
from gfx950.registers import LANES

OLD = 0xDEADBEEF
"""What destinations hold before."""

NAMES = {
    "d": "v0", "D": "v[0:1]", "a": "v2", "A": "v[2:3]", "b": "v4", "B": "v[4:5]", "c": "v6", "C": "v[6:7]",
    "s": "s20", "S": "s[20:21]", "t": "s22", "T": "s[22:23]", "u": "s24", "U": "s[24:25]", "r": "s26", "R": "s[26:27]",
}  # fmt: skip
FIRST = {"d": 0, "a": 2, "b": 4, "c": 6, "s": 20, "t": 22, "u": 24, "r": 26}


def f32(value: float) -> int:
    """Return the bits of a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def f16(value: float) -> int:
    """Return the bits of a float16."""
    return struct.unpack("<H", struct.pack("<e", value))[0]


def f64(value: float) -> int:
    """Return the bits of a float64."""
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def machine(lines: Sequence[str], *, waves: int = 1, lds: int = 0, denorm: int = 3) -> Machine:
    """Return a machine of one workgroup with the given program, s_endpgm appended."""
    program = Program(name="test", threads=waves * LANES)
    program.descriptor = {
        "next_free_vgpr": 72, "accum_offset": 64, "user_sgpr_count": 2, "float_denorm_mode_32": denorm,
        "float_denorm_mode_16_64": denorm, "group_segment_fixed_size": 0, "system_sgpr_workgroup_id_x": 0,
        "system_sgpr_workgroup_id_y": 0, "system_sgpr_workgroup_id_z": 0,
    }  # fmt: skip
    for line in [*lines, "s_endpgm"]:
        if line.endswith(":"):
            program.labels[line[:-1]] = len(program.instructions)
        else:
            program.instructions.append(
                parse_instruction(line.format(**NAMES), len(program.instructions) + 1)
            )
    return Machine(program, (1, 1, 1), lds)


def vector(line: str, cases: Sequence[tuple[int, ...]], *, denorm: int = 3) -> list[tuple[int, ...]]:
    """Execute a vector instruction, each case in a lane of its own: sources a, b, c; return d as 64 bits each.

    Lanes that have no case are disabled, and must keep their old destination.
    """
    m = machine([line], denorm=denorm)
    count = len(cases)
    m.state.vgpr[:] = OLD
    for lane, case in enumerate(cases):
        for name, value in zip("abc", case, strict=False):
            m.state.vgpr[FIRST[name], 0, lane] = value & 0xFFFFFFFF
            m.state.vgpr[FIRST[name] + 1, 0, lane] = value >> 32
    m.state.lanes[0] = np.arange(LANES) < count
    exec_mask = (1 << count) - 1
    m.state.sgpr[126, 0], m.state.sgpr[127, 0] = exec_mask & 0xFFFFFFFF, exec_mask >> 32
    m.run(100)
    assert (m.state.vgpr[0:2, 0, count:] == OLD).all(), "a disabled lane was written"
    low, high = m.state.vgpr[0, 0, :count], m.state.vgpr[1, 0, :count]
    return [int(x) | int(y) << 32 for x, y in zip(low, high, strict=True)]
