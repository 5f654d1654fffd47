"""Time the Triton backend on a GPU: quantization against a copy of memory, GEMMs against cuBLAS, and their errors.

Bits are checked first, on slabs of the data that is timed, which is heavy-tailed. Every number is the median over
replays of a CUDA graph that walks through more inputs than the cache holds; Python's launches are not in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import mxref
from bench import gpu_error
from mxref import GemmProfile, MXArray, OperandSpec, Stream
from mxref_triton import TritonBackend
from mxref_triton.fold import fold

STREAM = Stream(seed=1, step=2, layer=3, operand=4)
CACHE_BYTES = 200 << 20
"""Inputs of one measurement together, at least: several times any cache."""
CODES = 0.5 + 1 / 32
"""Bytes per element of a quantized tensor."""
FP8_EPS = 2.0**-6

Work = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """Something to time: `work(i)` uses the i-th set of inputs."""

    name: str
    size: int
    work: Work
    amount: float
    """Bytes read and written, or multiplications and additions."""
    graph: bool = True


def median_ms(case: Case, replays: int, calls: int) -> float:
    """Return milliseconds per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(calls):
            case.work(i)
    torch.cuda.synchronize()
    if case.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                case.work(i)
        run: Callable[[], Any] = graph.replay
    else:

        def run() -> None:
            for i in range(calls):
                case.work(i)

    run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / calls


# ---- inputs, and their bits ----


def heavy_tailed(size: int, seed: int) -> torch.Tensor:
    """Return Student-t(3) draws in bfloat16 [size, size]; zeros and constants would flatter any kernel."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(size, size, device="cuda", generator=generator)

    return (normal() / ((normal() ** 2 + normal() ** 2 + normal() ** 2) / 3).sqrt()).bfloat16()


ROW, H16, H32 = OperandSpec(), OperandSpec(hadamard=16), OperandSpec(hadamard=32)
SR = OperandSpec(rounding="sr")
QUANTIZE: dict[str, tuple[OperandSpec, int]] = {
    "row, RNE": (ROW, 1),
    "row, H16": (H16, 1),
    "row, H32": (H32, 1),
    "row, SR": (SR, 1),
    "column, RNE": (ROW, 0),
    "column, H16": (H16, 0),
    "column, SR": (SR, 0),
}
DUAL = {"dual, RNE": ROW, "dual, H16": H16, "dual, SR": SR}


def check_quantize(backend: TritonBackend, x: torch.Tensor) -> None:
    """Exit unless slabs of the timed data get the reference's bits, alone and inside the whole."""
    reference = mxref.get_backend("reference")
    for name, (spec, axis) in QUANTIZE.items():
        q = backend.quantize(x, spec, axis=axis, rng=STREAM)
        slab = x[-64:] if axis == 1 else x[:, -64:]
        origin = (x.shape[0] - 64, 0) if axis == 1 else (0, x.shape[1] - 64)
        placement: dict[str, Any] = {
            "axis": axis,
            "rng": STREAM,
            "origin": origin,
            "global_shape": tuple(x.shape),
        }
        want = reference.quantize(backend.to_numpy(slab), spec, **placement)
        same(name, q.codes[-64:], want.codes)
        same(name, q.scales[-64:], want.scales)
        values = backend.dequantize(
            MXArray(q.codes[-64:], q.scales[-64:], (64, x.shape[axis]), 1), "bfloat16"
        )
        want = MXArray(want.codes, want.scales, (64, x.shape[axis]), 1)
        same("dequantize", values, reference.dequantize(want, "bfloat16"))
    for name, spec in DUAL.items():
        pair = backend.quantize_dual(x, (spec, spec), rngs=(STREAM, STREAM))
        for q, axis in zip(pair, (1, 0), strict=True):
            alone = backend.quantize(x, spec, axis=axis, rng=STREAM)
            if not (torch.equal(q.codes, alone.codes) and torch.equal(q.scales, alone.scales)):
                raise SystemExit(f"{name} differs from quantize along axis {axis}; nothing is timed")


def same(name: str, got: torch.Tensor, want: Any) -> None:
    bits = got.cpu().contiguous().view(torch.uint8).numpy()
    if not np.array_equal(bits, np.ascontiguousarray(want).view(np.uint8)):
        raise SystemExit(f"{name} differs from the reference; nothing is timed")


def check_gemm(backend: TritonBackend, a: MXArray, b: MXArray) -> None:
    """Exit unless a slab of the product is the reference's, and `bounded` lies within its bound of it."""

    def slab(q: MXArray) -> MXArray:
        return MXArray(q.codes[:48].cpu().numpy(), q.scales[:48].cpu().numpy(), (48, q.shape[1]), 1)

    reference = mxref.get_backend("reference")
    whole = backend.scaled_gemm(a, b)
    same("scaled_gemm ordered", whole[:48, :48].contiguous(), reference.scaled_gemm(slab(a), slab(b)))
    bounded = backend.scaled_gemm(a, b, profile="bounded")
    if backend.range_exceeded():
        raise SystemExit("the operands exceed the range of bounded; nothing is timed")
    magnitude = backend.scaled_gemm(
        *(MXArray(q.codes & 0x77, q.scales, q.shape, 1) for q in (a, b)), profile="ordered"
    )
    if not ((bounded - whole).abs() <= 1.01 * FP8_EPS * magnitude).all():
        raise SystemExit("bounded lies outside its bound; nothing is timed")


# ---- what is timed ----


def quantize_cases(backend: TritonBackend, size: int) -> Iterator[Case]:
    sets = max(2, -(-CACHE_BYTES // (2 * size * size)))
    xs = [heavy_tailed(size, seed) for seed in range(sets)]
    check_quantize(backend, xs[0])
    elements = size * size

    def one(spec: OperandSpec, axis: int) -> Work:
        return lambda i: backend.quantize(xs[i % sets], spec, axis=axis, rng=STREAM)

    for name, (spec, axis) in QUANTIZE.items():
        yield Case(name, size, one(spec, axis), elements * (2 + CODES))
    for name, spec in DUAL.items():

        def both(i: int, spec: OperandSpec = spec) -> Any:
            return backend.quantize_dual(xs[i % sets], (spec, spec), rngs=(STREAM, STREAM))

        yield Case(name, size, both, elements * (2 + 2 * CODES))
    qs = [backend.quantize(x, ROW) for x in xs]
    yield Case(
        "dequantize to bf16",
        size,
        lambda i: backend.dequantize(qs[i % sets], "bfloat16"),
        elements * (2 + CODES),
    )
    yield Case(
        "fake quantize, bf16", size, lambda i: backend.fake_quantize(xs[i % sets], ROW, dtype="bfloat16"),
        elements * 4,
    )  # fmt: skip
    yield Case("fold into E4M3", size, lambda i: fold(qs[i % sets]), elements * (1 + CODES))
    yield from peer_cases(xs, size)


def peer_cases(xs: list[torch.Tensor], size: int) -> Iterator[Case]:
    """torchao's conversion to MXFP4, as it is and compiled; the same rule (FLOOR) and the same bytes."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    except ImportError as err:
        print(f"torchao is not timed: {err}")
        return

    def convert(x: torch.Tensor) -> Any:
        return to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)

    compiled = torch.compile(convert, fullgraph=True)
    amount = size * size * (2 + CODES)
    yield Case("torchao eager", size, lambda i: convert(xs[i % len(xs)]), amount, graph=False)
    yield Case("torchao compiled", size, lambda i: compiled(xs[i % len(xs)]), amount, graph=False)


def gemm_cases(backend: TritonBackend, size: int) -> Iterator[Case]:
    sets = 3
    xs = [(heavy_tailed(size, 2 * i), heavy_tailed(size, 2 * i + 1)) for i in range(sets)]
    qs = [tuple(backend.quantize(x, ROW) for x in pair) for pair in xs]
    check_gemm(backend, *qs[0])
    folded = [tuple(fold(q) for q in pair) for pair in qs]
    one = torch.ones((), device="cuda")
    flops = 2.0 * size**3

    def fp8(i: int, rowwise: bool, dtype: torch.dtype) -> torch.Tensor:
        a, b = folded[i % sets]
        scales = (a.scale, b.scale.view(1, -1)) if rowwise else (one, one)
        return torch._scaled_mm(a.values, b.values.t(), *scales, out_dtype=dtype, use_fast_accum=False)

    yield Case("cuBLAS bf16", size, lambda i: torch.mm(xs[i % sets][0], xs[i % sets][1].T), flops)
    if torch.version.cuda and torch.cuda.get_device_capability() == (9, 0):
        yield Case("cuBLAS fp8, row-wise scales", size, lambda i: fp8(i, True, torch.bfloat16), flops)
        yield Case("cuBLAS fp8, tensor scales", size, lambda i: fp8(i, False, torch.bfloat16), flops)
    ways = {"fp8": TritonBackend(bounded="fp8"), "bf16": TritonBackend(bounded="bf16")}
    for profile, way in (("bounded", "fp8"), ("bounded", "bf16"), ("ordered", "fp8")):
        name = f"MXFP4 {profile}{f' by {way}' if profile == 'bounded' else ''}"
        prepared = [ways[way].prepare(pair[1], profile=GemmProfile(profile)) for pair in qs]

        def multiply(
            i: int, weights: list[MXArray] | None, profile: str = profile, way: str = way
        ) -> torch.Tensor:
            a, b = qs[i % sets]
            right = weights[i % sets] if weights else b
            return ways[way].scaled_gemm(a, right, profile=GemmProfile(profile), out_dtype="bfloat16")

        yield Case(name, size, lambda i, multiply=multiply: multiply(i, None), flops)
        yield Case(
            f"{name}, weight prepared", size, lambda i, multiply=multiply, w=prepared: multiply(i, w), flops
        )


# ---- the record ----


def copy_rate() -> float:
    """Return bytes per second of a large device-to-device copy, read and written."""
    source = torch.randint(0, 255, (1 << 29,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    case = Case("copy", 0, lambda _: target.copy_(source), 2.0 * source.numel(), graph=False)
    return case.amount / median_ms(case, 10, 8) * 1e3


def machine() -> dict[str, str]:
    """Return what was measured on."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (
        "" if torch.version.hip else subprocess.run(query, capture_output=True, text=True, check=False).stdout
    )
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("quantize", "gemm", "error"), help="do one of the three parts")
    parser.add_argument("--match", default="", help="time cases whose name contains this")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows and columns of the matrices")
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    backend = TritonBackend()
    rate = copy_rate()
    record: dict[str, Any] = {
        "machine": machine(),
        "copy_tb_per_s": rate / 1e12,
        "quantize": [],
        "gemm": [],
        "error": [],
    }
    print(", ".join(record["machine"].values()))
    print(f"copy: {rate / 1e12:.2f} TB/s")
    parts = {
        "quantize": (quantize_cases, (4096, 8192, 16384), "of a copy", rate),
        "gemm": (gemm_cases, (2048, 4096, 8192), "of cuBLAS bf16", 0.0),
    }
    for part, (cases, sizes, unit, ceiling) in parts.items():
        if options.only not in (None, part):
            continue
        for size in options.sizes or sizes:
            base = ceiling
            for case in cases(backend, size):
                is_base = not base
                if options.match not in case.name and not is_base:
                    continue
                ms = median_ms(case, options.replays, 8 if part == "quantize" else 4)
                per_second = case.amount / ms * 1e3
                base = base or per_second
                row = {
                    "name": case.name,
                    "size": size,
                    "ms": ms,
                    "per_second": per_second,
                    "share": per_second / base,
                }
                record[part].append(row)
                print(
                    f"{size:6d}  {case.name:36s} {ms * 1e3:10.1f} us  {per_second / 1e12:8.2f} T/s  "
                    f"{row['share']:5.2f} {unit}",
                    flush=True,
                )
            torch.cuda.empty_cache()
    if options.only in (None, "error") and torch.cuda.get_device_capability() == (9, 0):
        for row in gpu_error.rows():
            record["error"].append(row)
            errors = "  ".join(
                f"{way} {'0' if log is None else f'2^{log}'}" for way, log in row["log2"].items()
            )
            print(f"{row['k']:6d}  {row['pattern']:36s} {errors}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
