"""What hosts of a cluster lack: a connection, GPUs that a rank sees, locks of a shared file system."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mxref.discovery import get_backend
from mxref_training.device import choose_device
from mxref_training.distributed.connect import connected
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import sync
from mxref_training.errors import CheckpointError, ConfigError
from training_setup import run

HERE = socket.gethostname()


def test_ranks_that_cannot_reach_each_other_say_what_hosts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def rendezvous(*_: Any, **given: Any) -> Any:
        assert given["timeout"].total_seconds() <= 600
        raise RuntimeError("the client socket has timed out")

    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "rendezvous", rendezvous)
    with pytest.raises(ConfigError, match="cannot connect to each other: .*has timed out") as caught:
        connected(Ranks(0, 4, 0, 2)).__enter__()
    assert caught.match(".*every host must reach MASTER_ADDR and MASTER_PORT; .*GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("count", "visible", "said"),
    [
        (0, None, f"4 ranks of this host, but PyTorch sees 0 GPUs on {HERE}: each rank must see the GPUs"),
        (
            1,
            "3",
            rf"PyTorch sees 1 GPU on {HERE}, where CUDA_VISIBLE_DEVICES = '3': each rank must see the GPUs",
        ),
    ],
)
def test_a_rank_that_sees_too_few_gpus_is_told_which(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    backend: Any = SimpleNamespace(
        name="gpu", capabilities=replace(get_backend("reference").capabilities, devices=frozenset({"cuda"}))
    )
    with pytest.raises(ConfigError, match=said):
        choose_device("auto", backend, Ranks(5, 8, 1, 4))
    with pytest.raises(ConfigError, match="run.device = 'cuda:7', but PyTorch sees"):
        choose_device("cuda:7", backend, SOLE)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(
        CheckpointError,
        match=r"No locks available; .*choose another --out",
    ):
        run(tmp_path / "run")


def test_the_lock_of_a_host_that_is_down_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(*_: Any) -> None:
        (tmp_path / "run.lock").write_text("process 12 on another")
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", held)
    with pytest.raises(
        ConfigError,
        match=r"process 12 on another is training in .* choose another --out .*delete .*run\.lock",
    ):
        run(tmp_path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_folders_that_cannot_be_synced_are_left_to_their_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(_: int) -> None:
        raise OSError(number, os.strerror(number))

    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match=os.strerror(number)):
        sync(file)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync(tmp_path)
    else:
        sync(tmp_path)
