"""The process that simulates a machine. It compiles each case in a child process, so a crash affects one case."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

from mxref_triton.aot import absent, amdgcn, sass
from mxref_triton.aot.table import CompiledCase, cases

_COUNT = {"hip": amdgcn.count, "cuda": sass.count}
_TEXT = {"hip": ("amdgcn", "ttgir"), "cuda": ("ptx",)}
_LIMIT = 300.0
"""Seconds that a case may take to compile, before its process is killed."""


def compile_case(case: CompiledCase, machine: absent.Machine, keep: Path | None) -> list[dict[str, Any]]:
    """Return one record per kernel that a case launches, in order of launch, each once."""
    with absent.launches() as seen:
        case.launch()
    records: list[dict[str, Any]] = []
    names: set[str] = set()
    for launch in seen:
        metadata = launch.compiled.metadata
        if metadata.hash in names:
            continue
        names.add(metadata.hash)
        counts = _COUNT[machine.target.backend](launch.compiled, metadata.num_warps)
        per_thread = case.elements / (launch.programs * metadata.num_warps * machine.warp)
        records.append(
            {
                "case": case.name,
                "target": machine.name,
                "kernel": launch.kernel,
                "programs": launch.programs,
                "warps": metadata.num_warps,
                "elements_per_thread": per_thread,
                **asdict(counts),
            }
        )
        if keep is not None:
            for kind in _TEXT[machine.target.backend]:
                text = launch.compiled.asm[kind]
                (keep / f"{case.name}.{launch.kernel}.{machine.name}.{kind}").write_text(text)
    return records


def _child(case: CompiledCase, machine: absent.Machine, keep: Path | None, pipe: Connection) -> None:
    try:
        pipe.send({"records": compile_case(case, machine, keep)})
    except Exception as err:  # the process ends here: the parent reports any exception
        pipe.send({"error": f"{type(err).__name__}: {err}", "traceback": traceback.format_exc()})


def results(
    todo: list[CompiledCase], machine: absent.Machine, jobs: int, keep: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield `records` or `error` of each case as it is done, each compiled by a child of its own.

    Args:
        todo: the cases.
        machine: which this process became.
        jobs: children at a time.
        keep: folder that gets the machine code; None for none.
    """
    fork = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[CompiledCase, ForkProcess, float]] = {}
    todo = todo[::-1]
    while todo or running:
        while todo and len(running) < jobs:
            case = todo.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(case, machine, keep, theirs))
            process.start()
            theirs.close()
            running[ours] = case, process, time.monotonic()
        # A compiler pass that does not end is reported as an error of the case.
        now = time.monotonic()
        late = [
            p for p, (_, process, start) in running.items() if now - start > _LIMIT and process.is_alive()
        ]
        for pipe in late:
            running[pipe][1].kill()
        ready = wait(list(running), timeout=1.0)
        for pipe in [p for p in running if p in ready]:
            case, process, start = running.pop(pipe)
            seconds = time.monotonic() - start
            try:
                answer = pipe.recv()
            except EOFError:
                process.join()
                answer = {
                    "error": f"the compiler ended with exit code {process.exitcode} after {seconds:.0f} s"
                }
            process.join()
            yield {"case": case.name, "target": machine.name, "seconds": seconds, **answer}


def _prepare_compiler(machine: absent.Machine) -> None:
    """Do once, before forking, what compiling otherwise does in every child.

    Triton hashes its library of several 100 MB for the keys of its cache. Triton also imports modules with the first
    kernel, and torch with the first product of matrices without data.
    """
    triton_key()
    make_backend(machine.target).hash()
    for name in ("triton.compiler.code_generator", "torch.fx.experimental.symbolic_shapes"):
        import_module(name)


def main(target: str, arguments: str) -> None:
    """Compile the named cases for the machine that this process simulates; write a line of JSON per case to stdout."""
    request = json.loads(arguments)
    machine = absent.MACHINES[target]
    table = cases()
    keep = Path(request["keep"]) if request["keep"] else None
    _prepare_compiler(machine)
    for result in results([table[name] for name in request["cases"]], machine, request["jobs"], keep):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
