"""A conformance run in several processes gives the same report, also if a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from conform_command import PLANTED
from mxref.cli import main
from mxref.conformance import check
from mxref.conformance.isolation import Processes
from mxref.conformance.outcome import to_json
from mxref.conformance.suite import Choice
from mxref.cores import THREAD_VARIABLES, cores, on_a_share
from mxref.errors import BackendError
from mxref.reference import backend as reference

HEADER = """
import os, signal, time
from dataclasses import replace
from pathlib import Path
from mxref.reference import ReferenceBackend
HERE = Path(__file__).parent
CHILD = os.getpid() != int(os.environ["MXREF_TEST_PARENT"])
"""


def faulty(folder: Path, body: str) -> str:
    """Return the name of a backend in a file: the reference with `body` added."""
    (folder / "faulty.py").write_text(
        f"{HEADER}\nclass Faulty(ReferenceBackend):\n{body}\nbackend = Faulty()\n"
    )
    return f"{folder}/faulty.py:backend"


@pytest.fixture(autouse=True)
def parent(monkeypatch):
    monkeypatch.setenv("MXREF_TEST_PARENT", str(os.getpid()))


def comparable(report):
    return to_json(replace(report, seconds=0.0))


@pytest.mark.parametrize("backend", ["reference", PLANTED])
def test_report_is_that_of_one_process(backend):
    clauses = ["scale.zero", "scale.rule.floor", "rounding.rne", "rounding.sr", "dequantize.nan", "gemm.nan"]
    one, three = (
        check(backend, level="quick", clauses=clauses, formats=["mxfp4"], jobs=jobs) for jobs in (1, 3)
    )
    assert comparable(one) == comparable(three)
    assert one.ok == (backend == "reference")
    assert bool(one.failures) == (backend != "reference")
    assert all(
        f.message.endswith("shrunk") for c in three.clauses for f in c.failures if c.clause == "rounding.rne"
    )


def test_crash_is_a_failure_of_the_check_it_came_at(tmp_path):
    backend = faulty(
        tmp_path,
        """
    def _hadamard(self, x, rotation, axis):
        if CHILD and rotation.n == 128:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super()._hadamard(x, rotation, axis)
""",
    )
    clauses = ["hadamard.factor", "hadamard.nonfinite"]  # a few, as each crash starts a process
    whole = check(reference, ops=["hadamard"], clauses=clauses, level="quick")
    report = check(backend, ops=["hadamard"], clauses=clauses, level="quick", jobs=2)
    assert 0 < report.total("failed") < report.total("passed")
    assert report.total("failed") + report.total("passed") == whole.total("passed")
    assert {f.message for f in report.failures} == {"the process was ended by SIGSEGV"}
    assert all("128" in f.request.get("n", f.check) for f in report.failures)


def test_process_that_dies_between_two_tasks_costs_nothing(tmp_path):
    """As when memory runs out: the one that has answered ends, while the other is still at its check.

    Each waits for the other: the first ends once its answer has come, and the second goes on once that is noticed.
    """
    backend = faulty(
        tmp_path,
        """
    def _hadamard(self, x, rotation, axis):
        import threading
        if CHILD and rotation.n == 16:
            (HERE / "new").write_text(str(os.getpid()))
            (HERE / "new").rename(HERE / "first")
            threading.Thread(target=end_once_heard, daemon=True).start()
        elif CHILD:
            while not (HERE / "first").exists() or running(int((HERE / "first").read_text())):
                time.sleep(0.01)
        return super()._hadamard(x, rotation, axis)

def end_once_heard():
    while not (HERE / "heard").exists():
        time.sleep(0.01)
    os._exit(9)

def running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
""",
    )
    choice = Choice.of(["hadamard"], ["hadamard.factor"], 0, "quick")
    checks = choice.checks(reference.capabilities)
    sizes = {dict(check.needs).get("hadamard_sizes"): i for i, check in enumerate(checks)}
    others = [i for n, i in sizes.items() if n not in (16, None)]
    assert len(others) > 2
    with closing(Processes(backend, choice, 2)) as processes:
        verdicts, _ = {}, processes.loaded
        for i, verdict in processes.verdicts([[sizes[16]], others]):
            assert not verdicts or (tmp_path / "heard").exists()  # the first answer is the first process's
            verdicts[i] = verdict
            (tmp_path / "heard").touch()
        assert len(processes._workers) == 1
    assert {i: v.failure for i, v in verdicts.items()} == dict.fromkeys([sizes[16], *others])


def test_exit_of_the_backend_is_a_failure(tmp_path):
    backend = faulty(
        tmp_path,
        """
    def _dequantize(self, q, dtype):
        if CHILD:
            os._exit(7)
        return super()._dequantize(q, dtype)
""",
    )
    report = check(backend, clauses=["dequantize.overflow"], level="quick", formats=["mxfp4"], jobs=2)
    assert report.total("passed") == 0 < report.total("failed")
    assert report.failures[0].message == "the process ended with exit code 7"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    if AGAIN: __import__('ctypes').CDLL(None)._exit(3)",
            "ended with exit code 3 before its first check",
        ),
        ("    if AGAIN: raise ImportError('no driver')", "no driver"),
    ],
)
def test_backend_that_a_second_process_cannot_have(tmp_path, body, message):
    """AGAIN is true where the file was loaded before. A few checks are enough for two processes."""
    body = f"    AGAIN = (HERE / 'mark').exists()\n    (HERE / 'mark').touch()\n{body}"
    with pytest.raises(BackendError, match=message):
        check(faulty(tmp_path, body), level="quick", clauses=["rounding.sr", "rounding.native_sr"],
              formats=["mxfp4"], jobs=2)  # fmt: skip


def test_interrupted_run_leaves_no_process(tmp_path):
    name = faulty(
        tmp_path,
        """
    def _hadamard(self, x, rotation, axis):
        (HERE / str(os.getpid())).touch()
        time.sleep(600)
""",
    )
    environment = {key: value for key, value in os.environ.items() if key != "MXREF_TEST_PARENT"}
    words = ["conform", "--backend", name, "--quick", "--op", "hadamard", "--jobs", "2"]
    command = [Path(sys.executable).with_name("mxref"), *words]
    # SIGINT is ignored by what a shell starts with &, as this test may have been.
    process = subprocess.Popen(
        command, env=environment | {"MXREF_TEST_PARENT": "0"}, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(children := [int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()]) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed.decode().strip()) == (130, "interrupted")
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ""])
def test_wrong_number_of_jobs_is_a_usage_error(value):
    found = CliRunner().invoke(main, ["conform", "--backend", "reference", "--jobs", value])
    assert found.exit_code == 2
    assert f"{value!r} is neither a whole number from 1 nor 'auto'" in " ".join(found.stderr.split())


def test_share_of_the_cores_is_for_what_starts_meanwhile(monkeypatch):
    monkeypatch.setattr("mxref.cores.cores", lambda: 8)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with on_a_share(3):
        assert [os.environ[name] for name in THREAD_VARIABLES] == ["5", "2", "2", "2"]
    with on_a_share(99):
        assert os.environ["NUMBA_NUM_THREADS"] == "1"
    assert [name for name in THREAD_VARIABLES if name in os.environ] == ["OMP_NUM_THREADS"]


def test_cores_are_those_this_process_may_use():
    assert 1 <= cores() <= (os.cpu_count() or 1)
