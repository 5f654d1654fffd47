"""One unit from elements to packed codes and scale bytes, all of it in the registers of one thread."""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import triton
import triton.language as tl

from mxref.formats import MXFP4, BlockShape
from mxref.hadamard import norm_factor
from mxref.philox import elements_per_call
from mxref.recipe import OperandSpec
from mxref.rounding import Rounding
from mxref.scale import ScaleRule
from mxref_triton.gfx950 import nearest_word, stochastic_word
from mxref_triton.hadamard import butterflies, flip_signs, multiplied
from mxref_triton.hopper import amax_bits_of_pairs, encode_pairs, encode_two, factors, pairs_of
from mxref_triton.hopper import encode_word as encode_packed
from mxref_triton.philox import philox
from mxref_triton.registers import bits_of, floats_of, halves_of
from mxref_triton.rounding import decode_element, encode_word, value_scale
from mxref_triton.scale import (
    CARRIES,
    amax_bits_of,
    over_tile,
    scaling,
)

MAX_FUSED_HADAMARD = 64
"""Largest transform that one thread does in registers, before it quantizes; longer ones go through memory."""

_RANDOM_CONSTANT = {Rounding.RNE: -1, Rounding.RTZ: 0, Rounding.RNA: 1 << 21, Rounding.SR: 0}
"""What SR's random integer of 22 bits is in the other modes; -1 for RNE, which has its own arithmetic."""


class Output(StrEnum):
    """What a kernel writes."""

    CODES = "codes"
    """Packed codes and scale codes."""
    VALUES = "values"
    """The bfloat16 values that these stand for, and scale codes."""
    TRANSFORMED = "transformed"
    """Float32 after the Hadamard transform, before any quantization."""


@dataclass(frozen=True, eq=False)
class Treatment:
    """What is done to an operand, as kernels are compiled for it; equal ones are one object."""

    kind: str
    """Type of the input: float32, bfloat16 or float16."""
    carry: int
    """The scale rule, as what is added to amax's bits."""
    zero: int
    """Scale code of an all-zero block."""
    constant: int
    """What is added to the fraction of a gap, of 22 bits; -1 for RNE."""
    random_bits: int
    """R for SR, else 0."""
    prescale: bool
    saturates: bool
    """Whether RNE may give a code of 8, which has to be brought back to 7: above 7 times the scale."""
    n: int
    """Size of the Hadamard transform that the kernel does, else 0."""
    signed: bool
    """Whether signs come before it."""
    norm: float
    """Factor after it, when it has to be a multiplication of its own, else 1."""
    folded_norm: float
    """Factor after it, when it can be part of the division by the scale, else 1."""
    tile: bool
    """Whether a block is 32x32."""
    native: bool
    """Whether the conversions of gfx950 round, RNE or SR."""
    packed: bool
    """Whether RNE is done on two elements at once, as `hopper` does."""
    output: Output

    @property
    def unit(self) -> int:
        """Elements of a unit."""
        return self.n if self.output is Output.TRANSFORMED else max(MXFP4.k, self.n)

    @property
    def blocks(self) -> int:
        """Scale codes of a unit, as many as are written."""
        return 0 if self.output is Output.TRANSFORMED else self.unit // MXFP4.k

    @property
    def calls(self) -> int:
        """Philox calls of a unit."""
        return self.unit // elements_per_call(self.random_bits)

    @property
    def direct(self) -> bool:
        """Whether elements are rounded as they are read, packed bfloat16."""
        return self.packed and self.kind == "bfloat16" and not self.n and not self.tile

    @property
    def two_lines(self) -> bool:
        """Whether a thread takes two lines at once where elements of 16 bits lie side by side across lines."""
        short = self.kind != "float32" and self.unit == MXFP4.k and not self.random_bits
        return short and not self.tile and self.output is not Output.TRANSFORMED

    @property
    def words_in(self) -> int:
        """32-bit words of a unit as it is read."""
        return self.unit if self.kind == "float32" else self.unit // 2

    @property
    def words_out(self) -> int:
        """32-bit words of a unit as it is written."""
        return self.unit * {Output.CODES: 1, Output.VALUES: 4, Output.TRANSFORMED: 8}[self.output] // 8


@cache
def treatment(
    spec: OperandSpec,
    kind: str,
    n: int,
    signed: bool,
    output: Output,
    norm: float | None = None,
    native: frozenset[Rounding] = frozenset(),
    packed: bool = False,
) -> Treatment:
    """Return how kernels treat an operand.

    Args:
        spec: its treatment in the recipe.
        kind: type of the input.
        n: size of the Hadamard transform that the kernel does, 0 for none.
        signed: whether signs come before it.
        output: what is written.
        norm: factor after the transform; default that of its size.
        native: roundings for which the conversions of gfx950 are used, where there is no prescale.
        packed: whether there is packed bfloat16 arithmetic, which RNE to codes then uses where there is no prescale.
    """
    if norm is None:
        norm = float(norm_factor(n)) if n else 1.0
    # An element of 16 bits is a multiple of 2^-133, and so are sums of them: a norm that is a power of two from 1/8
    # on is exact then, and rounds nothing when it is multiplied with the scale first. Float32 may lose bits here.
    folds = kind != "float32" and n in (4, 16, 64) and output is not Output.TRANSFORMED
    return Treatment(
        kind=kind,
        carry=CARRIES[spec.scale_rule],
        zero=spec.zero_scale,
        constant=_RANDOM_CONSTANT[spec.rounding],
        random_bits=spec.sr_bits if spec.rounding is Rounding.SR else 0,
        prescale=spec.prescale,
        saturates=spec.scale_rule is ScaleRule.FLOOR and not spec.prescale,
        n=n,
        signed=signed,
        norm=1.0 if folds else norm,
        folded_norm=norm if folds else 1.0,
        tile=spec.block is BlockShape.TILE,
        native=spec.rounding in native and not spec.prescale,
        packed=packed and spec.rounding is Rounding.RNE and not spec.prescale and output is Output.CODES,
        output=output,
    )


_VALUES = tl.constexpr(Output.VALUES.value)
_TRANSFORMED = tl.constexpr(Output.TRANSFORMED.value)


@triton.jit
def _transformed(values, signs_low, signs_high, P: tl.constexpr):
    """Return the elements of a unit after signs and Hadamard transform, but for a norm that folds into the scale."""
    UNIT: tl.constexpr = P.unit
    N: tl.constexpr = P.n
    NORM: tl.constexpr = P.norm
    if P.signed:
        values = flip_signs(values, signs_low, signs_high, UNIT, N)
    if N:
        values = butterflies(values, UNIT, N)
    if NORM != 1.0:
        values = multiplied(values, NORM, UNIT)
    return values


@triton.jit
def _random_words(group, key, index: tl.constexpr, P: tl.constexpr):
    """Return the random words of the eight elements `index` of a unit whose first call has number `group`."""
    if P.random_bits == 0:
        return ()
    elif P.random_bits <= 16:
        return philox(group + index, key[0], key[1], key[2], key[3])
    else:
        low = philox(group + 2 * index, key[0], key[1], key[2], key[3])
        high = philox(group + (2 * index + 1), key[0], key[1], key[2], key[3])
        return low + high


@triton.jit
def _decoded(word, code):
    """Return the eight elements of a word as four words of two bfloat16 values."""
    scale = value_scale(code)
    out = ()
    for i in tl.static_range(4):
        low = decode_element(word, 2 * i, scale) >> 16
        high = decode_element(word, 2 * i + 1, scale) & 0xFFFF0000
        out = out + (tl.where(code == 255, 0x7FC07FC0, low | high),)
    return out


@triton.jit
def _all_bits(values):
    out = ()
    for i in tl.static_range(len(values)):
        out = out + (bits_of(values[i]),)
    return out


@triton.jit
def _quantized(values, group, key, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    words = ()
    codes = ()
    if P.packed:
        magnitudes, signed = pairs_of(values, P.unit)
    for block in tl.static_range(P.unit // 32):
        if P.packed:
            amax_bits = amax_bits_of_pairs(magnitudes[16 * block : 16 * block + 16])
        else:
            amax_bits = amax_bits_of(values[32 * block : 32 * block + 32])
        if P.tile:
            amax_bits = over_tile(amax_bits, ROWS, COLUMNS)
        factor, keep, stored = scaling(amax_bits, P)
        if P.packed:
            both = factors(factor, factor)
        codes = codes + (stored,)
        for i in tl.static_range(4):
            random = _random_words(group, key, 4 * block + i, P)
            eight = values[32 * block + 8 * i : 32 * block + 8 * i + 8]
            if P.packed:
                pairs = magnitudes[16 * block + 4 * i : 16 * block + 4 * i + 4]
                tops = signed[16 * block + 4 * i : 16 * block + 4 * i + 4]
                word = encode_packed(pairs, tops, both, keep)
            elif not P.native:
                word = encode_word(eight, factor, keep, random, P)
            elif P.random_bits:
                word = stochastic_word(eight, factor, random) & keep
            else:
                word = nearest_word(eight, factor) & keep
            if P.output == _VALUES:
                words = words + _decoded(word, stored.to(tl.int32))
            else:
                words = words + (word,)
    return words, codes


@triton.jit
def encode_unit(
    values, signs_low, signs_high, group, key, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return what a unit is stored as.

    Args:
        values: its elements, a tuple of float32 [B].
        signs_low: bits 0 to 31 of the signs before the Hadamard transform.
        signs_high: bits 32 to 63.
        group: for SR, the number of its first Philox call, int64 [B]; else None.
        key: seed and stream, four words; else None.
        P: the treatment.
        ROWS: for 32x32 tiles, units lie row-major in ROWS x COLUMNS, and 32 rows share a scale.
        COLUMNS: see ROWS.

    Returns:
        Words of codes, bfloat16 values or float32, a tuple of uint32 [B], and scale bytes, one uint8 [B] per block.
    """
    values = _transformed(values, signs_low, signs_high, P)
    if P.output == _TRANSFORMED:
        return _all_bits(values), ()
    else:
        return _quantized(values, group, key, P, ROWS, COLUMNS)


@triton.jit
def encode_words(
    words, signs_low, signs_high, group, key, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return what a unit is stored as, from words of neighbouring elements; the rest as in `encode_unit`."""
    KIND: tl.constexpr = P.kind
    if P.direct:
        return encode_pairs(words, P)
    else:
        values = floats_of(words, P.words_in, KIND)
        return encode_unit(values, signs_low, signs_high, group, key, P, ROWS, COLUMNS)


@triton.jit
def encode_two_lines(words, signs_low, signs_high, P: tl.constexpr):
    """Return what two units are stored as, one in the lower halves of words, one in the upper; no unit has randomness.

    Args:
        words: a tuple of uint32 [B], one for each element.
        signs_low: and signs_high and P as in `encode_unit`.
        signs_high: see signs_low.
        P: see signs_low.

    Returns:
        Words and scale bytes of the lower unit, then of the upper, two tuples.
    """
    KIND: tl.constexpr = P.kind
    if P.direct:
        return encode_two(words, P)
    else:
        low, high = halves_of(words, P.unit, KIND)
        low_words, low_scales = encode_unit(low, signs_low, signs_high, None, None, P, 1, 1)
        high_words, high_scales = encode_unit(high, signs_low, signs_high, None, None, P, 1, 1)
        return low_words + high_words, low_scales + high_scales
