"""Any file operation may fail, any moment be the last: the same command ends with the same bytes.

`MXREF_FAULTS_ALL=1` (`make test-faults`) tries every operation; otherwise a few of each scenario are tried.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from faults import image
from faults.scenario import Scenario, contents, scenarios, write_inputs
from faults.shim import Ended, Fault, Kind, Operation, Server, recorded

ALL = bool(os.environ.get("MXREF_FAULTS_ALL"))
FEW = 4
"""Operations, and images of a disk, that are tried otherwise."""
NAMES = ("train", "ablate", "again", "longer")
T = TypeVar("T")

pytestmark = [
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler for the shim"),
    pytest.mark.timeout(0 if ALL else 300),
]


class Laboratory:
    """A folder in which a command is run again and again from the same state."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.root, self.server = folder, folder / "root", server
        write_inputs(folder)
        self.scenarios = {found.name: found for found in scenarios(folder, self.root)}
        self._known: dict[str, tuple[list[Operation], dict[str, Any]]] = {}

    def run(self, command: Sequence[str], fault: Fault = Fault.NONE, at: int = 0, **options: Any) -> Any:
        return self.server.run(
            list(command), self.root, fault, at, XDG_CACHE_HOME=str(self.root / "cache"), **options
        )

    def expect(self, command: Sequence[str]) -> None:
        ended = self.run(command)
        assert ended.code == 0, ended.output

    def reset(self, scenario: Scenario) -> None:
        """Make the state in which the command of a scenario is given."""
        shutil.rmtree(self.root, ignore_errors=True)
        if not scenario.before:
            self.root.mkdir()
            return
        saved = self.folder / scenario.name
        if not saved.exists():
            self.root.mkdir()
            self.expect(scenario.before)
            self.root.rename(saved)
        shutil.copytree(saved, self.root)

    def wrong_after(self, scenario: Scenario, expected: dict[str, Any], where: str) -> list[str]:
        """Give the command again, and return what is not as if nothing had happened."""
        again = self.run(scenario.command)
        if again.code:
            return [f"{where}: given again: {again}"]
        found = contents(self.root)
        differ = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return [f"{where}: these files differ: {', '.join(differ)}"] if differ else []

    def unbroken(self, scenario: Scenario) -> tuple[list[Operation], dict[str, Any]]:
        """Return the operations of the command, and what it leaves."""
        if scenario.name not in self._known:
            self.reset(scenario)
            ended = self.run(scenario.command, record=self.folder / "record")
            assert ended.code == 0, ended.output
            self._known[scenario.name] = list(recorded(self.folder / "record")), contents(self.root)
        return self._known[scenario.name]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("faults")
    with Server(folder) as server:
        yield Laboratory(folder, server)


def sample(items: Sequence[T], shift: int) -> list[T]:
    """Return all items, or a few that lie far apart."""
    stride = 1 if ALL else max(1, len(items) // FEW)
    return list(items[shift % stride :: stride])


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault])
@pytest.mark.parametrize("name", NAMES)
def test_any_operation_may_fail(laboratory: Laboratory, name: str, fault: Fault) -> None:
    scenario = laboratory.scenarios[name]
    operations, expected = laboratory.unbroken(scenario)
    writes = fault in (Fault.SHORT, Fault.TORN)
    # An operation that found nothing to do is counted and not recorded, so a number may name one further on.
    numbers = [i for i, op in enumerate(operations, 1) if op.kind is Kind.WRITE or not writes]
    wrong = []
    for at in sample(numbers, 7 * int(fault)):
        laboratory.reset(scenario)
        ended = laboratory.run(scenario.command, fault, at)
        where = f"{fault.name} at operation {at}, {operations[at - 1].kind.name} {operations[at - 1].path}"
        if not (ended.code == 0 or _is_fair(ended, fault)):
            wrong.append(f"{where}: {ended}")
        wrong += laboratory.wrong_after(scenario, expected, where)
    assert not wrong, "\n".join(wrong)


def _is_fair(ended: Ended, fault: Fault) -> bool:
    """Return whether a command that did not succeed ended as it may."""
    if fault in (Fault.KILL, Fault.TORN):
        return ended.code == -signal.SIGKILL
    last = ended.output.splitlines()[-1]
    return ended.code == 2 and last.startswith("error: cannot ") and "Traceback" not in ended.output


@pytest.mark.parametrize("name", NAMES)
def test_the_power_may_go_at_any_moment(laboratory: Laboratory, name: str) -> None:
    scenario = laboratory.scenarios[name]
    laboratory.reset(scenario)
    disk = image.Disk(laboratory.root)
    assert laboratory.run(scenario.command, record=laboratory.folder / "cut").code == 0
    operations, expected = list(recorded(laboratory.folder / "cut")), contents(laboratory.root)
    wrong = []
    for number, tree in sample(list(image.images(disk, operations)), 3):
        shutil.rmtree(laboratory.root)
        laboratory.root.mkdir()
        image.write(tree, laboratory.root)
        where = f"power lost after operation {number}, {operations[number - 1].kind.name}: {sorted(tree)}"
        wrong += laboratory.wrong_after(scenario, expected, where)
    assert not wrong, "\n".join(wrong)
