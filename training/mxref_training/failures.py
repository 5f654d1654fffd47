"""Unexpected exceptions, most often a backend's: one line for the user, the traceback in the run's log."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref_torch.operators import PLACE
from mxref_training.errors import RunError


@contextmanager
def explained(log: Path, when: Callable[[], str], way_on: Callable[[], str]) -> Iterator[None]:
    """Have an exception of the block that is no `MxrefError` end in RunError, its traceback in a log.

    `SystemExit` is such an exception too: a backend must not end the program. `KeyboardInterrupt` passes.

    Args:
        log: a file, in a folder that exists.
        when: says how far the run was, as in `after 3 of 10 steps`.
        way_on: says what to do next.

    Raises:
        RunError: names the exception, and the operation, backend and layer that it came from.
    """
    try:
        yield
    except MxrefError:
        raise
    except (Exception, SystemExit) as err:
        raise RunError(f"the run stopped {when()}: {_what(err)}; {_written(err, log)}; {way_on()}") from err


def _what(err: BaseException) -> str:
    notes = [note.removeprefix(PLACE) for note in getattr(err, "__notes__", ()) if note.startswith(PLACE)]
    return ": ".join([*([", ".join(notes[:2])] if notes else []), raised_text(err)])


def _written(err: BaseException, log: Path) -> str:
    """Add the traceback to the log; return where it is."""
    text = (
        f"--- {datetime.now(UTC).isoformat(timespec='seconds')}\n{''.join(traceback.format_exception(err))}"
    )
    try:
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as problem:
        return f"its traceback is lost, because {log} cannot be written ({problem.strerror})"
    return f"its traceback is in {log}"
