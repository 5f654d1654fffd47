"""The process that simulates a machine. It compiles cases in child processes, so a crash affects one case."""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

from aot import absent, amdgcn, sass
from aot.counts import Code
from aot.table import CompiledCase, cases

_COUNT = {"hip": amdgcn.count, "cuda": sass.count}
_CODE = {"hip": "amdgcn", "cuda": "cubin"}
_TEXT = {"hip": ("amdgcn", "ttgir"), "cuda": ("ptx",)}
_LIMIT = 300.0
"""Seconds that a case may take to compile, before its process is killed."""
_TOGETHER = 16
"""Cases that are counted at a time: the disassembler takes longer to start than to read the code of them all."""


def compile_case(
    case: CompiledCase, machine: absent.Machine, keep: Path | None
) -> list[tuple[dict[str, Any], Code]]:
    """Return a record and the machine code of each kernel that a case launches, in order of launch, each once."""
    with absent.launches() as seen:
        case.launch()
    out: list[tuple[dict[str, Any], Code]] = []
    names: set[str] = set()
    for launch in seen:
        metadata, asm = launch.compiled.metadata, launch.compiled.asm
        if metadata.hash in names:
            continue
        names.add(metadata.hash)
        record = {
            "case": case.name,
            "target": machine.name,
            "kernel": launch.kernel,
            "programs": launch.programs,
            "warps": metadata.num_warps,
            "elements_per_thread": case.elements / (launch.programs * metadata.num_warps * machine.warp),
        }
        code = asm[_CODE[machine.target.backend]]
        out.append((record, Code(code, int(metadata.shared), metadata.num_warps)))
        if keep is not None:
            for kind in _TEXT[machine.target.backend]:
                (keep / f"{case.name}.{launch.kernel}.{machine.name}.{kind}").write_text(asm[kind])
    return out


def _child(
    cases: list[CompiledCase],
    machine: absent.Machine,
    keep: Path | None,
    pipe: Connection,
    others: list[Connection],
) -> None:
    """Compile the cases whose numbers come, until the other end of the pipe is closed."""
    # Its copies of the parent's ends would keep the others from seeing that the parent closed them.
    for other in others:
        other.close()
    gc.disable()  # it would look through torch and Triton again and again, 5 % of the time
    while True:
        try:
            case = cases[pipe.recv()]
        except EOFError:
            return
        try:
            pipe.send({"compiled": compile_case(case, machine, keep)})
        except Exception as err:  # the parent reports any exception
            pipe.send({"error": f"{type(err).__name__}: {err}", "traceback": traceback.format_exc()})


@dataclass
class _Compiler:
    """A child, and what it compiles."""

    process: ForkProcess
    case: CompiledCase | None = None
    start: float = 0.0
    """Of the case, by the monotonic clock."""


def results(
    todo: list[CompiledCase], machine: absent.Machine, jobs: int, keep: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield `records` or `error` of each case, some cases at a time.

    A child that dies takes the case along that it compiles; another takes its place.

    Args:
        todo: the cases.
        machine: which this process became.
        jobs: children at a time.
        keep: folder that gets the machine code; None for none.
    """
    done: list[dict[str, Any]] = []
    for number, answer in enumerate(_compiled(todo, machine, jobs, keep), 1):
        done.append(answer)
        if len(done) == _TOGETHER or number == len(todo):
            yield from _counted(done, machine)
            done = []


def _counted(answers: list[dict[str, Any]], machine: absent.Machine) -> list[dict[str, Any]]:
    """Return answers with the counts of what was compiled in the records."""
    pairs = [answer.pop("compiled", []) for answer in answers]
    try:
        counts = iter(_COUNT[machine.target.backend]([code for made in pairs for _, code in made]))
    # Any exception is reported, as in the children: with another Triton the format of machine code may change.
    except Exception as err:
        if len(answers) > 1:  # one at a time: the error may be of one case
            alone = [answer | {"compiled": made} for answer, made in zip(answers, pairs, strict=True)]
            return [result for answer in alone for result in _counted([answer], machine)]
        failed = {"error": f"{type(err).__name__}: {err}", "traceback": traceback.format_exc()}
        return [answer if "error" in answer else answer | failed for answer in answers]
    return [
        answer
        if "error" in answer
        else answer | {"records": [record | asdict(next(counts)) for record, _ in made]}
        for answer, made in zip(answers, pairs, strict=True)
    ]


def _compiled(
    cases: list[CompiledCase], machine: absent.Machine, jobs: int, keep: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield `compiled` or `error` of each case as it is done."""
    fork = multiprocessing.get_context("fork")
    compilers: dict[Connection, _Compiler] = {}
    waiting = list(range(len(cases)))[::-1]
    try:
        while waiting or any(compiler.case for compiler in compilers.values()):
            while len(compilers) < min(jobs, len(waiting)):
                ours, theirs = fork.Pipe()
                process = fork.Process(target=_child, args=(cases, machine, keep, theirs, [ours, *compilers]))
                process.start()
                theirs.close()
                compilers[ours] = _Compiler(process)
            for pipe, compiler in list(compilers.items()):
                if waiting and compiler.case is None:
                    try:
                        pipe.send(waiting[-1])
                    except OSError:  # it died after its last answer
                        compiler.process.join()
                        del compilers[pipe]
                        continue
                    compiler.case, compiler.start = cases[waiting.pop()], time.monotonic()
            yield from _answers(compilers, machine)
    finally:
        for pipe in compilers:
            pipe.close()
        for compiler in compilers.values():
            compiler.process.join()


def _answers(compilers: dict[Connection, _Compiler], machine: absent.Machine) -> Iterator[dict[str, Any]]:
    """Wait a second for answers, yield those that came, and leave out the compilers that ended."""
    busy = {pipe: compiler for pipe, compiler in compilers.items() if compiler.case}
    ready = wait(list(busy), timeout=1.0)
    # A compiler pass that does not end is reported as an error of the case.
    for pipe, compiler in busy.items():
        if pipe not in ready and time.monotonic() - compiler.start > _LIMIT:
            compiler.process.kill()
    for pipe in [pipe for pipe in busy if pipe in ready]:
        compiler = busy[pipe]
        case, compiler.case = compiler.case, None
        assert case is not None
        seconds = time.monotonic() - compiler.start
        try:
            answer = pipe.recv()
        except (EOFError, OSError):  # OSError: in the middle of its answer, or before it read the number
            compiler.process.join()
            del compilers[pipe]
            answer = {
                "error": f"the compiler ended with exit code {compiler.process.exitcode} after {seconds:.0f} s"
            }
        yield {"case": case.name, "target": machine.name, "seconds": seconds, **answer}


def _prepare_compiler(machine: absent.Machine) -> None:
    """Do here, and not in every child, what compiling does once per process.

    Triton's library, of several 100 MB, is hashed: each key of its cache has the hash. And modules are imported that
    Triton imports with the first kernel, and torch with the first product of matrices without data.
    """
    triton_key()
    make_backend(machine.target).hash()
    for name in ("triton.compiler.code_generator", "torch.fx.experimental.symbolic_shapes"):
        import_module(name)


def main(target: str, arguments: str) -> None:
    """Compile the named cases for a machine that this process became; a line of JSON per case goes to stdout."""
    request = json.loads(arguments)
    machine = absent.MACHINES[target]
    table = cases()
    keep = Path(request["keep"]) if request["keep"] else None
    _prepare_compiler(machine)
    for result in results([table[name] for name in request["cases"]], machine, request["jobs"], keep):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
