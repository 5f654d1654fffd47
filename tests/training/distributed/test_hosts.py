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
from mxref_training import durable
from mxref_training.device import choose_device
from mxref_training.distributed import failing as module
from mxref_training.distributed.connect import connected
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import sync
from mxref_training.errors import CheckpointError, ConfigError
from training_setup import run

HERE = socket.gethostname()


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_that_cannot_reach_each_other_say_what_hosts_need(
    monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    def rendezvous(*_: Any, **given: Any) -> Any:
        assert given["timeout"].total_seconds() <= 600
        raise RuntimeError("the client socket has timed out")

    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "rendezvous", rendezvous)
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="cannot connect to each other: .*has timed out") as caught:
        connected(Ranks(0, 4, 0, 4 // hosts)).__enter__()
    needs = "every host must reach MASTER_ADDR = node-1, MASTER_PORT = 29500; .*GLOO_SOCKET_IFNAME"
    assert bool(caught.match(needs) if hosts == 2 else "GLOO" not in str(caught.value))


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3214",
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3600000ms for recv operation to complete",
        "writev [10.0.0.2]:3214: No route to host",
        "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.",
    ],
)
def test_a_host_that_is_gone_is_told_from_an_error(text: str) -> None:
    assert module._lost_connection(RuntimeError(text))
    assert not module._lost_connection(ValueError(text))
    assert not module._lost_connection(RuntimeError("shapes do not match"))


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
        match=r"No locks available; mount its file system with locks \(flock\), or choose another --out",
    ):
        run(tmp_path / "run")


@pytest.mark.parametrize("host", [HERE, f"{HERE}2"])
def test_the_lock_of_a_host_that_is_down_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    def held(*_: Any) -> None:
        (tmp_path / "run.lock").write_text(f"process 12 on {host}")
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", held)
    with pytest.raises(
        ConfigError, match=f"process 12 on {host} is training in .* choose another --out"
    ) as caught:
        run(tmp_path)
    advice = f"if that host is down and its lock stays, delete {tmp_path / 'run.lock'}"
    assert (advice in str(caught.value)) is (host != HERE)


@pytest.mark.parametrize("again", [False, True])
def test_ranks_that_are_started_again_wait_for_the_lock_of_a_host_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """An NFS server keeps it for a while; without the wait each restart would end at once."""
    tries: list[int] = []
    flock = fcntl.flock

    def held(descriptor: int, how: int) -> None:
        tries.append(how)
        if len(tries) < 4:
            raise BlockingIOError
        flock(descriptor, how)

    monkeypatch.setattr(durable, "_PAUSE", 0.0)
    monkeypatch.setattr(fcntl, "flock", held)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(int(again)))
    if again:
        assert run(tmp_path, stop_after=1).tokens
    else:
        with pytest.raises(ConfigError, match="is training in"):
            run(tmp_path, stop_after=1)
        assert len(tries) == 1


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
