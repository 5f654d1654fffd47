"""Whatever file operation fails, and whenever the process is killed, the same command ends with the same bytes.

`MXREF_FAULTS_ALL=1` (`make test-faults`) tries every operation and one cut in `CUT_STRIDE`. Otherwise `FEW` of each are
tried, a fixed distance apart. What a power cut may leave is computed after every operation, in either case, and held
against the promises of `faults.promises`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from faults import image
from faults.promises import Survey, survey
from faults.scenario import Scenario, contents, scenarios, write_inputs
from faults.shim import Ended, Fault, Kind, Operation, Server, recorded

ALL = bool(os.environ.get("MXREF_FAULTS_ALL"))
FEW = 2
CUT_STRIDE = 5
NAMES = ("train", "beside", "ablate", "again", "longer")
CASES = [
    (name, fault)
    for name in NAMES
    for fault in Fault
    if fault and (ALL or name != "beside" or fault in (Fault.FULL, Fault.KILL))
]
"""What a background checkpoint adds to `train` is how its errors arrive and when it gets its name."""
AGAIN = NAMES if ALL else tuple(name for name in NAMES if name != "beside")
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
        self._surveys: dict[tuple[str, str], Survey] = {}

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

    def unbroken(self, scenario: Scenario) -> tuple[list[Operation], dict[str, Any]]:
        """Return the operations of the command, and what it leaves."""
        if scenario.name not in self._known:
            self.reset(scenario)
            self._known[scenario.name] = self.recorded(scenario), contents(self.root)
        return self._known[scenario.name]

    def recorded(self, scenario: Scenario, plant: str = "") -> list[Operation]:
        """Give the command and return its operations."""
        ended = self.run(scenario.command, record=self.folder / "record", plant=plant)
        assert ended.code == 0, ended.output
        return list(recorded(self.folder / "record"))

    def spoiled(self, scenario: Scenario, fault: Fault, at: int, plant: str = "") -> list[str]:
        """Give the command with one spoiled operation, and again; return what is not as it should be."""
        operations, expected = self.unbroken(scenario)
        self.reset(scenario)
        ended = self.run(scenario.command, fault, at, plant=plant)
        where = f"{fault.name} at operation {at}, {operations[at - 1].kind.name} {operations[at - 1].path}"
        wrong = [] if _is_fair(ended, fault) else [f"{where}: {ended}"]
        if ended.code == 0:
            wrong += self.different(expected, f"{where}, unnoticed")
        return wrong + self.wrong_after(scenario, where, plant)

    def cut(self, scenario: Scenario, tree: image.Tree, where: str) -> list[str]:
        """Give the command where the power went, and return what is not as it should be."""
        _, expected = self.unbroken(scenario)
        self.put(tree)
        return self.wrong_after(scenario, f"{where}: {sorted(tree)}", expected=expected)

    def put(self, tree: image.Tree) -> None:
        """Make the folder what a power cut left."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        image.write(tree, self.root)

    def wrong_after(
        self, scenario: Scenario, where: str, plant: str = "", expected: dict[str, Any] | None = None
    ) -> list[str]:
        """Give the command again, and return what is not as if nothing had happened."""
        again = self.run(scenario.command, plant=plant)
        if again.code:
            return [f"{where}: given again: {again}"]
        return self.different(expected or self.unbroken(scenario)[1], where)

    def different(self, expected: dict[str, Any], where: str) -> list[str]:
        """Return which files are not as expected."""
        found = contents(self.root)
        differ = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return [f"{where}: these files differ: {', '.join(differ)}"] if differ else []

    def survey(self, scenario: Scenario, plant: str = "") -> Survey:
        """Give the command, and look at what a power cut after each of its operations would leave."""
        which = scenario.name, plant
        if which not in self._surveys:
            self.reset(scenario)
            disk = image.Disk(self.root)
            self._surveys[which] = survey(disk, self.recorded(scenario, plant))
        return self._surveys[which]


def _is_fair(ended: Ended, fault: Fault) -> bool:
    """Return whether a command ended as it may with a fault."""
    if fault in (Fault.KILL, Fault.TORN):
        return ended.code == -signal.SIGKILL
    if fault is Fault.SHORT or ended.code == 0:
        return ended.code == 0
    last = ended.output.splitlines()[-1]
    return ended.code == 2 and last.startswith("error: cannot ") and "Traceback" not in ended.output


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("faults")
    with Server(folder) as server:
        yield Laboratory(folder, server)


def sample(items: Sequence[T], shift: int) -> Sequence[T]:
    """Return a few items that lie far apart; the shift has each caller take others."""
    stride = max(1, len(items) // FEW)
    return items[shift % stride :: stride][:FEW]


def each(items: Sequence[T], title: str, wrong: Callable[[T], list[str]]) -> None:
    """Try every item, and fail with all that is wrong; the long run says how far it is."""
    found = []
    for number, item in enumerate(items, 1):
        new = wrong(item)
        found += new
        if ALL:
            print(*new, sep="\n", end="\n" if new else "")
            if number % 20 == 0 or number == len(items):
                print(f"{title}: {number} of {len(items)}, {len(found)} wrong", flush=True)
    assert not found, "\n".join(found)


def numbers(operations: Sequence[Operation], fault: Fault) -> list[int]:
    """Return the operations that a fault can spoil."""
    writes = fault in (Fault.SHORT, Fault.TORN)
    return [i for i, op in enumerate(operations, 1) if op.kind is Kind.WRITE or not writes]


@pytest.mark.parametrize(
    ("name", "fault"), CASES, ids=lambda value: str(getattr(value, "name", value)).lower()
)
def test_any_operation_may_fail(laboratory: Laboratory, name: str, fault: Fault) -> None:
    scenario = laboratory.scenarios[name]
    chosen: Sequence[int] = numbers(laboratory.unbroken(scenario)[0], fault)
    if not ALL:
        chosen = sample(chosen, 7 * int(fault))
    each(chosen, f"{name}, {fault.name}", lambda at: laboratory.spoiled(scenario, fault, at))


@pytest.mark.parametrize("name", NAMES)
def test_no_power_cut_breaks_a_promise(laboratory: Laboratory, name: str) -> None:
    scenario = laboratory.scenarios[name]
    _, expected = laboratory.unbroken(scenario)
    found = laboratory.survey(scenario)
    assert not found.broken, "\n".join(found.broken)
    for tree in found.last:  # what a command that succeeded has made stays
        laboratory.put(tree)
        assert not laboratory.different(expected, "power lost after the end")


@pytest.mark.parametrize("name", AGAIN)
def test_the_power_may_go_at_any_moment(laboratory: Laboratory, name: str) -> None:
    scenario = laboratory.scenarios[name]
    cuts = laboratory.survey(scenario).cuts
    chosen = cuts[::CUT_STRIDE] if ALL else sample(cuts, 3)
    each(chosen, f"{name}, power", lambda cut: laboratory.cut(scenario, cut[1], f"power lost after {cut[0]}"))


@pytest.mark.parametrize("name", AGAIN)
def test_the_shim_sees_everything(laboratory: Laboratory, name: str) -> None:
    """The recorded operations make the files that are there, whichever library wrote them."""
    scenario = laboratory.scenarios[name]
    laboratory.reset(scenario)
    disk = image.Disk(laboratory.root)
    for op in laboratory.recorded(scenario):
        disk.apply(op)
    seen = {path: held.data for path, held in disk.seen().items() if held}
    assert len(seen) > 10
    assert seen == {
        str(p.relative_to(laboratory.root)): p.read_bytes() for p in laboratory.root.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("name", ["run.lock", "arm.lock"])
def test_a_process_that_holds_the_lock_is_not_disturbed(laboratory: Laboratory, name: str) -> None:
    scenario = laboratory.scenarios["again" if name == "run.lock" else "longer"]
    laboratory.reset(scenario)
    path = next(laboratory.root.rglob("metrics.jsonl")).with_name(name)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = contents(laboratory.root)
        ended = laboratory.run(scenario.command)
        assert ended.code == 2
        assert f"is training in {path.parent}: wait until it has ended" in ended.output
        assert contents(laboratory.root) == before
        assert laboratory.run(scenario.command, plant="nobody_asks_for_a_lock").code == 0


# --- planted faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("files_are_not_synced", "is there in part"),
        ("folders_are_not_synced", "run.json')] had reached the disk"),
        ("the_name_of_a_checkpoint_is_not_synced", "step-1')] had reached the disk"),
        ("the_name_comes_before_the_data", "step-1 is there in part"),
        ("the_old_checkpoint_goes_first", "is back at step 0, though step 1 was safe"),
        ("the_log_is_not_synced_before_the_checkpoint", "metrics.jsonl does not hold what"),
        ("files_are_written_in_place", "run.json is there in part"),
        ("a_folder_is_deleted_in_place", "step-1 is there in part"),
    ],
)
def test_a_planted_fault_breaks_a_promise(laboratory: Laboratory, plant: str, said: str) -> None:
    broken = laboratory.survey(laboratory.scenarios["train"], plant).broken
    assert any(said in problem for problem in broken), broken


@pytest.mark.parametrize(
    ("plant", "fault", "kind", "name", "said"),
    [
        ("files_are_written_in_place", Fault.TORN, Kind.WRITE, "run.json", "run.json is damaged"),
        ("a_short_write_counts_as_whole", Fault.SHORT, Kind.WRITE, "metrics.jsonl", "restore the file"),
        ("what_dead_processes_left_stays", Fault.KILL, Kind.CREATE, "manifest.json", "File exists"),
        ("the_log_goes_on_where_it_ended", Fault.KILL, Kind.CREATE, "manifest.json", "files differ"),
    ],
)
def test_a_planted_fault_is_noticed_when_an_operation_fails(
    laboratory: Laboratory, plant: str, fault: Fault, kind: Kind, name: str, said: str
) -> None:
    scenario = laboratory.scenarios["train"]
    laboratory.reset(scenario)
    operations = laboratory.recorded(scenario, plant)
    at = next(i for i, op in enumerate(operations, 1) if op.kind is kind and op.path.name == name)
    wrong = laboratory.spoiled(scenario, fault, at, plant)
    assert wrong
    assert said in wrong[-1]
