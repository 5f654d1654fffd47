"""A recipe in a few words."""

from __future__ import annotations

from mxref.recipe import Recipe
from mxref.roles import OPERANDS, GemmRole


def describe(recipe: Recipe) -> list[tuple[str, str]]:
    """Return for each GEMM its role and its treatment in a few words, as in `MXFP4, EVEN, SR on dY, H16`."""
    return [(role.value.capitalize(), _treatment(recipe, role)) for role in GemmRole]


def _treatment(recipe: Recipe, role: GemmRole) -> str:
    specs = recipe.operands(role)
    first = specs[0]
    if first.format.name != "mxfp4":
        return first.format.name.upper()
    parts = ["MXFP4"]
    for key, default in (("scale_rule", None), ("rounding", "rne"), ("block", "1x32")):
        values = [str(getattr(spec, key).value) for spec in specs]
        if values[0] == values[1]:
            parts += [values[0].upper() if key != "block" else values[0]] if values[0] != default else []
        else:
            names = {"x": "X", "w": "W", "dy": "dY"}
            parts += [
                f"{value.upper()} on {names[operand.tensor]}"
                for value, operand in zip(values, OPERANDS[role], strict=True)
                if value != default
            ]
    parts += ["× 3/4"] if any(spec.prescale for spec in specs) else []
    if first.hadamard:
        signs = {"none": "", "fixed": ", fixed signs", "per_step": ", signs per step"}
        parts.append(f"H{first.hadamard}" + signs.get(first.signs.value, ", signs per step and layer"))
    return ", ".join(parts)
