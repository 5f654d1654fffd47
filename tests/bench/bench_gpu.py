"""Time the Triton backend on a GPU: quantization against a copy of memory, GEMMs against cuBLAS, and their errors.

Bits are checked first, on slabs of the data that is timed, which is heavy-tailed. Every number is the median over
replays of a CUDA graph, so Python's launches are not in it. Each call of a graph has results of its own, and inputs
that are together twice the largest cache of any of these GPUs, 256 MB: less than 16 GB of GPU memory in all.
`bounded` products are timed as this machine answers them, and by BF16, which every machine can. What products are
compared with is timed before and after them, and its better time counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import mxref
from bench import gpu_error
from gpu.operands_torch import exact, tolerance
from mxref import GemmProfile, MXArray, OperandSpec, PreparedArray, Stream
from mxref.placement import Placement
from mxref_triton import TritonBackend
from mxref_triton.products.bounded import BoundedWay
from mxref_triton.products.fold import fold
from projection.measure import input_sets

STREAM = Stream(seed=1, step=2, layer=3, operand=4)
CODES = 0.5 + 1 / 32
"""Bytes per element of a quantized tensor."""

_REST = 0.5
"""Seconds before each case."""

Work = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """Something to time: `work(i)` uses the i-th set of inputs."""

    name: str
    size: int
    work: Work
    amount: float
    """Bytes read and written, or multiplications and additions."""
    sets: int = 1
    """Sets of inputs."""
    graph: bool = True


def median_ms(case: Case, replays: int, calls: int) -> float:
    """Return milliseconds per call, of at least so many calls and at least one with each set of inputs."""
    calls = max(calls, case.sets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(calls):
            case.work(i)
    torch.cuda.synchronize()
    if case.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # A result that is written over by the next call would stay in a cache.
            _results = [case.work(i) for i in range(calls)]
        run: Callable[[], Any] = graph.replay
    else:

        def run() -> None:
            _results = [case.work(i) for i in range(calls)]

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
    """Exit unless slabs of the timed data have the reference's bits, both alone and inside the whole."""
    reference = mxref.get_backend("reference")
    for name, (spec, axis) in QUANTIZE.items():
        q = backend.quantize(x, spec, axis=axis, placement=Placement(STREAM))
        slab = x[-64:] if axis == 1 else x[:, -64:]
        origin = (x.shape[0] - 64, 0) if axis == 1 else (0, x.shape[1] - 64)
        placement = Placement(STREAM, origin, tuple(x.shape))
        want = reference.quantize(backend.to_numpy(slab), spec, axis=axis, placement=placement)
        same(name, q.codes[-64:], want.codes)
        same(name, q.scales[-64:], want.scales)
        values = backend.dequantize(
            MXArray(q.codes[-64:], q.scales[-64:], (64, x.shape[axis]), 1), "bfloat16"
        )
        want = MXArray(want.codes, want.scales, (64, x.shape[axis]), 1)
        same("dequantize", values, reference.dequantize(want, "bfloat16"))
    for name, spec in DUAL.items():
        pair = backend.quantize_dual(x, (spec, spec), placements=(Placement(STREAM), Placement(STREAM)))
        for q, axis in zip(pair, (1, 0), strict=True):
            alone = backend.quantize(x, spec, axis=axis, placement=Placement(STREAM))
            if not (torch.equal(q.codes, alone.codes) and torch.equal(q.scales, alone.scales)):
                raise SystemExit(f"{name} differs from quantize along axis {axis}; nothing is timed")


def same(name: str, got: torch.Tensor, want: Any) -> None:
    bits = got.cpu().contiguous().view(torch.uint8).numpy()
    if not np.array_equal(bits, np.ascontiguousarray(want).view(np.uint8)):
        raise SystemExit(f"{name} differs from the reference; nothing is timed")


def check_gemm(products: list[Product], a: MXArray, b: MXArray) -> None:
    """Exit unless products under `ordered` have the reference's bits, and others lie within their class."""

    def slab(q: MXArray) -> MXArray:
        return MXArray(q.codes[:48].cpu().numpy(), q.scales[:48].cpu().numpy(), (48, q.shape[1]), 1)

    want, magnitude = exact(a, b)
    for product in products:
        got = product.backend.scaled_gemm(a, b, profile=product.profile)
        if product.profile is GemmProfile.ORDERED:
            reference = mxref.get_backend("reference").scaled_gemm(slab(a), slab(b))
            same(product.name, got[:48, :48].contiguous(), reference)
            continue
        if product.backend.range_exceeded():
            raise SystemExit(f"{product.name}: the operands exceed its range; nothing is timed")
        error_class = product.backend.capabilities.bounded_class
        # Not "no error is larger": a NaN is none.
        if not ((got - want).abs() <= tolerance(a.length, magnitude, error_class)).all():
            raise SystemExit(f"{product.name} lies outside its class, {error_class}; nothing is timed")


# ---- what is timed ----


@dataclass(frozen=True)
class Product:
    """An MXFP4 product of this machine: its label, and the kernel that computes it."""

    name: str
    profile: GemmProfile
    backend: TritonBackend


def products(backend: TritonBackend) -> list[Product]:
    """Return the products that are timed, each named for the way that the backend takes.

    Args:
        backend: takes this machine's own way of `bounded`.
    """
    ways = {backend.way: backend}
    if backend.way is not BoundedWay.BF16:
        ways[BoundedWay.BF16] = TritonBackend(bounded=BoundedWay.BF16, conversions="portable")
    found = [Product(f"MXFP4 bounded by {way}", GemmProfile.BOUNDED, used) for way, used in ways.items()]
    return [*found, Product("MXFP4 ordered", GemmProfile.ORDERED, backend)]


def is_hopper() -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def quantize_cases(backend: TritonBackend, size: int) -> Iterator[Case]:
    sets = input_sets(size * size, torch.device("cuda"))
    xs = [heavy_tailed(size, seed) for seed in range(sets)]
    check_quantize(backend, xs[0])
    elements = size * size

    def one(spec: OperandSpec, axis: int) -> Work:
        return lambda i: backend.quantize(xs[i % sets], spec, axis=axis, placement=Placement(STREAM))

    for name, (spec, axis) in QUANTIZE.items():
        yield Case(name, size, one(spec, axis), elements * (2 + CODES), sets)
    for name, spec in DUAL.items():

        def both(i: int, spec: OperandSpec = spec) -> Any:
            return backend.quantize_dual(
                xs[i % sets], (spec, spec), placements=(Placement(STREAM), Placement(STREAM))
            )

        yield Case(name, size, both, elements * (2 + 2 * CODES), sets)
    qs = [backend.quantize(x, ROW) for x in xs]

    def dequantize(i: int) -> Any:
        return backend.dequantize(qs[i % sets], "bfloat16")

    def fake(i: int) -> Any:
        return backend.fake_quantize(xs[i % sets], ROW, dtype="bfloat16")

    def fold_one(i: int) -> Any:
        return backend.prepare(qs[i % sets], profile=GemmProfile.ORDERED)

    yield Case("dequantize to bf16", size, dequantize, elements * (2 + CODES), sets)
    yield Case("fake quantize, bf16", size, fake, elements * 4, sets)
    # By row or by block, as this device reads it; others fold nothing.
    if isinstance(fold_one(0), PreparedArray):
        yield Case("fold into E4M3", size, fold_one, elements * (1 + CODES), sets)
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

    # Else the second size makes it compile for any, which is several times slower.
    compiled = torch.compile(convert, fullgraph=True, dynamic=False)
    amount, sets = size * size * (2 + CODES), len(xs)
    yield Case("torchao eager", size, lambda i: convert(xs[i % sets]), amount, sets, graph=False)
    yield Case("torchao compiled", size, lambda i: compiled(xs[i % sets]), amount, sets, graph=False)


def gemm_cases(backend: TritonBackend, size: int) -> Iterator[Case]:
    sets = input_sets(2 * size * size, torch.device("cuda"))
    xs = [(heavy_tailed(size, 2 * i), heavy_tailed(size, 2 * i + 1)) for i in range(sets)]
    qs = [tuple(backend.quantize(x, ROW) for x in pair) for pair in xs]
    timed = products(backend)
    check_gemm(timed, *qs[0])
    flops = 2.0 * size**3
    # ROCm's torch has several libraries to choose from.
    library = "torch.mm" if torch.version.hip else "cuBLAS"
    yield Case(f"{library} bf16", size, lambda i: torch.mm(xs[i % sets][0], xs[i % sets][1].T), flops, sets)
    if is_hopper():
        yield from fp8_cases(qs, size, flops)
    for product in timed:
        weights = [product.backend.prepare(right, profile=product.profile) for _, right in qs]

        def multiply(i: int, rights: list[MXArray], product: Product = product) -> torch.Tensor:
            left, right = qs[i % sets][0], rights[i % sets]
            return product.backend.scaled_gemm(left, right, profile=product.profile, out_dtype="bfloat16")

        plain = partial(multiply, rights=[right for _, right in qs])
        yield Case(product.name, size, plain, flops, sets)
        if isinstance(weights[0], PreparedArray):
            name = f"{product.name}, weight prepared"
            yield Case(name, size, partial(multiply, rights=weights), flops, sets)


def fp8_cases(qs: list[tuple[MXArray, ...]], size: int, flops: float) -> Iterator[Case]:
    """cuBLAS's own products of operands folded by row, under scales of rows or of none."""
    folded = [tuple(fold(q) for q in pair) for pair in qs]
    one = torch.ones((), device="cuda")

    def multiply(i: int, rowwise: bool) -> torch.Tensor:
        a, b = folded[i % len(folded)]
        scales = (a.scale, b.scale.view(1, -1)) if rowwise else (one, one)
        return torch._scaled_mm(
            a.values, b.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False
        )

    for name, rowwise in (("row-wise", True), ("tensor", False)):
        work = partial(multiply, rowwise=rowwise)
        yield Case(f"cuBLAS fp8, {name} scales", size, work, flops, len(folded))


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
        "driver": driver.partition("\n")[0].strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def timed(case: Case, replays: int, calls: int) -> dict[str, Any]:
    """Return a row of the record, without its share."""
    # What ran before may have taken the GPU to its power limit, which the next would pay for.
    torch.cuda.synchronize()
    time.sleep(_REST)
    ms = median_ms(case, replays, calls)
    return {"name": case.name, "size": case.size, "ms": ms, "per_second": case.amount / ms * 1e3}


def show(row: dict[str, Any], base: float, unit: str) -> None:
    rate = row["per_second"]
    print(
        f"{row['size']:6d}  {row['name']:36s} {row['ms'] * 1e3:10.1f} us  {rate / 1e12:8.2f} T/s  "
        f"{rate / base:5.2f} {unit}",
        flush=True,
    )


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
        "gemm": (gemm_cases, (2048, 4096, 8192), "of BF16", 0.0),
    }
    for part, (cases, sizes, unit, ceiling) in parts.items():
        if options.only not in (None, part):
            continue
        for size in options.sizes or sizes:
            rows: list[dict[str, Any]] = []
            base, peer = ceiling, None
            for case in cases(backend, size):
                if options.match not in case.name and base:
                    continue
                if not base:
                    peer = case
                row = timed(case, options.replays, 8 if part == "quantize" else 4)
                base = base or row["per_second"]
                show(row, base, unit)
                rows.append(row)
            if peer:
                # Measured before and after, so that a GPU that warms up favours neither side.
                again = timed(peer, options.replays, 4)
                show(again, base, unit)
                rows[0] = max(rows[0], again, key=lambda row: float(row["per_second"]))
                base = rows[0]["per_second"]
            record[part] += [row | {"share": row["per_second"] / base} for row in rows]
            torch.cuda.empty_cache()
    if options.only in (None, "error") and is_hopper():
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
