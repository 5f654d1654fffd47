"""One run of a ladder in a process of its own: `python -m mxref_training.lab.worker NAME`, for the ladder.

Standard input gives the run as JSON; NAME only labels the process in a list of processes. Standard output carries the
run's progress, one call of `ProgressSink` per line. Everything else is printed to standard error, which is the run's
log. The exit code is 0 with a result, 130 after an interrupt, and 2 after an error, whose last line says what failed.
"""

# Imports are in the functions, so that an interrupt while PyTorch loads ends like any other.
from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


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
        """Do nothing: the other process notices the end of this one."""

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


def main() -> int:
    """Train the run that standard input gives, and return the exit code."""
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        return _train(json.load(sys.stdin), PipeProgress(channel))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as err:
        from mxref.raised import raised_text

        traceback.print_exc()
        print(f"error: {raised_text(err)}", file=sys.stderr)
        return EXIT_ERROR


def _train(table: dict[str, Any], progress: PipeProgress) -> int:
    from mxref.discovery import get_backend
    from mxref.errors import MxrefError
    from mxref_training.data.corpus import prepare_corpus
    from mxref_training.errors import ConfigError
    from mxref_training.lab.arm import ArmRun, plain, train_arm
    from mxref_training.lab.fingerprint import changes, code_digest, fingerprint
    from mxref_training.run.interrupt import Interrupted
    from mxref_training.run.loop import train

    try:
        run, backend = ArmRun.from_table(table["run"]), get_backend(table["backend"])
        corpus = prepare_corpus(run.config)
        key = plain(fingerprint(run.config, run.recipe, backend, corpus, code_digest()))
        if key != run.key:
            # The sources may have been edited since the ladder began; then its arms cannot be compared.
            changed = ", ".join(changes(run.key, key))
            raise ConfigError(f"{changed} while the ladder ran: give the same command again")
        train_arm(run, train, backend, corpus, progress)
    except Interrupted as err:
        print(f"interrupted: {err}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MxrefError as err:
        print(f"error: {err}", file=sys.stderr)
        return EXIT_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
