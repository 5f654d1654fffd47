"""Time models that train side by side on one GPU, each in a process of its own.

    PYTHONPATH=.:backends:training:tests python3 -m bench.bench_gpu_together --model lab_20m --together 1 --together 8 \
        --recipe mxfp4_h16:bounded [--seconds 4] [--json FILE]

The processes of a recipe are started once, as many as the largest `--together` asks for, and wait when their steps are
compiled and captured. Then so many of them train at a time, all for the same seconds, on tokens drawn at random.
`tokens/s` is their sum. Run it once more under CUDA MPS (`nvidia-cuda-mps-control -d`), which lets kernels of several
processes run at the same time; without it they take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
STARTED = "MXREF_BENCH_STARTED"
"""Environment variable: when a worker's process was started, in seconds of `time.time`."""
_SAMPLES = "utilization.gpu,memory.used,power.draw"


def worker(model_name: str, recipe: str, mode: str, backend_name: str) -> None:
    """Prepare the steps of one model, then train for as many seconds as each line of standard input asks."""
    marks = {"import": time.time() - float(os.environ[STARTED])}
    began = time.time()

    def mark(name: str) -> None:
        nonlocal began
        now = time.time()
        marks[name], began = now - began, now

    import mxref
    from bench.bench_gpu_step import WARM_UP, find, wait
    from bench.peers import PEERS
    from bench.step import Mode, Steps, config_of
    from mxref_training.device import choose_device, deterministic
    from mxref_training.model.llama import Llama

    config = config_of(model_name)
    backend = mxref.get_backend(backend_name)
    device = choose_device("auto", backend)
    mark("backend")
    with deterministic(device, threads=1):
        model = Llama(config.model, config.run.seed, device=device)
        steps = Steps(model, recipe if recipe in PEERS else find(recipe), config, backend, Mode(mode))
        wait(device)
        mark("model")
        for name in ("first step", *["second step"] * (WARM_UP - 1), "capture"):
            steps.take(lambda _: None)
            wait(device)
            mark(name)
        _say({"start": marks, "tokens": config.run.step_tokens})
        for line in sys.stdin:
            seconds, count = float(line), 0
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                steps.take(lambda _: None)
                count += 1
            wait(device)
            _say({"steps": count, "seconds": time.perf_counter() - began})


def _say(table: Row) -> None:
    print(json.dumps(table), flush=True)


class _Load:
    """Samples of what nvidia-smi says of the GPU while the block runs; nothing where it is not installed."""

    def __enter__(self) -> _Load:
        self.lines: list[list[float]] = []
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={_SAMPLES}"]
        command += ["--format=csv,noheader,nounits", "-lms", "200"]
        self._process: subprocess.Popen[str] | None = None
        with suppress(OSError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                self.lines.append([float(word) for word in line.split(",")])

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def means(self) -> Row:
        """Return the mean share of time with a kernel on the GPU, the memory in MiB and the power in watts."""
        if not self.lines:
            return {}
        columns = zip(*self.lines, strict=True)
        return dict(zip(("busy", "mib", "watt"), (sum(c) / len(c) for c in columns), strict=True))


def measured(
    model: str, recipe: str, mode: str, backend: str, counts: list[int], seconds: float
) -> list[Row]:
    """Return a row for each number of processes; RuntimeError if one of them ends."""
    command = [sys.executable, "-m", "bench.bench_gpu_together", "--worker", recipe]
    command += ["--model", model, "--mode", mode, "--backend", backend]
    environment = os.environ | {STARTED: str(time.time()), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    began = time.perf_counter()
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(max(counts))
    ]
    try:
        ready = [_answer(process) for process in processes]
        started = time.perf_counter() - began
        rows = []
        for count in counts:
            with _Load() as load:
                for process in processes[:count]:
                    assert process.stdin is not None
                    process.stdin.write(f"{seconds}\n")
                    process.stdin.flush()
                answers = [_answer(process) for process in processes[:count]]
            rates = [a["steps"] * r["tokens"] / a["seconds"] for a, r in zip(answers, ready, strict=False)]
            row = {
                "model": model,
                "recipe": recipe,
                "mode": mode,
                "together": count,
                "tokens_per_s": sum(rates),
            }
            row |= {"slowest": min(rates), "fastest": max(rates)} | load.means()
            rows.append(
                row | {"start_s": started, "start": ready[0]["start"], "last_start": ready[-1]["start"]}
            )
        return rows
    finally:
        for process in processes:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def _answer(process: subprocess.Popen[str]) -> Row:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            table: Row = json.loads(line)
            return table
    raise RuntimeError(f"a process ended with exit code {process.wait()}; its messages are above")


@click.command(help=__doc__)
@click.option("--model", default="lab_20m", show_default=True, help="A preset, or `llama-50m`.")
@click.option("--recipe", "recipes", multiple=True, default=("mxfp4_h16:bounded",), show_default=True)
@click.option("--mode", default="captured", show_default=True, help="As `bench_gpu_step` has it.")
@click.option("--together", "counts", multiple=True, type=click.IntRange(1), default=(1, 4, 8))
@click.option("--seconds", default=4.0, show_default=True, type=click.FloatRange(0.1))
@click.option("--backend", default="triton", show_default=True)
@click.option(
    "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the numbers here."
)
@click.option("--worker", "only", hidden=True)
def main(
    model: str, recipes: tuple[str, ...], mode: str, counts: tuple[int, ...], seconds: float, backend: str,
    out: Path | None, only: str | None,
) -> None:  # fmt: skip
    if only:
        worker(model, only, mode, backend)
        return
    rows = []
    table = Table("model", "recipe", "together", "tokens/s", "slowest", "busy %", "GiB", "W", "start s")
    for recipe in recipes:
        try:
            found = measured(model, recipe, mode, backend, list(counts), seconds)
        except RuntimeError as err:
            raise click.ClickException(f"{recipe}: {err}") from err
        rows += found
        for row in found:
            print(f"{model} {recipe} x {row['together']}: {row['tokens_per_s']:,.0f} tokens/s", flush=True)
            shares = (("busy", 1), ("mib", 1024), ("watt", 1))
            load = (f"{row[key] / unit:.0f}" if key in row else "" for key, unit in shares)
            table.add_row(
                model, recipe, str(row["together"]), f"{row['tokens_per_s']:,.0f}", f"{row['slowest']:,.0f}", *load,
                f"{row['start_s']:.1f}",
            )  # fmt: skip
        print(json.dumps({"start": found[0]["start"], "last": found[0]["last_start"]}), flush=True)
    Console(width=140).print(table)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
