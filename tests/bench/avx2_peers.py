"""PyTorch's GEMMs on a CPU without BF16 instructions and AVX-512: what the GEMM for AVX2 is compared with.

Libraries choose their code when they are loaded, so a process of its own measures them. oneDNN and ATen are told to
use AVX2 at most; MKL is told so too, but on processors not made by Intel it decides by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

VARIABLES = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What keeps the process to AVX2."""


def measure(
    size: int, seconds: float, threads: int, bfloat16_ms: float, float32_ms: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each type; ratios are to the products of the whole CPU, which take the milliseconds given."""
    command = [sys.executable, "-m", "bench.avx2_peers", str(size), str(seconds), str(threads)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        env=os.environ | VARIABLES | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for dtype, timing in json.loads(done.stdout).items():
        yield {
            "operation": f"torch.mm {dtype}, AVX2", "size": size, "threads": threads, "backend": "torch", **timing,
            "gflop_per_s": 2 * size**3 / timing["min_ms"] / 1e6,
            "ratio": bfloat16_ms / timing["min_ms"], "ratio_float32": float32_ms / timing["min_ms"],
        }  # fmt: skip


def _work(size: int, seconds: float, threads: int) -> None:
    import torch

    from bench.timing import in_turns

    torch.set_num_threads(threads)
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    operands = {"float32": x, "bfloat16": x.to(torch.bfloat16)}
    timings = in_turns(2 * seconds, *(lambda one=one: one @ one.T for one in operands.values()))
    json.dump({name: asdict(t) for name, t in zip(operands, timings, strict=True)}, sys.stdout)


if __name__ == "__main__":
    _work(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
