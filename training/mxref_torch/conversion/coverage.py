"""How much of a model its recipe reaches: the matrices of its blocks, and which of them no linear layer holds.

A block is what a number in a name tells apart, as in `layers.3.mlp.up.weight`; a model without numbers is one block. A
matrix is a Parameter with two or more dimensions longer than 1. The tables of nn.Embedding and biases are none, because
no GEMM reads them. Experts, convolutions and position tables are matrices: nothing tells what a module does with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch import nn

from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref_torch.names import named_linears, named_modules, some

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def starred(name: str) -> str:
    """Return a name with a star for each number in it."""
    return _NUMBER.sub("*", name)


class Coverage:
    """The matrices of a model's blocks, as the model is now."""

    def __init__(self, model: nn.Module) -> None:
        found: dict[str, int] = {}
        seen: set[nn.Parameter] = set()
        for owner, module in named_modules(model):
            for key, parameter in module._parameters.items():
                if parameter is None or parameter in seen:
                    continue
                seen.add(parameter)
                is_matrix = sum(size > 1 for size in parameter.shape) >= 2 and not key.endswith("bias")
                if is_matrix and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    found[f"{owner}.{key}".lstrip(".")] = parameter.numel()
        blocks = {name: size for name, size in found.items() if _NUMBER.search(name)}
        self.sizes = blocks or found
        """Elements of each matrix, by the name of its Parameter."""
        self.linears = named_linears(model)

    @property
    def others(self) -> list[str]:
        """Names of the matrices that no linear layer holds, which `convert` therefore cannot reach."""
        return [name for name in self.sizes if self._layer(name) not in self.linears]

    def share(self, layers: Collection[str]) -> float:
        """Return the share of all elements, in per cent, that is in the weights of these linear layers."""
        within = sum(size for name, size in self.sizes.items() if self._layer(name) in layers)
        return 100 * within / max(1, sum(self.sizes.values()))

    @staticmethod
    def _layer(name: str) -> str | None:
        """Return the layer that has a Parameter of this name as its weight."""
        owner, _, key = name.rpartition(".")
        return owner if key == "weight" else None


def quantizes(*recipes: Recipe) -> bool:
    """Return whether a GEMM of one of these recipes has an operand of low precision."""
    return any(recipe.kind(role) != "bf16" for recipe in recipes for role in GemmRole)


def grouped(names: Iterable[str]) -> str:
    """Return names in a line; those that differ in numbers alone are one, with how many they are."""
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(starred(name), []).append(name)
    return some([f"{row} (x{len(alike)})" if len(alike) > 1 else alike[0] for row, alike in rows.items()])
