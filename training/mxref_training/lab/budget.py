"""The time that a queue of runs may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mxref_training.lab.arm import ArmRun

_TO_STOP = 10.0  # seconds in which a run ends its step and saves a checkpoint


@dataclass
class Budget:
    """A limit of time: a run that would not end in time is not started. Unlimited by default.

    A run whose cost nobody knows is started.
    """

    deadline: float | None = None
    """The end of the budget, on the clock `time.monotonic`."""
    expected: Callable[[ArmRun], float | None] = lambda run: None
    """Seconds that a run will take; None if nothing is known."""
    learn: Callable[[ArmRun, float], None] = lambda run, seconds: None
    """Receives the seconds that a run took."""
    clock: Callable[[], float] = field(default=time.monotonic)

    @classmethod
    def of_minutes(
        cls,
        minutes: float | None,
        began: float,
        expected: Callable[[ArmRun], float | None],
        learn: Callable[[ArmRun, float], None],
    ) -> Budget:
        """Return the budget of a command that began at a time of the clock; None sets no limit."""
        return cls(None if minutes is None else began + 60 * minutes - _TO_STOP, expected, learn)

    def is_spent(self) -> bool:
        """Return whether the runs have to stop now."""
        return self.deadline is not None and self.clock() >= self.deadline

    def allows(self, run: ArmRun) -> bool:
        """Return whether a run would end in time."""
        if self.deadline is None:
            return True
        seconds = self.expected(run)
        return not self.is_spent() and (seconds is None or self.clock() + seconds <= self.deadline)
