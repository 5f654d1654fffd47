"""Time whole optimizer steps on a GPU for each recipe, by phase and by kind of GPU work.

    PYTHONPATH=.:backends:training:tests python3 -m bench.bench_gpu_step [--quick] [--recipe mxfp4_h16:ordered] \
        [--layers 4] [--micro-batch 2] [--json FILE]

The model is four layers of Llama 3.1 8B, or a whole Llama of a billion parameters, whose products are too short to
keep a GPU from waiting for Python; weights and tokens are random. Peers run as fast as they can: `plain` is nn.Linear
in BF16, compiled as a whole, and no step is waited for. Recipes are trained as `mxref train` trains, with the checks of
each step, and once more with deterministic kernels. A recipe may be followed by the profile of its GEMMs and its mode.
`ms` is the mean of steps that nobody waits for; in eager modes, which training waits for, the median. Phases are by
events on the GPU. `busy` is the time of all kernels of a step, taken in one more step under the profiler, against `ms`;
the rest of the time the GPU waits for Python.
`floor` is the least time that `step_floor` computes from what cuBLAS, a copy of memory and the other parts of the same
step take in the same run, and `of floor` how many times of it the step takes.
`GiB` is the memory at the peak of a step, and `activations` what remains of it without weights, moments and gradients.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import mxref
from bench.peers import PEERS, TORCHAO, has_torchao
from bench.step import PARTS, PHASES, Function, Mode, Steps, config_of, timed_parts, with_run
from bench.step_floor import Ceilings, demand
from mxref.errors import MxrefError
from mxref.gemm import gemm_profile
from mxref.recipe_files import load_recipe
from mxref_training.config import TrainConfig
from mxref_training.device import choose_device, deterministic
from mxref_training.environment import device_name
from mxref_training.model.llama import Llama, parameter_count

RECIPES = (
    "plain@whole", "plain@captured-whole", "torchao-fp8@whole", "torchao-fp8@captured-whole",
    "mxfp4_h16:bounded@captured", "fp8@captured", "mxfp8:bounded@captured", "mxfp4_h16:ordered@captured",
)  # fmt: skip
WARM_UP = 2
"""Steps that compile kernels, fill caches, and give FP8 its history."""
QUICK_LAYERS = 2
_KEPT_KERNELS = 30
_OPTIMIZER = "optimizer"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_WAITS += tuple(name.replace("cuda", "hip") for name in _WAITS)
"""Calls in which Python waits for the GPU."""

_KERNELS = {
    "gemm": r"nvjet|gemm|cutlass::Kernel|_fold|_ordered|_dequantize|_finish|_misfits|_flag_scales",
    _OPTIMIZER: r"multi_tensor_apply",
    "quantize": r"quantize_(rows|columns|both)",
}
"""What the names of kernels say of the part of a step that started them, where nothing else says it."""

Row = dict[str, Any]


class Phases:
    """Milliseconds between the phases of a step: by events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End one phase and begin another."""
        mark: Any = time.perf_counter()
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((phase, mark))

    def ms(self) -> dict[str, float]:
        """Return the milliseconds of each phase, once all of its work is done."""
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[phase] += begin.elapsed_time(end) if self._on_gpu else 1e3 * (end - begin)
        return found


def find(name: str) -> mxref.Recipe:
    """Return the recipe of `name` or `name:profile`."""
    recipe_name, _, profile_name = name.partition(":")
    recipe = load_recipe(recipe_name)
    return replace(recipe, gemm=gemm_profile(profile_name)) if profile_name else recipe


def wait(device: torch.device) -> None:
    """Wait for all work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_steps(steps: Steps, count: int) -> Row:
    """Return the medians of so many steps after the warm-up, in milliseconds, and the memory at their peak."""
    device, began = steps.device, time.perf_counter()
    for _ in range(WARM_UP):
        steps.take(lambda _: None)
    wait(device)
    warm_up = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: list[dict[str, float]] = []
    for _ in range(count):
        phases, began = Phases(device), time.perf_counter()
        steps.take(phases.enter)
        wait(device)
        found.append({"ms": 1e3 * (time.perf_counter() - began)} | phases.ms())
    row: Row = {key: statistics.median(step[key] for step in found) for key in found[0]}
    row |= {"fastest_ms": min(step["ms"] for step in found), "warm_up_s": warm_up, "repeated": steps.repeated}
    row |= {"mode": steps.mode.value, "saved_gib": steps.saved_bytes / 2**30}
    if steps.captured is not None or isinstance(steps.recipe, str):
        row["ms"] = _free_running(steps, count)
    if steps.captured is not None:
        row |= dict.fromkeys(PHASES, 0.0)
    row["tokens_per_s"] = 1e3 * steps.config.run.step_tokens / row["ms"]
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        row["activations_gib"] = row["peak_gib"] - steps.held_bytes() / 2**30
    return row


def _free_running(steps: Steps, count: int) -> float:
    """Return the milliseconds of a step where none is waited for, as training runs them."""
    began = time.perf_counter()
    for _ in range(count):
        steps.take(lambda _: None, reads=False)
    wait(steps.device)
    ms = 1e3 * (time.perf_counter() - began) / count
    if steps.captured is None:
        steps.require_finite()
    return ms


def _ranged(part: str, function: Function) -> Function:
    def ranged(*args: Any, **named: Any) -> Any:
        with record_function(f"part {part}"):
            return function(*args, **named)

    return ranged


def profiled_step(steps: Steps) -> Row:
    """Return what the GPU does in a step: milliseconds of all kernels, of each part, and of the longest kernels.

    And how often Python waits for it, once of these after the step.
    """
    inside: AbstractContextManager[Any] = nullcontext()

    def enter(phase: str) -> None:
        nonlocal inside
        inside.__exit__(None, None, None)
        inside = record_function(f"part {_OPTIMIZER}") if phase == _OPTIMIZER else nullcontext()
        inside.__enter__()

    with timed_parts(_ranged), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps.take(enter)
        wait(steps.device)
    return gpu_time(profiler.key_averages())


def gpu_time(averages: Any) -> Row:
    """Return what `profiled_step` returns from what a profiler saw; ranges named `part ...` hold what they started."""
    waits = 0
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    parts = dict.fromkeys((*PARTS, _OPTIMIZER), 0.0)
    for event in averages:
        if event.device_type == DeviceType.CPU:
            waits += event.count if event.key in _WAITS else 0
            if (part := event.key.removeprefix("part ")) in parts and part != event.key:
                parts[part] += event.device_time_total / 1e3
        elif not event.is_user_annotation:
            kernels[event.key][0] += event.device_time_total / 1e3
            kernels[event.key][1] += event.count
    unseen = {part for part, ms in parts.items() if not ms}  # compiled code and a graph call no operator
    for name, (ms, _) in kernels.items():
        part = next((part for part, known in _KERNELS.items() if re.search(known, name)), None)
        if part in unseen:
            parts[part] += ms
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    total = sum(ms for ms, _ in kernels.values())
    return {
        "kernel_ms": total,
        "waits": waits,
        "launches": sum(count for _, count in kernels.values()),
        "parts": parts | {"rest": total - sum(parts.values())},
        "kernels": [
            {"name": name, "ms": ms, "count": count} for name, (ms, count) in longest[:_KEPT_KERNELS]
        ],
    }


def rows_of(
    config: TrainConfig, recipes: tuple[str, ...], modes: tuple[Mode, ...], backend: mxref.Backend,
    device: torch.device, count: int, fixed: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """Yield a row for each recipe and mode; all train one model in turns, whose weights take longest to draw.

    With `fixed`, recipes are also timed with deterministic kernels.
    """
    model, ceilings, run = Llama(config.model, config.run.seed, device=device), Ceilings(), config.run
    for name, mode in asked(recipes, modes):
        recipe = name if name in PEERS else find(name)
        steps = Steps(model, recipe, config, backend, mode)
        row = {"recipe": name} | timed_steps(steps, count)
        if device.type == "cuda":
            row |= profiled_step(steps)
            row["busy"] = row["kernel_ms"] / row["ms"]
            asked_for = demand(model, run.sequences * run.seq_len, run.micro_batches)
            row["floor"] = ceilings.floor_of(row["parts"], asked_for)
            row["of_floor"] = row["ms"] / row["floor"]["ms"]
        del steps
        gc.collect()  # the optimizer's moments, before those of the next
        if fixed and name not in PEERS:
            with deterministic(device, threads=0):
                row["deterministic_ms"] = timed_steps(Steps(model, recipe, config, backend, mode), count)[
                    "ms"
                ]
            gc.collect()
        yield row


def asked(recipes: tuple[str, ...], modes: tuple[Mode, ...]) -> Iterator[tuple[str, Mode]]:
    """Yield each recipe with its modes: that of `name@mode`, else `modes`."""
    for text in recipes:
        name, at, mode = text.partition("@")
        if at:
            yield name, Mode(mode)
        else:
            yield from ((name, each) for each in modes)


def machine(device: torch.device) -> dict[str, str]:
    """Return what was measured on."""
    if device.type == "cuda":
        from bench.bench_gpu import machine as of_gpu

        return of_gpu()
    return {"gpu": device_name(device), "torch": torch.__version__}


def show(rows: list[Row]) -> None:
    """Print the rows, and the kernels that take longest."""
    console = Console(width=140)
    table = Table(
        *(
            "recipe",
            "tokens/s",
            "ms",
            *PHASES,
            "floor",
            "of floor",
            "GPU busy",
            *PARTS,
            "rest",
            "launches",
            "waits",
            "GiB",
            "activations",
            "warm-up s",
        )
    )
    for row in rows:
        parts = row.get("parts", {})
        table.add_row(
            f"{row['recipe']} {row['mode']}", f"{row['tokens_per_s']:,.0f}", f"{row['ms']:.1f}",
            *(f"{row[p]:.1f}" for p in PHASES),
            *((f"{row['floor']['ms']:.1f}", f"{row['of_floor']:.2f}") if "floor" in row else ("", "")),
            f"{row['busy']:.2f}" if "busy" in row else "",
            *(f"{parts[p]:.1f}" if parts else "" for p in (*PARTS, "rest")),
            str(row.get("launches", "")), str(row.get("waits", "")),
            *(f"{row[key]:.1f}" if key in row else "" for key in ("peak_gib", "activations_gib")),
            f"{row['warm_up_s']:.1f}",
        )  # fmt: skip
    console.print(table)
    for row in rows:
        console.print(row["recipe"])
        for kernel in row.get("kernels", ())[:12]:
            console.print(
                f"  {kernel['ms']:8.2f} ms {kernel['count']:5d} x {kernel['name'][:110]}", markup=False
            )


@click.command(help=__doc__)
@click.option(
    "--model",
    default="llama-8b-slice",
    show_default=True,
    help="`llama-8b-slice`, `llama-1b`, `wide`, or a preset.",
)
@click.option("--recipe", "recipes", multiple=True, default=RECIPES, show_default=True)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    default=(Mode.EAGER.value,),
    show_default=True,
    type=click.Choice([mode.value for mode in Mode]),
    help="How to run the recipes that name no mode, as name@mode.",
)
@click.option("--layers", type=click.IntRange(1), help="Layers of the model.")
@click.option("--micro-batch", type=click.IntRange(1), help="Sequences of a forward pass.")
@click.option("--micro-batches", type=click.IntRange(1), help="Forward passes of a step.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Steps that are timed.")
@click.option(
    "--deterministic/--no-deterministic",
    "fixed",
    default=True,
    show_default=True,
    help="Whether to time recipes with deterministic kernels too.",
)
@click.option("--quick", is_flag=True, help=f"{QUICK_LAYERS} layers.")
@click.option("--backend", "backend_name", default="triton", show_default=True)
@click.option(
    "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the numbers here."
)
def main(
    model: str, recipes: tuple[str, ...], modes: tuple[str, ...], layers: int | None, micro_batch: int | None,
    micro_batches: int | None,
    steps: int, fixed: bool, quick: bool, backend_name: str, out: Path | None,
) -> None:  # fmt: skip
    try:
        config = config_of(model)
        layers = layers or (QUICK_LAYERS if quick else config.model.layers)
        sequences = micro_batch or config.run.sequences
        batch = sequences * (micro_batches or config.run.micro_batches)
        config = replace(
            with_run(config, micro_batch=sequences, batch=batch), model=replace(config.model, layers=layers)
        )
        for name in (text.partition("@")[0] for text in recipes):
            if name == TORCHAO and not has_torchao():
                raise click.ClickException(
                    "torchao is not installed: pip install torchao, or leave its row out"
                )
            if name not in PEERS:
                find(name)
        backend = mxref.get_backend(backend_name)
        device = choose_device("auto", backend)
        rows = []
        for row in rows_of(config, recipes, tuple(map(Mode, modes)), backend, device, steps, fixed):
            rows.append(row)
            name, fixed = f"{row['recipe']} {row['mode']}", row.get("deterministic_ms")
            said = f", {fixed:.1f} with deterministic kernels" if fixed else ""
            if "floor" in row:
                said += f", {row['of_floor']:.2f} of a floor of {row['floor']['ms']:.1f}"
            print(f"{name}: {row['ms']:.1f} ms{said}, {row['tokens_per_s']:,.0f} tokens/s", flush=True)
    except MxrefError as err:
        raise click.ClickException(str(err)) from err
    show(rows)
    if out:
        m, run = config.model, config.run
        shape = {name: getattr(m, name) for name in ("layers", "width", "heads", "kv_heads", "ffn", "vocab")}
        shape |= {"parameters": parameter_count(m), "seq_len": run.seq_len}
        shape |= {"micro_batch": run.sequences, "micro_batches": run.micro_batches}
        record = {"machine": machine(device), "backend": backend_name, "model": shape, "steps": rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
