"""Recipes: how each operand of each GEMM is treated, as frozen data, with TOML in and out.

A recipe table is laid out as it is overridden: `[all]`, then a GEMM (`[fprop]`), then one operand of it
(`[fprop.x]`); the later ones win. Dialects are named starting points for the MXFP4 keys.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

from mxref.errors import RecipeError
from mxref.formats import BlockShape, Nonfinite, OperandFormat
from mxref.linear import OPERANDS, GemmRole
from mxref.steps.hadamard import SIZES, SignPolicy
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import ScaleRule
from mxref.tomlio import build, convert, merge, nearest, normalize, read_toml, shown, to_table


class GemmProfile(StrEnum):
    """Which results a scaled GEMM may return."""

    EXACT = "exact"
    """The real sum, rounded once: one answer."""
    ORDERED = "ordered"
    """Float32 accumulation, block by block in ascending order: one answer, on every device."""
    BOUNDED = "bounded"
    """Any result within the backend's declared error class."""


@dataclass(frozen=True)
class OperandSpec:
    """The treatment of one operand: its format and, for MXFP4, every choice that its bits depend on.

    Choices may be given by their names, as in `OperandSpec(rounding="sr")`; RecipeError lists the valid ones.

    Implements: recipe.unknown
    """

    format: OperandFormat = OperandFormat.MXFP4
    scale_rule: ScaleRule = ScaleRule.FLOOR
    rounding: Rounding = Rounding.RNE
    sr_bits: int = 16
    """R, the random bits per element under SR, 1 to 22."""
    block: BlockShape = BlockShape.ROW
    zero_scale: int = 0
    """E8M0 code of an all-zero block, 0 or 127."""
    nonfinite: Nonfinite = Nonfinite.NAN_BLOCK
    prescale: bool = False
    """Multiply by 3/4 before rounding; the GEMM undoes it."""
    hadamard: int = 0
    """Size of the Hadamard transform along the block axis, 2 to 256; 0 is none."""
    signs: SignPolicy = SignPolicy.NONE

    def __post_init__(self) -> None:
        normalize(self)
        for f in fields(self):
            _require_in_range(f.name, getattr(self, f.name))
        if self.signs is not SignPolicy.NONE and not self.hadamard:
            raise RecipeError(
                f"signs = {self.signs.value!r} without a Hadamard transform: set hadamard = 16, say"
            )


def _require_in_range(key: str, value: Any) -> None:
    """Raise RecipeError unless a key of `OperandSpec` may have this value, of the right type."""
    if key == "sr_bits" and not 1 <= value <= MAX_SR_BITS:
        raise RecipeError(f"sr_bits = {value} is outside 1 .. {MAX_SR_BITS}")
    if key == "zero_scale" and value not in (0, 127):
        raise RecipeError(f"zero_scale = {value} is neither 0 nor 127")
    if key == "hadamard" and value and value not in SIZES:
        raise RecipeError(f"hadamard = {value} is not 0 (none) or one of {', '.join(map(str, SIZES))}")


@dataclass(frozen=True)
class FpropSpec:
    """Operands of Fprop."""

    x: OperandSpec = OperandSpec()
    w: OperandSpec = OperandSpec()

    def __post_init__(self) -> None:
        normalize(self)


@dataclass(frozen=True)
class DgradSpec:
    """Operands of Dgrad."""

    dy: OperandSpec = OperandSpec()
    w: OperandSpec = OperandSpec()

    def __post_init__(self) -> None:
        normalize(self)


@dataclass(frozen=True)
class WgradSpec:
    """Operands of Wgrad."""

    dy: OperandSpec = OperandSpec()
    x: OperandSpec = OperandSpec()

    def __post_init__(self) -> None:
        normalize(self)


class Fp8Scaling(StrEnum):
    """Where a tensor's FP8 scale comes from."""

    DELAYED = "delayed"
    """The amax of the step before."""
    CURRENT = "current"
    """The tensor's own amax."""


@dataclass(frozen=True)
class Recipe:
    """The treatment of all six GEMM operands of a linear layer, and what surrounds them.

    Implements: linear.rotation, linear.formats
    """

    fprop: FpropSpec = FpropSpec()
    dgrad: DgradSpec = DgradSpec()
    wgrad: WgradSpec = WgradSpec()
    gemm: GemmProfile = GemmProfile.ORDERED
    """Profile of the MXFP4 GEMMs."""
    fp8_scaling: Fp8Scaling = Fp8Scaling.DELAYED
    keep_bf16: tuple[str, ...] = ("lm_head",)
    """Globs over module names: these linear layers stay in BF16."""

    def __post_init__(self) -> None:
        normalize(self)
        for role in GemmRole:
            a, b = self.operands(role)
            for key in ("format", "hadamard", "signs"):
                if getattr(a, key) != getattr(b, key):
                    first, second = (o.tensor for o in OPERANDS[role])
                    raise RecipeError(
                        f"{role.value}: both operands of a GEMM share {key}, got {getattr(a, key)!s} for {first} "
                        f"and {getattr(b, key)!s} for {second}; set it in [{role.value}]"
                    )

    def operands(self, role: GemmRole) -> tuple[OperandSpec, OperandSpec]:
        """Return the specs of the role's two operands, in the order of `mxref.linear.OPERANDS`."""
        gemm = getattr(self, role.value)
        first, second = (getattr(gemm, operand.tensor) for operand in OPERANDS[role])
        return first, second

    def format(self, role: GemmRole) -> OperandFormat:
        """Return the format of the role's GEMM, which both of its operands share."""
        return self.operands(role)[0].format

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the resolved recipe.

        Implements: recipe.digest
        """
        text = json.dumps(to_table(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Dialect:
    """A named policy of some production stack: where bit equality with it is claimed, and on what evidence."""

    spec: OperandSpec
    domain: str
    evidence: str
    roles: tuple[GemmRole, ...] = field(default=tuple(GemmRole))
    """GEMMs in which the stack uses it."""


DIALECTS = {
    "ocp": Dialect(
        OperandSpec(),
        domain="all inputs; the cases that OCP MX v1.0 leaves open are decided by this specification",
        evidence="OCP Microscaling Formats v1.0, section 6.3",
    ),
    "amd": Dialect(
        OperandSpec(scale_rule=ScaleRule.EVEN, zero_scale=127),
        domain="finite blocks",
        evidence="kernel source of the ROCm Transformer Engine, read and not run; it leaves NaN and Inf unhandled",
    ),
    "nvidia": Dialect(
        OperandSpec(scale_rule=ScaleRule.RCEIL),
        domain="finite blocks with scale code 1 or more, amax not within 34 ulps above 6 * 2^e",
        evidence="torchao 0.18's RCEIL, by running it (it takes a float32 log2); NVIDIA's own kernels were not run",
    ),
    "tseng": Dialect(
        OperandSpec(rounding=Rounding.SR, prescale=True, hadamard=64, signs=SignPolicy.PER_STEP_LAYER),
        domain="statistics only: the random bits differ",
        evidence="arXiv 2502.20586",
        roles=(GemmRole.DGRAD, GemmRole.WGRAD),
    ),
}
"""The named policies; `ocp` is the default everywhere."""


def dialect(name: str) -> Dialect:
    """Return a dialect by name; RecipeError names the nearest known one.

    Implements: dialect.ocp, dialect.amd, dialect.nvidia, dialect.tseng
    """
    if not isinstance(name, str) or name not in DIALECTS:
        raise RecipeError(f"unknown dialect {shown(name)}{nearest(name, DIALECTS)}")
    return DIALECTS[name]


def recipe_from_table(table: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Return the recipe of a TOML table, every layer of it applied.

    Args:
        table: keys `dialect`, `all`, `fprop`, `dgrad`, `wgrad` and the fields of `Recipe`; absent keys
            keep their defaults.
        where: name of the table in error messages.

    Raises:
        RecipeError: an unknown key (the nearest valid one is named), a wrong value, or operands of one
            GEMM that do not fit together.

    Implements: recipe.overlay, recipe.unknown
    """
    known = {"dialect", "all", *(f.name for f in fields(Recipe))}
    for key in table:
        if key not in known:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, known)}")
    table = dict(table)
    base = dialect(table.pop("dialect")).spec if "dialect" in table else OperandSpec()
    common, _ = _layer(table.pop("all", {}), f"{where}.all")
    for role in GemmRole:
        names = [operand.tensor for operand in OPERANDS[role]]
        place = f"{where}.{role.value}"
        shared, own = _layer(table.get(role.value, {}), place, names)
        over = merge(merge(to_table(base), common), shared)
        table[role.value] = {
            name: merge(over, _layer(own.get(name, {}), f"{place}.{name}")[0]) for name in names
        }
    return build(Recipe, table, where)


def _layer(value: Any, where: str, operands: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layer's keys of `OperandSpec` and its tables of single operands.

    A mistake is named where it stands, before the layers are merged.
    """
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where}: expected a table, got {shown(value)}")
    kinds = get_type_hints(OperandSpec)
    for key, given in value.items():
        if key in operands:
            continue
        if key not in kinds:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, [*kinds, *operands])}")
        try:
            _require_in_range(key, convert(kinds[key], given, key))
        except RecipeError as err:
            raise RecipeError(f"{where}.{err}") from None
    shared = {key: given for key, given in value.items() if key in kinds}
    return shared, {key: given for key, given in value.items() if key in operands}


def load_recipe(path: str | Path | Recipe) -> Recipe:
    """Return the recipe of a TOML file, or of the name of one that the training package ships.

    Args:
        path: a file, whose name ends in `.toml` or has a folder before it; a shipped name, as `mxfp4_h16`;
            or a recipe, which is returned as it is.

    Raises:
        RecipeError: an unknown name (the nearest is named), a wrong key or value, or no path at all.
        FileFormatError: a file that cannot be read.
    """
    if isinstance(path, Recipe):
        return path
    if not isinstance(path, str | os.PathLike):
        raise RecipeError(
            f"expected a recipe, the name of one, or the path of a TOML file, got {type(path).__name__}"
        )
    text = os.fspath(path)
    if not isinstance(text, str) or "\0" in text:
        raise RecipeError(f"expected the path of a TOML file, got {text!r}")
    file = Path(text)
    if file.suffix != ".toml" and len(file.parts) < 2:
        shipped = {found.stem: found for found in _shipped_recipes()}
        if text not in shipped:
            hint = nearest(text, shipped) if shipped else "; the shipped ones come with 'mxref[training]'"
            raise RecipeError(f"unknown recipe {text!r}{hint}; a file's name must end in .toml")
        file = shipped[text]
    return recipe_from_table(read_toml(file), where=file.name)


def _shipped_recipes() -> list[Path]:
    """Return the recipe files of the training package, found without importing it."""
    found = importlib.util.find_spec("mxref_training")
    folders = (found and found.submodule_search_locations) or []
    return sorted(file for folder in folders for file in Path(folder, "recipes").glob("*.toml"))
