"""A trace of some steps by torch.profiler, and a table of the operators that took longest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxref_training.durable import explained, make_folder, replace_text, sync, temporary
from mxref_training.errors import CheckpointError, ConfigError

_ROWS = 25
"""Operators in the table."""


@dataclass(frozen=True)
class Window:
    """The steps that are profiled, counted from 1 as in `metrics.jsonl`; both ends are included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ConfigError(
                f"--profile {self}: steps count from 1, and the first must not be above the last, as in 10:13"
            )

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, text: str) -> Window:
        """Return the window of a text such as 10:13, or of one step, as in 10; ConfigError for anything else."""
        first, colon, last = text.partition(":")
        try:
            return cls(int(first), int(last if colon else first))
        except ValueError as err:
            if isinstance(err, ConfigError):
                raise
            raise ConfigError(f"--profile {text}: expected FIRST:LAST, as in 10:13, or one step") from None


class Profiler:
    """Profiles a window of steps of a run into its folder `profile`."""

    def __init__(
        self, window: Window, folder: Path, device: torch.device, note: Callable[[str], None]
    ) -> None:
        self._window, self._folder, self._note = window, folder / "profile", note
        self._device = device
        self._active: Any = None
        self._began = self._ended = 0

    def begin(self, step: int) -> None:
        """Start to record where the window begins, or where the run goes on inside it."""
        if self._active is None and self._window.first <= step <= self._window.last:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._active = torch.profiler.profile(activities=kinds)
            self._active.start()
            self._began = step

    def end(self, step: int) -> None:
        """Write the trace after the window's last step."""
        self._ended = step
        if step >= self._window.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if anything was and is not written yet.

        Raises:
            CheckpointError: a file cannot be written.
        """
        if self._active is None:
            return
        profile, self._active = self._active, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile.stop()
        if self._ended < self._began:
            return  # the first step of the window did not end
        name = f"steps-{self._began}-{self._ended}"
        trace, table = self._folder / f"{name}.json", self._folder / f"{name}.txt"
        with explained(CheckpointError, f"write {trace}", "free some space, or train without --profile"):
            make_folder(self._folder)
            profile.export_chrome_trace(str(temporary(trace)))
            sync(temporary(trace))
            temporary(trace).replace(trace)
            replace_text(table, self._table(profile) + "\n")
        self._note(f"profile of steps {self._began} to {self._ended}: {trace}")

    def _table(self, profile: Any) -> str:
        by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        text: str = profile.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=60)
        return text
