"""Two linear layers in which nothing coincides, so that taking one thing for another shows.

The twelve operands have twelve treatments. Widths, numbers of tokens, micro-batches and their places differ. The
weights change between steps, through `.data` too. What the layers must compute is composed of `mxref.quantize` and
`mxref.scaled_gemm` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from mxref import Placement, Stream, quantize, scaled_gemm
from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref.roles import OPERANDS, GemmRole
from mxref_torch import convert, sole_uses, weights_held

E2M1, E4M3, E5M2 = "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"


def _operand(
    format: str, scale_rule: str, rounding: str, sr_bits: int, block: str, prescale: bool
) -> dict[str, Any]:
    return {
        "format": format, "scale_rule": scale_rule, "rounding": rounding, "sr_bits": sr_bits, "block": block,
        "prescale": prescale,
    }  # fmt: skip


FIRST: dict[str, Any] = {
    "fprop": {
        "hadamard": 16, "signs": "fixed",
        "x": _operand(E4M3, "rceil", "sr", 11, "1x32", False),
        "w": _operand(E2M1, "even", "rne", 16, "32x32", True),
    },
    "dgrad": {
        "hadamard": 0, "signs": "none",
        "dy": _operand(E5M2, "floor", "rna", 16, "1x32", True),
        "w": _operand(E2M1, "rceil", "sr", 20, "1x32", False),
    },
    "wgrad": {
        "hadamard": 32, "signs": "per_step_layer",
        "dy": _operand(E2M1, "floor", "sr", 7, "1x32", True),
        "x": _operand(E4M3, "ceil", "rtz", 16, "32x32", False),
    },
}  # fmt: skip
SECOND: dict[str, Any] = {
    "fprop": {
        "hadamard": 0, "signs": "none",
        "x": _operand(E2M1, "floor", "rna", 16, "1x32", True),
        "w": _operand(E5M2, "ceil", "sr", 3, "1x32", False),
    },
    "dgrad": {
        "hadamard": 64, "signs": "per_step",
        "dy": _operand(E4M3, "even", "sr", 13, "1x32", False),
        "w": _operand(E4M3, "floor", "rne", 16, "32x32", True),
    },
    "wgrad": {
        "hadamard": 16, "signs": "none",
        "dy": _operand(E5M2, "rceil", "sr", 5, "32x32", False),
        "x": _operand(E2M1, "even", "sr", 17, "1x32", True),
    },
}  # fmt: skip
TABLE = {"gemm": "ordered", "keep_bf16": [], **FIRST, "layers": [{"match": ["second"], "recipe": SECOND}]}
WIDTHS, SEED = (96, 64, 192), 0x9ABC_DEF0_1234_5678
PARTS = ((0, 37), (64, 53))
"""Origin and tokens of the micro-batches of a step."""
TOKENS = 160
"""Tokens of a step: more than the micro-batches have."""
STEPS = (5, 6)


class Apart(nn.Module):
    """A chain of two layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        inputs, middle, outputs = WIDTHS
        self.first, self.second = (
            nn.Linear(inputs, middle, bias=False),
            nn.Linear(middle, outputs, bias=False),
        )
        for scale, layer in ((3.0, self.first), (0.02, self.second)):
            layer.weight.data = scale * torch.randn(layer.weight.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def change(self) -> None:
        """Change the weights as no version tells, and as an optimizer does."""
        self.first.weight.data.mul_(-2.0)
        with torch.no_grad():
            self.second.weight.add_(0.01)


def converted(backend: Any = "reference", table: dict[str, Any] = TABLE) -> tuple[Any, Any]:
    model = Apart()
    return model, convert(model, recipe_from_table(table), backend=backend, seed=SEED)


def batches(step: int, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield origin, X and dY of the micro-batches of a step; rows differ in size by powers of two."""
    for number, (origin, tokens) in enumerate(PARTS):
        generator = torch.Generator().manual_seed(10 * step + number)
        x, dy = (torch.randn(tokens, width, generator=generator) for width in (WIDTHS[0], WIDTHS[2]))
        size = 2.0 ** torch.arange(-8, tokens - 8).remainder(13).unsqueeze(1)
        yield origin, (x * size).to(dtype).requires_grad_(), (dy / size).to(dtype)


def numbers(t: torch.Tensor) -> np.ndarray[Any, Any]:
    t = t.detach().contiguous()
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype is torch.bfloat16 else t.numpy()


def product(
    recipe: Recipe,
    role: GemmRole,
    a: Any,
    b: Any,
    layer: int,
    step: int,
    origin: int,
    out: str,
    amax: tuple[Any, Any] = (None, None),
) -> np.ndarray[Any, Any]:
    """Return a GEMM of a layer; `amax` is the placement's, of A and of B."""
    operands = []
    for t, spec, operand, largest in zip((a, b), recipe.operands(role), OPERANDS[role], amax, strict=True):
        placement = Placement(Stream(SEED, step, layer, operand.id), amax=largest)
        if operand.tensor != "w":
            if operand.axis == 0:  # whole blocks and Hadamard groups of tokens
                t = np.pad(t, ((0, -len(t) % max(32, spec.hadamard)), (0, 0)))
            if spec.rounding == "sr":
                placement = replace(placement, origin=(origin, 0), global_shape=(TOKENS, t.shape[1]))
        operands.append(quantize(t, spec, axis=operand.axis, placement=placement))
    return np.asarray(scaled_gemm(*operands, profile=recipe.gemm, out_dtype=out))


def trained(model: Any, handle: Any, dtype: torch.dtype, held: bool = False) -> dict[str, Any]:
    """Train the steps, and change the weights after each; return Y, dX and the gradients by what they are.

    `held` has the layers hold their quantized weights within each step.
    """
    found: dict[str, Any] = {}
    for step in STEPS:
        handle.step, handle.context.global_tokens = step, TOKENS
        with weights_held(handle) if held else nullcontext():
            for origin, x, dy in batches(step, dtype):
                handle.context.token_origin = origin
                y = model(x)
                handle.context.sole_uses = sole_uses(y)
                y.backward(dy)
                found |= {f"{step} {origin} Y": numbers(y), f"{step} {origin} dX": numbers(x.grad)}
        for name, weight in model.named_parameters():
            found[f"{step} {name}"] = numbers(weight.grad).copy()
            weight.grad = None
        handle.context.close_step(True)
        model.change()
        handle.restart()
    return found


def composed(recipes: dict[str, Recipe], dtype: torch.dtype) -> dict[str, Any]:
    """Return what `trained` has to."""
    model, out, found = Apart(), str(dtype).removeprefix("torch."), {}
    first, second = recipes["first"], recipes["second"]
    for step in STEPS:
        w, v = (numbers(layer.weight).copy() for layer in (model.first, model.second))
        sums: dict[str, Any] = {}
        for origin, x, dy in batches(step, dtype):
            at = step, origin
            x, dy = numbers(x), numbers(dy)
            h = product(first, GemmRole.FPROP, x, w, 0, *at, out)
            found[f"{step} {origin} Y"] = product(second, GemmRole.FPROP, h, v, 1, *at, out)
            dh = product(second, GemmRole.DGRAD, dy, v, 1, *at, out)
            found[f"{step} {origin} dX"] = product(first, GemmRole.DGRAD, dh, w, 0, *at, out)
            for name, own in (
                ("first.weight", product(first, GemmRole.WGRAD, dh, x, 0, *at, "float32")),
                ("second.weight", product(second, GemmRole.WGRAD, dy, h, 1, *at, "float32")),
            ):
                sums[name] = sums[name] + own if name in sums else own
        found |= {f"{step} {name}": total for name, total in sums.items()}
        model.change()
    return found
