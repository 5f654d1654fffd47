"""SIGINT, SIGTERM and SIGHUP as a request to stop after the step in progress, of one rank or all."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from mxref_training.distributed.ranks import Ranks
from mxref_training.errors import AgreedStop


class Interrupted(AgreedStop):
    """A run stopped on request, after it wrote a checkpoint."""


_AT_ONCE: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
}  # fmt: skip
"""Handlers of the second signal if signals were ignored before; shells ignore them for commands started with `&`."""
TOGETHER = 2.0
"""Seconds after the first signal in which others repeat it. A service manager signals every process of a job, and
`torchrun` passes its own signal on, so that a rank gets two.
"""


class StopRequest:
    """Takes the first of these signals as a request to stop; one that comes `TOGETHER` seconds later acts at once.

    SIGHUP, of a terminal that was closed, stays ignored if it was, as under `nohup`.
    Python delivers signals only to the main thread. In any other thread this changes nothing.

    Attributes:
        signal: name of the received signal; empty if there was none.
    """

    def __init__(self) -> None:
        self.signal = ""
        self._asked = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _AT_ONCE:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._ask) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, ranks: Ranks) -> str:
        """Return the name of the signal that any rank received; empty if none did.

        On several ranks every rank calls this after a step, so that all stop after the same one.
        """
        if not ranks.several:
            return self.signal
        own = signal.Signals[self.signal].value if self.signal else 0
        number = max(int(row[0]) for row in ranks.gather_numbers([own]))
        return signal.Signals(number).name if number else ""

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._asked = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._asked >= TOGETHER:
            for own, handler in self._before.items():
                signal.signal(own, _AT_ONCE[own] if handler is signal.SIG_IGN else handler)
            signal.raise_signal(number)
