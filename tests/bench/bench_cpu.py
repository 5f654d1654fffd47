"""Time a CPU backend: its operations against copying the same array, its GEMMs against PyTorch, its peers.

    PYTHONPATH=tests python -m bench.bench_cpu [--quick] [--record]

No number is printed before the bits agree. Each number of threads gets its own process, since thread pools are made
once. In it, an operation and what it is compared with run in turns. A ratio compares the fastest runs: 1 is as fast as
the other, 2 is twice as fast.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

import mxref
from bench import machine
from bench.render import keep, show
from mxref.errors import MxrefError

ROOT = Path(__file__).parents[2]
SHORT = 0.1
"""Seconds a row below which nothing is repeated: such a run is a trial of the benchmark itself."""
SLOWER_GEMM_SIZE = 2048
"""Largest GEMM of the slower paths, which take seconds."""
COMPARED_SIZE = 4096
"""Size at which peers and the slower paths are timed, or the largest one below."""


def _numbers(_context: Any, _parameter: Any, text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text) or "0" in text.split(","):
        raise click.BadParameter(f"{text!r} is not a list of positive numbers like 1024,2048")
    return [int(n) for n in text.split(",")]


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One thread, small matrices, short turns: under a minute.")
@click.option(
    "--sizes", default="1024,2048,4096,8192", callback=_numbers, help="Rows and columns of matrices."
)
@click.option("--gemm-sizes", default="1024,2048,4096", callback=_numbers, help="M, N and K of GEMMs.")
@click.option("--threads", default="1,2", callback=_numbers, help="Numbers of threads.")
@click.option("--seconds", default=0.8, show_default=True, help="Time for each row.")
@click.option("--peers/--no-peers", default=True, help="Time other packages too.")
@click.option("--formats", is_flag=True, help="NVFP4, MXFP6 and rows of MXFP4, 4096 x 4096, no GEMMs.")
@click.option("--backend", "name", default="numba", show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), default=ROOT / "runs/bench_cpu.json")
@click.option(
    "--record", is_flag=True, help="Keep the numbers in docs/records, for docs/explanation/performance.rst."
)
@click.option("--worker", hidden=True, type=click.Path(path_type=Path))
def main(
    quick: bool, sizes: list[int], gemm_sizes: list[int], threads: list[int], seconds: float, peers: bool,
    formats: bool, name: str, out: Path, record: bool, worker: Path | None,
) -> None:  # fmt: skip
    if quick:
        sizes, gemm_sizes, threads, seconds, peers = [1024, 2048], [1024], [1], 0.2, False
    if formats:
        sizes, gemm_sizes, threads, peers = [COMPARED_SIZE], [], [1], False
    if worker:
        try:
            found = list(_work(name, peers, sizes, gemm_sizes, threads[0], seconds, formats))
        except MxrefError as err:
            raise click.ClickException(str(err)) from None
        worker.write_text(json.dumps(found), encoding="utf-8")
        return
    start = time.perf_counter()
    here = machine.describe()
    if not here["quiet"]:
        click.echo(
            f"warning: other work takes {here['busy_share']:.0%} of this machine (load average "
            f"{here['load_average'][0]}); these numbers are worth little",
            err=True,
        )
    results: dict[str, Any] = {
        "machine": here,
        "backend": name,
        "quick": quick,
        "formats": formats,
        "absent_peers": machine.ABSENT_PEERS,
        "rows": [],
    }
    for count in threads:
        arguments = [f"--sizes={_list(sizes)}", f"--seconds={seconds}"]
        arguments += [f"--gemm-sizes={_list(gemm_sizes)}"] * bool(gemm_sizes)
        arguments += [
            f"--threads={count}",
            f"--backend={name}",
            "--peers" if peers and count == 1 else "--no-peers",
            *["--formats"] * formats,
        ]
        results["rows"] += _in_process(count, arguments)
        click.echo(f"{count} thread{'s'[: count != 1]}: {time.perf_counter() - start:.0f} s", err=True)
    results["seconds"] = round(time.perf_counter() - start)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)
    click.echo(f"{out}, after {results['seconds']} s")
    if record:
        click.echo(keep(results))


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _in_process(threads: int, arguments: list[str]) -> list[dict[str, Any]]:
    """Return the rows that a process with so many threads measures."""
    environment = os.environ | {variable: str(threads) for variable in machine.THREAD_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        done = subprocess.run(
            [sys.executable, "-m", "bench.bench_cpu", *arguments, f"--worker={file}"], env=environment
        )
        if done.returncode:
            raise SystemExit(done.returncode)
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return rows


def _work(
    name: str,
    peers: bool,
    sizes: list[int],
    gemm_sizes: list[int],
    threads: int,
    seconds: float,
    formats: bool,
) -> Iterator[dict[str, Any]]:
    from bench import operations, products

    backend = mxref.get_backend(name)
    compared = max((size for size in sizes if size <= COMPARED_SIZE), default=sizes[0])
    backends = [backend, *_slower_paths(backend)]
    try:
        for b in backends:
            whole = b is backend
            for size in sizes if whole else [compared] * (threads == 1):
                yield from _on_path(b, "operation", operations.measure(b, size, seconds, threads, formats))
            for size in gemm_sizes:
                if whole or (threads == 1 and size <= SLOWER_GEMM_SIZE):
                    rows = products.measure(b, size, seconds, threads)
                    yield from _on_path(b, "gemm", (row for row in rows if whole or row["backend"] == b.name))
    except operations.BitsDiffer as err:
        raise click.ClickException(str(err)) from None
    if peers:
        from bench import packages

        yield from _tagged("peer", packages.measure(backend, compared, seconds, threads))
    if threads == 1 and not formats:
        yield from _calls(name, backend, processes=5 if seconds >= SHORT else 1)


def _slower_paths(backend: mxref.Backend) -> list[mxref.Backend]:
    """Return the Numba backend on each path that is slower than its own; nothing for another backend."""
    if backend.name != "numba":
        return []
    from mxref_numba import NumbaBackend
    from mxref_numba.path import available

    assert isinstance(backend, NumbaBackend)
    paths = available()
    return [NumbaBackend(path) for path in paths[paths.index(backend.path) + 1 :]]


def _calls(name: str, backend: mxref.Backend, processes: int) -> Iterator[dict[str, Any]]:
    from bench import calls

    for label, microseconds in calls.overheads(backend).items():
        yield {"kind": "overhead", "operation": label, "microseconds": microseconds}
    if name == "numba":
        for label, milliseconds in calls.first_calls(name, processes).items():
            yield {"kind": "first call", "operation": label, "milliseconds": milliseconds}


def _on_path(backend: mxref.Backend, kind: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    path = getattr(backend, "path", None)
    return ({**row, "path": str(path)} if path else row for row in _tagged(kind, rows))


def _tagged(kind: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return ({"kind": kind, **row} for row in rows)


if __name__ == "__main__":
    main()
