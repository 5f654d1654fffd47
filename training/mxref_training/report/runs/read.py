"""Read what a run has written, for its report; nothing is changed in its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError, MxrefError
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.tomlio import read_toml
from mxref_training.run_folder import FORMAT

Line = dict[str, Any]

SLOTS = [(role.value, operand.tensor) for role in GemmRole for operand in OPERANDS[role]]
"""Role and tensor of the six operands, in the order of all tables and figures."""


@dataclass(frozen=True)
class Run:
    """The content of a run's files."""

    name: str
    """A short name that no other run of the report has."""
    path: Path
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
    operands: list[Line] = field(default_factory=list)
    """Lines of `telemetry.jsonl` about operands."""
    gradients: list[Line] = field(default_factory=list)
    """Lines of `telemetry.jsonl` about gradients of weights."""
    censuses: list[Line] = field(default_factory=list)
    """Lines of `telemetry.jsonl` that count GEMMs."""

    @property
    def measured(self) -> list[int]:
        """The steps with telemetry of operands."""
        return sorted({line["step"] for line in self.operands})

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
        _require(config, "config.toml", "run", "model", "optim")
    except (MxrefError, OSError, ValueError) as err:
        raise FileFormatError(
            f"{folder}: config.toml and recipe.toml are not both readable ({err}); the command that trained the run "
            "writes them again"
        ) from err
    metrics = _lines(folder / "metrics.jsonl", _check_metrics)
    telemetry = _lines(folder / "telemetry.jsonl", _check_telemetry)
    return Run(
        name,
        folder,
        record,
        config,
        recipe,
        steps=[line for line in metrics if "lr" in line],
        evaluations=[line for line in metrics if "val_loss" in line],
        timing=[line for line in _lines(folder / "timing.jsonl", _check_step) if "seconds" in line],
        operands=[line for line in telemetry if "snr" in line],
        gradients=[line for line in telemetry if "cosine" in line],
        censuses=[line for line in telemetry if "census" in line],
    )


def _record(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not folder.is_dir():
        raise FileFormatError(
            f"{folder} is not a folder; name the --out of an `mxref train` or `mxref ablate`"
        )
    if not path.exists():
        raise FileFormatError(
            f"{folder} is no run: it has no run.json, nor the results.json of a ladder; "
            "name the --out of an `mxref train` or `mxref ablate`"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = str(found["format"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise FileFormatError(f"{path} is damaged ({err}); restore it, or train the run again") from err
    if version != FORMAT:
        raise FileFormatError(
            f"{path} was written by another version of mxref: its format is {version}, and this version reads "
            f"{FORMAT}; make the report with that version"
        )
    record: dict[str, Any] = found
    return record


def _lines(path: Path, check: Callable[[Line], None]) -> list[Line]:
    """Return the lines of a log; the last one is left out if it is still being written."""
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            break
        try:
            line = json.loads(text)
            check(line)
        except (ValueError, KeyError, TypeError) as err:
            raise FileFormatError(
                f"{path}, line {number} is damaged ({err}); restore the file, or give `mxref train` the same command "
                "again, which refuses or repairs it"
            ) from err
        found.append(line)
    return found


def _check_step(line: Line) -> None:
    _require(line, "the line", "step")
    _number(line, "step")
    for key in ("seconds", "eval_seconds", "tokens_per_second"):
        _number(line, key)


def _check_metrics(line: Line) -> None:
    _check_step(line)
    _require(line, "the line", "tokens", *(("loss",) if "lr" in line else ("val_loss",)))
    for key in ("tokens", "loss", "lr", "grad_norm", "val_loss", "val_perplexity"):
        _number(line, key)


OPERAND_NUMBERS = (
    "elements", "nonzero", "clipped", "zeroed", "snr", "bias", "scale_min", "scale_max", "scale_low", "scale_high",
    "nonfinite",
)  # fmt: skip
"""Keys of a line about an operand, after those that name it."""
GRADIENT_NUMBERS = ("cosine", "norm_ratio")
"""The same of a line about a gradient."""


def _check_telemetry(line: Line) -> None:
    _check_step(line)
    if "census" in line:
        if not isinstance(line["census"], dict):
            raise ValueError("census is no table")
        return
    numbers = GRADIENT_NUMBERS if "cosine" in line else OPERAND_NUMBERS
    _require(line, "the line", "layer", "role", "operand", "format", *numbers)
    for key in numbers:
        _number(line, key)
    for key in ("layer", "format"):
        if not isinstance(line[key], str):
            raise ValueError(f"{key} is no text")
    if (line["role"], line["operand"]) not in (*SLOTS, ("wgrad", "dw")):
        raise ValueError(f"{line['role']}.{line['operand']} is no operand")


def _require(table: Mapping[str, Any], what: str, *keys: str) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{what} is no table")
    for key in keys:
        if key not in table:
            raise ValueError(f"{what} has no {key}")


def _number(line: Line, key: str) -> None:
    value = line.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{key} is no number")
