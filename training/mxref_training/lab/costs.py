"""How long runs take: recipes of one cost class take the same time, which finished runs and calibrations have shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mxref.recipe import OperandSpec, Recipe
from mxref.roles import GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.result_file import Record

_SPARE = 1.1
"""By how much a run may take longer than the slowest one of its class."""


def cost_class(recipe: Recipe) -> str:
    """Return a name that recipes share if a step takes them the same time.

    Formats, transforms, stochastic rounding, prescale and the GEMM's profile count. The scale rule, the size of the
    transform and the policy of its signs do not.
    """
    return " | ".join(sorted({_class(one) for one in recipe.treatments()}))


def _class(recipe: Recipe) -> str:
    roles = (
        f"{role.value} {' x '.join(_operand(spec) for spec in recipe.operands(role))}" for role in GemmRole
    )
    block = any(recipe.kind(role) == "block" for role in GemmRole)
    return "; ".join([*roles, *([recipe.gemm.value] if block else []), *recipe.keep_bf16])


def _operand(spec: OperandSpec) -> str:
    signs = spec.signs is not SignPolicy.NONE
    marks = (
        (bool(spec.hadamard), "rotated"), (signs, "signed"), (spec.rounding.value == "sr", "sr"),
        (spec.prescale, "prescaled"), (spec.block.value != "row", spec.block.value),
    )  # fmt: skip
    return "+".join([spec.format.title, *(name for said, name in marks if said)])


@dataclass
class Costs:
    """Seconds of whole runs by cost class."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of the slowest run of each class so far, from its start to its result."""

    def learn_records(self, found: Iterable[tuple[ArmRun, Record]]) -> None:
        """Take note of what finished runs say of themselves: their steps and evaluations, without their start."""
        for run, record in found:
            self.learn(run, (record.get("seconds") or 0.0) + (record.get("evaluation_seconds") or 0.0))

    def learn(self, run: ArmRun, seconds: float) -> None:
        """Take note of the seconds that a run took."""
        if seconds <= 0:
            return
        name = self._name(run)
        self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))

    def expected(self, run: ArmRun) -> float | None:
        """Return the seconds that the rest of a run may take; None if no run has been timed.

        A class that was never timed counts as the slowest one that was.
        """
        if not self.seconds:
            return None
        whole = self.seconds.get(self._name(run), max(self.seconds.values()))
        return _SPARE * whole * (1 - run.progress())

    @staticmethod
    def _name(run: ArmRun) -> str:
        first, last = run.span
        return cost_class(run.recipe) + (
            f" | {last - first} of {run.config.run.steps} steps" if run.stops else ""
        )
