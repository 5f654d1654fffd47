"""A conformance report as JSON and JUnit XML, which other programs read: keys may be added, not changed."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from mxref._version import __version__
from mxref.conformance.outcome import COUNTS, ClauseResult, Failure, Report, failure_text
from mxref.errors import FileFormatError
from mxref.printable import printable

FORMAT = "mxref.conformance.1"


def to_json(report: Report) -> str:
    """Return a report as JSON: totals, then every clause with its counts, skip reasons and first failure."""
    table = {
        "format": FORMAT,
        "mxref": __version__,
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
    outcomes = [c.outcome for c in report.clauses]
    suite = xml.Element(
        "testsuite",
        name=f"mxref conform {report.backend}",
        tests=str(len(outcomes)),
        failures=str(outcomes.count("failed")),
        skipped=str(outcomes.count("skipped")),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    for c in report.clauses:
        case = xml.SubElement(suite, "testcase", classname=f"mxref.{report.backend}", name=c.clause)
        if c.outcome == "failed":
            text = "\n\n".join(failure_text(f) for f in c.failures)
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


def write(path: Path, text: str) -> None:
    """Write a file, replacing an existing one only when all is written; FileFormatError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as err:
        raise FileFormatError(f"cannot write {path}: {err.strerror or err}") from err
    finally:
        temporary.unlink(missing_ok=True)
