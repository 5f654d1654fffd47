"""The least time of a training step: its matrix products at the rate of cuBLAS, and its operands at that of a copy.

A product counts as cuBLAS multiplies it in the type that its operands need: in FP8 if both fit E4M3 or E5M2, else in
BF16. Making operands in block formats counts as a copy of as many bytes. All other work counts as it was measured in
the same step: attention, norms, casts, loss and optimizer, and FP8's operands, which compiled code makes.

Bytes are the fewest that separate passes move:

- the tensor is read once for all operands that are made of it at a time, in BF16, or float32 of a weight;
- once more, where its format has a scale of the tensor, which needs the largest magnitude first;
- codes and scale codes of each operand are written once, and read once;
- its values are written once in the type that is multiplied.

X of layers that read the same tensor counts once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxref.formats import BlockFormat
from mxref.recipe import Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref_torch.layer.linear import MXLinear

BF16, FP8 = "bf16", "fp8"
_BYTES = {BF16: 2, FP8: 1}
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Layers of a Llama that read the X of another one."""
_SOURCE = {"x": 2, "w": 4, "dy": 2}
"""Bytes of an element of a tensor before it is quantized."""


@dataclass(frozen=True)
class Product:
    """A product of A [m, k] and B [n, k]."""

    type: str
    m: int
    n: int
    k: int


@dataclass
class Demand:
    """What the linear layers of a step ask for."""

    products: Counter[Product]
    bytes: float


def demand(model: nn.Module, tokens: int, micro_batches: int = 1) -> Demand:
    """Return the products of a step of so many micro-batches of `tokens`, and the bytes that making operands moves.

    Operands of weights are made once in a step.
    """
    found = Demand(Counter(), 0.0)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | MXLinear):
            continue
        outputs, inputs = layer.out_features, layer.in_features
        for role in GemmRole:
            product = Product(_type(layer, role), *_shape(role, outputs, inputs, tokens))
            found.products[product] += micro_batches
        if isinstance(layer, MXLinear):
            shares_x = name.rpartition(".")[2] in SHARED
            for tensor, moved in _bytes(layer.recipe, outputs, inputs, tokens * micro_batches):
                found.bytes += 0.0 if shares_x and tensor == "x" else moved
    return found


def multiplied_in(recipe: Recipe, role: GemmRole) -> str:
    """Return the type in which Hopper multiplies the operands of a GEMM."""
    kind = recipe.kind(role)
    if kind != "block":
        return kind
    return FP8 if all(map(fits_fp8, recipe.formats(role))) else BF16


def fits_fp8(made: Any) -> bool:
    """Return whether rows of a block format are folded into FP8; see `mxref_triton.products.fold`."""
    return bool(made.element.bits < 8 and made.k == 32 and made.scale.powers)


def _type(layer: nn.Module, role: GemmRole) -> str:
    if isinstance(layer, MXLinear):
        return multiplied_in(layer.recipe, role)
    return FP8 if type(layer).__module__.startswith("torchao") else BF16


def _shape(role: GemmRole, outputs: int, inputs: int, tokens: int) -> tuple[int, int, int]:
    """Return rows, columns and the contraction length of a GEMM."""
    return {
        GemmRole.FPROP: (tokens, outputs, inputs),
        GemmRole.DGRAD: (tokens, inputs, outputs),
        GemmRole.WGRAD: (outputs, inputs, tokens),
    }[role]


def _bytes(recipe: Recipe, outputs: int, inputs: int, tokens: int) -> Iterator[tuple[str, float]]:
    """Yield the bytes of a layer's operands in block formats, by tensor."""
    elements = {"x": tokens * inputs, "w": outputs * inputs, "dy": tokens * outputs}
    together: dict[tuple[str, str], list[tuple[BlockFormat, str]]] = defaultdict(list)
    for role in GemmRole:
        if recipe.kind(role) == "block":
            for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True):
                assert isinstance(spec.format, BlockFormat)
                # Both operands of X are made at a time, and both of dY.
                when = role if operand.tensor == "w" else ""
                together[operand.tensor, when].append((spec.format, multiplied_in(recipe, role)))
    for (tensor, _), operands in together.items():
        reads = 1 + any(made.tensor_scale for made, _ in operands)
        codes = sum(made.element.bits / 8 + 1 / made.k for made, _ in operands)
        values = sum(_BYTES[type] for _, type in operands)
        yield tensor, elements[tensor] * (reads * _SOURCE[tensor] + 2 * codes + values)


def floor_of(
    parts: Mapping[str, float], asked: Demand, product_ms: Callable[[Product], float], bytes_per_ms: float
) -> dict[str, float]:
    """Return the milliseconds of a step's floor: products, operands, what was measured, and the sum `ms`.

    Args:
        parts: milliseconds of the parts of the step, of which `rest` and `optimizer` count as measured.
        asked: by the step.
        product_ms: the time of a product by cuBLAS.
        bytes_per_ms: of a copy, reads and writes together.
    """
    floor = {
        "gemm": sum(count * product_ms(product) for product, count in asked.products.items()),
        "quantize": asked.bytes / bytes_per_ms,
        "measured": parts["rest"] + parts["optimizer"],
    }
    return floor | {"ms": sum(floor.values())}


class Ceilings:
    """Times of cuBLAS and of a copy on the current GPU, each measured once."""

    def __init__(self) -> None:
        self._products: dict[Product, float] = {}
        self._bytes_per_ms = 0.0

    def floor_of(self, parts: Mapping[str, float], asked: Demand) -> dict[str, float]:
        """Return the floor of a step; see there."""
        from bench.bench_gpu import copy_rate

        self._bytes_per_ms = self._bytes_per_ms or copy_rate() / 1e3
        return floor_of(parts, asked, self._product_ms, self._bytes_per_ms)

    def _product_ms(self, product: Product) -> float:
        if product not in self._products:
            self._products[product] = _measured(product)
        return self._products[product]


def _measured(product: Product) -> float:
    """Return the milliseconds of a product of random operands by cuBLAS, with bfloat16 output.

    FP8 products have scales by row and no fast accumulation, as backends ask for them.
    """
    from bench.bench_gpu import Case, median_ms

    a, b = (torch.randn(rows, product.k, device="cuda").to(torch.bfloat16) for rows in (product.m, product.n))
    if product.type == FP8:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        scales = torch.ones(product.m, 1, device="cuda"), torch.ones(1, product.n, device="cuda")

    def multiply(_: int) -> Any:
        if product.type == BF16:
            return torch.mm(a, b.T)
        return torch._scaled_mm(
            a, b.T, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=False
        )

    flops = 2.0 * product.m * product.n * product.k
    return median_ms(Case("product", product.k, multiply, flops), replays=10, calls=4)
