"""Memory: host arrays as buffers at invented 64-bit addresses, and the LDS of every workgroup.

Each buffer has an address range of its own, far from all others, with guard bytes before and behind it. An
access that is not wholly inside one buffer raises; the guards are checked again when the launch ends.
"""

from __future__ import annotations

import numpy as np

from gfx950.errors import Gfx950Error

GUARD = 256
GUARD_BYTE = 0xC5
REGION_BITS = 40
FIRST_REGION = 0x17
"""Buffers lie across a 4 GiB boundary: an address cut to 32 bits, or one with a lost carry, hits nothing."""


class Buffer:
    """One array's bytes between its guards; read-only buffers refuse stores."""

    def __init__(self, data: np.ndarray, address: int, writable: bool) -> None:
        if not data.flags.c_contiguous:
            raise Gfx950Error("a buffer must be contiguous")
        self.array = data
        self.address = address
        self.size = data.nbytes
        self.writable = writable
        self.bytes = np.full(self.size + 2 * GUARD, GUARD_BYTE, np.uint8)
        self.bytes[GUARD : GUARD + self.size] = data.reshape(-1).view(np.uint8)

    def copy_back(self) -> None:
        """Copy the buffer into its array; raise if a guard byte changed."""
        guards = np.concatenate([self.bytes[:GUARD], self.bytes[GUARD + self.size :]])
        if (guards != GUARD_BYTE).any():
            raise Gfx950Error(f"guard bytes around the buffer at {self.address:#x} were overwritten")
        if self.writable:
            self.array.reshape(-1).view(np.uint8)[:] = self.bytes[GUARD : GUARD + self.size]

    def overlaps(self, data: np.ndarray) -> bool:
        """Return whether an array has bytes of this buffer's host memory."""
        return np.may_share_memory(self.array, data)

    def covers(self, data: np.ndarray) -> bool:
        """Return whether an array is the very bytes of this buffer's host memory."""
        same = (self.array.ctypes.data, self.size) == (data.ctypes.data, data.nbytes)
        return same and data.flags.c_contiguous


class Memory:
    """All buffers of a launch."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, data: np.ndarray, *, writable: bool = True, misalign: int = 0) -> int:
        """Take an array in; return its address, `misalign` bytes behind a multiple of 256.

        An array that was taken in already has the address that it got then.
        """
        for other in self.buffers:
            if other.overlaps(data):
                if other.covers(data) and other.writable == writable:
                    return other.address
                raise Gfx950Error("two arguments share part of their memory; that is not modelled")
        address = ((FIRST_REGION + len(self.buffers)) << REGION_BITS) + 0xFFFFFE00 + misalign
        self.buffers.append(Buffer(data, address, writable))
        return address

    def finish(self) -> None:
        """Copy every buffer back into its array, guards checked."""
        for buffer in self.buffers:
            buffer.copy_back()

    def _parts(self, addresses: np.ndarray, size: int) -> list[tuple[Buffer, np.ndarray | slice, np.ndarray]]:
        """Split addresses [n] by buffer: (buffer, which of them, their offsets in its bytes)."""
        regions = addresses >> np.uint64(REGION_BITS)
        first = regions[0]
        numbers = [first] if (regions == first).all() else np.unique(regions)
        parts = []
        for number in numbers:
            index = int(number) - FIRST_REGION
            which = slice(None) if len(numbers) == 1 else np.flatnonzero(regions == number)
            found = addresses[which]
            if not 0 <= index < len(self.buffers):
                raise Gfx950Error(f"access at {int(found[0]):#x}, where no buffer is")
            buffer = self.buffers[index]
            offsets = found.astype(np.int64) - buffer.address
            outside = (offsets < 0) | (offsets > buffer.size - size)
            if outside.any():
                raise Gfx950Error(
                    f"access of {size} bytes at offset {int(offsets[outside][0])} of a buffer of {buffer.size}"
                )
            parts.append((buffer, which, offsets + GUARD))
        return parts

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return bytes [n, size] at addresses uint64 [n]."""
        result = np.empty((len(addresses), size), np.uint8)
        if len(addresses):
            for buffer, which, offsets in self._parts(addresses, size):
                result[which] = buffer.bytes[offsets[:, None] + np.arange(size)]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store bytes [n, size]; of two lanes with one address the higher lane stays."""
        if len(addresses):
            for buffer, which, offsets in self._parts(addresses, values.shape[1]):
                if not buffer.writable:
                    raise Gfx950Error(f"store into the read-only buffer at {buffer.address:#x}")
                buffer.bytes[offsets[:, None] + np.arange(values.shape[1])] = values[which]


class Lds:
    """The local memory of every workgroup, [workgroup, size] bytes, filled with `poison` at the start."""

    def __init__(self, workgroups: int, size: int, poison: int) -> None:
        self.size = size
        self.bytes = np.full((workgroups, size), poison, np.uint8)

    def _index(self, workgroups: np.ndarray, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if len(offsets) and (offsets.min() < 0 or offsets.max() > self.size - size):
            worst = int(offsets.max() if offsets.min() >= 0 else offsets.min())
            raise Gfx950Error(f"LDS access of {size} bytes at {worst}; the workgroup has {self.size}")
        return workgroups[:, None], offsets[:, None] + np.arange(size)

    def load(self, workgroups: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return bytes [n, size]."""
        return self.bytes[self._index(workgroups, offsets, size)]

    def store(self, workgroups: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        """Store bytes [n, size]."""
        self.bytes[self._index(workgroups, offsets, values.shape[1])] = values
