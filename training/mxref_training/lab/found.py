"""A result file that was found in a folder, and the first difference between two files of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref_training.errors import ConfigError
from mxref_training.lab import result_file
from mxref_training.lab.arm import DESIGN, run_name
from mxref_training.lab.branches import branch_place
from mxref_training.lab.result_file import Record


@dataclass(frozen=True)
class Found:
    """A result file."""

    path: Path
    table: dict[str, Any]

    @property
    def record(self) -> Record:
        """The result."""
        record: Record = self.table["record"]
        return record

    @property
    def name(self) -> str:
        """Name of the run's directory, made of its arm and repetition; the `name` in the file is not used as a path."""
        return run_name(self.record["arm"], self.record["pair"])

    @property
    def design(self) -> dict[str, Any] | None:
        """Where the run starts and ends; None if it is a whole one."""
        design: dict[str, Any] | None = self.table["key"].get(DESIGN)
        return design

    @property
    def is_placed(self) -> bool:
        """Whether repetition and step, which its directory is named by, are integers from 0 on."""
        step = self.design["step"] if self.design else 0
        return all(type(number) is int and number >= 0 for number in (self.record.get("pair"), step))

    @property
    def place(self) -> Path:
        """The directory of the run in that of its ladder."""
        arms = Path("arms", self.name)
        return branch_place(self.design["step"]) / arms if self.design else arms

    @property
    def shared(self) -> dict[str, Any]:
        """The part of the fingerprint that all runs of a ladder share, or all branches."""
        key: dict[str, Any] = self.table["key"]
        run = {name: value for name, value in key["run"].items() if name not in ("seed", "data_seed")}
        rest = {name: part for name, part in key.items() if name not in ("recipe", "phases", DESIGN)}
        return rest | {
            "run": run,
            DESIGN: {k: v for k, v in (self.design or {}).items() if k not in ("step", "trunk")},
        }

    @property
    def is_repeatable(self) -> bool:
        """Whether the run gives equal bits on every machine of a kind: no kernel is chosen by its time."""
        run = self.table["config"]["run"]
        return bool(run["deterministic"] or run["compile"] == "none")

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return str(self.table["key"]["backend"]["name"])

    @property
    def device(self) -> str:
        """The device that computed it."""
        return str(self.record["environment"].get("hardware", {}).get("device", "unknown"))


def results_in(folder: Path, *, required: bool = True) -> Iterator[Found]:
    """Yield the results of a folder, at any depth.

    Raises:
        FileFormatError: one is damaged, or was edited.
        ConfigError: there is none, and `required`.
    """
    paths = sorted(path for path in folder.rglob(result_file.NAME) if "superseded" not in path.parts)
    if required and not paths:
        raise ConfigError(
            f"{folder} holds no {result_file.NAME}: name the --out of 'mxref ablate', or a folder with such directories"
        )
    for path in paths:
        table = result_file.read(path)
        found = table and Found(path, table)
        # A trunk is kept for its checkpoints, and a calibration for its times: neither is compared.
        if found and found.design is not None and "step" not in found.design:
            continue
        if not found or not found.is_placed:
            raise FileFormatError(
                f"{path} is damaged, was edited, or is of another version of mxref: copy it again, or delete it"
            )
        yield found


def parting(one: Found, other: Found) -> str:
    """Return where two results of one run begin to differ; empty if they are equal."""
    if one.table["metrics"] == other.table["metrics"] and _curves(one) == _curves(other):
        return ""
    for (what, a), (_, b) in zip(_curves(one).items(), _curves(other).items(), strict=True):
        for mine, theirs in zip_longest(a, b):
            if mine != theirs:
                step = (mine or theirs)[0]
                values = " and ".join("none" if x is None else repr(x[1]) for x in (mine, theirs))
                return f"the {what} losses part at step {step}: {values}"
    return "the logs differ, though the curves do not: steps between the points of the curves, or their gradient norms"


def _curves(result: Found) -> dict[str, list[Any]]:
    return {"validation": result.record["losses"], "training": result.record["train_curve"]}


def where(result: Found) -> str:
    """Return the device and the version of PyTorch that a result was computed with."""
    facts = result.record["environment"]
    versions = facts.get("versions", {})
    return f"{result.device}, torch {versions.get('torch', 'unknown')}"
