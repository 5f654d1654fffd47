"""gfx950's hardware conversions to E2M1, E2M3 and E3M2, which replace the arithmetic of `rounding` and `grid`.

One instruction divides two float32 values by a power of two, rounds them, RNE or SR, saturates at 6, and writes the
pair to one byte of a register, the first value to the low nibble. The divisor is a float32 of which only the exponent
counts. Four instructions make a word. Two instructions that write bytes of one register need a wait state between them,
which compilers do not insert into inline assembly.

To elements of 6 bits one instruction converts a whole block of 32 in the same way, RNE, from 32 neighbouring registers.
Inline assembly in Triton has no operand of so many, so `gfx950.ll` calls the instruction, and is linked to kernels.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from mxref.formats import E2M1, E2M3, E3M2, ElementFormat
from mxref.steps.rounding import Rounding
from mxref_triton.lane.registers import bits_of, float_of

MNEMONIC = "v_cvt_scalef32_pk_fp4_f32"
"""Rounds to nearest even."""
SR_MNEMONIC = "v_cvt_scalef32_sr_pk_fp4_f32"
"""Rounds stochastically, by one seed of 32 bits for two values."""

SIX_BITS = {E2M3: "v_cvt_scalef32_2xpk16_fp6_f32", E3M2: "v_cvt_scalef32_2xpk16_bf6_f32"}
"""Rounds 32 values to nearest even, by element format."""

Conversion = tuple[ElementFormat, Rounding]
"""What a conversion of the hardware makes, and how it rounds."""
NEAREST: tuple[Conversion, ...] = tuple((element, Rounding.RNE) for element in (E2M1, *SIX_BITS))
STOCHASTIC: Conversion = (E2M1, Rounding.SR)

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


_LIBRARY = Path(__file__).with_suffix(".ll")
_FUNCTIONS = {element: f"__mxref_{element.name.lower()}" for element in SIX_BITS}


@cache
def library() -> dict[str, Any]:
    """Return the option of a launch that links `gfx950.ll` to a kernel."""
    # Only the name that is part of a function's name is linked. The other one is made of the text: until 3.9 Triton
    # takes a compiled kernel from its cache by the names and paths of libraries, whatever is in them now.
    digest = hashlib.sha256(_LIBRARY.read_bytes()).hexdigest()
    return {"extern_libs": (("__mxref_", str(_LIBRARY)), (digest, str(_LIBRARY)))}


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


@tl.core.extern
def _word_of_block(values, divisor, word, E, _semantic=None):
    """Return one of the six words of a block, int32 [B]."""
    arguments = [*values, divisor, _semantic.to_tensor(tl.core._unwrap_if_constexpr(word))]
    kinds = (tl.float32,) * 33 + (tl.int32,)
    function = _FUNCTIONS[tl.core._unwrap_if_constexpr(E)]
    return tl.core.extern_elementwise(
        "", "", arguments, {kinds: (function, tl.int32)}, is_pure=True, _semantic=_semantic
    )


@triton.jit
def nearest_words_of_block(values, factor, keep, E: tl.constexpr):
    """Return the 32 elements of a block, rounded to nearest even, as six words of codes of E, a tuple of uint32 [B].

    The kernel has to be launched with `library`.

    Args:
        values: tuple of 32 float32 [B].
        factor: a power of two by which they are multiplied first, float32 [B].
        keep: the bits of words to keep, uint32 [B].
        E: E2M3 or E3M2.
    """
    divisor = _reciprocal(factor)
    out = ()
    for word in tl.static_range(6):
        out = out + (_word_of_block(values, divisor, word, E).to(tl.uint32, bitcast=True) & keep,)
    return out
