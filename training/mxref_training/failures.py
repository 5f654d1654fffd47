"""Exceptions that are none of mxref's: one line for the user, the traceback of an unexpected one in the log."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref_torch.operators import NOTE
from mxref_training.distributed.failing import one_error
from mxref_training.errors import ConfigError, RunError
from mxref_training.forecast import less_memory

if TYPE_CHECKING:
    from mxref_training.open_run import OpenRun

_NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
_NO_MEMORY = "DefaultCPUAllocator"
"""PyTorch's allocator on the CPU, which has no error class of its own."""


@contextmanager
def run_errors(run: OpenRun) -> Iterator[None]:
    """Stop all ranks of a run if the block raises on one, with RunError if that is no `MxrefError`; log its traceback.

    `SystemExit` is such an exception too: a backend must not end the program. `KeyboardInterrupt` passes.

    Raises:
        RunError: names the exception, the operation, backend and layer that it came from, and what to do next.
        ConfigError: as of `known_errors`.
    """
    try:
        with one_error(run.ranks), known_errors(less_memory(run.config)):
            yield
    except MxrefError:
        raise
    except (Exception, SystemExit) as err:
        steps, saved = run.config.run.steps, run.folder.store.latest()
        when = f"after {run.step} of {steps} steps" if run.training else "before its first step"
        notes = [note.removeprefix(NOTE) for note in getattr(err, "__notes__", ()) if note.startswith(NOTE)]
        what = ": ".join([*filter(None, [", ".join(notes[:2])]), raised_text(err)])
        way_on = f"goes on from step {saved}" if saved else "starts it again"
        raise RunError(
            f"the run stopped {when}: {what}; {_written(err, run.folder.log)}; the same command {way_on}"
        ) from err


@contextmanager
def known_errors(way_out: str) -> Iterator[None]:
    """Turn two errors of PyTorch into ConfigError: an allocation that fails, and an operation that is not repeatable.

    Args:
        way_out: what to do where memory is short.
    """
    try:
        yield
    except MxrefError:
        raise
    except (MemoryError, RuntimeError) as err:
        said = str(err).partition("\n")[0]
        if found := _NOT_DETERMINISTIC.match(said):
            raise ConfigError(
                f"PyTorch {torch.__version__} has no deterministic kernel for {found[1]}, which training requires: "
                "choose another run.device, or another version of PyTorch"
            ) from err
        if isinstance(err, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(err):
            raise ConfigError(f"out of memory ({said or 'no more memory'}): {way_out}") from err
        raise


def _written(err: BaseException, log: Path) -> str:
    """Add the traceback to the log; return where it is."""
    now, text = datetime.now(UTC).isoformat(timespec="seconds"), "".join(traceback.format_exception(err))
    try:
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"--- {now}\n{text}")
    except OSError as problem:
        return f"its traceback is lost, because {log} cannot be written ({problem.strerror})"
    return f"its traceback is in {log}"
