"""A recipe in a few words."""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

from mxref.formats import BlockFormat, BlockShape, ElementFormat
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole


def describe(recipe: Recipe) -> list[tuple[str, str]]:
    """Return for each GEMM its role and its treatment in a few words, as in `MXFP4, EVEN, SR on dY, H16`."""
    return [(role.value.capitalize(), _treatment(recipe, role)) for role in GemmRole]


def _treatment(recipe: Recipe, role: GemmRole) -> str:
    first, second = recipe.operands(role)
    titles = first.format.title, second.format.title
    if recipe.kind(role) != "block":
        return titles[0]
    parts = _of_both(role, titles, None)
    for key, default in (("scale_rule", None), ("rounding", "RNE"), ("block", "1x32")):
        parts += _of_both(role, tuple(_shown(getattr(spec, key)) for spec in (first, second)), default)
    parts += sorted({f"× {Fraction(_element(spec).prescale)}" for spec in (first, second) if spec.prescale})
    if first.hadamard:
        signs = {"none": "", "fixed": ", fixed signs", "per_step": ", signs per step"}
        parts.append(f"H{first.hadamard}" + signs.get(first.signs.value, ", signs per step and layer"))
    return ", ".join(parts)


def _of_both(role: GemmRole, values: tuple[str, ...], default: str | None) -> list[str]:
    """Return a choice once where both operands share it, else with the operand's name; nothing for the default."""
    if values[0] == values[1]:
        return [values[0]] if values[0] != default else []
    names = {"x": "X", "w": "W", "dy": "dY"}
    return [
        f"{value} on {names[operand.tensor]}"
        for value, operand in zip(values, OPERANDS[role], strict=True)
        if value != default
    ]


def _shown(choice: StrEnum) -> str:
    """Return a choice as texts write it: acronyms in capitals, block shapes as they are."""
    return choice.value if isinstance(choice, BlockShape) else choice.value.upper()


def _element(spec: OperandSpec) -> ElementFormat:
    assert isinstance(spec.format, BlockFormat)
    return spec.format.element
