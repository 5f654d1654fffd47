"""Layers on a grid: one row for each depth, one column for each kind of layer, as in q_proj of block 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGrid:
    """Where each layer of a model stands."""

    depths: list[str]
    """Labels of the rows."""
    kinds: list[str]
    """Labels of the columns."""
    place: dict[str, tuple[int, int]]
    """Row and column by the layer's name."""


def layer_grid(names: Sequence[str]) -> LayerGrid:
    """Return the grid of some layers: the first number in a name is its depth, the rest its kind."""
    split = {name: _split(name) for name in names}
    depths = list(dict.fromkeys(depth for depth, _ in split.values()))
    depths.sort(key=lambda depth: (depth < 0, depth))
    kinds = list(dict.fromkeys(kind for _, kind in split.values()))
    place = {name: (depths.index(depth), kinds.index(kind)) for name, (depth, kind) in split.items()}
    return LayerGrid([str(depth) if depth >= 0 else "–" for depth in depths], _short(kinds), place)


def _split(name: str) -> tuple[int, str]:
    """Return the first number in a dotted name, -1 without one, and the name without it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return int(part), ".".join(parts[:i] + parts[i + 1 :])
    return -1, name


def _short(kinds: Sequence[str]) -> list[str]:
    """Return the last parts of dotted names, as many as tell them apart; without the suffix `_proj`."""
    parts = [kind.split(".") for kind in kinds]
    for length in range(1, max((len(each) for each in parts), default=1) + 1):
        labels = [".".join(each[-length:]) for each in parts]
        if len(set(labels)) == len(labels):
            break
    bare = [label.removesuffix("_proj") for label in labels]
    return bare if len(set(bare)) == len(bare) else labels
