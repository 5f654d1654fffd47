"""How long runs take: recipes of one cost class take the same time, which finished runs and calibrations have shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref.recipe import OperandSpec, Recipe
from mxref.recipe_plan import RecipePlan
from mxref.roles import GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.result_file import Record, read_json, write_json
from mxref_training.treatment import gemm_words

FILE = "costs.json"
_FORMAT = "mxref-costs/1"
_SPARE = 1.1
"""Factor by which a run may take longer than the slowest one of its class."""


def cost_class(recipe: Recipe) -> str:
    """Return a name that recipes share if a step takes them the same time.

    Formats, transforms, stochastic rounding, prescale and the GEMM's profile count, and which layers and steps have
    which. The scale rule, the size of the transform and the policy of its signs do not.
    """
    if not isinstance(recipe, RecipePlan):
        return _class(recipe)
    layers = (
        f"{','.join(rule.match or ())}[{rule.blocks or ''}]: {_class(rule.recipe)}" for rule in recipe.layers
    )
    phases = (f"{phase.start} to {phase.until}: {cost_class(phase.recipe)}" for phase in recipe.schedule)
    return " | ".join([_class(recipe.own), *layers, *phases])


def _class(recipe: Recipe) -> str:
    roles = (
        f"{role.value} {' x '.join(_operand(spec) for spec in recipe.operands(role))}"
        + "".join(f" {words}" for words in gemm_words(recipe, role))
        for role in GemmRole
    )
    block = any(recipe.kind(role) == "block" for role in GemmRole)
    return "; ".join([*roles, *([recipe.gemm.value] if block else []), *recipe.keep_bf16])


def _operand(spec: OperandSpec) -> str:
    signs = spec.signs is not SignPolicy.NONE
    marks = (
        (bool(spec.hadamard), "rotated"), (signs, "signed"), (spec.rounding.value == "sr", "sr"),
        (spec.prescale, "prescaled"), (spec.block.value != "1x32", spec.block.value),
    )  # fmt: skip
    return "+".join([spec.format.title, *(name for said, name in marks if said)])


@dataclass(frozen=True)
class Rate:
    """The result of a calibration, in seconds."""

    start: float
    """From the start of a run to its first step, and from its last step to its result."""
    step: float
    evaluation: float

    def of(self, run: ArmRun) -> float:
        """Return the seconds of a whole run."""
        first, last = run.span
        evaluations = math.ceil((last - first) / run.config.run.eval_every)
        return self.start + (last - first) * self.step + evaluations * self.evaluation


@dataclass
class Costs:
    """Seconds of runs by cost class."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the slowest whole run of each class so far, from its start to its result."""
    rates: dict[str, Rate] = field(default_factory=dict)
    """Rates of the calibrated classes."""

    def learn_records(self, found: Iterable[tuple[ArmRun, Record]]) -> None:
        """Record the times of steps and evaluations that finished runs report, without their start."""
        for run, record in found:
            self.learn(run, (record.get("seconds") or 0.0) + (record.get("evaluation_seconds") or 0.0))

    def learn(self, run: ArmRun, seconds: float) -> None:
        """Record the seconds that a run took."""
        if seconds > 0:
            name = _name(run)
            self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))

    def known(self, run: ArmRun) -> bool:
        """Return whether a run of this class was timed."""
        return _name(run) in self.seconds or self._rate(run) is not None

    def whole(self, run: ArmRun) -> float | None:
        """Return the seconds of a whole run; None if no run has been timed.

        Runs that have finished count before a calibration. A class that was never timed counts as the slowest.
        """
        finished = self.seconds.get(_name(run))
        rate = self._rate(run)
        if finished is not None:
            return finished
        if rate is not None:
            return rate.of(run)
        return max([*self.seconds.values(), *(rate.of(run) for rate in self.rates.values())], default=None)

    def _rate(self, run: ArmRun) -> Rate | None:
        """Return the rate of a run, whose phases count by their steps; None if it was not calibrated.

        A calibration of the run itself ends in its first phase. A later one takes the rate of its own class, if there
        is one, else that of the first.
        """
        own = self.rates.get(cost_class(run.recipe))
        steps = run.config.run.steps
        spans = run.recipe.spans(steps)
        own = own or self.rates.get(cost_class(spans[0].recipe))
        if own is None or len(spans) == 1:
            return own
        first, *later = [(span.end or steps) - span.first for span in spans]
        rates = [self.rates.get(cost_class(span.recipe), own) for span in spans[1:]]
        step = (own.step * first + sum(r.step * n for r, n in zip(rates, later, strict=True))) / steps
        return replace(own, step=step)

    def expected(self, run: ArmRun) -> float | None:
        """Return the seconds that the rest of a run may take; None if no run has been timed."""
        whole = self.whole(run)
        return None if whole is None else _SPARE * whole * (1 - run.progress())

    def save(self, out: Path, facts: dict[str, Any]) -> None:
        """Write the rates of a calibration into a ladder's directory; `facts` say where they were measured."""
        rates = {name: asdict(rate) for name, rate in self.rates.items()}
        write_json(out / FILE, {"format": _FORMAT, **facts, "rates": rates})

    @classmethod
    def load(cls, out: Path) -> tuple[Costs, dict[str, Any]]:
        """Return the rates of a ladder's directory, and where they were measured; FileFormatError if it is damaged."""
        path = out / FILE
        if not path.exists():
            return cls(), {}
        table = read_json(path) or {}
        try:
            if table["format"] != _FORMAT:
                raise ValueError(f"its format is {table['format']}")
            rates = {name: Rate(**rate) for name, rate in table["rates"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise FileFormatError(
                f"{path} is damaged ({err!r}): delete it; --calibrate makes it again"
            ) from err
        return cls(rates=rates), {key: table[key] for key in table if key not in ("format", "rates")}


def _name(run: ArmRun) -> str:
    """Return the class of whole runs: a branch takes fewer steps."""
    first, last = run.span
    return cost_class(run.recipe) + (
        f" | {last - first} of {run.config.run.steps} steps" if run.stops else ""
    )
