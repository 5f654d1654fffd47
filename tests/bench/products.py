"""Scaled GEMMs, timed against PyTorch's in float32 and bfloat16 of the same shape, after their bits were checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from bench import avx2_peers
from bench.operations import PLAIN, REFERENCE, BitsDiffer, inputs
from bench.timing import in_turns
from mxref import Backend, GemmProfile, OperandSpec
from mxref.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.gemm import bounded_tolerance

ROWS, COLUMNS = 8, 48
"""The corner of the result that is compared: the reference takes its time."""
AVX2_SIZES = range(1024, 2049)
"""Sizes at which PyTorch's products without AVX-512 and BF16 instructions are timed: larger ones take many seconds."""


def measure(backend: Backend, size: int, seconds: float, threads: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each profile, prepared or not, and for PyTorch's products in the same turns.

    At some sizes PyTorch's products on AVX2 alone follow, from another process.

    Raises:
        BitsDiffer: a result that is not the reference's, or, under `bounded`, outside its bound.
    """
    x = inputs(size)["float32"]
    q = backend.quantize(x, PLAIN)
    works = {}
    for profile in (GemmProfile.ORDERED, GemmProfile.BOUNDED):
        if profile in backend.capabilities.profiles(MXFP4, MXFP4):
            _check(backend, profile, x, q)
            prepared = backend.prepare(q, profile=profile)
            works[f"scaled_gemm {profile}"] = lambda p=profile: backend.scaled_gemm(q, q, profile=p)
            if prepared is not q:
                works[f"scaled_gemm {profile}, B prepared"] = lambda p=profile, b=prepared: (
                    backend.scaled_gemm(q, b, profile=p)
                )
    for made in (MXFP8_E4M3, MXFP8_E5M2):
        if (GemmProfile.ORDERED, made, made) in backend.capabilities.gemms:
            spec = OperandSpec(format=made)
            operand = backend.quantize(x, spec)
            _check(backend, GemmProfile.ORDERED, x, operand, spec)
            works[f"scaled_gemm ordered {made.title}"] = lambda q=operand: backend.scaled_gemm(q, q)
    wide = torch.from_numpy(x)
    half = wide.to(torch.bfloat16)
    works["torch.mm float32"] = lambda: wide @ wide.T
    works["torch.mm bfloat16"] = lambda: half @ half.T
    timings = dict(zip(works, in_turns(seconds * len(works), *works.values()), strict=True))
    float32, bfloat16 = (timings[f"torch.mm {dtype}"].min_ms for dtype in ("float32", "bfloat16"))
    for label, timing in timings.items():
        yield {
            "operation": label, "size": size, "threads": threads,
            "backend": "torch" if label.startswith("torch") else backend.name,
            **asdict(timing), "gflop_per_s": 2 * size**3 / timing.min_ms / 1e6,
            "ratio": bfloat16 / timing.min_ms, "ratio_float32": float32 / timing.min_ms,
        }  # fmt: skip
    if backend.name == "numba" and threads == 1 and size in AVX2_SIZES:
        yield from avx2_peers.measure(size, seconds, threads, bfloat16, float32)


def _check(backend: Backend, profile: GemmProfile, x: Any, q: Any, spec: OperandSpec = PLAIN) -> None:
    a, b = (REFERENCE.quantize(x[:rows], spec) for rows in (ROWS, COLUMNS))
    found = backend.scaled_gemm(q, q, profile=profile)[:ROWS, :COLUMNS]
    expected = REFERENCE.scaled_gemm(a, b, profile=profile)
    if profile is GemmProfile.ORDERED:
        right = np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    else:
        exact = REFERENCE.scaled_gemm(a, b, profile=GemmProfile.EXACT)
        tolerance = bounded_tolerance(a, b, backend.capabilities.bounded_class)
        right = bool((np.abs(found.astype(np.float64) - exact) <= tolerance).all())
    if not right:
        raise BitsDiffer(f"{backend.name}: scaled_gemm {profile} is not the reference's; nothing is timed")
