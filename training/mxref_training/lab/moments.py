"""The branch design: every recipe goes on from checkpoints of one run, on the same batches, for some updates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from mxref.tomlio import shown
from mxref_training.errors import ConfigError

_MOMENT = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


@dataclass(frozen=True)
class Branch:
    """The table `[branch]` of a ladder."""

    trunk: str = ""
    """Name of the arm that is trained up to the moments; empty: the reference."""
    moments: tuple[str, ...] = ("25%", "50%", "75%")
    """Steps, or shares of the steps of the run as in `25%`, at which all recipes branch off."""
    updates: int = 200
    """Optimizer steps that each branch takes."""
    eval_every: int = 0
    """Steps between evaluations of a branch; `updates` and the moments are multiples. 0: a quarter of `updates`."""
    seeds: int = 1
    """Trunks, each at other seeds."""
    anneal: bool = False
    """Lower the learning rate of every branch to 0, in a straight line over its updates."""

    def __post_init__(self) -> None:
        for name, least in (("updates", 1), ("eval_every", 0), ("seeds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"branch.{name} = {getattr(self, name)} is below {least}")
        if self.updates % self.interval:
            raise ConfigError(
                f"branch.updates = {self.updates} is not a multiple of branch.eval_every = {self.eval_every}, so the "
                "end of a branch would not be evaluated"
            )
        if not self.moments:
            raise ConfigError("branch.moments is empty: give steps or shares, as in 25%")

    @property
    def interval(self) -> int:
        """Steps between evaluations: without `eval_every` a quarter of the updates, or all where that is not whole."""
        return self.eval_every or (self.updates // 4 if self.updates % 4 == 0 else self.updates)

    def steps(self, steps: int) -> tuple[int, ...]:
        """Return the steps of the moments in a run of that many steps, ascending.

        Raises:
            ConfigError: a moment is no number or share, is not between two evaluations of a branch, has too few steps
                after it, or is named twice.
        """
        found = [self._step(text, steps) for text in self.moments]
        for text, step in zip(self.moments, found, strict=True):
            if not 1 <= step <= steps - self.updates:
                raise ConfigError(
                    f"branch.moments: {text} is step {step}, which is not from 1 to {steps - self.updates}: a branch "
                    f"takes {self.updates} of the {steps} steps"
                )
            if found.count(step) > 1:
                raise ConfigError(f"branch.moments names step {step} twice")
        return tuple(sorted(found))

    def _step(self, text: str, steps: int) -> int:
        found = _MOMENT.fullmatch(text.strip())
        if not found or (not found[2] and "." in found[1]):
            raise ConfigError(
                f"branch.moments: {shown(text)} is neither a step nor a share of the run, as in 500 or 25%"
            )
        if found[2]:
            return round(Fraction(found[1]) * steps / 100 / self.interval) * self.interval
        step = int(found[1])
        if step % self.interval:
            raise ConfigError(
                f"branch.moments: step {step} is not a multiple of {self.interval}, the steps between evaluations, so "
                "the end of a branch would not be evaluated"
            )
        return step
