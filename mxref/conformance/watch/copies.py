"""Copies of this process: a backend that forks must not let its copy return into the code that called it."""

from __future__ import annotations

import os
import select
from types import TracebackType
from typing import Self

_PATIENCE = 2000
"""Milliseconds for a copy to come back: it runs what this process ran after the fork."""


class Copies:
    """A context that ends a copy of this process which leaves it, and tells in `returned` that there was one.

    A copy that ends by itself, or lives on, does no harm and is not counted.
    """

    def __init__(self) -> None:
        self.returned = False

    def __enter__(self) -> Self:
        if not hasattr(os, "fork"):
            return self
        self._process = os.getpid()
        self._read, self._write = os.pipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not hasattr(os, "fork"):
            return
        if os.getpid() != self._process:
            os.write(self._write, b".")
            os._exit(0)
        # A copy holds the other end of the pipe until it ends: without one this reads the end at once.
        os.close(self._write)
        poll = select.poll()
        poll.register(self._read, select.POLLIN | select.POLLHUP)
        self.returned = bool(poll.poll(_PATIENCE)) and bool(os.read(self._read, 1))
        os.close(self._read)
