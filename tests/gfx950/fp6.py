"""The scaled conversions to elements of 6 bits, E2M3 and E3M2, a block of 32 at once.

The divisor is read as in `fp4`. The first source holds the elements of even index, the second those of odd index, and
the codes are a stream of 6 bits each from the lowest bit on: AMD's "CDNA4" ISA names two packed vectors and one result,
and that they are interleaved is in AMD's Composable Kernel, and was seen on hardware by the tests of its FP sanitizer.
The instruction takes several passes, so its result must not lie over a source (LLVM pull request 188809).
"""

from __future__ import annotations

import numpy as np

from gfx950.assembly import Instruction
from gfx950.errors import Gfx950Error
from gfx950.fp4 import exponents
from gfx950.registers import Group
from gfx950.sources import Handler, check_modifiers
from gfx950.valu_tables import U32


def magnitudes(mantissa_bits: int, bias: int) -> np.ndarray:
    """Return the values of the codes 0 to 31, in float64."""
    code = np.arange(32)
    field, fraction = code >> mantissa_bits, code % (1 << mantissa_bits)
    significand = np.where(field == 0, 0, 1) + fraction / (1 << mantissa_bits)
    return np.ldexp(significand, np.maximum(field, 1) - bias)


GRIDS = {"fp6": magnitudes(3, 1), "bf6": magnitudes(2, 3)}
"""E2M3 and E3M2, by the name that instructions use."""


def encode(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return float64 as codes: RNE, saturating; a NaN gives the largest code, which nothing may rely on."""
    size = np.abs(x)
    between = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(between, size, side="left")
    # A tie, which `left` keeps below, goes to the even code.
    tie = np.append(between, np.inf)[below] == size
    code = np.where(np.isnan(x), 31, below + (tie & (below % 2 == 1)))
    return code.astype(U32) | (np.signbit(x).astype(U32) << U32(5))


def decode(codes: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the values of codes in float64."""
    return np.where(codes & 32, -1.0, 1.0) * grid[codes & 31]


def codes_of(words: np.ndarray) -> np.ndarray:
    """Return the codes in words uint32 [..., 3 n], the first in the lowest bits, as integers [..., 16 n]."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    bits = stream.reshape(*words.shape[:-1], -1, 6)
    codes: np.ndarray = (bits << np.arange(6, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return codes


def words_of(codes: np.ndarray) -> np.ndarray:
    """Return codes uint32 [..., 32] as words [..., 6], the first code in the lowest bits."""
    bits = (codes[..., None] >> np.arange(6, dtype=U32)) & U32(1)
    stream = bits.reshape(*codes.shape[:-1], 192).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view(U32)


def from_f32(kind: str) -> Handler:
    """Return v_cvt_scalef32_2xpk16_<kind>_f32: 2 x 16 registers to 6."""

    def run(group: Group, instruction: Instruction) -> None:
        check_modifiers(instruction, frozenset())
        destination, even, odd, scale = instruction.operands
        if (destination.count, even.count, odd.count) != (6, 16, 16):
            raise Gfx950Error("the instruction takes twice 16 registers and gives 6")
        if any(source.overlaps(destination) for source in (even, odd, scale)):
            raise Gfx950Error("the result lies over a source, which is still read")
        exponent = exponents(group, scale)
        codes = [
            encode(
                np.ldexp(group.vector32(source, i).view(np.float32).astype(np.float64), -exponent),
                GRIDS[kind],
            )
            for i in range(16)
            for source in (even, odd)
        ]
        words = words_of(np.stack(np.broadcast_arrays(*codes), axis=-1))
        for part in range(6):
            group.write_vector(destination, part, words[..., part], None)

    return run


HANDLERS: dict[str, Handler] = {f"v_cvt_scalef32_2xpk16_{kind}_f32": from_f32(kind) for kind in GRIDS}
