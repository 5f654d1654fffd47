"""What came of a conformance run: of a check, of a clause, and of all of them, as text, JSON and JUnit XML.

Other programs read the JSON and the XML: keys may be added, not changed. A failure keeps its clause, the smallest input
that shows it, and its bits in hex.
"""

from __future__ import annotations

import json
import os
import platform
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from mxref._version import SPECIFICATION, __version__
from mxref.errors import ConformanceError, FileFormatError
from mxref.formats import BLOCK_FORMATS
from mxref.printable import printable

FORMAT = "mxref.conformance.1"
COUNTS = ("passed", "failed", "skipped", "compared")
"""What is counted of each clause."""
NOT_ASKED = "not asked any more"
"""Why a check was skipped after too many that ended their process or took too long."""
_FEW, _PER_LINE = 8, 6
"""Numbers that are shown by their places, and words in a line."""
_SURE = 0.95


class Level(StrEnum):
    """How much is checked: both cover every clause and capability, `full` every exponent and combination."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True)
class Failure:
    """A request that a backend answers wrong, shrunk to the smallest one that is still wrong."""

    clause: str
    message: str
    """What is wrong, in one line."""
    request: dict[str, str] = field(default_factory=dict)
    """The request in words; that of the check if it is left out."""
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Input bits as hex words, by operand."""
    expected: str = ""
    got: str = ""
    differing: tuple[int, ...] = ()
    """Positions of the elements that differ."""
    command: str | None = None
    """A command that prints the steps to the expected answer; tiles have none."""
    lost: bool = False
    """Whether the backend ended the process of the check, or took too long."""
    check: str = ""
    """The title of the check."""

    def __str__(self) -> str:
        """Return lines: clause and check, what differs, the request, inputs, both answers, the command."""
        lines = [f"{self.clause}: {self.check}", f"  {self.message}"]
        if self.request:
            lines.append("  asked     " + ", ".join(f"{k} {v}" for k, v in self.request.items()))
        for name, words in self.inputs.items():
            lines += [f"  {name if i == 0 else '':<9} {row}" for i, row in enumerate(_rows(words))]
        if self.expected:
            lines += [f"  expected  {self.expected}", f"  got       {self.got}"]
        if self.differing:
            lines.append(f"  differing {', '.join(map(str, self.differing))}")
        if self.command:
            lines.append(f"  explain   {self.command}")
        return "\n".join(lines)


def _rows(words: tuple[str, ...]) -> list[str]:
    """Return input words as lines; where most are zero, only the others, with their places and values."""
    live = [i for i, word in enumerate(words) if word.startswith("0x") and int(word, 16)]
    if not words or not words[0].startswith("0x") or len(live) > _FEW:
        return [" ".join(words[i : i + _PER_LINE]) for i in range(0, len(words), _PER_LINE)]
    values = (struct.unpack(">f", bytes.fromhex(words[i].removeprefix("0x")))[0] for i in live)
    rows = [f"[{i}] = {words[i]} = {value:.9g}" for i, value in zip(live, values, strict=True)]
    return [*rows, f"the other {len(words) - len(live)} are 0"] if len(live) < len(words) else rows


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
        __tracebackhide__ = True  # pytest shows the line of the test
        if not self.ok:
            raise ConformanceError(str(self))


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
    level: Level
    seed: int
    ops: tuple[str, ...]
    clauses: tuple[ClauseResult, ...]
    """In the order of `CLAUSES`: causes first."""
    seconds: float
    formats: tuple[str, ...] = tuple(BLOCK_FORMATS)
    """Names of the block formats that were asked about."""

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return not self.failing and any(c.passed for c in self.clauses)

    def __str__(self) -> str:
        """Return the verdict, the clauses that failed, and the first failure of each."""
        parts = ["\n".join(self.last_lines()), *map(str, self.failures)]
        return printable_lines("\n\n".join(parts))

    def last_lines(self, few: int | None = None) -> list[str]:
        """Return the verdict with the counts; then the first `few` clauses that failed, or how rare a fault can be."""
        passed, failed, skipped, compared = map(self.total, COUNTS)
        unasked = sum(c.reasons.get(NOT_ASKED, 0) for c in self.clauses)
        lines = [
            f"{self.verdict} ({self.level.value}, seed {self.seed}): {passed:,} checks passed, {failed:,} failed, "
            f"{skipped - unasked:,} skipped as not declared{f', {unasked:,} {NOT_ASKED}' if unasked else ''}; "
            f"{compared:,} results compared in {self.seconds:.1f} s"
        ]
        if self.failing:
            more = len(self.failing[few:]) if few else 0
            rest = f" and {more} more clauses" if more else ""
            lines.append(f"broken, likely causes first: {', '.join(self.failing[:few])}{rest}")
        elif self.ok and self.seen_fault:
            lines.append(
                f"in {self.total('calls'):,} calls, a fault in 1 of {self.seen_fault:,} calls at random would have "
                f"shown with {_SURE:.0%} probability"
            )
        return lines

    @property
    def verdict(self) -> str:
        """The backend and the outcome, as the beginning of a sentence."""
        if self.ok:
            return f"{self.backend} conforms"
        failed = self.total("failed")
        return f"{self.backend} {'does not conform' if failed else 'declares nothing that was asked for'}"

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


def printable_lines(text: str) -> str:
    """Return lines with the control codes within them escaped."""
    return "\n".join(map(printable, text.split("\n")))


def to_json(report: Report) -> str:
    """Return a report as JSON: totals, then every clause with its counts, skip reasons and first failure."""
    table = {
        "format": FORMAT,
        "mxref": __version__,
        "specification": SPECIFICATION,
        "backend": report.backend,
        "level": report.level.value,
        "seed": report.seed,
        "ops": list(report.ops),
        "formats": list(report.formats),
        "machine": platform.platform(),
        "ok": report.ok,
        "seconds": round(report.seconds, 3),
        "totals": {name: report.total(name) for name in COUNTS},
        "calls": report.total("calls"),
        "seen_fault": report.seen_fault,
        "clauses": [_clause(c) for c in report.clauses],
    }
    return json.dumps(table, indent=2) + "\n"


def _clause(c: ClauseResult) -> dict[str, Any]:
    counts = {name: getattr(c, name) for name in COUNTS}
    failures = [_failure(f) for f in c.failures]
    return {"clause": c.clause, "outcome": c.outcome, **counts, "reasons": c.reasons, "failures": failures}


def _failure(f: Failure) -> dict[str, Any]:
    return {
        "check": f.check, "message": f.message, "request": f.request,
        "inputs": {name: list(words) for name, words in f.inputs.items()}, "expected": f.expected, "got": f.got,
        "differing": list(f.differing), "command": f.command,
    }  # fmt: skip


def to_junit(report: Report) -> str:
    """Return a report as JUnit XML: a test suite of the backend, a test case per clause."""
    backend = printable(report.backend)  # XML cannot hold control codes
    outcomes = [c.outcome for c in report.clauses]
    suite = xml.Element(
        "testsuite",
        name=f"mxref conform {backend}",
        tests=str(len(outcomes)),
        failures=str(outcomes.count("failed")),
        skipped=str(outcomes.count("skipped")),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    for c in report.clauses:
        case = xml.SubElement(suite, "testcase", classname=f"mxref.{backend}", name=c.clause)
        if c.outcome == "failed":
            text = "\n\n".join(str(f) for f in c.failures)
            message = c.failures[0].message if c.failures else ""
            xml.SubElement(case, "failure", message=printable(message)).text = printable(text)
        elif c.outcome == "skipped":
            xml.SubElement(case, "skipped", message=printable(reasons_text(c)))
    root = xml.Element("testsuites")
    root.append(suite)
    xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def reasons_text(c: ClauseResult) -> str:
    """Return the undeclared values, grouped by capability."""
    fields: dict[str, list[str]] = {}
    for reason in c.reasons:
        name, _, value = reason.partition(": ")
        fields.setdefault(name, []).append(value)
    return "; ".join(f"{name} {', '.join(filter(None, values))}".strip() for name, values in fields.items())


def check_writable(path: Path) -> None:
    """Raise FileFormatError unless a file can be written at `path`: better before a run than after it."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileFormatError(f"cannot write {path}: name a file in a folder that exists and can be written")


def write(path: Path, data: str | bytes) -> None:
    """Write a file; it appears only when all of it is on the disk. FileFormatError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as err:
        raise FileFormatError(f"cannot write {path}: {err.strerror or err}") from err
    finally:
        temporary.unlink(missing_ok=True)
