"""The computed step at each level of the assumptions, and its deviation from published results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from projection.assumptions import Assumptions, Level, Machine
from projection.counted import KernelCounts, case_name, one
from projection.published import CARDS, PUBLISHED, Published
from projection.roofline import kernel_time
from projection.step import (
    ARMS,
    OUTSIDE_LAYERS,
    Arm,
    Pass,
    Times,
    Workload,
    step_times,
    total,
)


@dataclass(frozen=True)
class Projection:
    """A workload with all that its time is computed from."""

    work: Workload
    records: Sequence[KernelCounts]
    machine: Machine
    assumed: Assumptions
    native: bool = True

    def times(self, arm: Arm) -> Times:
        """Return the seconds of a step by pass and part."""
        return step_times(self.work, arm, self.records, self.machine, self.assumed, self.native)

    def quantities(self) -> dict[str, float]:
        """Return what is compared with published numbers, by name."""
        times = {arm.key: self.times(arm) for arm in ARMS}
        backward = {key: total(t, when=Pass.BACKWARD, leave=OUTSIDE_LAYERS) for key, t in times.items()}
        kernel = {
            rotation: kernel_time(
                one(self.records, case_name("x", rotation, self.native)), 1e9, self.machine, self.assumed
            ).seconds
            for rotation in ("h16", "h32")
        }
        return {
            **{f"{key} samples/s": self.work.batch / total(t) for key, t in times.items()},
            "h16 over fp8": total(times["fp8"]) / total(times["h16"]),
            "h16 over bf16": total(times["bf16"]) / total(times["h16"]),
            "mx64 over fp8": total(times["fp8"]) / total(times["mx64"]),
            "mx64 over h16": total(times["h16"]) / total(times["mx64"]),
            "h16 over h32": kernel["h32"] / kernel["h16"],
            "backward over fp8": backward["fp8"] / backward["h16"],
            "backward over bf16": backward["bf16"] / backward["h16"],
        }

    def at(self, level: Level) -> Projection:
        """Return the projection with all assumptions at a level."""
        return replace(self, assumed=self.assumed.at(level))

    def ends(self) -> dict[str, tuple[Projection, Projection]]:
        """Return the projection with each assumption alone at its low and at its high end; the conversions are one."""
        names = [f.name for f in fields(Assumptions)]
        found = {
            name: (
                replace(self, assumed=self.assumed.varied(name, Level.LOW)),
                replace(self, assumed=self.assumed.varied(name, Level.HIGH)),
            )
            for name in names
        }
        return found | {"native conversions": (replace(self, native=False), self)}


@dataclass(frozen=True)
class Comparison:
    """A published number beside the computed one."""

    published: Published
    low: float
    """Smallest over all assumptions at one level, and each alone at an end."""
    nominal: float
    high: float
    """Largest, likewise."""

    @property
    def deviation(self) -> float:
        """How far the nominal number lies above the published one, as a fraction of it."""
        return self.nominal / self.published.value - 1

    @property
    def verdict(self) -> str:
        """What the bounds say about the published number."""
        value = self.published.value
        if self.published.bound == ">":
            return "holds" if self.low > value else "holds nominally" if self.nominal > value else "missed"
        return "within the bounds" if self.low <= value <= self.high else "outside the bounds"


def compare(projection: Projection) -> list[Comparison]:
    """Return every published number beside the computed one; samples/s only on as many cards."""
    same = projection.work.cards == CARDS
    return [
        Comparison(p, *bounds(projection, p.key))
        for p in PUBLISHED
        if same or not p.key.endswith("samples/s")
    ]


def bounds(projection: Projection, quantity: str) -> tuple[float, float, float]:
    """Return a quantity's least, nominal and largest value: all assumptions at one level, or each alone at an end."""
    variants = [projection.at(level) for level in Level]
    variants += [end for pair in projection.ends().values() for end in pair]
    computed = [variant.quantities()[quantity] for variant in variants]
    return min(computed), projection.quantities()[quantity], max(computed)


@dataclass(frozen=True)
class Sensitivity:
    """The effect of one assumption on the result."""

    name: str
    rate: tuple[float, float]
    """Samples/s of MXFP4 + H16 at its low and high end."""
    ratio: tuple[float, float]
    """Step throughput of MXFP4 + H16 over FP8, likewise."""

    @property
    def spread(self) -> float:
        """Largest relative change of either."""
        return max(max(pair) / min(pair) for pair in (self.rate, self.ratio))


def sensitivities(projection: Projection) -> list[Sensitivity]:
    """Return what each assumption does, the others nominal, the strongest first."""
    found = []
    for name, pair in projection.ends().items():
        low, high = (p.quantities() for p in pair)
        rate = low["h16 samples/s"], high["h16 samples/s"]
        found.append(Sensitivity(name, rate, (low["h16 over fp8"], high["h16 over fp8"])))
    return sorted(found, key=lambda s: s.spread, reverse=True)
