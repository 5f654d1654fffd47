"""The outcome of a conformance run: failures, results by clause and the whole report, also as text.

`report` writes it as JSON and JUnit XML. Other programs read both, so their keys stay as they are.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from numpy.typing import NDArray

from mxref.errors import ConformanceError
from mxref.formats import BLOCK_FORMATS
from mxref.printable import printable

COUNTS = ("passed", "failed", "skipped", "compared")
"""What is counted of each clause."""

_FEW, _PER_LINE = 8, 6
_SURE = 0.95

NOT_ASKED = "not asked any more"
"""Why a check was skipped after too many that ended their process or took too long."""


class Level(StrEnum):
    """How much is checked: both cover every clause and capability, `full` every exponent and combination."""

    QUICK = "quick"
    FULL = "full"


class Judgement(ABC):
    """The outcome of a check; true if everything was right."""

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether everything was right."""

    def __bool__(self) -> bool:
        return self.ok

    def require(self) -> None:
        """Raise ConformanceError, whose message is this as text, unless everything was right."""
        if not self.ok:
            raise ConformanceError(str(self))


@dataclass(frozen=True)
class Failure:
    """A request that a backend answers wrong, shrunk to the smallest one that is still wrong."""

    clause: str
    check: str
    message: str
    """What is wrong, in one line."""
    request: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Input bits as hex words, by operand."""
    expected: str = ""
    got: str = ""
    differing: tuple[int, ...] = ()
    """Positions of the elements that differ."""
    command: str | None = None
    """A command that prints the steps to the expected answer."""
    array: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    """The shrunk input of a quantization, block axis last."""
    file_command: str | None = None
    """The same command for tiles, which need a file; FILE stands for the place of `array`."""
    lost: bool = False
    """Whether the backend ended the process of the check, or took too long."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: how many blocks, values or results were compared, and what was wrong."""

    compared: int
    failure: Failure | None = None
    misuse: Failure | None = None
    """A wrong use of memory by the call, whatever its answer was."""
    unasked: str | None = None
    """Why the backend was not asked, None where it was."""
    calls: int = 0
    """Calls of the backend that were answered."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What was wrong: the answer, the use of memory, or both."""
        return tuple(failure for failure in (self.failure, self.misuse) if failure)


@dataclass
class ClauseResult:
    """The result of the checks of one clause."""

    clause: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    compared: int = 0
    calls: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Each capability that was not declared, or `NOT_ASKED`, and how many checks were skipped for it."""
    failures: list[Failure] = field(default_factory=list)
    """The first failure, or the first that ended its process or took too long."""

    @property
    def outcome(self) -> str:
        """`failed`, `passed`, or `skipped` where nothing was declared."""
        if self.failed:
            return "failed"
        return "passed" if self.passed else "skipped"


@dataclass(frozen=True)
class Report(Judgement):
    """The result of a conformance run."""

    backend: str
    """Its name, with control codes spelled out."""
    level: Level
    seed: int
    ops: tuple[str, ...]
    clauses: tuple[ClauseResult, ...]
    """In the order of `CLAUSES`: causes first."""
    seconds: float
    formats: tuple[str, ...] = tuple(BLOCK_FORMATS)
    """Names of the block formats that were asked about."""

    def __post_init__(self) -> None:
        # Spelled out here, before lines are measured and wrapped, and because XML cannot hold control codes.
        object.__setattr__(self, "backend", printable(str(self.backend)))

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return not self.failing and any(c.passed for c in self.clauses)

    def __str__(self) -> str:
        """Return the verdict, the clauses that failed, and the first failure of each."""
        return report_text(self)

    @property
    def failing(self) -> tuple[str, ...]:
        """The clauses that failed: those with a check that ended its process or took too long, then causes first."""
        return tuple(c.clause for c in self._failed)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures, in the order of `failing`."""
        return tuple(f for c in self._failed for f in c.failures)

    @property
    def _failed(self) -> list[ClauseResult]:
        failed = (c for c in self.clauses if c.failed)
        return sorted(failed, key=lambda c: not any(f.lost for f in c.failures))

    def total(self, name: str) -> int:
        """Return the sum of `passed`, `failed`, `skipped`, `compared` or `calls` over all clauses."""
        return sum(getattr(c, name) for c in self.clauses)

    @property
    def seen_fault(self) -> int:
        """The largest n for which a fault in one of n calls, at random, would have failed with 95 % probability."""
        calls = self.total("calls")
        return int(1 / (1 - (1 - _SURE) ** (1 / calls))) if calls else 0


def report_text(report: Report) -> str:
    """Return a report as text: the verdict, the clauses that failed, and the first failure of each."""
    lines = [
        f"{report.backend} {verdict(report)} ({report.level.value}, seed {report.seed}): {totals(report)}"
    ]
    if report.failing:
        lines.append(f"broken, likely causes first: {', '.join(report.failing)}")
    elif report.ok and report.seen_fault:
        lines.append(certainty(report))
    return printable_lines("\n\n".join(["\n".join(lines), *map(failure_text, report.failures)]))


def verdict(report: Report) -> str:
    """Return the outcome of a report as part of a sentence."""
    if report.ok:
        return "conforms"
    return "does not conform" if report.total("failed") else "declares nothing that was asked for"


def totals(report: Report) -> str:
    """Return the counts of a report as part of a sentence."""
    passed, failed, skipped, compared = map(report.total, COUNTS)
    unasked = sum(c.reasons.get(NOT_ASKED, 0) for c in report.clauses)
    found = f"{passed:,} checks passed, {failed:,} failed, {skipped - unasked:,} skipped as not declared"
    found += f", {unasked:,} {NOT_ASKED}; " if unasked else "; "
    return found + f"{compared:,} results compared in {report.seconds:.1f} s"


def certainty(report: Report) -> str:
    """Return as a sentence how rare a fault can be that a run without failures has missed."""
    return (
        f"in {report.total('calls'):,} calls, a fault in 1 of {report.seen_fault:,} calls at random would have shown "
        f"with {_SURE:.0%} probability"
    )


def printable_lines(text: str) -> str:
    """Return lines with the control codes within them escaped."""
    return "\n".join(map(printable, text.split("\n")))


def failure_text(f: Failure) -> str:
    """Return a failure as lines: clause and check, what differs, the request, inputs, both answers, the command."""
    lines = [f"{f.clause}: {f.check}", f"  {f.message}"]
    if f.request:
        lines.append("  asked     " + ", ".join(f"{k} {v}" for k, v in f.request.items()))
    for name, words in f.inputs.items():
        lines += [f"  {name if i == 0 else '':<9} {row}" for i, row in enumerate(_rows(words))]
    if f.expected:
        lines += [f"  expected  {f.expected}", f"  got       {f.got}"]
    if f.differing:
        lines.append(f"  differing {', '.join(map(str, f.differing))}")
    if f.command:
        lines.append(f"  explain   {f.command}")
    return "\n".join(lines)


def _rows(words: tuple[str, ...]) -> list[str]:
    """Return input words as lines; where most are zero, only the others, with their places and values."""
    live = [i for i, word in enumerate(words) if word.startswith("0x") and int(word, 16)]
    if not words or not words[0].startswith("0x") or len(live) > _FEW:
        return [" ".join(words[i : i + _PER_LINE]) for i in range(0, len(words), _PER_LINE)]
    rows = [f"[{i}] = {words[i]} = {_float32(words[i]):.9g}" for i in live]
    return [*rows, f"the other {len(words) - len(live)} are 0"] if len(live) < len(words) else rows


def _float32(word: str) -> float:
    value: float = struct.unpack(">f", bytes.fromhex(word.removeprefix("0x")))[0]
    return value
