"""A pytest plugin: with `--mxref-backend NAME`, every clause of the specification becomes a test of that backend.

Without the option the plugin does nothing and imports only pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

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


def pytest_configure(config: pytest.Config) -> None:
    """Add the backend's tests to the run, whichever paths are given."""
    if config.getoption("--mxref-backend"):
        config.pluginmanager.register(_Conformance(), "mxref-conformance")


class _Conformance:
    """Collects the clauses after all other tests, and before options such as `-k` select tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Append an item per clause."""
        collector = _Backend.from_parent(
            session, name=f"mxref[{config.getoption('--mxref-backend')}]", nodeid="mxref"
        )
        items.extend(collector.collect())


class _Backend(pytest.Collector):
    """The backend under test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item per clause, causes first."""
        from mxref.conformance import asked_clauses
        from mxref.errors import MxrefError

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
            raise BrokenClauseError(str(report.failures[0]))
        if result.failures:
            counts = f"\n{result.failed} of {result.failed + result.passed} checks failed"
            raise BrokenClauseError(str(result.failures[0]) + counts)
        if not result.passed:
            why = reasons_text(result)
            pytest.skip(why if NOT_ASKED in result.reasons else f"not declared: {why}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Return the failure as text, without a traceback into the checks."""
        if isinstance(excinfo.value, BrokenClauseError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the place that a failure report names."""
        return "mxref", None, f"mxref: {self.name}"


class BrokenClauseError(AssertionError):
    """A clause that the backend breaks."""
