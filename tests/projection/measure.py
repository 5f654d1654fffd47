"""`python -m projection.measure`: measures on this machine's GPU the rates that the projection assumes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton
from rich.console import Console
from rich.table import Table

from mxref.errors import MxrefError
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.scale import ScaleRule
from mxref_training.config import ModelConfig
from mxref_training.config_files import load_config
from mxref_triton.backend import TritonBackend, backend
from mxref_triton.lane.gfx950 import is_gfx950
from mxref_triton.products.bounded import BoundedWay
from mxref_triton.products.matrix_cores import multiply as gemm_kernel
from projection.assumptions import Assumption, Assumptions, Machine
from projection.counted import ROTATIONS
from projection.roofline import CODES

_REPEATS = 10
_CALLS = 8
LARGEST_CACHE = 256 << 20
"""Bytes of the largest cache of a GPU that this runs on: an MI355X's Infinity Cache, before its memory."""
_MOST_SETS = 128
"""Sets of inputs at most: small ones would have to be many to fill a cache."""


@dataclass(frozen=True)
class Rate:
    """Something that was timed."""

    name: str
    seconds: float
    amount: float
    """Bytes, or multiplications and additions."""
    unit: str
    assumption: str = ""
    """Name of the assumption that it measures, or empty."""
    format: str = ""
    """Of multiplications: `fp4` or `bf16`, whose peak they are a share of."""

    @property
    def per_second(self) -> float:
        """Amount per second."""
        return self.amount / self.seconds


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers, those of one shape once."""
    narrow = model.kv_heads * model.head_dim
    return {
        "q, o": (model.width, model.width),
        "k, v": (narrow, model.width),
        "gate, up": (model.ffn, model.width),
        "down": (model.width, model.ffn),
    }


def input_sets(elements: int, device: torch.device) -> int:
    """Return how many sets of inputs are taken in turns, so that none is in a cache when its turn comes again.

    Packed, all of them together are twice the largest cache; in BF16 they are more.

    Args:
        elements: that a set holds.
        device: what reads them; two sets are enough on a CPU, where nothing of a cache is measured.
    """
    if device.type != "cuda":
        return 2
    return min(_MOST_SETS, max(2, math.ceil(2 * LARGEST_CACHE / (CODES * elements))))


def rates(used: TritonBackend, device: torch.device, tokens: int, model: ModelConfig) -> Iterator[Rate]:
    """Yield rates of a copy, of dual quantizations and of forward products, in MXFP4 and in BF16.

    An MXFP4 product is all that the backend does for one. Where that is a GEMM of packed codes and a look at their
    scales, the GEMM is timed alone too: it is what others publish, and so what `fp4_share` is about.

    Args:
        used: the backend.
        device: where it computes.
        tokens: rows of activations.
        model: whose linear layers give the shapes.
    """
    sets = input_sets(tokens * model.width, device)
    source = [_normal((tokens, model.width), device) for _ in range(sets)]
    target = torch.empty_like(source[0])
    elements = float(source[0].numel())
    copied = _seconds(lambda i: target.copy_(source[i]), sets, device)
    yield Rate("copy", copied, 4 * elements, "B", "memory_share")
    for rotation, n in ROTATIONS.items():
        spec = OperandSpec(scale_rule=ScaleRule.EVEN, hadamard=n)

        def both(i: int, spec: OperandSpec = spec) -> Any:
            return used.quantize_dual(source[i], (spec, spec))

        yield Rate(f"quantize X, {rotation}", _seconds(both, sets, device), (2 + 2 * CODES) * elements, "B")
    for name, (outputs, inputs) in linear_shapes(model).items():
        sets = input_sets(tokens * inputs, device)
        x = [_normal((tokens, inputs), device) for _ in range(sets)]
        w = _normal((outputs, inputs), device)
        flops = 2.0 * tokens * outputs * inputs
        bf16 = _seconds(lambda i, x=x, w=w: torch.mm(x[i], w.T), sets, device)  # type: ignore[misc]
        yield Rate(f"BF16 product, {name}", bf16, flops, "FLOP", "bf16_share", "bf16")
        spec = OperandSpec(scale_rule=ScaleRule.EVEN, hadamard=16)
        a, b = [used.quantize(t, spec) for t in x], used.quantize(w, spec)

        def product(i: int, a: list[MXArray] = a, b: MXArray = b) -> Any:
            return used.scaled_gemm(a[i], b, profile=GemmProfile.BOUNDED, out_dtype="bfloat16")

        reads_codes = used.way is BoundedWay.MFMA
        if reads_codes:

            def kernel(i: int, a: list[MXArray] = a, b: MXArray = b) -> Any:
                return gemm_kernel(a[i], b, "bfloat16")

            alone = _seconds(kernel, sets, device)
            yield Rate(f"MXFP4 GEMM kernel, {name}", alone, flops, "FLOP", "fp4_share", "fp4")
        whole = _seconds(product, sets, device)
        assumption = "" if reads_codes else "fp4_share"
        yield Rate(f"MXFP4 product, {name}", whole, flops, "FLOP", assumption, "fp4")


def _normal(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _seconds(work: Callable[[int], object], sets: int, device: torch.device) -> float:
    """Return the least time of a call; on a GPU that of a captured graph, which leaves Python's launches out.

    Args:
        work: what is timed, given the number of a set of inputs.
        sets: how many there are.
        device: where it computes.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        for i in range(sets):
            work(i)
        return (time.perf_counter() - begin) / sets
    calls = max(_CALLS, sets)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for i in range(sets):
            work(i)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Each call has results of its own: one that is written again and again would stay in a cache.
        _results = [work(i % sets) for i in range(calls)]
    best = float("inf")
    for _ in range(_REPEATS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def share(rate: Rate, machine: Machine) -> float:
    """Return a rate as a share of an MI355X's peak: of its memory, or of its multiplications in the rate's format."""
    if rate.unit == "B":
        return rate.per_second / machine.memory.value
    return rate.per_second / machine.matrix_flops(rate.format)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--tokens", type=click.IntRange(32), default=32768, show_default=True, help="Rows of activations."
)
@click.option(
    "--json",
    "path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write them there.",
)
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a key of the preset, as model.ffn=512.",
)
def main(tokens: int, path: Path | None, changes: tuple[str, ...]) -> None:
    """Measure the rates that the projection assumes, at the linear layers of Llama 3.1 8B.

    Shares are of an MI355X's peaks, so they are shown on a gfx950 alone.
    """
    try:
        used = backend()
        model = load_config("llama31_8b", changes).model
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = list(rates(used, device, tokens, model))
    except MxrefError as err:
        raise click.ClickException(str(err)) from None
    machine, assumed, known = Machine(), Assumptions(), device.type == "cuda" and is_gfx950(device)
    table = Table("what", "ms", "rate", "share", "assumed", title=used.details(), title_justify="left")
    for rate in found:
        a: Assumption | None = getattr(assumed, rate.assumption) if rate.assumption else None
        table.add_row(
            rate.name, f"{rate.seconds * 1e3:.3f}", f"{rate.per_second / 1e12:.3g} T{rate.unit}/s",
            f"{share(rate, machine):.3f}" if known else "", f"{a.nominal:g} ({a.low:g} to {a.high:g})" if a else "",
        )  # fmt: skip
    Console(highlight=False).print(table)
    if path:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
        head = {
            "gpu": gpu,
            "torch": torch.__version__,
            "hip": torch.version.hip,
            "triton": triton.__version__,
        }
        record = head | {"backend": used.details(), "rates": [asdict(rate) for rate in found]}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
