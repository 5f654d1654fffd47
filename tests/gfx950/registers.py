"""Register files of all waves of a launch, and the view of those waves that execute one instruction together.

vgpr [register, wave, 64] uint32; sgpr [register, wave] uint32, VCC, M0 and EXEC among them under their
encoded numbers; scc [wave] bool. Registers that nothing wrote hold POISON, a signalling NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from gfx950.errors import Gfx950Error
from gfx950.operands import EXEC, VCC, Operand

LANES = 64
POISON = 0x7FA5C3E1
SGPRS = 128
LANE = np.arange(LANES)


@cache
def constant(operand: Operand, bits: int) -> np.ndarray:
    """Return a constant operand as a [1] array of that width."""
    value = operand.constant(bits)
    if value is None:
        raise Gfx950Error(f"literal {operand.value} for a {bits}-bit operand is not modelled")
    array = np.array([value], np.uint64 if bits == 64 else np.uint32)
    array.setflags(write=False)
    return array


def to_lanes(masks: np.ndarray) -> np.ndarray:
    """Return bool [n, 64] of uint64 [n]."""
    data = np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(data, axis=1, bitorder="little").view(bool)


def from_lanes(lanes: np.ndarray) -> np.ndarray:
    """Return uint64 [n] of bool [n, 64]."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint64).ravel()


@dataclass(frozen=True)
class Choices:
    """What public texts leave to the hardware, or state in two ways."""

    rcp_side: int = 0
    """Where v_rcp_f32 lies beside an inexact result: 0 nearest, -1 below, 1 above; a right kernel does not care."""
    rcp_flushes: bool = False
    """Whether v_rcp_f32 gives a zero for a subnormal result; a right kernel does not care."""
    nan_scales: bool = True
    """Whether scale byte 255 of a scaled matrix instruction is NaN, and not 2^128; `bounded` needs NaN."""
    unknown_sums: float | None = None
    """What a matrix sum is that may depend on the hardware; None makes it an error."""


class Registers:
    """The state of all waves, and the modes that they share."""

    def __init__(self, waves: int, vgprs: int, agprs: int) -> None:
        self.vgpr = np.full((vgprs, waves, LANES), POISON, np.uint32)
        self.agpr = np.full((agprs, waves, LANES), POISON, np.uint32)
        self.sgpr = np.full((SGPRS, waves), POISON, np.uint32)
        self.sgpr[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.scc = np.zeros(waves, bool)
        self.lanes = np.ones((waves, LANES), bool)
        self.pc = np.zeros(waves, np.int64)
        self.workgroup = np.zeros(waves, np.int64)
        self.denorm32 = self.denorm16 = 3
        self.choices = Choices()


class Group:
    """Some waves of the state, `chosen` by a slice or an index array, that are at the same instruction."""

    def __init__(self, state: Registers, chosen: slice | np.ndarray) -> None:
        self.state = state
        self.chosen = chosen
        self.lanes = state.lanes[chosen]
        self.count = len(self.lanes)
        self.all_on = bool(self.lanes.all())

    # --- vector operands: uint32 or uint64 [n, 64], [n, 1] if scalar, [1, 1] if constant

    def file(self, operand: Operand) -> np.ndarray:
        """Return the register file of a v or a operand, after checking its range."""
        array = self.state.vgpr if operand.kind == "v" else self.state.agpr
        if operand.index + operand.count > len(array):
            raise Gfx950Error(f"{operand.kind}{operand.index} is not allocated ({len(array)} are)")
        return array

    def vector32(self, operand: Operand, part: int = 0) -> np.ndarray:
        """Return 32 bits: of a register tuple its register `part`."""
        if operand.kind in "va":
            return self.file(operand)[operand.index + part][self.chosen]
        if operand.kind == "s":
            return self.state.sgpr[operand.index + part][self.chosen][:, None]
        if operand.kind == "status":
            return self.scalar32(operand)[:, None]
        return constant(operand, 32)[None]

    def vector64(self, operand: Operand) -> np.ndarray:
        """Return 64 bits, the lower register first."""
        if operand.kind in ("int", "float"):
            return constant(operand, 64)[None]
        if operand.count != 2:
            raise Gfx950Error(f"{operand.kind}{operand.index} for a 64-bit operand is no pair")
        return join(self.vector32(operand), self.vector32(operand, 1))

    def write_vector(self, operand: Operand, part: int, values: np.ndarray, mask: np.ndarray | None) -> None:
        """Write uint32 values where `mask` [n, 64] is set; None means the lanes that EXEC enables."""
        if operand.kind not in "va":
            raise Gfx950Error("destination is no vector register")
        array = self.file(operand)[operand.index + part]
        if mask is None and not self.all_on:
            mask = self.lanes
        if mask is None:
            array[self.chosen] = values
        else:
            array[self.chosen] = np.where(mask, values, array[self.chosen])

    def write_vector64(self, operand: Operand, values: np.ndarray, mask: np.ndarray | None) -> None:
        """Write uint64 values to a register pair."""
        if operand.count != 2:
            raise Gfx950Error(f"{operand.kind}{operand.index} for a 64-bit destination is no pair")
        low, high = split(values)
        self.write_vector(operand, 0, low, mask)
        self.write_vector(operand, 1, high, mask)

    # --- scalar operands: uint32 or uint64 [n]

    def scalar32(self, operand: Operand, part: int = 0) -> np.ndarray:
        """Return the scalar operand of every wave."""
        if operand.kind == "s":
            return self.state.sgpr[operand.index + part][self.chosen]
        if operand.kind == "status":
            return self.status(str(operand.value)).astype(np.uint32)
        if operand.kind in ("int", "float"):
            return np.broadcast_to(constant(operand, 32), (self.count,))
        raise Gfx950Error(f"a {operand.kind} register as a scalar operand")

    def scalar64(self, operand: Operand) -> np.ndarray:
        """Return the scalar pair of every wave."""
        if operand.kind in ("int", "float"):
            return np.broadcast_to(constant(operand, 64), (self.count,))
        if operand.count != 2:
            raise Gfx950Error("a single register for a 64-bit scalar operand")
        return join(self.scalar32(operand), self.scalar32(operand, 1))

    def status(self, name: str) -> np.ndarray:
        """Return SCC, VCCZ or EXECZ as bool [n]."""
        if name == "scc":
            return self.state.scc[self.chosen]
        first = VCC if name == "vccz" else EXEC
        return (self.state.sgpr[first][self.chosen] | self.state.sgpr[first + 1][self.chosen]) == 0

    def write_scalar(self, operand: Operand, values: np.ndarray, part: int = 0) -> None:
        """Write 32 bits; a write to EXEC changes the enabled lanes at once."""
        if operand.kind != "s":
            raise Gfx950Error("destination is no scalar register")
        index = operand.index + part
        self.state.sgpr[index][self.chosen] = values
        if index in (EXEC, EXEC + 1):
            pair = self.state.sgpr[EXEC : EXEC + 2, self.chosen]
            self.state.lanes[self.chosen] = to_lanes(join(pair[0], pair[1]))
            self.lanes = self.state.lanes[self.chosen]
            self.all_on = bool(self.lanes.all())

    def write_scalar64(self, operand: Operand, values: np.ndarray) -> None:
        """Write a scalar pair."""
        if operand.count != 2:
            raise Gfx950Error("a single register for a 64-bit scalar destination")
        low, high = split(values)
        self.write_scalar(operand, low, 0)
        self.write_scalar(operand, high, 1)

    def write_scc(self, values: np.ndarray) -> None:
        """Set SCC of every wave."""
        self.state.scc[self.chosen] = values

    # --- lane masks in scalar pairs

    def mask(self, operand: Operand) -> np.ndarray:
        """Return a lane mask as bool [n, 64]."""
        return to_lanes(self.scalar64(operand))

    def write_mask(self, operand: Operand, bits: np.ndarray) -> None:
        """Write a lane mask; lanes that EXEC disables become 0."""
        self.write_scalar64(operand, from_lanes(np.broadcast_to(bits, self.lanes.shape) & self.lanes))


def join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return uint64 of two uint32 halves."""
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the uint32 halves of uint64."""
    values = np.asarray(values, np.uint64)
    return values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)
