"""What shows a run while it goes on: a tracker, a profile, telemetry, a shadow. None of them changes a bit of it.

The log files of the run are complete without them. A tracker gets the same numbers under flat names.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

import mxref_torch
from mxref.raised import raised_text
from mxref.roles import GemmRole
from mxref.tomlio import to_table
from mxref_training.durable import explained, make_folder, replace_text, sync, temporary
from mxref_training.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mxref_training.open_run import OpenRun

TRACKERS = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
"""Trackers that `--track` takes, with the module that each is used by."""
_PROJECT = "mxref"
_ROWS = 25
"""Operators in the table of a profile."""


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
            ends = int(first), int(last if colon else first)
        except ValueError:
            raise ConfigError(f"--profile {text}: expected FIRST:LAST, as in 10:13, or one step") from None
        return cls(*ends)


@dataclass(frozen=True)
class Observation:
    """What shows a run besides its logs."""

    track: str = ""
    """The tracker that gets the numbers, one of `TRACKERS`."""
    profile: Window | None = None
    """Steps to profile."""

    def require(self, steps: int) -> None:
        """Raise ConfigError where a package is missing, or the profiled steps are none of the run's `steps`."""
        if self.track:
            _module(self.track)
        if self.profile and self.profile.first > steps:
            raise ConfigError(f"--profile {self.profile}: the run has {steps} steps")


UNOBSERVED = Observation()


class _Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, step: int) -> None:
        # Events after `step` are of a process that died, and are written again.
        self._writer = _module("tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """Trackio or W&B, which share an interface: init, log and finish."""

    def __init__(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        self._api = _module(name)
        given: dict[str, Any] = {"project": _PROJECT, "name": folder.name, "config": dict(about)}
        if name == "wandb":  # it finds a run by its id, and keeps files of its own
            given |= {"id": _identifier(folder), "dir": str(folder)}
        self._api.init(**given, resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._api.log(dict(values), step=step)

    def close(self) -> None:
        self._api.finish()


class Tracking:
    """Passes the numbers of a run to its tracker, if it has one, as long as that works."""

    def __init__(self, name: str, run: OpenRun) -> None:
        """Start the tracker of this name, if it is not empty, behind the step of a run.

        A tracker that does not start is an error at step 0, where nothing is lost. A run that goes on, which may be
        one that a launcher started again at night, is trained without it.

        Raises:
            ConfigError: the tracker is not installed, or does not start at step 0.
        """
        folder, step, note = run.folder.path, run.step, run.sink.note
        self._name, self._note = name, note
        self._tracker: _Tracker | None = None
        if not name:
            return
        try:
            if name == "tensorboard":
                self._tracker = _TensorBoard(folder, step)
            else:
                about = {"config": to_table(run.config), "recipe": to_table(run.recipe)}
                self._tracker = _Hosted(name, folder, about | {"digest": run.recipe.digest})
        except ConfigError:
            raise
        except Exception as err:  # whatever its package raises, for example without a network
            if not step:
                login = "log in by `wandb login`, set WANDB_MODE=offline, or " if name == "wandb" else ""
                raise ConfigError(
                    f"--track {name} did not start, and nothing has been trained: {raised_text(err)}; "
                    f"{login}leave --track {name} out"
                ) from err
            note(
                f"--track {name} did not start, and gets no numbers; the run's own logs have them: {raised_text(err)}"
            )

    def log(self, *lines: Mapping[str, Any]) -> None:
        """Pass on the numbers of lines of the logs, all of one step."""
        values = {name: value for line in lines for name, value in flat(line).items()}
        if self._tracker is None or not values:
            return
        step = lines[0]["step"]
        try:
            self._tracker.log(step, values)
        except Exception as err:  # as above
            self._tracker = None
            self._note(f"{self._name} failed at step {step}, and gets no more numbers: {raised_text(err)}")

    def close(self) -> None:
        """Have the tracker write what is left; the run's own files are complete if that fails."""
        if self._tracker is not None:
            with suppress(Exception):
                self._tracker.close()


def _module(name: str) -> Any:
    if name not in TRACKERS:
        raise ConfigError(f"--track {name}: no such tracker; take one of {', '.join(TRACKERS)}")
    try:
        return importlib.import_module(TRACKERS[name])
    except ImportError as err:
        raise ConfigError(
            f"--track {name} needs the package {name}, which is not installed: pip install {name}"
        ) from err


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


class Profiler:
    """Profiles a window of steps of a run by torch.profiler: a trace, and a table of the longest operators."""

    def __init__(self, window: Window | None, run: OpenRun) -> None:
        self._window, self._folder = window, run.folder.path / "profile"
        self._device, self._note = run.device, run.sink.note
        if window and window.last <= run.step:
            self._note(f"nothing to profile: the run is at step {run.step} already, beyond {window}")
        self._active: Any = None
        self._began = self._ended = 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the block, which takes a step, if the step lies in the window; write the files after the last one."""
        window = self._window
        if self._active is None and window and window.first <= step <= window.last:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._active = torch.profiler.profile(activities=kinds)
            self._active.start()
            self._began = step
        yield
        self._ended = step
        if window and step >= window.last:
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
        by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        with explained(CheckpointError, f"write {trace}", "free some space, or train without --profile"):
            make_folder(self._folder)
            profile.export_chrome_trace(str(temporary(trace)))
            sync(temporary(trace))
            temporary(trace).replace(trace)
            rows = profile.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=60)
            replace_text(table, f"{rows}\n")
        self._note(f"profile of steps {self._began} to {self._ended}: {trace}")


@contextmanager
def measuring(
    model: torch.nn.Module, context: mxref_torch.StepContext, rows: list[Mapping[str, Any]]
) -> Iterator[None]:
    """Measure the forward and backward passes of the block: add its GEMMs and the rows of telemetry to `rows`."""
    before = Counter(context.census)
    with mxref_torch.telemetry(model) as seen:
        yield
    ran = context.census - before
    rows += [
        {
            "census": {
                mxref_torch.operators.gemm_text(gemm): ran[gemm]
                for gemm in mxref_torch.operators.in_order(ran)
            }
        },
        *seen.rows,
    ]


@contextmanager
def shadowed(run: OpenRun, model: torch.nn.Module) -> Iterator[None]:
    """Have the reference repeat the share `run.shadow` of the block's operations; say what was compared.

    Raises:
        ConfigError: the recipe has no operations to compare.
        ShadowError: an answer of the backend differs.
    """
    if not (share := run.config.run.shadow):
        yield
        return
    if all(own.kind(role) != "block" for own in run.recipe.treatments() for role in GemmRole):
        raise ConfigError(
            f"run.shadow = {share}, but the recipe has no block format to compare: set run.shadow = 0"
        )
    file = run.folder.path / "shadow.npz"
    with mxref_torch.shadow(model, share, file=file, seed=run.config.run.seed) as watch:
        yield
        run.sink.note(str(watch))
