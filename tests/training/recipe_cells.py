"""Treatments in a few words, as a table of a test writes them, and recipes checked against them.

The words of an operand: its format; `floor`, `even` or `rceil`; `zero127`; `sr` or `rna`, else round to nearest even;
`h16` and other sizes; `fixed`, `step` or `step-layer` for random signs, or the signs themselves; `3/4` for the
prescale; `tile` for 32 x 32 and `tile16` for 16 x 16; `4/6` for four over six. What no word
names has the default of the specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole

_WORDS: dict[str, dict[str, object]] = {
    "floor": {"scale_rule": "floor"},
    "even": {"scale_rule": "even"},
    "rceil": {"scale_rule": "rceil"},
    "zero127": {"zero_scale": 127},
    "sr": {"rounding": "sr"},
    "rna": {"rounding": "rna"},
    "fixed": {"signs": "fixed"},
    "step": {"signs": "per_step"},
    "step-layer": {"signs": "per_step_layer"},
    "3/4": {"prescale": True},
    "tile": {"block": "32x32"},
    "tile16": {"block": "16x16"},
    "4/6": {"four_over_six": "squared"},
}


def spec(words: str) -> OperandSpec:
    """Return the treatment that the words name."""
    format_, *rest = words.split()
    keys: dict[str, object] = {"format": format_}
    for word in rest:
        if word[0] == "h" and word[1:].isdigit():
            keys["hadamard"] = int(word[1:])
        elif set(word) <= {"+", "-"}:
            keys["sign_vector"] = word
        else:
            keys |= _WORDS[word]
    return OperandSpec(**keys)  # type: ignore[arg-type]


def differences(recipe: Recipe, cells: Sequence[str]) -> Iterator[str]:
    """Yield the operands whose treatment is not that of six cells: Fprop X, W, Dgrad dY, W, Wgrad dY, X.

    The other keys of an operand in BF16 or FP8 have no effect, and are not compared.
    """
    operands = [
        pair for role in GemmRole for pair in zip(Recipe.operands(recipe, role), OPERANDS[role], strict=True)
    ]
    for (found, operand), words in zip(operands, cells, strict=True):
        wanted = spec(words)
        same = found == wanted if wanted.format.kind == "block" else found.format == wanted.format
        if not same:
            yield f"{operand}: {found}, not {words}"
