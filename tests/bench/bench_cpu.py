"""Time CPU backends against copying the same array, in one run; no number is printed before the bits agree.

    python tests/bench/bench_cpu.py [--size 4096] [--repeats 7] [--backend numba] [--json FILE]

`make bench` sets one thread for Numba and BLAS. A ratio of 1 means as fast as the peer, on minimum times.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

import mxref
from mxref import OperandSpec, Stream

SPECS = {
    "quantize float32": ("float32", OperandSpec(), -1),
    "quantize bfloat16": ("bfloat16", OperandSpec(), -1),
    "quantize + H16": ("float32", OperandSpec(hadamard=16), -1),
    "quantize + SR": ("float32", OperandSpec(rounding="sr"), -1),
    "quantize along axis 0": ("float32", OperandSpec(), 0),
    "quantize 32x32": ("float32", OperandSpec(block="32x32"), -1),
}


def repeat(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return minimum and median seconds of `work`, which has run before."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), statistics.median(seconds)


def inputs(size: int) -> dict[str, np.ndarray]:
    """Return heavy-tailed matrices: zeros and constants would flatter a quantizer."""
    x = np.random.default_rng(0).standard_t(3, (size, size)).astype(np.float32)
    return {"float32": x, "bfloat16": x.astype(ml_dtypes.bfloat16)}


def check_bits(backend: mxref.Backend, x: dict[str, np.ndarray]) -> None:
    """Exit unless the backend gives the reference's bits on a slab of the timed data."""
    reference = mxref.get_backend("reference")
    stream = Stream(1)
    for name, (dtype, spec, axis) in SPECS.items():
        slab = x[dtype][:256, :512]
        if backend.quantize(slab, spec, axis=axis, rng=stream) != reference.quantize(
            slab, spec, axis=axis, rng=stream
        ):
            raise SystemExit(f"{backend.name}: {name} differs from the reference; nothing is timed")
    q = reference.quantize(x["float32"][:128, :512], OperandSpec())
    if not np.array_equal(
        backend.scaled_gemm(q, q, profile="ordered"), reference.scaled_gemm(q, q, profile="ordered")
    ):
        raise SystemExit(f"{backend.name}: scaled_gemm differs from the reference; nothing is timed")


@click.command(help=__doc__)
@click.option("--size", default=4096, show_default=True, help="Rows and columns of the matrix.")
@click.option("--gemm-size", default=1024, show_default=True, help="M, N and K of the GEMM.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--backend", "name", default="numba", show_default=True)
@click.option("--json", "out", type=click.Path(dir_okay=False), help="Also write the numbers here.")
def main(size: int, gemm_size: int, repeats: int, name: str, out: str | None) -> None:
    backend = mxref.get_backend(name)
    x = inputs(size)
    check_bits(backend, x)
    rows: list[dict[str, Any]] = []

    def measure(label: str, peer: str, work: Callable[[], Any], peer_work: Callable[[], Any]) -> None:
        work()
        peer_work()
        (best, median), (peer_best, _) = repeat(work, repeats), repeat(peer_work, repeats)
        rows.append(
            {"operation": label, "peer": peer, "min_ms": 1e3 * best, "median_ms": 1e3 * median}
            | {"peer_min_ms": 1e3 * peer_best, "ratio": peer_best / best}
        )

    for label, (dtype, spec, axis) in SPECS.items():
        source, target = x[dtype], np.empty_like(x[dtype])
        measure(
            label,
            "np.copyto",
            lambda s=source, p=spec, a=axis: backend.quantize(s, p, axis=a, rng=Stream(1)),
            lambda s=source, t=target: np.copyto(t, s),
        )
    q = backend.quantize(x["float32"], OperandSpec())
    wide = np.empty_like(x["float32"])
    measure(
        "dequantize float32",
        "np.copyto",
        lambda: backend.dequantize(q),
        lambda: np.copyto(wide, x["float32"]),
    )
    square = np.ascontiguousarray(x["float32"][:gemm_size, :gemm_size])
    qa = backend.quantize(square, OperandSpec())
    for profile in ("ordered", "bounded"):
        measure(
            f"scaled_gemm {profile} {gemm_size}",
            "np.matmul f32",
            lambda p=profile: backend.scaled_gemm(qa, qa, profile=p),
            lambda: square @ square.T,
        )

    table = Table(
        "operation",
        "min ms",
        "median ms",
        "peer",
        "peer min ms",
        "ratio",
        title=f"{name}, {size} x {size}, 1 thread",
    )
    for row in rows:
        numbers = (f"{row[k]:.2f}" for k in ("min_ms", "median_ms"))
        table.add_row(
            row["operation"], *numbers, row["peer"], f"{row['peer_min_ms']:.2f}", f"{row['ratio']:.2f}"
        )
    Console().print(table)
    if out:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        with open(out, "w", encoding="utf-8") as f:
            json.dump({"machine": machine, "numpy": np.__version__, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
