"""Runs of a ladder in a process of their own, one after another: `python -m mxref_training.lab.worker`.

Each line of standard input is a JSON value. The first one has the backend and the tokens, which all runs share. Each
further line is a run and the path of its log. Standard output carries the progress of the run, one call of
`ProgressSink` per line, and `["finished"]` after each run. Everything else is printed to the log of the run.

The process ends with code 0 at the end of its input. It also ends when a run has no result: with code 130 after an
interrupt, and 2 after an error, whose last line says what failed. So nothing that went wrong can affect another run.
"""

# Imports are in the functions, so that an interrupt while PyTorch loads ends like any other.
from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxref.backend import Backend
    from mxref_training.data.corpus import TokenCorpus

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
FINISHED = "finished"
"""What standard output says when a run has its result."""


class PipeProgress:
    """Sends a run's progress to the process that started this one; a `ProgressSink`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._open = True

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        """Send the call."""
        self._send("start", label, step, steps, step_tokens)

    def step(self, step: int, loss: float | None) -> None:
        """Send the call."""
        self._send("step", step, loss)

    def validation(self, step: int, loss: float) -> None:
        """Send the call."""
        self._send("validation", step, loss)

    def note(self, text: str) -> None:
        """Send the call, and write the text to the log."""
        print(text, file=sys.stderr, flush=True)
        self._send("note", text)

    def stop(self) -> None:
        """Do nothing: the other process notices the end of the run."""

    def finished(self) -> None:
        """Tell the other process that the run has its result."""
        self._send(FINISHED)

    def _send(self, *call: Any) -> None:
        data = (json.dumps(call) + "\n").encode()
        try:
            while data and self._open:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            # The ladder's process has ended, perhaps killed. Nothing else would stop this process, so it stops itself.
            self._open = False
            print("the process that runs the ladder is gone", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Shared:
    """What all runs of a process share."""

    backend: Backend
    corpus: TokenCorpus


def main() -> int:
    """Train the runs that standard input gives, and return the exit code."""
    channel = os.dup(1)
    os.dup2(2, 1)
    progress = PipeProgress(channel)
    try:
        return _serve(progress)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as err:
        from mxref.raised import raised_text

        traceback.print_exc()
        print(f"error: {raised_text(err)}", file=sys.stderr)
        return EXIT_ERROR


def _serve(progress: PipeProgress) -> int:
    lines = _lines()
    first = next(lines, None)  # before the imports, so that the other process need not wait for them
    if first is None:
        return 0
    from mxref.errors import MxrefError
    from mxref_training.interrupt import Interrupted

    try:
        shared = _shared(first)
        for table in lines:
            _log_to(table["log"])
            _train(table["run"], shared, progress)
            progress.finished()
    except Interrupted as err:
        print(f"interrupted: {err}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MxrefError as err:
        print(f"error: {err}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _lines() -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in sys.stdin)


def _log_to(path: str) -> None:
    """Have everything that this process and its libraries print from now on appended to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _shared(table: dict[str, Any]) -> Shared:
    from mxref.discovery import get_backend
    from mxref_training.data.handed_over import from_table

    return Shared(get_backend(table["backend"]), from_table(table["corpus"]))


def _train(table: dict[str, Any], shared: Shared, progress: PipeProgress) -> None:
    from mxref_training.errors import ConfigError
    from mxref_training.lab.arm import ArmRun
    from mxref_training.lab.fingerprint import DESIGN, changes, fingerprint
    from mxref_training.lab.fresh import train_afresh
    from mxref_training.lab.result_file import plain
    from mxref_training.lab.runner import train_arm
    from mxref_training.sources import code_digest

    run = ArmRun.from_table(table)
    key = plain(fingerprint(run.config, run.recipe, shared.backend, shared.corpus, code_digest()))
    if key != {part: value for part, value in run.key.items() if part != DESIGN}:
        # The sources may have been edited since the ladder began; then its arms cannot be compared.
        changed = ", ".join(changes(run.key, key))
        raise ConfigError(f"{changed} while the ladder ran: give the same command again")
    train_arm(run, train_afresh, shared.backend, shared.corpus, progress)


if __name__ == "__main__":
    sys.exit(main())
