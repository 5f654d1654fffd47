"""Recipes: how each operand of each GEMM is treated, as frozen data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from mxref.errors import RecipeError
from mxref.formats import BF16, MXFP4, BlockFormat, BlockShape, Nonfinite, OperandFormat
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SIZES, SignPolicy, sign_bits
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import ScaleRule
from mxref.tomlio import OMITTED, convert, normalize, to_table


class GemmProfile(StrEnum):
    """Which results a scaled GEMM may return."""

    EXACT = "exact"
    """The real sum, rounded once: one answer."""
    ORDERED = "ordered"
    """Float32 accumulation, block by block in ascending order: one answer, on every device."""
    BOUNDED = "bounded"
    """Any result within the backend's declared error class."""


_BY_FORMAT: Any = None
"""Default of a field of `OperandSpec` that the format decides."""


@dataclass(frozen=True)
class OperandSpec:
    """The treatment of one operand: its format and, for a block format, every choice that its bits depend on.

    The format and the choices may be given by name, as in `OperandSpec(rounding="sr")`; RecipeError lists the
    valid names.

    Implements: recipe.unknown
    """

    format: OperandFormat = MXFP4
    scale_rule: ScaleRule = _BY_FORMAT
    """FLOOR where scales are powers of two, else NEAREST."""
    rounding: Rounding = Rounding.RNE
    sr_bits: int = 16
    """R, the random bits per element under SR, 1 to 22."""
    block: BlockShape = _BY_FORMAT
    """What shares a scale: a block of a row, as `1x32` for k = 32, or a tile, as `32x32`; by default a block."""
    zero_scale: int = 0
    """Scale code of an all-zero block: 0, or that of the scale 1, which is 127 for E8M0 and 56 for UE4M3."""
    nonfinite: Nonfinite = Nonfinite.NAN_BLOCK
    prescale: bool = False
    """Multiply by the element's prescale (3/4 for MXFP4, 7/8 for MXFP8) before rounding; the GEMM undoes it."""
    hadamard: int = 0
    """Size of the Hadamard transform along the block axis, 2 to 256; 0 is none."""
    signs: SignPolicy = SignPolicy.NONE
    sign_vector: str | None = None
    """Given signs in place of random ones: `+` or `-` for each element of a group; None is all `+`."""
    arithmetic: Arithmetic = field(default=Arithmetic.REAL, metadata=OMITTED)
    """How quotients by scales with a mantissa are computed: rounded once, or in an implementation's order."""
    four_over_six: FourOverSix = field(default=FourOverSix.OFF, metadata=OMITTED)
    """Whether a block under a scale with a mantissa may take amax / 4 in place of amax / 6, and by which error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", convert(OperandFormat, self.format, "format"))
        blocks = self.format if isinstance(self.format, BlockFormat) else MXFP4
        if self.scale_rule is None:
            rule = ScaleRule.FLOOR if blocks.scale.powers else ScaleRule.NEAREST
            object.__setattr__(self, "scale_rule", rule)
        if self.block is None:
            object.__setattr__(self, "block", blocks.row)
        normalize(self)
        for f in fields(self):
            require_in_range(f.name, getattr(self, f.name))
        if isinstance(self.format, BlockFormat):  # any other reads none of these choices
            self._require_fit(self.format)
        if self.signs is not SignPolicy.NONE and not self.hadamard:
            raise RecipeError(
                f"signs = {self.signs.value!r} without a Hadamard transform: set hadamard = 16, say"
            )
        if self.sign_vector is not None:
            if self.signs is not SignPolicy.NONE:
                raise RecipeError(
                    f"sign_vector beside signs = {self.signs.value!r}: signs are given or drawn, so leave one out"
                )
            if len(self.sign_vector) != self.hadamard:
                raise RecipeError(
                    f"sign_vector has {len(self.sign_vector)} signs and hadamard = {self.hadamard}: "
                    "give one sign for each element of a group"
                )

    @property
    def stated(self) -> dict[str, Any]:
        """The fields that differ from those of `OperandSpec(format)`; another format may have them too."""
        usual = OperandSpec(self.format)
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != getattr(usual, f.name)
        }

    def _require_fit(self, blocks: BlockFormat) -> None:
        """Raise RecipeError unless shape, scale rule, zero scale and prescale are choices that the format has."""
        scale = blocks.scale
        if self.block.columns != blocks.k:
            raise RecipeError(
                f"block = '{self.block}' with the format {self.format}, whose blocks have {blocks.k} elements: "
                f"set block = '{self.block.rows}x{blocks.k}', or leave it out for '{blocks.row}'"
            )
        if (self.scale_rule is ScaleRule.NEAREST) == scale.powers:
            fitting = "a rule such as 'floor'" if scale.powers else "'nearest'"
            raise RecipeError(
                f"scale_rule = '{self.scale_rule}' with the format {self.format}, whose scales are {scale.name}: "
                f"set scale_rule = {fitting}, or leave it out"
            )
        if self.zero_scale not in (0, scale.one_code):
            raise RecipeError(
                f"zero_scale = {self.zero_scale} is neither 0 nor {scale.one_code}, the code of 1 in {scale.name}"
            )
        if self.prescale and not scale.powers:
            raise RecipeError(
                f"prescale = true with the format {self.format}: it keeps powers of two from saturating, and "
                f"scales of {scale.name} do not; leave it out"
            )
        if self.arithmetic is not Arithmetic.REAL and (scale.powers or self.zero_scale):
            raise RecipeError(
                f"arithmetic = '{self.arithmetic}' with the format {self.format} and zero_scale = {self.zero_scale}: "
                "an order of operations is for scales with a mantissa, and says what a zero block gets"
            )
        if self.four_over_six is not FourOverSix.OFF and (
            scale.powers or self.arithmetic is not Arithmetic.REAL
        ):
            raise RecipeError(
                f"four_over_six = '{self.four_over_six}' with the format {self.format} and arithmetic = "
                f"'{self.arithmetic}': the choice is for scales with a mantissa, by real errors; leave one out"
            )
        most = 23 - blocks.element.precision
        if blocks.tensor_scale and self.sr_bits > most:
            raise RecipeError(
                f"sr_bits = {self.sr_bits} with the format {self.format}: under a scale of the tensor, "
                f"{blocks.element.name} takes at most {most}"
            )


UNTURNED: dict[str, Any] = {"hadamard": 0, "signs": SignPolicy.NONE, "sign_vector": None}
"""The fields of an `OperandSpec` that leave its Hadamard transform out."""


def require_in_range(key: str, value: Any) -> None:
    """Raise RecipeError unless a key of `OperandSpec` may have this value, of the right type."""
    if key == "sr_bits" and not 1 <= value <= MAX_SR_BITS:
        raise RecipeError(f"sr_bits = {value} is outside 1 .. {MAX_SR_BITS}")
    if key == "zero_scale" and not 0 <= value <= 255:
        raise RecipeError(f"zero_scale = {value} is no code of a scale, which is a byte")
    if key == "sign_vector" and value is not None:
        if not value:
            raise RecipeError(
                "sign_vector is empty: leave it out, or give one sign for each element of a group"
            )
        sign_bits(value)
    if key == "hadamard" and value and value not in SIZES:
        raise RecipeError(f"hadamard = {value} is not 0 (none) or one of {', '.join(map(str, SIZES))}")


def _block_length(spec: OperandSpec) -> int:
    return spec.format.k if isinstance(spec.format, BlockFormat) else 0


class OperandSource(StrEnum):
    """What an operand of a backward GEMM is quantized from, where Fprop quantized the same tensor."""

    TENSOR = "tensor"
    """The tensor in high precision."""
    FPROP = "fprop"
    """The values of Fprop's operand."""


class ResultType(StrEnum):
    """The type to which a GEMM rounds its result."""

    TENSOR = "tensor"
    """That of the tensor it becomes."""
    BF16 = "bf16"
    """Bfloat16, widened where the tensor is float32."""


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """What a GEMM does with its result."""

    out: ResultType = field(default=ResultType.TENSOR, metadata=OMITTED)
    gain: float = field(default=1.0, metadata=OMITTED)
    """Constant by which the float32 result is multiplied, before it is rounded to the output type."""

    def __post_init__(self) -> None:
        normalize(self)
        with np.errstate(over="ignore", under="ignore"):
            factor = float(np.float32(self.gain))
        if not 0 < factor < math.inf:
            raise RecipeError(f"gain = {self.gain:g} is not a positive number that float32 holds")


@dataclass(frozen=True)
class FpropSpec(GemmSpec):
    """Operands of Fprop."""

    x: OperandSpec = OperandSpec()
    w: OperandSpec = OperandSpec()


@dataclass(frozen=True)
class DgradSpec(GemmSpec):
    """Operands of Dgrad."""

    dy: OperandSpec = OperandSpec()
    w: OperandSpec = OperandSpec()
    source: OperandSource = field(default=OperandSource.TENSOR, metadata=OMITTED, kw_only=True)
    """What W is quantized from."""


@dataclass(frozen=True)
class WgradSpec(GemmSpec):
    """Operands of Wgrad."""

    dy: OperandSpec = OperandSpec()
    x: OperandSpec = OperandSpec()
    source: OperandSource = field(default=OperandSource.TENSOR, metadata=OMITTED, kw_only=True)
    """What X is quantized from."""


class Fp8Scaling(StrEnum):
    """Where a tensor's FP8 scale comes from."""

    DELAYED = "delayed"
    """The amax of the step before."""
    CURRENT = "current"
    """The tensor's own amax."""


MAIN = "main"
"""Name of the steps at which a recipe file's own treatment is in force."""


@dataclass(frozen=True)
class Span:
    """Consecutive optimizer steps with one recipe."""

    name: str
    """Name of the phase, or `main`."""
    first: int
    """First step, from 0."""
    end: int | None
    """Step after the last; None if the length of the run is not known."""
    recipe: Recipe
    """The recipe of the whole model at these steps."""


@dataclass(frozen=True)
class Recipe:
    """The treatment of all six GEMM operands of a linear layer, and what surrounds them.

    A file that gives layers or steps other treatments is a `mxref.recipe_plan.RecipePlan`. A recipe answers the same
    questions: `spans`, `at` and `by_layer`.

    Implements: linear.rotation, linear.formats, recipe.formats
    """

    fprop: FpropSpec = FpropSpec()
    dgrad: DgradSpec = DgradSpec()
    wgrad: WgradSpec = WgradSpec()
    gemm: GemmProfile = GemmProfile.ORDERED
    """Profile of the GEMMs of block formats."""
    fp8_scaling: Fp8Scaling = Fp8Scaling.DELAYED
    keep_bf16: tuple[str, ...] = ("lm_head",)
    """Globs over module names: these linear layers stay in BF16."""

    def __post_init__(self) -> None:
        normalize(self)
        for role in GemmRole:
            a, b = Recipe.operands(self, role)  # a plan's own treatment is checked too
            for key, first, second in (
                ("kind of format", a.format.kind, b.format.kind),
                ("block length", *(_block_length(spec) for spec in (a, b))),
                ("hadamard", a.hadamard, b.hadamard),
                ("signs", a.signs, b.signs),
                ("sign_vector", a.sign_vector, b.sign_vector),
            ):
                if first != second:
                    names = [operand.tensor for operand in OPERANDS[role]]
                    raise RecipeError(
                        f"{role.value}: both operands of a GEMM share {key}, got {first!s} for {names[0]} "
                        f"and {second!s} for {names[1]}; set it in [{role.value}]"
                    )
            if Recipe.source(self, role) is OperandSource.FPROP:
                self._require_source(role)

    def _require_source(self, role: GemmRole) -> None:
        """Raise RecipeError unless Fprop's operand has values that the role's own can be quantized from."""
        tensor = OPERANDS[role][1].tensor
        read = getattr(self.fprop, tensor)
        problem = ""
        if self.fprop.x.format.kind != "block" or Recipe.operands(self, role)[0].format.kind == "fp8":
            problem = f"needs block formats in fprop, and no FP8 in {role.value}"
        elif read.hadamard or read.prescale:
            what = f"hadamard = {read.hadamard}" if read.hadamard else "prescale = true"
            problem = f"reads the values of fprop.{tensor}, and these are not the tensor's under {what}"
        if problem:
            raise RecipeError(
                f"{role.value}: source = 'fprop' {problem}; change [fprop], or set {role.value}.source = 'tensor'"
            )

    def gemm_spec(self, role: GemmRole) -> GemmSpec:
        """Return what the role's GEMM does with its result, and its operands."""
        spec: GemmSpec = getattr(self, role.value)
        return spec

    def source(self, role: GemmRole) -> OperandSource:
        """Return what the role's second operand is quantized from."""
        return getattr(self.gemm_spec(role), "source", OperandSource.TENSOR)

    def operands(self, role: GemmRole) -> tuple[OperandSpec, OperandSpec]:
        """Return the specs of the role's two operands, in the order of `mxref.roles.OPERANDS`."""
        gemm = getattr(self, role.value)
        first, second = (getattr(gemm, operand.tensor) for operand in OPERANDS[role])
        return first, second

    def formats(self, role: GemmRole) -> tuple[OperandFormat, OperandFormat]:
        """Return the formats of the role's two operands."""
        a, b = self.operands(role)
        return a.format, b.format

    def kind(self, role: GemmRole) -> str:
        """Return the kind of format that the role's two operands share: `bf16`, `fp8` or `block`."""
        return self.operands(role)[0].format.kind

    def keeps(self, name: str) -> bool:
        """Return whether `keep_bf16` names a linear layer, given by its qualified name without wrappers."""
        return any(fnmatchcase(name, glob) for glob in self.keep_bf16)

    def by_layer(self, names: Iterable[str]) -> dict[str, Recipe]:
        """Return the recipe of each linear layer of a model.

        Args:
            names: qualified names of all its linear layers, without wrappers.

        Raises:
            RecipeError: an entry of `layers` that selects no layer or has no effect; or a recipe with a schedule.

        Implements: recipe.layers
        """
        return {name: BF16_RECIPE if self.keeps(name) else self for name in names}

    def treatments(self) -> tuple[Recipe, ...]:
        """Return the recipes that a layer may have at some step, the file's own first."""
        return (self,)

    def spans(self, steps: int | None = None) -> tuple[Span, ...]:
        """Return the phases of a run of that many optimizer steps, in order and without gaps.

        Raises:
            RecipeError: phases that overlap, are empty or lie beyond the run; or a share of a run of unknown length.

        Implements: recipe.schedule
        """
        return (Span(MAIN, 0, steps, self),)

    def at(self, step: int, steps: int | None = None) -> Recipe:
        """Return the recipe in force at an optimizer step, from 0; after the last step, that of the last step.

        Raises:
            RecipeError: a negative step, or as in `spans`.
        """
        if step < 0:
            raise RecipeError(f"step = {step} is negative")
        return next(span.recipe for span in reversed(self.spans(steps)) if span.first <= step)

    @cached_property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the resolved recipe.

        Implements: recipe.digest
        """
        text = json.dumps(to_table(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_BF16 = OperandSpec(format=BF16)
BF16_RECIPE = Recipe(FpropSpec(_BF16, _BF16), DgradSpec(_BF16, _BF16), WgradSpec(_BF16, _BF16))
"""The recipe of the layers that `keep_bf16` names."""
