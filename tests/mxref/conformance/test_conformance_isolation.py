"""A backend that ends, copies or blocks its process: a failed check or a failed report, and never exit code 0."""

from __future__ import annotations

import json
import os
import time
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from mxref.cli import main
from mxref.conformance import check, isolation, watch
from mxref.conformance.checking import Asked, Check, Op, Subject
from mxref.conformance.outcome import CheckResult
from mxref.conformance.suite import result_of
from mxref.conformance.watch import Copies
from mxref.errors import BackendError
from mxref.reference import ReferenceBackend

pytestmark = pytest.mark.clause("conformance.protocol")

LIMIT = "3"
"""Seconds for a check where one is meant to take longer: a check itself takes milliseconds."""
PATIENT = "from mxref.conformance import watch\nwatch._PATIENCE = 60_000\n"
"""For faults whose copy comes back or ends: a loaded machine may run the copy late."""
HEADER = "import os, signal, time\nfrom pathlib import Path\nfrom mxref.reference import ReferenceBackend\n"
IN_A_CALL = """
class Faulty(ReferenceBackend):
    def _dequantize(self, q, dtype):
        if dtype == "float64" and q.shape == (256, 32):
            {}
        return super()._dequantize(q, dtype)
backend = Faulty()
"""
WHILE_LOADED = "{}\nbackend = ReferenceBackend()\n"


def written(folder, template, fault, header=HEADER):
    """Return the name of a backend written to a file, which does `fault` where the template has it."""
    (folder / "faulty.py").write_text(header + template.format(fault))
    return f"{folder}/faulty.py:backend"


def run(backend, folder, *options):
    """Return the result of the command, the clauses of its JSON report, and the number of JUnit failures."""
    words = ["conform", "--backend", backend, "--quick", "--format", "mxfp4", "--clause", "dequantize.nan"]
    files = folder / "report.json", folder / "report.xml"
    result = CliRunner().invoke(main, [*words, "--json", str(files[0]), "--junit", str(files[1]), *options])
    assert files[0].exists(), result.output
    table = json.loads(files[0].read_text())
    assert table["ok"] is (result.exit_code == 0)
    return result, table["clauses"], int(ElementTree.parse(files[1]).getroot()[0].get("failures"))


EXIT_0, OS_EXIT_0 = "raise SystemExit(0)", "os._exit(0)"
FORKED = "forked the process, and the copy went on"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (EXIT_0, "raised SystemExit: 0"),
        (OS_EXIT_0, "the process ended with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process was ended by SIGSEGV"),
        ("os.fork()", FORKED),
        ("os.fork() or time.sleep(1)", FORKED),
        ("time.sleep(600)", f"the process took longer than {LIMIT} s"),
        ("os.fork(); time.sleep(600)", f"the process took longer than {LIMIT} s"),
        ("os.fork() and os._exit(0); time.sleep(600)", "the process ended with exit code 0"),
        ("raise KeyboardInterrupt", "the process was ended by SIGINT"),
    ],
)  # fmt: skip
def test_what_a_call_does_to_its_process_is_a_failed_check(tmp_path, fault, message):
    backend = written(tmp_path, IN_A_CALL, fault, PATIENT + HEADER if message == FORKED else HEADER)
    result, (clause,), failures = run(
        backend, tmp_path, *(["--time-limit", LIMIT] if "took longer" in message else [])
    )
    assert (result.exit_code, failures) == (1, 1), result.output
    assert (clause["clause"], clause["failed"]) == ("dequantize.nan", 1)
    assert clause["passed"] > 2
    assert message in clause["failures"][0]["message"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (EXIT_0, "its code raised SystemExit: 0"),
        (OS_EXIT_0, "its code raised SystemExit: os._exit(0)"),
        ("__import__('ctypes').CDLL(None)._exit(0)", "the process that loaded it ended with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process that loaded it was ended by SIGKILL"),
        ("os.fork()", "forked the process while it was loaded"),
        ("raise ValueError('no\\n device')", "its code raised ValueError: no device"),
    ],
)  # fmt: skip
def test_what_loading_does_to_its_process_is_a_failed_report(tmp_path, fault, message):
    backend = written(tmp_path, WHILE_LOADED, fault, PATIENT + HEADER if "fork" in message else HEADER)
    result, (clause,), failures = run(backend, tmp_path)
    assert (result.exit_code, failures) == (1, 1), result.output
    assert (clause["clause"], clause["passed"], clause["failed"]) == ("conformance.protocol", 0, 1)
    assert message in clause["failures"][0]["message"]


@pytest.mark.parametrize(("given", "least", "limit"), [("1", 2.0, "2"), ("1", 0.5, "1")])
def test_loading_may_take_the_time_limit_or_a_minute(tmp_path, monkeypatch, given, least, limit):
    assert isolation.LEAST_TO_LOAD == 60
    monkeypatch.setattr(isolation, "LEAST_TO_LOAD", least)
    backend = written(tmp_path, WHILE_LOADED, "time.sleep(600)")
    result, (clause,), failures = run(backend, tmp_path, "--time-limit", given)
    assert (result.exit_code, failures) == (1, 1), result.output
    assert (clause["clause"], clause["passed"], clause["failed"]) == ("conformance.protocol", 0, 1)
    assert f"the process that loaded it took longer than {limit} s" in clause["failures"][0]["message"]


@pytest.mark.parametrize("name", ["json", "random", "numpy"])
def test_a_file_with_the_name_of_a_module_does_not_take_its_place(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the current folder was imported')\n")
    result, (clause,), _ = run("reference", tmp_path)
    assert (result.exit_code, clause["outcome"]) == (0, "passed"), result.output


def test_a_run_does_not_wait_for_every_hanging_check(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "MOST_HUNG", 1)
    hanging = IN_A_CALL.replace('if dtype == "float64" and q.shape == (256, 32):', "if True:")
    backend = written(tmp_path, hanging, "time.sleep(600)")
    result, clauses, failures = run(backend, tmp_path, "--time-limit", "1")
    counts = {c["clause"]: (c["passed"], c["failed"], c["skipped"]) for c in clauses}
    assert counts == {"conformance.protocol": (0, 1, 0), "dequantize.nan": (0, 1, 5)}
    assert failures == 2
    assert clauses[1]["reasons"] == {"not asked any more": 5}
    printed = " ".join(result.output.split())
    assert "took longer than 1 s" in printed  # without -v, which prints the failure shown second
    assert "dequantize.nan, conformance.protocol" in printed
    assert "5 not asked any more" in printed


def test_processes_that_a_backend_started_end_with_it(tmp_path):
    fault = f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.fork() or time.sleep(600)))"
    result, _, _ = run(written(tmp_path, IN_A_CALL, fault), tmp_path)
    assert result.exit_code == 0, result.output  # the copy that never comes back is the backend's own affair
    copy = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while _running(copy):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_process_is_kept_for_debuggers(tmp_path):
    """`--in-process` loads and runs the backend where the command runs, and an exit is a finding there too."""
    mark = f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    result, _, _ = run(written(tmp_path, IN_A_CALL, mark), tmp_path, "--in-process")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "pid").read_text() == str(os.getpid())
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", IN_A_CALL, EXIT_0)
    result, (clause,), _ = run(other, tmp_path, "--in-process")
    assert (result.exit_code, clause["failures"][0]["message"]) == (1, "raised SystemExit: 0")
    refused = CliRunner().invoke(main, ["conform", "--backend", "reference", "--in-process", "--jobs", "2"])
    assert refused.exit_code == 2
    assert "exclude each other" in refused.stderr
    with pytest.raises(BackendError, match="each of 2 processes loads the backend by its name"):
        check("reference", in_process=True, jobs=2)


def test_a_copy_in_this_process_ends_where_it_leaves_the_check(monkeypatch):
    monkeypatch.setattr(watch, "_PATIENCE", 60_000)

    def run(subject: Subject) -> CheckResult:
        os.fork()
        return CheckResult(1)

    verdict = result_of(Check("c", "t", Asked(Op.QUANTIZE), run), Subject(ReferenceBackend()))
    assert FORKED in verdict.failure.message
    with Copies() as ended:
        if not os.fork():
            os._exit(0)  # as a pool's worker does
    assert not ended.returned
