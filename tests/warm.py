"""Python processes that begin with PyTorch imported: forks of one process, for tests that start many.

To import PyTorch and its compiler takes 3 s of CPU time, most of what such a process of a test takes. `Popen` is
`subprocess.Popen` for commands of this Python. Its processes are children of this one, with the environment, folder,
session and pipes that were asked for. What a library reads from the environment when it is loaded is that of the first
process: one thread of OpenMP, OpenBLAS and MKL. Triton alone is told whether to interpret: there is a first process of
each kind.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import types
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, ClassVar

_MODULES = (
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.fsdp",
    "jinja2",
    "mxref.cli",
    "mxref_torch",
    "mxref_training.cli.ablate",
    "mxref_training.cli.train",
    "mxref_training.lab.queue",
    "mxref_training.lab.study",
    "mxref_training.trainer",
    "tokenizers",
)
"""What is imported before the forks: nothing that starts a thread, and no backend, whose settings are the process's."""
_PACKAGES = ("mxref", "mxref_torch", "mxref_training")
"""What a fork has imported, and would import from the same files if it began anew."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_INTERPRETS = "TRITON_INTERPRET"
"""The variable that decides, when Triton is imported, whether its functions are interpreted."""
_ALL = 1 << 22
"""Bytes that a request may have."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


class _Server:
    """The processes that the others are forked from, each started at the first request for one of its kind."""

    connections: ClassVar[dict[str, socket.socket]] = {}
    """By the value of `_INTERPRETS`."""

    @classmethod
    def request(cls, request: dict[str, Any], descriptors: list[int]) -> int:
        """Have a process forked that becomes a child of this one, and return its number."""
        interprets = request["environment"].get(_INTERPRETS, "")
        connection = cls.connections.get(interprets) or cls._start(interprets)
        adopts = ctypes.CDLL(None).prctl
        data = json.dumps(request | {"parent": os.getpid()}).encode()
        adopts(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(connection, [data], descriptors)
            answer = connection.recv(64)
        finally:
            adopts(_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the process that others are forked from has ended")
        return int(answer)

    @classmethod
    def _start(cls, interprets: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ALL)
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env={k: v for k, v in os.environ.items() if k != _INTERPRETS}
            | _ONE_THREAD
            | {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
            | ({_INTERPRETS: interprets} if interprets else {}),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        cls.connections[interprets] = ours
        atexit.register(process.wait)
        atexit.register(ours.close)
        return ours


class _ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` whose process is a fork."""

    def _execute_child(self, *arguments: Any) -> None:
        (
            args, _executable, preexec, _close_fds, pass_fds, cwd, env, _startup, _flags, shell, p2cread, _p2cwrite,
            _c2pread, c2pwrite, _errread, errwrite, _restore, gid, gids, uid, umask, new_session, *group,
        ) = arguments  # fmt: skip
        words = [os.fsdecode(word) for word in args]
        assert words[0] == sys.executable, f"{words[0]} is not this Python"
        assert (preexec, tuple(pass_fds), shell, gid, gids, uid, umask) == (
            None,
            (),
            False,
            None,
            None,
            None,
            -1,
        )
        assert all(number == -1 for number in group)
        request = {
            "command": words[1:],
            "environment": dict(os.environ if env is None else {k: os.fspath(v) for k, v in env.items()}),
            "folder": os.fspath(cwd or os.getcwd()),
            "session": bool(new_session),
        }
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _Server.request(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, _p2cwrite, _c2pread, c2pwrite, _errread, errwrite)


Popen: type[subprocess.Popen[Any]] = _ForkedPopen if sys.platform == "linux" else subprocess.Popen
"""`subprocess.Popen`, with `-P`, `-c CODE`, `-m MODULE` or a script after this Python's own name."""


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; return its request in it, and None at the end in this one."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _ALL, 3)
        if not data:
            return None
        number, told = os.pipe()
        if between := os.fork():
            os.close(told)
            os.waitpid(between, 0)  # whoever asked adopts what it leaves
            connection.send(os.read(number, 64))
            for descriptor in (number, *descriptors):
                os.close(descriptor)
            continue
        if child := os.fork():
            os.write(told, str(child).encode())
            os._exit(0)
        for descriptor in (number, told):
            os.close(descriptor)
        connection.close()
        for own, descriptor in enumerate(descriptors):
            os.dup2(descriptor, own)
            os.close(descriptor)
        request: dict[str, Any] = json.loads(data)
        for _ in range(10_000):
            if os.getppid() == request["parent"]:
                return request
            time.sleep(0.001)
        os._exit(1)  # whoever asked has ended


def _become(request: dict[str, Any]) -> None:
    """Be the process that was asked for, until its end."""
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    first, *arguments = request["command"]
    base = list(sys.path)
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-P":
        first, *arguments = arguments
    else:
        added.insert(0, "" if first in ("-c", "-m") else str(Path(first).absolute().parent))
    sys.path[:] = added + [path for path in base if path not in added]
    for package in _PACKAGES:
        spec = PathFinder.find_spec(package)
        assert spec is not None
        assert spec.origin == sys.modules[package].__file__, f"{package} is not the one under test"
    if first == "-c":
        code, *arguments = arguments
        sys.argv[:] = ["-c", *arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        module, *arguments = arguments
        sys.argv[:] = [module, *arguments]
        sys.modules.pop(module, None)  # a fresh process would not have it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in _MODULES:
        import_module(module)
    # A process that collects garbage would go through all that is imported, and copy it.
    gc.collect()
    gc.freeze()
    if request := _serve(connection):
        _become(request)


if __name__ == "__main__":
    _main()
