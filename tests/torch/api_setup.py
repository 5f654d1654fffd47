"""What the tests of the public interface share: a small model, recipes, and a backend that records what it makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mxref import get_backend
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend

SR = recipe_from_table({"gemm": "ordered", "all": {"rounding": "sr", "sr_bits": 8}})
PLAIN = recipe_from_table({"gemm": "ordered"})
FP8 = recipe_from_table({"all": {"format": "fp8"}})
REFERENCE = get_backend("reference")


class Recorder(ReferenceBackend):
    """The reference, which keeps the codes it made, with the step and the operand they are of."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, int, Any]] = []

    def quantize(self, x: Any, spec: Any, *, placement: Any, **given: Any) -> Any:
        q = super().quantize(x, spec, placement=placement, **given)
        self.made.append((placement.stream.step, placement.stream.operand, q.codes))
        return q

    def quantize_dual(self, x: Any, specs: Any, *, placements: Any, **given: Any) -> Any:
        pair = super().quantize_dual(x, specs, placements=placements, **given)
        for placement, q in zip(placements, pair, strict=True):
            self.made.append((placement.stream.step, placement.stream.operand, q.codes))
        return pair

    def codes(self, operand: int, step: int = 0) -> list[Any]:
        """Return what was made of an operand in a step, in its order."""
        return [codes for at, of, codes in self.made if (at, of) == (step, operand)]


class Block(nn.Module):
    """Two layers around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(32, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.blocks(self.embed(ids)))


def batch(number: int, tokens: int = 32) -> torch.Tensor:
    return torch.randint(32, (2, tokens // 2), generator=torch.Generator().manual_seed(number))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b))
