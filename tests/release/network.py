"""Commands without a network: in a network namespace of their own, or, where that is not allowed, unconnected."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from release.errors import ReleaseError

_NAMESPACES = (("unshare", "--user", "--map-root-user", "--net", "--"), ("unshare", "--net", "--"))
REFUSING = '''"""Refuses every connection of this Python to a machine, and every look-up of a name."""

import sys

_UNIX = 1


def _refuse(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        raise OSError("the network is cut off")
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg") and args[0].family != _UNIX:
        raise OSError("the network is cut off")


sys.addaudithook(_refuse)
'''
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()"


@dataclass(frozen=True)
class Cut:
    """How the network is cut off: words before a command, or a module in the environment's site-packages."""

    name: str
    words: tuple[str, ...] = ()
    sitecustomize: str = ""


NAMESPACE = "network namespace"
PYTHON = "Python without connections"


def find_cut() -> Cut:
    """Return the strongest way that this machine allows."""
    for words in _NAMESPACES:
        if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return Cut(NAMESPACE, words)
    return Cut(PYTHON, sitecustomize=REFUSING)


def require_cut(cut: Cut, python: Path, env: Mapping[str, str]) -> None:
    """Raise ReleaseError if a Python under the cut can connect to a port that one outside of it can connect to."""
    with _listener() as address:
        words = ["-c", _CONNECT, *address]
        if not _succeeds([sys.executable, *words]):
            raise ReleaseError(f"cannot connect to a port of this machine: {' '.join(address)}")
        if _succeeds([*cut.words, str(python), *words], env):
            raise ReleaseError(f"the network is said to be cut off ({cut.name}), but can be reached")


def _succeeds(words: list[str], env: Mapping[str, str] | None = None) -> bool:
    return subprocess.run(words, capture_output=True, env=env, timeout=60).returncode == 0


@contextlib.contextmanager
def _listener() -> Iterator[tuple[str, str]]:
    """Yield host and port of this machine at which connections are accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        yield host, str(port)
