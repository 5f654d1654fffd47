"""Experiment trackers that show a run while it goes on: TensorBoard, Trackio and W&B, each by its public interface.

The log files of the run are complete without them. A tracker gets the same numbers under flat names.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref_training.errors import ConfigError

TRACKERS = ("trackio", "wandb")
"""Packages that `--track` takes."""

_PROJECT = "mxref"
_WAYS_OUT = {"--track wandb": "log in by `wandb login`, set WANDB_MODE=offline, or "}
"""What else than leaving the tracker out helps where it does not start."""


class Tracker(ABC):
    """Takes the numbers of a run, step by step."""

    name: str
    """As messages call it."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step by their names."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left and end."""


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as err:
            raise _missing("--tensorboard", "tensorboard") from err
        # Events after `step` are of a process that died, and are written again.
        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write each number as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Hosted(Tracker):
    """Trackio or W&B, which share an interface: init, log and finish.

    Raises:
        ConfigError: an unknown tracker, or one that is not installed.
    """

    def __init__(self, package: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._api, self.name = _imported(package), package
        given: dict[str, Any] = {"project": _PROJECT, "name": folder.name, "config": dict(config)}
        if package == "wandb":  # it finds a run by its id, and keeps files of its own
            given |= {"id": _identifier(folder), "dir": str(folder)}
        self._api.init(**given, resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers."""
        self._api.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._api.finish()


def require_trackers(tensorboard: bool, track: str) -> None:
    """Raise ConfigError where a tracker is unknown or not installed, before anything is trained."""
    if tensorboard:
        try:
            importlib.import_module("torch.utils.tensorboard")
        except ImportError as err:
            raise _missing("--tensorboard", "tensorboard") from err
    if track:
        _imported(track)


def start_trackers(
    tensorboard: bool,
    track: str,
    folder: Path,
    config: Mapping[str, Any],
    step: int,
    note: Callable[[str], None],
) -> list[Tracker]:
    """Return the trackers that a run asks for, started behind a step.

    A tracker that does not start is an error at step 0, where nothing is lost. A run that goes on, which may be one
    that a launcher started again at night, is trained without it.

    Args:
        tensorboard: whether to write TensorBoard's event files.
        track: package of a hosted tracker; empty for none.
        folder: of the run.
        config: what a hosted tracker shows of the run.
        step: from which the run goes on.
        note: is told which tracker is left out.

    Raises:
        ConfigError: a tracker is not installed, or does not start at step 0.
    """
    asked: list[tuple[str, Callable[[], Tracker]]] = []
    if tensorboard:
        asked.append(("--tensorboard", lambda: TensorBoard(folder, step)))
    if track:
        asked.append((f"--track {track}", lambda: Hosted(track, folder, config)))
    started: list[Tracker] = []
    for option, start in asked:
        try:
            started.append(start())
        except MxrefError:
            raise
        except Exception as err:  # whatever its package raises, for example without a network
            if step:
                note(
                    f"{option} did not start, and gets no numbers; the run's own logs have them: {raised_text(err)}"
                )
                continue
            for tracker in started:
                with suppress(Exception):
                    tracker.close()
            raise ConfigError(
                f"{option} did not start, and nothing has been trained: {raised_text(err)}; "
                f"{_WAYS_OUT.get(option, '')}leave {option} out"
            ) from err
    return started


def _imported(package: str) -> Any:
    if package not in TRACKERS:
        raise ConfigError(f"--track {package}: no such tracker; take one of {', '.join(TRACKERS)}")
    try:
        return importlib.import_module(package)
    except ImportError as err:
        raise _missing(f"--track {package}", package) from err


def _missing(option: str, package: str) -> ConfigError:
    return ConfigError(f"{option} needs the package {package}, which is not installed: pip install {package}")


def _identifier(folder: Path) -> str:
    """Return a name that W&B finds the run by when it goes on: of the folder, without the signs that W&B refuses."""
    path = str(folder.resolve())
    with suppress(ValueError):
        path = str(folder.resolve().relative_to(Path.cwd()))
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in path)[-120:]


def flat(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of `metrics.jsonl` or `telemetry.jsonl` by the names that trackers show.

    Telemetry is named telemetry/NUMBER/ROLE.OPERAND/LAYER, so that one number of all layers stands together.
    """
    numbers = {
        key: float(value)
        for key, value in line.items()
        if key not in ("step", "elements", "nonzero")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    if "operand" not in line:
        return {
            ("val/" if key.startswith("val_") else "train/") + key.removeprefix("val_"): value
            for key, value in numbers.items()
        }
    place = f"{line['role']}.{line['operand']}/{line['layer']}"
    return {f"telemetry/{key}/{place}": value for key, value in numbers.items()}
