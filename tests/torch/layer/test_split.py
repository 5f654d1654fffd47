"""Ranks share a layer only in whole blocks and whole Hadamard groups, and each knows the place of its part."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mxref.recipe import BF16_RECIPE
from mxref.recipe_files import recipe_from_table
from mxref_torch.errors import LayerError
from mxref_torch.layer.split import TensorSplit, check_split

PLAIN = recipe_from_table({"dialect": "amd"})
H16 = recipe_from_table({"dialect": "amd", "all": {"hadamard": 16, "signs": "fixed"}})
H64 = recipe_from_table({"dialect": "amd", "all": {"hadamard": 64, "signs": "fixed"}})
TILES = recipe_from_table(
    {"dialect": "amd", "fprop": {"w": {"block": "32x32"}}, "dgrad": {"w": {"block": "32x32"}}}
)


class Mesh:
    """As much of a mesh of ranks as the place of a part needs."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


@pytest.mark.parametrize(
    ("recipe", "shape", "axis", "ranks", "message"),
    [
        (
            PLAIN,
            (64, 96),
            0,
            4,
            "q has 64 outputs, and 4 ranks would have 16 each, not a multiple of 32, .* dgrad",
        ),
        (
            PLAIN,
            (64, 96),
            1,
            2,
            "q has 96 inputs, and 2 ranks would have 48 each, .* fprop .*over fewer ranks",
        ),
        (
            H16,
            (96, 64),
            0,
            2,
            "48 each, not a multiple of 32, .* Hadamard groups that must not lie on two",
        ),
        (H64, (256, 64), 0, 8, "32 each, not a multiple of 64, .*split it over fewer ranks"),
        (TILES, (64, 80), 1, 2, "40 each, not a multiple of 32"),
        (BF16_RECIPE, (65, 64), 0, 2, "32.5 each, not a multiple of 1, to be split evenly"),
    ],
)
def test_blocks_and_groups_do_not_lie_on_two_ranks(
    recipe: Any, shape: tuple[int, int], axis: int, ranks: int, message: str
) -> None:
    with pytest.raises(LayerError, match=message):
        check_split("q", shape, axis, ranks, recipe)


@pytest.mark.parametrize(
    ("recipe", "shape", "axis", "ranks"),
    [
        (PLAIN, (64, 33), 0, 2),
        (PLAIN, (33, 64), 1, 2),
        (H64, (256, 64), 0, 4),
        (BF16_RECIPE, (64, 64), 0, 64),
    ],
)
def test_whole_blocks_may_be_shared(recipe: Any, shape: tuple[int, int], axis: int, ranks: int) -> None:
    check_split("q", shape, axis, ranks, recipe)


def test_each_part_knows_its_place() -> None:
    by_outputs = TensorSplit(0, Mesh(2, 4))  # type: ignore[arg-type]
    found = by_outputs.placements((128, 96))
    assert {name: (p.origin, p.global_shape) for name, p in found.items()} == {
        "w": ((64, 0), (128, 96)),
        "dy": ((0, 64), (0, 128)),
    }
    assert by_outputs.tensors == {"w", "dy"}
    by_inputs = TensorSplit(1, Mesh(1, 2))  # type: ignore[arg-type]
    found = by_inputs.placements((128, 96))
    assert {name: (p.origin, p.global_shape) for name, p in found.items()} == {
        "w": ((0, 48), (128, 96)),
        "x": ((0, 48), (0, 96)),
    }
    assert by_inputs.tensors == {"w", "x"}
