"""Time the optimizer steps of small models, by phase and by kind of work.

    NUMBA_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONPATH=tests python -m bench.bench_step \
        [--model demo] [--recipe mxfp4] [--steps 10] [--backend numba] [--json FILE] [--against FILE]

Times are processor time of the process; with one thread this equals the clock of an idle machine. A row shows the
fastest step, and `wall` the least time by the clock. `quantize` includes everything that makes an operand of a GEMM in
MXFP4 or FP8, also layouts of weights. `rest` is PyTorch's own work: attention, norms, casts to BF16, the embedding,
the loss. `--against` takes the JSON of another run, for example of another checkout, and adds the ratio of the speeds.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import mxref
import mxref_torch
from bench.step import PARTS, PHASES, Steps, config_of, timed_parts
from mxref.recipe_files import load_recipe
from mxref_training.config import TrainConfig
from mxref_training.device import deterministic
from mxref_training.model.llama import Llama

_WIDE = 160


class Clock:
    """Seconds by phase and part, from functions that are timed where training looks them up."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.phase, self.began = "", 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its seconds counted for a part."""

        def timed(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **named)
            finally:
                self.seconds[self.phase, part] += time.process_time() - began

        return timed

    def enter(self, phase: str) -> None:
        """End one phase and begin another; the phase `""` is not timed."""
        now = time.process_time()
        self.seconds[self.phase, "all"] += now - self.began
        self.phase, self.began = phase, now


def steps_of(
    config: TrainConfig, recipe: str, backend: mxref.Backend, steps: int, clock: Clock
) -> dict[str, Any]:
    """Return the split of the fastest of the steps, in milliseconds; the first two make caches and are not counted."""
    taken = Steps(Llama(config.model, config.run.seed), load_recipe(recipe), config, backend)
    fastest: dict[str, Any] = {}
    wall = []
    for step in range(steps + 2):
        clock.seconds.clear()
        began = time.perf_counter()
        taken.take(clock.enter)
        wall.append(1e3 * (time.perf_counter() - began))
        ms = {key: 1e3 * seconds for key, seconds in clock.seconds.items()}
        total = sum(ms[phase, "all"] for phase in PHASES)
        if step >= 2 and (not fastest or total < fastest["ms"]):
            fastest = {"ms": total} | {phase: ms[phase, "all"] for phase in PHASES}
            fastest |= {f"{p} {part}": ms.get((p, part), 0.0) for p in PHASES[:2] for part in PARTS}
            fastest |= {part: sum(ms.get((p, part), 0.0) for p in PHASES) for part in PARTS}
            fastest["rest"] = total - fastest["optimizer"] - fastest["quantize"] - fastest["gemm"]
    return fastest | {"wall_ms": min(wall[2:]), "tokens": config.run.step_tokens}


def report(title: str, rows: list[dict[str, Any]], against: list[dict[str, Any]]) -> None:
    """Print the rows, and where there are rows of another run how many times faster these are."""
    before = {(row["model"], row["recipe"]): row for row in against}
    columns = {
        "ms": "ms", "wall": "wall_ms", "fwd": "forward", "quantize": "forward quantize", "gemm": "forward gemm",
        "bwd": "backward", " quantize": "backward quantize", " gemm": "backward gemm", "optim": "optimizer",
        "all quantize": "quantize", "all gemm": "gemm", "rest": "rest",
    }  # fmt: skip
    table = Table("model", "recipe", title=title)
    for column in (*columns, *(("x", "quantize x", "gemm x") if before else ())):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["model"], row["recipe"], *(f"{row[key]:.1f}" for key in columns.values())]
        other = before.get((row["model"], row["recipe"]))
        if other:
            cells += [
                f"{other[key] / row[key]:.2f}" if row[key] else "" for key in ("ms", "quantize", "gemm")
            ]
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)  # a file or a pipe has room
    console.print(table)


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, default=("tiny", "demo", "wide"), show_default=True)
@click.option(
    "--recipe", "recipes", multiple=True, default=("bf16", "fp8", "mxfp4", "mxfp4_h16"), show_default=True
)
@click.option("--steps", default=10, show_default=True, help="Steps that are timed, after two that are not.")
@click.option("--backend", "name", default="numba", show_default=True)
@click.option("--json", "out", type=click.Path(dir_okay=False), help="Also write the numbers here.")
@click.option("--against", type=click.Path(dir_okay=False, exists=True), help="The JSON of another run.")
def main(
    models: tuple[str, ...],
    recipes: tuple[str, ...],
    steps: int,
    name: str,
    out: str | None,
    against: str | None,
) -> None:
    backend, clock = mxref.get_backend(name), Clock()
    with deterministic(torch.device("cpu"), threads=1), timed_parts(clock.timed):
        rows = [
            {"model": model, "recipe": recipe} | steps_of(config_of(model), recipe, backend, steps, clock)
            for model in models
            for recipe in recipes
        ]
    other = json.loads(Path(against).read_text(encoding="utf-8"))["rows"] if against else []
    report(f"one optimizer step, {name}, milliseconds, 1 thread", rows, other)
    if out:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        about = {"machine": machine, "backend": name, "code": str(Path(mxref_torch.__file__).parent)}
        Path(out).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
