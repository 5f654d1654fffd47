"""What is done to an operand, as data that kernels are compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from mxref.formats import E2M1, BlockFormat, ElementFormat, ScaleFormat
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import norm_factor
from mxref.steps.random import elements_per_call
from mxref.steps.rounding import Rounding
from mxref.steps.scale import MANTISSA_MASK, ScaleRule, bump_above

MAX_FUSED_HADAMARD = 64
"""Largest transform that one thread does in registers, before it quantizes; longer ones go through memory."""

PACKED_K = 32
"""Elements of the blocks for which `hopper` packs RNE."""

_RANDOM_CONSTANT = {Rounding.RNE: -1, Rounding.RTZ: 0, Rounding.RNA: 1 << 21, Rounding.SR: 0}
"""The constant that replaces SR's random integer of 22 bits in other modes; -1 for RNE, which uses other arithmetic."""


class Output(StrEnum):
    """What a kernel writes."""

    CODES = "codes"
    """Packed codes and scale codes."""
    VALUES = "values"
    """The bfloat16 values that these stand for, and scale codes."""
    TRANSFORMED = "transformed"
    """Float32 after the Hadamard transform, before any quantization."""
    AMAX = "amax"
    """The largest finite magnitude after the transform, from which the scale of the tensor follows."""


@dataclass(frozen=True, eq=False)
class Treatment:
    """What is done to an operand, as kernels are compiled for it; equal ones are one object."""

    kind: str
    """Type of the input: float32, bfloat16 or float16."""
    element: ElementFormat
    scale: ScaleFormat
    tensor_scale: bool
    """Whether there is a scale of the tensor."""
    k: int
    """Elements of a block."""
    carry: int
    """The scale rule: added to amax's bits, it carries into the exponent if the mantissa is above the rule's bound."""
    zero: int
    """Scale code of an all-zero block."""
    constant: int
    """Integer that is added to the 22-bit fraction of a gap; -1 for RNE."""
    random_bits: int
    """R for SR, else 0."""
    four_over_six: FourOverSix
    """By which error a block chooses between two scales, if it does."""
    prescale: float
    """Factor after the division by the scale; 1 for none."""
    saturates: bool
    """Whether RNE may give a code above the largest one, so that codes must be limited."""
    n: int
    """Size of the Hadamard transform that the kernel does, else 0."""
    signed: bool
    """Whether signs come before it."""
    late: bool
    """Whether the step is read from memory: the argument `stream_high` is a pointer to it then."""
    drawn: bool
    """Whether the kernel draws the signs, at that step: `signs_low` is the low word of their stream then."""
    norm: float
    """Factor after it, when it has to be a multiplication of its own, else 1."""
    folded_norm: float
    """Factor after it, when it can be part of the division by the scale, else 1."""
    tile: int
    """Rows that share their scales; 0 if each has its own."""
    native: bool
    """Whether the conversions of gfx950 round, RNE or SR."""
    packed: bool
    """Whether RNE is done on two elements at once, as `hopper` does."""
    by_sum: bool
    """Whether SR finds a place between grid points by a sum rounded toward zero, as `hopper_sr` does."""
    narrow: bool
    """Whether the numbers of all Philox calls are below 2^32; used together with `by_sum`."""
    output: Output

    @property
    def unit(self) -> int:
        """Elements of a unit."""
        return self.n if self.output is Output.TRANSFORMED else max(self.k, self.n)

    @property
    def quantizes(self) -> bool:
        """Whether the kernel makes codes, as it does for their values too."""
        return self.output in (Output.CODES, Output.VALUES)

    @property
    def blocks(self) -> int:
        """Scale codes of a unit, as many as are written."""
        return self.unit // self.k if self.quantizes else 0

    @property
    def chooses(self) -> bool:
        """Whether a block chooses between two scales."""
        return self.four_over_six is not FourOverSix.OFF

    @property
    def calls(self) -> int:
        """Philox calls of a unit."""
        return self.unit // elements_per_call(self.random_bits)

    @property
    def is_e2m1(self) -> bool:
        """Whether elements have the arithmetic of `rounding`, and not that of `quads`, which serves every format."""
        return self.element is E2M1

    @property
    def by_block(self) -> bool:
        """Whether one conversion of gfx950 makes all codes of a block."""
        return self.native and not self.is_e2m1

    @property
    def direct(self) -> bool:
        """Whether elements are rounded as they are read, packed bfloat16."""
        return self.packed and self.kind == "bfloat16" and not self.n and not self.tile

    @property
    def two_lines(self) -> bool:
        """Whether a thread takes two lines at once where elements of 16 bits lie side by side across lines."""
        short = self.kind != "float32" and self.unit == self.k and not self.random_bits
        return short and not self.tile and self.output is not Output.TRANSFORMED

    @property
    def words_in(self) -> int:
        """32-bit words of a unit as it is read."""
        return self.unit if self.kind == "float32" else self.unit // 2

    @property
    def words_out(self) -> int:
        """32-bit words of a unit as it is written."""
        if self.output is Output.AMAX:
            return 1
        bits = {Output.CODES: self.element.bits, Output.VALUES: 16, Output.TRANSFORMED: 32}[self.output]
        return self.unit * bits // 32


@cache
def treatment(
    spec: OperandSpec,
    kind: str,
    n: int,
    signed: bool,
    output: Output,
    norm: float | None = None,
    native: frozenset[tuple[ElementFormat, Rounding]] = frozenset(),
    packed: bool = False,
    late: bool = False,
    drawn: bool = False,
    narrow: bool = False,
) -> Treatment:
    """Return how kernels treat an operand.

    Args:
        spec: its treatment in the recipe.
        kind: type of the input.
        n: size of the Hadamard transform that the kernel does, 0 for none.
        signed: whether signs come before it.
        output: what is written.
        norm: factor after the transform; default that of its size.
        native: elements and roundings for which the conversions of gfx950 are used, where there is no prescale; for
            elements of 6 bits where codes are written.
        packed: whether there is the arithmetic of Hopper: packed bfloat16, which RNE to codes of E2M1 uses where there
            is no prescale and amax stays on its side of the scale rule's bound, and sums rounded toward zero, which SR
            to E2M1 uses.
        late: whether the kernel reads the step from memory.
        drawn: whether the kernel draws the signs at that step.
        narrow: whether the numbers of all Philox calls are below 2^32.
    """
    if norm is None:
        norm = float(norm_factor(n)) if n else 1.0
    # An element of 16 bits is a multiple of 2^-133, and so are sums of them: a norm that is a power of two from 1/8
    # on is exact then, and rounds nothing when it is multiplied with the scale first. Float32 may lose bits here.
    folds = kind != "float32" and n in (4, 16, 64) and output is not Output.TRANSFORMED
    block = spec.format
    assert isinstance(block, BlockFormat)  # checked when the quantization was planned
    element, nibbles = block.element, block.element is E2M1
    by_sum = packed and nibbles and spec.rounding is Rounding.SR
    powers = block.scale.powers
    bound = bump_above(spec.scale_rule, element)
    exact = kind == "bfloat16" and not n
    return Treatment(
        kind=kind,
        element=element,
        scale=block.scale,
        tensor_scale=block.tensor_scale,
        k=block.k,
        carry=MANTISSA_MASK - bound,
        zero=spec.zero_scale,
        constant=_RANDOM_CONSTANT[spec.rounding],
        random_bits=spec.sr_bits if spec.rounding is Rounding.SR else 0,
        four_over_six=spec.four_over_six,
        prescale=element.prescale if spec.prescale else 1.0,
        saturates=powers and not spec.prescale and _saturates(spec.scale_rule, element),
        n=n,
        signed=signed,
        late=late,
        drawn=drawn,
        norm=1.0 if folds else norm,
        folded_norm=norm if folds else 1.0,
        tile=spec.block.rows if spec.block.is_tile else 0,
        native=(element, spec.rounding) in native
        and not spec.prescale
        and (nibbles or output is Output.CODES),
        packed=packed
        and nibbles
        and powers
        and block.k == PACKED_K
        and spec.rounding is Rounding.RNE
        and not spec.prescale
        and output is Output.CODES
        and (exact or odd_keeps_side(bound)),
        by_sum=by_sum,
        narrow=by_sum and narrow,
        output=output,
    )


def odd_keeps_side(bound: int) -> bool:
    """Return whether every float32 that is rounded to odd in bfloat16 stays on its side of a scale rule's bound.

    Rounding to odd keeps seven bits of the mantissa, and sets the last of them if a lower bit was set. The comparison
    with a bound has the same outcome if the bound's last 17 bits are all zeros or all ones.

    Args:
        bound: from `bump_above`.
    """
    return bound % (1 << 17) == 0 or (bound + 1) % (1 << 17) == 0


def _saturates(rule: ScaleRule, element: ElementFormat) -> bool:
    """Return whether an element under a rule's scale may be rounded, to nearest even, beyond the largest one."""
    largest = math.ldexp(1 + bump_above(rule, element) / (MANTISSA_MASK + 1), element.max_exponent)
    half_a_step = math.ldexp(1.0, element.max_exponent - element.mantissa_bits - 1)
    # Below an exponent of 1 the scale of the largest float32 would be 2^128, which E8M0 does not have.
    return largest >= element.max_value + half_a_step or element.max_exponent < 1
