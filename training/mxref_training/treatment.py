"""A recipe in a few words."""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction
from itertools import dropwhile

from mxref.formats import BlockFormat, ElementFormat
from mxref.recipe import OperandSource, OperandSpec, Recipe, ResultType
from mxref.recipe_plan import LayerRule, RecipePlan
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.quotient import Arithmetic


def describe(recipe: Recipe) -> list[tuple[str, str]]:
    """Return for each GEMM its role and its treatment in a few words, as in `MXFP4, EVEN, SR on dY, H16`.

    Layers and phases with another treatment follow: `MXFP4, EVEN; BF16 in blocks -2:; FP8 until 10%`.
    """
    return [(role.value.capitalize(), "; ".join(_parts(recipe, role))) for role in GemmRole]


def _parts(recipe: Recipe, role: GemmRole) -> list[str]:
    """Return the treatment of a GEMM, and each that differs from it with its layers or steps."""
    if not isinstance(recipe, RecipePlan):
        return [_treatment(recipe, role)]
    own = _treatment(recipe.own, role)
    # The first entries may repeat a GEMM's default treatment.
    rules = dropwhile(lambda rule: _treatment(rule.recipe, role) == own, recipe.layers)
    parts = [f"{_treatment(rule.recipe, role)} in {_layers(rule)}" for rule in rules]
    since = None
    for phase in recipe.schedule:
        start = phase.start or since
        since = phase.until
        when = [*([_begin(start)] if start else []), *([_end(phase.until)] if phase.until else [])]
        other, *exceptions = _parts(phase.recipe, role)
        note = f" ({'; '.join(exceptions)})" if exceptions and phase.recipe.layers != recipe.layers else ""
        parts.append(f"{other} {' '.join(when)}{note}")
    return [own, *parts]


def _layers(rule: LayerRule) -> str:
    """Return which layers a rule selects, as in `*.down_proj of blocks -2:`."""
    return " of ".join(
        [
            *([", ".join(rule.match)] if rule.match else []),
            *([f"blocks {rule.blocks}"] if rule.blocks else []),
        ]
    )


def _begin(start: str) -> str:
    """Return the first step of a phase; as logs count them, from 1."""
    return f"from {start}" if start.endswith("%") else f"from step {int(start) + 1}"


def _end(until: str) -> str:
    """Return the last step of a phase; as logs count them, from 1."""
    return f"until {until}" if until.endswith("%") else f"to step {until}"


def _treatment(recipe: Recipe, role: GemmRole) -> str:
    first, second = recipe.operands(role)
    titles = first.format.title, second.format.title
    if recipe.kind(role) != "block":
        return ", ".join([titles[0], *gemm_words(recipe, role)])
    parts = _of_both(role, titles, None)
    for key, default in (("scale_rule", None), ("rounding", "RNE")):
        parts += _of_both(role, tuple(_shown(getattr(spec, key)) for spec in (first, second)), default)
    for words in zip(*map(_rarer_words, (first, second)), strict=True):
        parts += _of_both(role, words, "")
    parts += sorted({f"× {Fraction(_element(spec).prescale)}" for spec in (first, second) if spec.prescale})
    if first.hadamard:
        given = f", signs {first.sign_vector}" if first.sign_vector else ""
        signs = {"none": given, "fixed": ", fixed signs", "per_step": ", signs per step"}
        parts.append(f"H{first.hadamard}" + signs.get(first.signs.value, ", signs per step and layer"))
    return ", ".join([*parts, *gemm_words(recipe, role)])


def _rarer_words(spec: OperandSpec) -> tuple[str, str, str]:
    """Return the tile, the choice of a scale by error, and the order of operations; each empty where it has none."""
    return (
        str(spec.block) if spec.block.is_tile else "",
        f"four over six ({spec.four_over_six})" if spec.four_over_six is not FourOverSix.OFF else "",
        f"{spec.arithmetic} arithmetic" if spec.arithmetic is not Arithmetic.REAL else "",
    )


def gemm_words(recipe: Recipe, role: GemmRole) -> list[str]:
    """Return the keys of a GEMM as a whole in words, as in `X from Fprop`; nothing for defaults."""
    keys = recipe.gemm_spec(role)
    return [
        *(
            [f"{_NAMES[OPERANDS[role][1].tensor]} from Fprop"]
            if recipe.source(role) is OperandSource.FPROP
            else []
        ),
        *(["result in BF16"] if keys.out is ResultType.BF16 else []),
        *([f"result × {keys.gain:g}"] if keys.gain != 1 else []),
    ]


_NAMES = {"x": "X", "w": "W", "dy": "dY"}


def _of_both(role: GemmRole, values: tuple[str, ...], default: str | None) -> list[str]:
    """Return a choice once where both operands share it, else with the operand's name; nothing for the default."""
    if values[0] == values[1]:
        return [values[0]] if values[0] != default else []
    return [
        f"{value} on {_NAMES[operand.tensor]}"
        for value, operand in zip(values, OPERANDS[role], strict=True)
        if value != default
    ]


def _shown(choice: StrEnum) -> str:
    """Return a choice for messages, in capitals."""
    return choice.value.upper()


def _element(spec: OperandSpec) -> ElementFormat:
    assert isinstance(spec.format, BlockFormat)
    return spec.format.element
