"""Errors of FP8 products on Hopper by K and by the multiplied data: the measurement behind their error class.

A row names a pattern, a K, and the largest error over the sum of magnitudes, as a power of two, of cuBLAS's FP8
product of folded operands (as `bounded` uses it, with a prepared left operand, and with fast accumulation), of
`ordered`, and of BF16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from gpu.operands_torch import drawn, exact, values_of
from mxref import MXArray, OperandSpec
from mxref_triton import TritonBackend
from mxref_triton.products.fold import Folded, fold

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_ROWS = 256


def student(k: int, seed: int) -> MXArray:
    """Return quantized Student-t(3) draws."""
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = torch.randn(4, _ROWS, k, device="cuda", generator=generator)
    x = normal[0] / ((normal[1:] ** 2).sum(dim=0) / 3).sqrt()
    return TritonBackend().quantize(x, OperandSpec())


def positive(q: MXArray) -> MXArray:
    """Return an operand without its signs: nothing cancels, and every truncation adds up."""
    return MXArray(q.codes & 0x77, q.scales, q.shape, 1)


def big_and_small(k: int, period: int, code: int, drop: int, full: bool) -> tuple[MXArray, MXArray]:
    """Return operands of a one, or 32, per period of blocks, and elsewhere products of P(code) * 2^-drop."""
    pair = []
    for which, low in ((code, drop // 2), (2, drop - drop // 2)):
        q = drawn(16, k, 0, 127 - low)
        q.codes.fill_(which | which << 4)
        blocks = q.codes.view(16, -1, 16)
        blocks[:, ::period] = 0x22 if full else 0
        blocks[:, ::period, 0] = 0x22 if full else 2
        q.scales[:, ::period] = 127
        pair.append(q)
    return pair[0], pair[1]


def patterns(k: int) -> Iterator[tuple[str, list[tuple[MXArray, MXArray]]]]:
    """Yield patterns and the products that stand for them."""
    yield "normal block scales", [(drawn(_ROWS, k, 1, seed=1), drawn(_ROWS, k, 1, seed=2))]
    yield "equal block scales", [(drawn(_ROWS, k, 0, seed=1), drawn(_ROWS, k, 0, seed=2))]
    yield "Student-t(3)", [(student(k, 1), student(k, 2))]
    yield "lognormal block scales, sd 2", [(drawn(_ROWS, k, 2, seed=1), drawn(_ROWS, k, 2, seed=2))]
    yield (
        "the same, all positive",
        [(positive(drawn(_ROWS, k, 2, seed=1)), positive(drawn(_ROWS, k, 2, seed=2)))],
    )
    if k in (128, 4096, 32768):
        cases = itertools.product((4, 8, k // 32), (1, 2, 3, 5, 7), range(6, 24), (False, True))
        yield "one large block, many small products", [big_and_small(k, *case) for case in cases]


def _worst(got: torch.Tensor, a: MXArray, b: MXArray, left: Folded, right: Folded) -> float:
    """Return the largest error over the sum of magnitudes, among rows that fit."""
    want, magnitude = exact(a, b)
    error = (got.double() - want).abs() / magnitude.clamp(min=1e-300)
    for f, line in ((left, error), (right, error.T)):
        line[f.misfits[1 : 1 + int(f.misfits[0])].long()] = 0
    return float(error.max())


def _errors(a: MXArray, b: MXArray, backend: TritonBackend) -> dict[str, float]:
    left, prepared, right = fold(a, wide=True), fold(a), fold(b)

    def fp8(left: Folded, fast: bool = False) -> torch.Tensor:
        scales = left.scale, right.scale.view(1, -1)
        return torch._scaled_mm(
            left.values, right.values.t(), *scales, out_dtype=torch.float32, use_fast_accum=fast
        )

    decoded = [
        values_of(q.codes) * torch.exp2(q.scales.double() - 127).repeat_interleave(32, 1) for q in (a, b)
    ]
    products = {
        "fp8": fp8(left),
        "fp8 prepared": fp8(prepared),
        "fp8 fast": fp8(left, fast=True),
        "ordered": backend.scaled_gemm(a, b),
        "bf16": torch.mm(decoded[0].bfloat16(), decoded[1].bfloat16().T, out_dtype=torch.float32),
    }
    return {
        name: _worst(got, a, b, prepared if name == "fp8 prepared" else left, right)
        for name, got in products.items()
    }


def rows(lengths: tuple[int, ...] = LENGTHS) -> Iterator[dict[str, Any]]:
    """Yield a row per pattern and K."""
    backend = TritonBackend()
    for k in lengths:
        for name, pairs in patterns(k):
            worst: dict[str, float] = {}
            for a, b in pairs:
                for way, error in _errors(a, b, backend).items():
                    worst[way] = max(worst.get(way, 0.0), error)
            logs = {way: round(math.log2(error), 1) if error else None for way, error in worst.items()}
            yield {"pattern": name, "k": k, "log2": logs}
