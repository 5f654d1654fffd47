"""gfx950's hardware conversions to E2M1, which replace the arithmetic of `rounding`.

One instruction divides two float32 values by a power of two, rounds them, RNE or SR, saturates at 6, and writes the
pair to one byte of a register, the first value to the low nibble. The divisor is a float32 of which only the exponent
counts. Four instructions make a word. Two instructions that write bytes of one register need a wait state between them,
which compilers do not insert into inline assembly.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from mxref_triton.lane.registers import bits_of, float_of

MNEMONIC = "v_cvt_scalef32_pk_fp4_f32"
"""Rounds to nearest even."""
SR_MNEMONIC = "v_cvt_scalef32_sr_pk_fp4_f32"
"""Rounds stochastically, by one seed of 32 bits for two values."""

_ARCHITECTURE = "gfx950"
_BYTES = ("0,0,0,0", "0,0,1,0", "0,0,0,1", "0,0,1,1")
"""op_sel for each byte of the result."""
_NEAREST = tl.constexpr(
    "\n\ts_nop 0\n\t".join(
        f"{MNEMONIC} $0, ${2 * b + 1}, ${2 * b + 2}, $9 op_sel:[{select}]" for b, select in enumerate(_BYTES)
    )
)
_STOCHASTIC = tl.constexpr(
    "\n\ts_nop 0\n\t".join(
        f"{SR_MNEMONIC} $0, ${b + 1}, ${b + 5}, $9 op_sel:[{select}]" for b, select in enumerate(_BYTES)
    )
)
# The result is written before the last operand is read, so it shares its register with none of them: "&".
_OPERANDS = tl.constexpr("=&v" + 9 * ",v")
_ONE_TWICE = tl.constexpr(254 << 23)


@cache
def is_gfx950(device: torch.device) -> bool:
    """Return whether a device of this torch is a gfx950."""
    if torch.version.hip is None:
        return False
    return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0] == _ARCHITECTURE


@triton.jit
def _reciprocal(factor):
    """Return 1 / factor for a normal power of two, exactly."""
    return float_of(_ONE_TWICE - bits_of(factor))


@triton.jit
def nearest_word(values, factor):
    """Return eight elements, rounded to nearest even, as packed codes, uint32 [B].

    Args:
        values: tuple of eight float32 [B].
        factor: a power of two by which they are multiplied first, float32 [B].
    """
    return tl.inline_asm_elementwise(
        _NEAREST, _OPERANDS,
        [
            values[0], values[1], values[2], values[3],
            values[4], values[5], values[6], values[7], _reciprocal(factor),
        ],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _pair(low, high):
    """Return two float32 in the registers of one 64-bit operand."""
    return (bits_of(high).to(tl.uint64) << 32) | bits_of(low).to(tl.uint64)


@triton.jit
def stochastic_word(values, factor, words):
    """Return eight elements, rounded by the hardware's own SR, as packed codes, uint32 [B].

    Args:
        values: and factor as in `nearest_word`.
        factor: see values.
        words: four random words, one for two elements.
    """
    return tl.inline_asm_elementwise(
        _STOCHASTIC, _OPERANDS,
        [
            _pair(values[0], values[1]), _pair(values[2], values[3]),
            _pair(values[4], values[5]), _pair(values[6], values[7]),
            words[0], words[1], words[2], words[3], _reciprocal(factor),
        ],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
