"""What shows a run while it goes on: a tracker, a profile, telemetry, a shadow. None of them changes a bit of it.

The log files of the run are complete without them. A tracker gets the same numbers under flat names.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
_ROWS = 25
"""Operators in the table of a profile."""


class Window(NamedTuple):
    """The steps that are profiled, counted from 1 as in `metrics.jsonl`; both ends are included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, text: str) -> Window:
        """Return the window of a text such as 10:13, or of one step, as in 10; ConfigError for anything else."""
        first, colon, last = text.partition(":")
        try:
            window = cls(int(first), int(last if colon else first))
        except ValueError:
            raise ConfigError(f"--profile {text}: expected FIRST:LAST, as in 10:13, or one step") from None
        if not 1 <= window.first <= window.last:
            raise ConfigError(
                f"--profile {text}: steps count from 1, and the first must not be above the last, as in 10:13"
            )
        return window


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


def _module(name: str) -> Any:
    if name not in TRACKERS:
        raise ConfigError(f"--track {name}: no such tracker; take one of {', '.join(TRACKERS)}")
    try:
        return importlib.import_module(TRACKERS[name])
    except ImportError as err:
        raise ConfigError(
            f"--track {name} needs the package {name}, which is not installed: pip install {name}"
        ) from err


def _started(name: str, run: OpenRun) -> tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]:
    """Start a tracker behind the step of a run; return what takes the numbers of a step, and what ends it."""
    api, folder = _module(name), run.folder.path
    if name == "tensorboard":
        # Events after the run's step are of a process that died, and are written again.
        writer = api.SummaryWriter(str(folder / "tensorboard"), purge_step=run.step + 1)

        def log(step: int, values: dict[str, float]) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        return log, writer.close
    about = {"config": to_table(run.config), "recipe": to_table(run.recipe), "digest": run.recipe.digest}
    given = {"project": "mxref", "name": folder.name, "config": about, "resume": "allow"}
    if name == "wandb":  # it finds a run by its id, and keeps files of its own
        given |= {"id": _identifier(folder), "dir": str(folder)}
    api.init(**given)
    return lambda step, values: api.log(values, step=step), api.finish


def _identifier(folder: Path) -> str:
    """Return a name that W&B finds the run by when it goes on: of the folder, without the signs that W&B refuses."""
    path = folder.resolve()
    with suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return re.sub(r"[^\w.-]", "-", str(path))[-120:]


class Tracking:
    """Passes the numbers of a run to its tracker, if it has one, as long as that works."""

    def __init__(self, name: str, run: OpenRun) -> None:
        """Start the tracker of this name, if it is not empty.

        A tracker that does not start is an error at step 0, where nothing is lost. A run that goes on, which may be
        one that a launcher started again at night, is trained without it.

        Raises:
            ConfigError: the tracker is not installed, or does not start at step 0.
        """
        self._name, self._note = name, run.sink.note
        self._tracker = None
        if not name:
            return
        try:
            self._tracker = _started(name, run)
        except ConfigError:
            raise
        except Exception as err:  # whatever its package raises, for example without a network
            if not run.step:
                login = "log in by `wandb login`, set WANDB_MODE=offline, or " if name == "wandb" else ""
                raise ConfigError(
                    f"--track {name} did not start, and nothing has been trained: {raised_text(err)}; "
                    f"{login}leave --track {name} out"
                ) from err
            self._note(
                f"--track {name} did not start, and gets no numbers; the run's own logs have them: {raised_text(err)}"
            )

    def log(self, *lines: Mapping[str, Any]) -> None:
        """Pass on the numbers of lines of the logs, all of one step."""
        values = {name: value for line in lines for name, value in flat(line).items()}
        if self._tracker is None or not values:
            return
        log, _ = self._tracker
        step = lines[0]["step"]
        try:
            log(step, values)
        except Exception as err:  # as above
            self._tracker = None
            self._note(f"{self._name} failed at step {step}, and gets no more numbers: {raised_text(err)}")

    def close(self) -> None:
        """Have the tracker write what is left; the run's own files are complete if that fails."""
        if self._tracker is not None:
            _, close = self._tracker
            with suppress(Exception):
                close()


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
    if "operand" in line:
        place = f"{line['role']}.{line['operand']}/{line['layer']}"
        return {f"telemetry/{key}/{place}": value for key, value in numbers.items()}
    return {
        ("val/" if key.startswith("val_") else "train/") + key.removeprefix("val_"): value
        for key, value in numbers.items()
    }


@contextmanager
def profiling(window: Window | None, run: OpenRun) -> Iterator[Callable[[], None]]:
    """Profile a window of the block's steps by torch.profiler: a trace, and a table of the longest operators.

    Yields:
        What to call after each step.

    Raises:
        CheckpointError: a file cannot be written.
    """
    begun, cuda = run.step, run.device.type == "cuda"
    if window and window.last <= begun:
        run.sink.note(f"nothing to profile: the run is at step {begun} already, beyond {window}")
    if window is None or window.last <= begun:
        yield lambda: None
        return

    def action(calls: int) -> torch.profiler.ProfilerAction:
        """Return what to do with the step that follows so many calls."""
        step = begun + calls + 1
        if not window.first <= step <= window.last:
            return torch.profiler.ProfilerAction.NONE
        last = step == window.last
        return torch.profiler.ProfilerAction.RECORD_AND_SAVE if last else torch.profiler.ProfilerAction.RECORD

    def write(profile: torch.profiler.profile) -> None:
        first, last = max(window.first, begun + 1), min(window.last, run.step)
        if last < first:
            return  # the first step of the window did not end
        trace = run.folder.path / "profile" / f"steps-{first}-{last}.json"
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        with explained(CheckpointError, f"write {trace}", "free some space, or train without --profile"):
            make_folder(trace.parent)
            profile.export_chrome_trace(str(temporary(trace)))
            sync(temporary(trace))
            temporary(trace).replace(trace)
            rows = profile.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=60)
            replace_text(trace.with_suffix(".txt"), f"{rows}\n")
        run.sink.note(f"profile of steps {first} to {last}: {trace}")

    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=kinds, schedule=action, on_trace_ready=write) as profile:
        yield profile.step


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
