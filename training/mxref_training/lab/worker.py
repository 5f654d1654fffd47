"""One run of a ladder: `python -m mxref_training.lab.worker TASK`, alone or on each rank of a torchrun.

TASK is a JSON file with a list: the name of the backend, `TokenCorpus.to_table` and `ArmRun.to_table`. Standard output
carries the progress, one call of `ProgressSink` a line. Everything else is printed to standard error, which is the log
of the run.

The exit code is 0 if the run has its result, 130 after an interrupt, and 2 after an error, whose last line says what
failed.
"""

# Imports are in the functions, so that an interrupt while PyTorch loads ends like any other.
from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from datetime import UTC, datetime
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxref_training.distributed.ranks import Ranks

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
HEADER = "--- "
"""How the first line of a process in the log begins."""


class PipeProgress:
    """Sends a run's progress to the process that started this one; a `ProgressSink`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._open = True

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

    start = partialmethod(_send, "start")
    step = partialmethod(_send, "step")
    validation = partialmethod(_send, "validation")

    def note(self, text: str) -> None:
        """Send the call, and write the text to the log."""
        print(text, file=sys.stderr, flush=True)
        self._send("note", text)

    def stop(self) -> None:
        """Do nothing: the other process notices the end of the run."""


def main(task: str) -> int:
    """Train the run that a file describes, and return the exit code."""
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        from mxref_training.distributed.connect import connected, started_ranks

        with connected(started_ranks()) as ranks:
            backend, tokens, run = json.loads(Path(task).read_text())
            train_run(backend, tokens, run, PipeProgress(channel), ranks)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as err:
        from mxref.errors import MxrefError
        from mxref.raised import raised_text
        from mxref_training.interrupt import Interrupted

        if isinstance(err, Interrupted):
            print(f"interrupted: {err}", file=sys.stderr)
            return EXIT_INTERRUPTED
        if not isinstance(err, MxrefError):
            traceback.print_exc()
        print(f"error: {err if isinstance(err, MxrefError) else raised_text(err)}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def train_run(
    backend: str, tokens: dict[str, Any], table: dict[str, Any], progress: PipeProgress, ranks: Ranks
) -> None:
    """Train a run, unless it is no longer the one that the ladder began with: then its arms cannot be compared."""
    from mxref.discovery import get_backend
    from mxref_training.data.corpus import TokenCorpus
    from mxref_training.errors import ConfigError
    from mxref_training.lab.arm import DESIGN, ArmRun, changes, fingerprint, train_arm
    from mxref_training.sources import code_digest
    from mxref_training.trainer import train

    run = ArmRun.from_table(table)
    if ranks.first:
        began = datetime.now(UTC).isoformat(timespec="seconds")
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        threads = f"threads {run.config.run.threads}{f', GPU {gpus}' if gpus else ''}"
        print(f"{HEADER}{began}: process {os.getpid()}, {threads}", file=sys.stderr, flush=True)
    chosen, corpus = get_backend(backend), TokenCorpus.from_table(tokens)
    key = fingerprint(run.config, run.recipe, chosen, corpus, code_digest(), ranks.world)
    if key != {part: value for part, value in run.key.items() if part != DESIGN}:
        # The sources may have been edited since the ladder began.
        changed = ", ".join(changes(run.key, key))
        raise ConfigError(f"{changed} while the ladder ran: give the same command again")
    train_arm(run, train, chosen, corpus, progress, ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
