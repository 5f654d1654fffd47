"""Gradients of a model of two blocks, compiled and eager, and the comparison of the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref_torch import check_census, convert

COMPILERS = ("aot_eager", "inductor")
PARTS = ("block", "model")
MIXED = {
    "gemm": "ordered", "keep_bf16": ["head"],
    "fprop": {"format": "bf16"}, "dgrad": {"format": "mxfp4", "rounding": "sr"}, "wgrad": {"format": "fp8"},
}  # fmt: skip
KEYS = {
    "gemm": "ordered", "keep_bf16": ["head"],
    "fprop": {"x": {"format": "mxfp6_e2m3"}},  # no kernels of a GPU multiply MXFP8 under `ordered`
    "dgrad": {"format": "bf16", "source": "fprop"},
    "wgrad": {"source": "fprop", "rounding": "sr", "gain": 1.25, "out": "bf16"},
}  # fmt: skip
NVFP4 = {
    "keep_bf16": ["head"], "all": {"format": "nvfp4"}, "dgrad": {"dy": {"rounding": "sr"}},
    "wgrad": {"format": "mxfp4", "hadamard": 16, "dy": {"rounding": "sr"}},
}  # fmt: skip
RECIPES = ("bf16", "fp8", "mxfp4", "mxfp4_h16", "mixed", "mixed reversed", "keys")


def recipe_of(name: str) -> Recipe:
    if name == "nvfp4 with mxfp4":
        return recipe_from_table(NVFP4)
    if name == "keys":
        return recipe_from_table(KEYS)
    if name == "mixed":
        return recipe_from_table(MIXED)
    if name == "mixed reversed":
        return recipe_from_table({**MIXED, "fprop": MIXED["wgrad"], "wgrad": MIXED["fprop"]})
    return load_recipe(name)


class Block(nn.Module):
    """A residual block in the type that production computes in: bfloat16 between float32 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.gate = (nn.Linear(width, 2 * width, bias=bias) for bias in (False, True))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.float()).to(x.dtype)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Blocks of one width, so that a compiler may give their graphs the same code."""

    def __init__(self, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids).bfloat16())).float()


def gradients(
    recipe: str,
    compiler: str,
    part: str,
    *,
    compiled: bool,
    backend: Backend,
    device: str,
    width: int,
    tokens: int,
) -> dict[str, torch.Tensor]:
    """Return the gradients of two steps, by Parameter and step; the census is checked in both."""
    torch.manual_seed(0)
    model: Any = Model(width).to(device)
    context = convert(model, recipe_of(recipe), backend=backend, seed=1).context
    names = dict(model.named_parameters())
    if compiled and part == "block":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend=compiler, fullgraph=True)
    run = torch.compile(model, backend=compiler, fullgraph=True) if compiled and part == "model" else model
    found = {}
    for context.step in range(2):
        generator = torch.Generator().manual_seed(context.step)
        ids, targets = torch.randint(64, (2, 2, tokens // 2), generator=generator).to(device)
        model.zero_grad()
        context.reset_census()
        loss = F.cross_entropy(run(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        check_census(context, run, recipe_of(recipe))
        found |= {f"{name} of step {context.step}": p.grad.clone() for name, p in names.items()}
    return found


def check_gradients(recipe: str, compiler: str, part: str, **given: Any) -> None:
    """Assert that no gradient is lost: close to the eager one, whose zeros are few.

    What surrounds the GEMMs is fused and rounded in another order by inductor, and a value that lies near a tie
    then takes another code; so equality is asked of aot_eager, which keeps torch's own operators, and closeness
    of inductor. A gradient that is dropped, doubled or another weight's has an error of 1 and more.
    """
    torch._dynamo.reset()
    eager, compiled = (
        gradients(recipe, compiler, part, compiled=compiled, **given) for compiled in (False, True)
    )
    assert eager.keys() == compiled.keys()
    for name, want in eager.items():
        got = compiled[name]
        assert want.norm() > 0, name
        if compiler == "aot_eager":
            assert torch.equal(got, want), name
        else:
            assert (got - want).norm() < 0.3 * want.norm(), name
