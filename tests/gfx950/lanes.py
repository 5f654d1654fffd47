"""Where a lane's data comes from under DPP and ds_swizzle: static lane maps, [64] each."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from gfx950.errors import Gfx950Error
from gfx950.registers import LANE, LANES

DPP = frozenset(
    {
        *("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast"),
        *("row_newbcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror"),
    }
)
ROW, WITHIN = LANE // 16 * 16, LANE % 16


def _move(name: str, value: object) -> tuple[np.ndarray, np.ndarray]:
    """Return (source lane, whether it exists) of every lane for one DPP control."""
    everywhere = np.ones(LANES, bool)
    if name == "quad_perm":
        assert isinstance(value, tuple)
        return LANE // 4 * 4 + np.array(value)[LANE % 4], everywhere
    if name == "row_mirror":
        return ROW + 15 - WITHIN, everywhere
    if name == "row_half_mirror":
        return LANE // 8 * 8 + 7 - LANE % 8, everywhere
    assert isinstance(value, int)
    if name == "row_shl":
        return LANE + value, WITHIN + value < 16
    if name == "row_shr":
        return LANE - value, value <= WITHIN
    if name == "row_ror":
        return ROW + (WITHIN - value) % 16, everywhere
    if name == "row_newbcast":
        return ROW + value, everywhere
    if name == "row_bcast" and value == 15:
        # The last lane of a row to every lane of the next one.
        return ROW - 1, LANE >= 16
    if name == "row_bcast" and value == 31:
        return np.full(LANES, 31), LANE >= 32
    if value == 1 and name in ("wave_shl", "wave_shr"):
        source = LANE + (1 if name == "wave_shl" else -1)
        return source, (source >= 0) & (source < LANES)
    if value == 1 and name in ("wave_rol", "wave_ror"):
        return (LANE + (1 if name == "wave_rol" else -1)) % LANES, everywhere
    raise Gfx950Error(f"DPP control {name}:{value} is not modelled")


@cache
def dpp_map(modifiers: Iterable[tuple[str, object]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Return (source lane, it exists, lane may be written, bound_ctrl) of an instruction's DPP modifiers."""
    given = dict(modifiers)
    controls = [name for name in given if name in DPP]
    if len(controls) != 1:
        raise Gfx950Error(f"{len(controls)} DPP controls in one instruction")
    source, exists = _move(controls[0], given[controls[0]])
    rows, banks = given.get("row_mask", 15), given.get("bank_mask", 15)
    assert isinstance(rows, int)
    assert isinstance(banks, int)
    written = ((rows >> (LANE // 16)) & 1 == 1) & ((banks >> (WITHIN // 4)) & 1 == 1)
    return np.where(exists, source, 0), exists, written, "bound_ctrl" in given


@cache
def swizzle_map(control: str) -> np.ndarray:
    """Return the source lane of every lane for a ds_swizzle mode as the assembly writes it."""
    kind, *values = control.split(",")
    low, group = LANE % 32, LANE // 32 * 32
    if kind == "QUAD_PERM":
        return LANE // 4 * 4 + np.array([int(v) for v in values])[LANE % 4]
    if kind == "BITMASK_PERM":
        # Five letters, high bit first: keep (p), invert (i), or a constant bit.
        source = np.zeros(LANES, np.int64)
        for bit, letter in enumerate(reversed(values[0].strip('"'))):
            old = (low >> bit) & 1
            source |= {"p": old, "i": 1 - old, "0": 0 * old, "1": 0 * old + 1}[letter] << bit
        return group + source
    if kind == "SWAP":
        return LANE ^ int(values[0])
    if kind == "REVERSE":
        return LANE ^ (int(values[0]) - 1)
    if kind == "BROADCAST":
        size = int(values[0])
        return LANE // size * size + int(values[1])
    raise Gfx950Error(f"ds_swizzle mode {control} is not modelled")
