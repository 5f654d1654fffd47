"""Plans: recipes whose treatment depends on the layer and on the optimizer step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from mxref.errors import RecipeError
from mxref.layer_choice import in_blocks, matching, require_blocks
from mxref.recipe import BF16_RECIPE, MAIN, OperandSpec, Recipe, Span
from mxref.roles import GemmRole
from mxref.tomlio import normalize, shown

_POSITION = re.compile(r"(\d{1,10})|(\d{1,3}(?:\.\d{1,6})?) ?%")
_WHOLE_SHARES = 100 * 10**6
"""Steps of which every share is a whole number: shares are compared with each other in a run of this length."""


@dataclass(frozen=True)
class LayerRule:
    """Linear layers that have a recipe of their own: those that a glob matches and that lie in the blocks."""

    recipe: Recipe
    """Their recipe, which names no layers or steps; its `keep_bf16` is empty."""
    match: tuple[str, ...] | None = None
    """Globs over qualified names; None is every layer."""
    blocks: str | None = None
    """A place or a range of the numbered blocks, as a slice in Python has it, or a share; None is every layer."""

    def __post_init__(self) -> None:
        normalize(self)
        if isinstance(self.recipe, RecipePlan):
            raise RecipeError("recipe: a layer's recipe has no layers and no schedule of its own")
        object.__setattr__(self, "recipe", replace(self.recipe, keep_bf16=()))
        if not self.match and self.blocks is None:
            raise RecipeError("an entry selects layers by match, by blocks or by both, and has neither")
        if self.match == ():
            raise RecipeError("match is empty: leave it out, or give globs")
        if self.blocks is not None:
            require_blocks(self.blocks, "blocks")

    def select(self, recipe: Recipe, names: list[str], where: str) -> list[str]:
        """Return the layers that get this recipe if no later entry selects them.

        Args:
            recipe: the plan, whose `keep_bf16` excepts layers.
            names: qualified names of all linear layers.
            where: the entry in error messages.

        Raises:
            RecipeError: a glob that matches nothing or only layers that `keep_bf16` names; blocks that do not exist.
        """
        found: dict[str, None] = {}
        for glob in self.match or ("*",):
            matched = matching(names, glob, f"{where}.match")
            if all(map(recipe.keeps, matched)):
                raise RecipeError(
                    f"{where}.match: {shown(glob)} matches only layers that keep_bf16 names ({matched[0]!r}), which "
                    "stay in BF16; take it out of one of the two"
                )
            found |= dict.fromkeys(matched)
        if self.blocks is not None:
            found = dict.fromkeys(in_blocks(names, found, self.blocks, f"{where}.blocks"))
        return [name for name in found if not recipe.keeps(name)]


@dataclass(frozen=True)
class Phase:
    """Optimizer steps at which another recipe is in force for the whole model."""

    recipe: RecipePlan
    """The recipe of these steps, which has no schedule of its own. A plain recipe becomes a plan without layers."""
    name: str
    """How metrics and texts call the phase."""
    start: str | None = None
    """First step, `100`, or a share of the run, `90%`; None is the end of the phase before."""
    until: str | None = None
    """First step after the phase, in the same way; None is the end of the run."""

    def __post_init__(self) -> None:
        for key in ("start", "until"):
            object.__setattr__(self, key, _position(getattr(self, key), key))
        if type(self.recipe) is Recipe:
            object.__setattr__(self, "recipe", RecipePlan(**_fields(self.recipe)))
        normalize(self)
        if not self.name.strip() or self.name == MAIN:
            raise RecipeError(
                f"name = {shown(self.name)} is empty or {MAIN!r}, which is the file's own treatment"
            )
        if self.recipe.schedule:
            raise RecipeError("recipe: the recipe of a phase has no schedule of its own")


@dataclass(frozen=True)
class RecipePlan(Recipe):
    """A recipe file with `layers` or a `schedule`: its own treatment, and where and when there is another.

    Resolve it for one layer at one step by `plan.at(step, steps).by_layer(names)`. Asking the plan itself for the
    treatment of an operand raises RecipeError.
    """

    layers: tuple[LayerRule, ...] = ()
    """Layers with another recipe; the last entry that selects a layer wins, `keep_bf16` before all."""
    schedule: tuple[Phase, ...] = ()
    """Steps with another recipe, in order; between phases the file's own is in force."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedule:
            return
        for i, phase in enumerate(self.schedule[:-1]):
            if phase.until is None:
                raise RecipeError(
                    f"{self._where(i)} has no `until`, but another phase follows it: set its `until`"
                )
        if self.schedule[0].start is None and self.schedule[0].until is None:
            raise RecipeError(f"{self._where(0)} lasts for the whole run: set its `start` or `until`")
        positions = [p for phase in self.schedule for p in (phase.start, phase.until) if p is not None]
        shares = [p for p in positions if p.endswith("%")]
        if not shares:
            self.spans()
        elif len(shares) == len(positions):
            self.spans(_WHOLE_SHARES)

    @property
    def own(self) -> Recipe:
        """The file's own treatment as a recipe without layers and steps."""
        return Recipe(**_fields(self))

    def operands(self, role: GemmRole) -> tuple[OperandSpec, OperandSpec]:
        """Raise RecipeError: the treatment depends on the layer or the step."""
        raise RecipeError(
            "this recipe treats layers or steps differently: resolve it by recipe.at(step, steps).by_layer(names)"
        )

    def by_layer(self, names: Iterable[str]) -> dict[str, Recipe]:
        """Return the recipe of each linear layer; arguments and errors as in `Recipe.by_layer`.

        Implements: recipe.layers
        """
        if self.schedule:
            raise RecipeError("this recipe has a schedule: choose the step by recipe.at(step, steps) first")
        names = list(names)
        own = self.own
        found = {name: BF16_RECIPE if self.keeps(name) else own for name in names}
        last = {
            name: i for i, rule in enumerate(self.layers) for name in rule.select(self, names, f"layers[{i}]")
        }
        for i in range(len(self.layers)):
            if i not in last.values():
                raise RecipeError(
                    f"layers[{i}] has no effect: later entries or keep_bf16 take all its layers"
                )
        return found | {name: self.layers[i].recipe for name, i in last.items()}

    def treatments(self) -> tuple[Recipe, ...]:
        """Return the recipes that a layer may have at some step, the file's own first, each once."""
        phases = (found for phase in self.schedule for found in phase.recipe.treatments())
        return tuple(dict.fromkeys((self.own, *(rule.recipe for rule in self.layers), *phases)))

    def spans(self, steps: int | None = None) -> tuple[Span, ...]:
        """Return the phases of a run, and the steps between them; arguments and errors as in `Recipe.spans`.

        Implements: recipe.schedule
        """
        main = replace(self, schedule=()) if self.layers else self.own
        found: list[Span] = []
        at = 0
        for i, phase in enumerate(self.schedule):
            first = at if phase.start is None else _step(phase.start, steps)
            end = steps if phase.until is None else _step(phase.until, steps)
            self._require_order(i, at, first, end, steps)
            if first > at:
                found.append(Span(MAIN, at, first, main))
            recipe = phase.recipe
            found.append(Span(phase.name, first, end, recipe if recipe.layers else recipe.own))
            if end is None:
                return tuple(found)
            at = end
        if steps is None or at < steps:
            found.append(Span(MAIN, at, steps, main))
        return tuple(found)

    def _require_order(self, i: int, at: int, first: int, end: int | None, steps: int | None) -> None:
        """Raise RecipeError if a phase begins before step `at`, is empty, or leaves the run."""
        where, phase = self._where(i), self.schedule[i]
        before = self.schedule[i - 1].until if i else None
        begins = f"begins {_moment(phase.start or before, first, steps)}"
        if first < at:
            raise RecipeError(
                f"{where} {begins}, and the phase before it ends later, {_moment(before, at, steps)}"
            )
        left = "of which no step is left" if steps == _WHOLE_SHARES else f"and the run has {_counted(steps)}"
        if steps is not None and first >= steps:
            raise RecipeError(f"{where} {begins}, {left}")
        if end is None:
            return
        ends = f"ends {_moment(phase.until, end, steps)}"
        if steps is not None and end > steps:
            raise RecipeError(f"{where} {ends}, {left}")
        if end <= first:
            raise RecipeError(f"{where} is empty: it {begins} and {ends}")

    def _where(self, i: int) -> str:
        return f"schedule[{i}] ({self.schedule[i].name})"


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that a plan shares with a recipe."""
    return {f.name: getattr(recipe, f.name) for f in fields(Recipe)}


def _position(value: object, key: str) -> str | None:
    """Return a step or a share of the run in its shortest form; RecipeError if it is neither."""
    if value is None:
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    found = _POSITION.fullmatch(text) if isinstance(text, str) else None
    if not found or (found[2] and Fraction(found[2]) > 100):
        raise RecipeError(
            f"{key} = {shown(value)} is neither a step like 100 nor a share of the run like '10%'"
        )
    if found[1]:
        return str(int(found[1]))
    whole, _, decimals = found[2].partition(".")
    return f"{int(whole)}.{decimals}".rstrip("0").rstrip(".") + "%"


def _moment(position: str | None, step: int, steps: int | None) -> str:
    """Return when a phase begins or ends, in the words of the file: after a share of the run, or after some steps."""
    share = position is not None and position.endswith("%")
    if share and steps == _WHOLE_SHARES:
        return f"after {position} of the run"
    return f"after {_counted(step)}" + (f" ({position} of {steps})" if share else "")


def _counted(steps: int | None) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def _step(position: str, steps: int | None) -> int:
    """Return the first step at or after a position."""
    if not position.endswith("%"):
        return int(position)
    if steps is None:
        raise RecipeError(
            f"the schedule has {position} of the run, whose length is not known: give the number of steps"
        )
    return math.ceil(Fraction(position[:-1]) * steps / 100)
