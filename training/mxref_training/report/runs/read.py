"""Read what a run has written, for its report; nothing is changed in its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError, MxrefError
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.tomlio import read_toml
from mxref_training.log_files import read_lines
from mxref_training.run_folder import read_record

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The content of a run's files."""

    name: str
    """A short name that no other run of the report has."""
    record: dict[str, Any]
    """`run.json`."""
    config: dict[str, Any]
    """`config.toml`."""
    recipe: Recipe
    steps: list[Line]
    """Lines of `metrics.jsonl` about training steps."""
    evaluations: list[Line]
    """Lines of `metrics.jsonl` about evaluations."""
    timing: list[Line]
    operands: list[Line]
    """Lines of `telemetry.jsonl` about operands."""
    gradients: list[Line]
    """Lines of `telemetry.jsonl` about gradients of weights."""

    @property
    def measured(self) -> list[int]:
        """The steps with telemetry of operands."""
        return sorted({line["step"] for line in self.operands})

    @property
    def latest(self) -> list[Line]:
        """The lines of `telemetry.jsonl` of the last measured step, but for the census."""
        lines = (*self.operands, *self.gradients)
        return [line for line in lines if line["step"] == self.measured[-1]]

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        run = self.config["run"]
        return int(run["batch"] * run["seq_len"])


def is_run(folder: Path) -> bool:
    """Return whether a folder has the file that makes it a run."""
    return (folder / "run.json").exists()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs of some folders, each with a name of its own.

    Raises:
        FileFormatError: a folder that is no run, a run of another version, or a damaged file.
    """
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart, equal paths numbered."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(len(each) for each in parts)
    for length in range(1, longest + 1):
        names = [os.sep.join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _read(folder: Path, name: str) -> Run:
    record = _record(folder)
    try:
        config, recipe = read_toml(folder / "config.toml"), load_recipe(folder / "recipe.toml")
    except (MxrefError, OSError, ValueError) as err:
        raise FileFormatError(
            f"{folder}: config.toml and recipe.toml are not both readable ({err}); the command that trained the run "
            "writes them again"
        ) from err
    metrics, timing, telemetry = (
        list(read_lines(folder / f"{name}.jsonl")) for name in ("metrics", "timing", "telemetry")
    )
    return Run(
        name,
        record,
        config,
        recipe,
        steps=[line for line in metrics if "lr" in line],
        evaluations=[line for line in metrics if "val_loss" in line],
        timing=[line for line in timing if "seconds" in line],
        operands=[line for line in telemetry if "snr" in line],
        gradients=[line for line in telemetry if "cosine" in line],
    )


def _record(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileFormatError(
            f"{folder} is not a folder; name the --out of an `mxref train` or `mxref ablate`"
        )
    record = read_record(folder)
    if record is None:
        raise FileFormatError(
            f"{folder} is no run: it has no run.json, nor the results.json of a ladder; "
            "name the --out of an `mxref train` or `mxref ablate`"
        )
    return record
