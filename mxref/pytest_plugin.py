"""A pytest plugin: clauses as tests of a backend, `check_quantizer` as a test of a function, and a summary for CI.

With `--mxref-backend NAME` every clause of the specification becomes a test of that backend. With `--mxref-quantizer
NAME` one test holds a function to one treatment. `--mxref-summary FILE` writes what failed as Markdown. Without these
options the plugin adds no test, and loads only pytest beside `import mxref`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mxref.errors import ConformanceError, MxrefError

if TYPE_CHECKING:
    from mxref.conformance.outcome import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the group `mxref`."""
    group = parser.getgroup("mxref", "conformance of a backend to the mxref specification")
    group.addoption(
        "--mxref-backend",
        metavar="NAME",
        help="Test a backend: a name, module:object or path/to/file.py:object.",
    )
    group.addoption(
        "--mxref-level", choices=("quick", "full"), default="quick", help="Amount of checks; default quick."
    )
    group.addoption("--mxref-seed", type=int, default=0, help="Seed of the random values.")
    group.addoption(
        "--mxref-quantizer",
        metavar="NAME",
        help="Test a function as check_quantizer does: module:function or path/to/file.py:function.",
    )
    group.addoption(
        "--mxref-treatment",
        metavar="NAME",
        default="ocp",
        help="How the function quantizes: a dialect, or an operand such as mxfp4_h16:wgrad.dy; default ocp.",
    )
    group.addoption(
        "--mxref-summary",
        metavar="FILE",
        help="Append what was checked, and each failure with its smallest block, to a Markdown file.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the tests of a backend or function to the run, whichever paths are given."""
    if config.getoption("--mxref-backend") or config.getoption("--mxref-quantizer"):
        config.pluginmanager.register(_Conformance(), "mxref-conformance")
    file = config.getoption("--mxref-summary")
    if file and not hasattr(config, "workerinput"):  # under pytest-xdist, one process sees the reports of all
        config.pluginmanager.register(_Summary(Path(file)), "mxref-summary")


class _Conformance:
    """Collects its tests after all others, and before options such as `-k` select tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Append an item per clause of the backend, and one of the function."""
        if backend := config.getoption("--mxref-backend"):
            collector = _Backend.from_parent(session, name=f"mxref[{backend}]", nodeid="mxref")
            items.extend(collector.collect())
        if function := config.getoption("--mxref-quantizer"):
            items.append(_Quantizer.from_parent(session, name=function, nodeid=f"mxref::{function}"))


class _Backend(pytest.Collector):
    """The backend under test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item per clause, causes first."""
        from mxref.conformance import asked_clauses

        self.backend = self.config.getoption("--mxref-backend")
        try:
            clauses = asked_clauses(self.backend, **self.amount)
        except MxrefError as err:
            raise pytest.UsageError(str(err)) from err
        for clause in clauses:
            yield _Clause.from_parent(self, name=clause, backend=self)

    @property
    def amount(self) -> dict[str, Any]:
        """How much to check."""
        return {
            "seed": self.config.getoption("--mxref-seed"),
            "level": self.config.getoption("--mxref-level"),
        }

    @cached_property
    def report(self) -> Report:
        """The report of all checks: a check can show that another clause than its own is broken."""
        from mxref.conformance import check

        return check(self.backend, **self.amount)


class _Clause(pytest.Item):
    """The checks of one clause."""

    def __init__(self, *, backend: _Backend, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backend = backend

    def runtest(self) -> None:
        """Fail with the shrunk block, or skip if the backend declares nothing that the clause covers."""
        from mxref.conformance.outcome import NOT_ASKED, reasons_text

        report = self.backend.report
        result = next((c for c in report.clauses if c.clause == self.name), None)
        if result is None:  # listing the clauses loaded the backend, but the second load failed
            raise ConformanceError(str(report.failures[0]))
        if result.failures:
            counts = f"\n{result.failed} of {result.failed + result.passed} checks failed"
            raise ConformanceError(str(result.failures[0]) + counts)
        if not result.passed:
            why = reasons_text(result)
            pytest.skip(why if NOT_ASKED in result.reasons else f"not declared: {why}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Return the failure as text, without a traceback into the checks."""
        return _text(excinfo) or super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the place that a failure report names."""
        return "mxref", None, f"mxref: {self.name}"


class _Quantizer(pytest.Item):
    """`check_quantizer` of a function."""

    def runtest(self) -> None:
        """Fail with the clauses that the function breaks, and the smallest block of each."""
        from mxref.check import check_quantizer
        from mxref.discovery import load_function

        option = self.config.getoption
        check_quantizer(
            load_function(self.name), option("--mxref-treatment"), level=option("--mxref-level"),
            seed=option("--mxref-seed"),
        ).require()  # fmt: skip

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Return the failure, or why the function cannot be checked, as text."""
        return _text(excinfo) or super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the place that a failure report names."""
        return "mxref", None, f"mxref: {self.name}"


def _text(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the message of an error of mxref, which needs no traceback; empty for other exceptions."""
    return str(excinfo.value) if isinstance(excinfo.value, MxrefError) else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the text of a ConformanceError, which any test may raise by `require()`, for the summary."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, ConformanceError):
        vars(report)["mxref"] = str(call.excinfo.value)  # pytest-xdist sends it along
    return report


class _Summary:
    """Appends Markdown to a file at the end of the run, as GitHub reads it from `$GITHUB_STEP_SUMMARY`."""

    SHOWN = 5
    """Failures that are shown whole, likely causes first; the others are named."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and keep why it failed."""
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures[report.nodeid] = getattr(report, "mxref", report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        """Write the section of this run."""
        lines = ["### mxref: " + ", ".join(f"{n} {outcome}" for outcome, n in self.counts.items()), ""]
        for name, text in list(self.failures.items())[: self.SHOWN]:
            lines += [f"**{name}**", "", "```text", text.strip(), "```", ""]
        if others := list(self.failures)[self.SHOWN :]:
            lines += [f"Failed too: {', '.join(others)}", ""]
        with open(self.file, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
