"""CUDA MPS around a block: a daemon of its own that ends with it, one that runs already, or a reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from mxref_training.run.gpu_sharing import CONTROL, PIPES, shared_gpus

FAKE = """#!/bin/sh
asked="$1 $(cat)"
echo "$asked $CUDA_MPS_PIPE_DIRECTORY ${CUDA_VISIBLE_DEVICES-unset}" >>"$MPS_CALLS"
if [ "$asked" = "$MPS_FAILS" ]; then echo "no permission"; exit 3; fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was asked of a program that stands in for NVIDIA's."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MPS_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setenv(PIPES, str(tmp_path / "none"))
    return tmp_path / "calls"


@pytest.mark.parametrize("fails", [True, False])
def test_a_daemon_of_its_own_ends_with_the_block(calls: Path, fails: bool) -> None:
    try:
        with shared_gpus() as sharing:
            assert sharing.active
            folder = sharing.environment[PIPES]
            assert Path(folder).is_dir()
            assert calls.read_text() == f"-d  {folder} unset\n"
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert calls.read_text().splitlines()[1:] == [f" quit {folder} unset"]
    assert not Path(folder).exists()


def test_a_daemon_that_does_not_start_is_reported(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_FAILS", "-d ")
    with shared_gpus() as sharing:
        assert (sharing.active, sharing.environment) == (False, {})
        assert sharing.note.endswith("the MPS daemon did not start (exit code 3: no permission)")
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize("alive", [True, False])
def test_a_daemon_that_runs_already_is_used_and_left(
    alive: bool, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = calls.parent / "pipes"
    pipes.mkdir()
    (pipes / "control").touch()
    monkeypatch.setenv(PIPES, str(pipes))
    monkeypatch.setenv("MPS_FAILS", "" if alive else " get_server_list")
    with shared_gpus() as sharing:
        assert sharing.active
        assert (str(pipes) in sharing.note) is alive
        assert bool(sharing.environment) is not alive
    asked = [line.split(" /")[0] for line in calls.read_text().splitlines()]
    assert asked == [" get_server_list", *([] if alive else ["-d ", " quit"])]


def test_without_the_program_the_note_says_so(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(calls.parent))
    with shared_gpus() as sharing:
        assert not sharing.active
        assert "nvidia-cuda-mps-control is not installed" in sharing.note
