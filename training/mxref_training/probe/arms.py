"""The recipes that a probe compares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from mxref.backend import Backend
from mxref.errors import MxrefError
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import GemmRole
from mxref.tomlio import nearest, shown
from mxref_torch.conversion.convert import recipe_of_layers, require_supported
from mxref_training.config_files import RECIPES, names
from mxref_training.errors import ConfigError
from mxref_training.lab.ladder import Ladder

BASELINE = "bf16"
"""The recipe that is always among those compared."""


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe with a name."""

    name: str
    """No other arm of the probe has it."""
    label: str
    recipe: Recipe


def chosen_arms(
    recipes: Sequence[str], ladders: Mapping[str, Ladder], without: Collection[str] = ()
) -> list[NamedRecipe]:
    """Return the arms of some recipes and ladders, each recipe once, BF16 first.

    Args:
        recipes: names or files. Without any recipe or ladder: all shipped recipes.
        ladders: all of whose arms are taken, by name.
        without: names of arms to leave out.

    Raises:
        ConfigError: two recipes of one name, or a name to leave out that no arm has.
        MxrefError: a recipe that cannot be read.
    """
    recipes = recipes or ([] if ladders else names(RECIPES))
    found = [("", NamedRecipe(BASELINE, "BF16", load_recipe(BASELINE)))]
    found += [("", NamedRecipe(Path(name).stem, Path(name).stem, load_recipe(name))) for name in recipes]
    found += [(name, arm) for name, ladder in ladders.items() for arm in _of_ladder(ladder)]
    known = [arm.name for _, arm in found]
    for name in without:
        if name not in known:
            raise ConfigError(f"--without {shown(name)}: no recipe has this name{nearest(name, known)}")
    arms: dict[str, NamedRecipe] = {}
    for source, arm in found:
        if arm.name in without or any(_alike(arm.recipe, other.recipe) for other in arms.values()):
            continue
        if arm.name in arms:
            arm = replace(arm, name=f"{source}/{arm.name}", label=f"{source}: {arm.label}")
        if arm.name in arms:
            raise ConfigError(
                f"two different recipes are named {shown(arm.name)}: give one of the files another name"
            )
        arms[arm.name] = arm
    if not arms:
        raise ConfigError("no recipe is left to probe: leave out fewer by --without")
    return list(arms.values())


def that_a_backend_has(
    arms: Sequence[NamedRecipe], backend: Backend, said: Callable[[str], None]
) -> list[NamedRecipe]:
    """Return the arms that a backend can compute, and say which it cannot, and why."""
    found = []
    for arm in arms:
        try:
            for recipe in arm.recipe.treatments():
                require_supported(backend, recipe)
        except MxrefError as err:
            said(f"left out {arm.name}: {err}")
        else:
            found.append(arm)
    return found


def _of_ladder(ladder: Ladder) -> list[NamedRecipe]:
    """Return the arms of a ladder, with the stage in a label that two arms share."""
    labels = [arm.label for arm in ladder.arm]
    return [
        NamedRecipe(
            arm.name,
            f"{arm.stage}: {arm.label}" if labels.count(arm.label) > 1 else arm.label,
            ladder.resolve(arm),
        )
        for arm in ladder.arm
    ]


def _alike(one: Recipe, other: Recipe) -> bool:
    """Return whether two recipes are the same; what a BF16 recipe says of blocks does not matter."""
    return one.digest == other.digest or all(
        own.kind(role) == "bf16"
        for recipe in (one, other)
        for own in recipe.treatments()
        for role in GemmRole
    )


def resolved(
    arms: Sequence[NamedRecipe],
    linears: Mapping[str, nn.Linear],
    backend: Backend,
    seed: int,
    step: int,
    steps: int,
) -> dict[str, dict[str, Recipe]]:
    """Return the recipe of each layer at a step of a run of `steps`, by the arm's name.

    Raises:
        MxrefError: a recipe that does not fit the model, or that the backend does not declare; it names the recipe.
    """
    found: dict[str, dict[str, Recipe]] = {}
    refused: dict[str, MxrefError] = {}
    for arm in arms:
        try:
            recipe = arm.recipe.at(min(step, steps - 1), steps)
            found[arm.name] = recipe_of_layers(linears, recipe, backend, seed)
        except MxrefError as err:
            refused[arm.name] = err
    if refused:
        name, first = next(iter(refused.items()))
        way_out = " ".join(f"--without {other}" for other in refused)
        raise type(first)(
            f"recipe {name}: {first}; {way_out} leaves out what cannot be probed here"
        ) from first
    return found


def phases(arms: Sequence[NamedRecipe], step: int, steps: int) -> dict[str, str]:
    """Return the phase that `resolved` takes of each recipe that has several, by the arm's label."""
    spans = {arm.label: arm.recipe.spans(steps) for arm in arms}
    return {
        label: next(span.name for span in reversed(own) if span.first <= min(step, steps - 1))
        for label, own in spans.items()
        if len(own) > 1
    }


def probed_layers(recipes: Mapping[str, Mapping[str, Recipe]], layers: Sequence[str]) -> list[str]:
    """Return the layers that some recipe does not compute in BF16; all of them where every recipe is BF16."""
    low = [
        name
        for name in layers
        if any(by_layer[name].kind(role) != "bf16" for by_layer in recipes.values() for role in GemmRole)
    ]
    return low or list(layers)
