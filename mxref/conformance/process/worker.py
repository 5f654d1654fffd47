"""The process that loads a backend and runs its checks; `processes` starts it and receives the results.

It is a fresh interpreter, because a GPU driver does not survive a fork. What it sends is `Loaded` or
`Refused` once, and then the number and the verdict of every check that it was given.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection

from mxref.capabilities import Capabilities
from mxref.conformance.model import Subject
from mxref.conformance.suite import Outline, outline, result_of
from mxref.conformance.watch.copies import Copies
from mxref.discovery import get_backend
from mxref.errors import LoadError, MxrefError


@dataclass(frozen=True)
class Loaded:
    """The message that a backend was loaded: its name, and the outline of its checks."""

    name: str
    capabilities: Capabilities
    outline: Outline


@dataclass(frozen=True)
class Refused:
    """The message that a backend was not loaded: the reason, and whether its own code is to blame."""

    text: str
    its_fault: bool


def main(channel: int, alive: int) -> None:
    """Run the requested checks until the channel ends.

    Args:
        channel: file descriptor of the connection to the parent.
        alive: file descriptor of a pipe that ends when the parent does.
    """
    for descriptor in (channel, alive):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    pipe = Connection(channel)
    name, choice = pipe.recv()
    try:
        with Copies() as copies:
            backend = get_backend(name)
            checks = choice.checks(backend.capabilities)
        if copies.returned:
            raise LoadError(
                f"backend {name!r} forked the process while it was loaded, and the copy went on as well"
            )
        # A plain copy, because the parent could not unpickle a class of the backend's own file.
        plain = {f.name: getattr(backend.capabilities, f.name) for f in fields(Capabilities)}
        loaded = Loaded(str(backend.name), Capabilities(**plain), outline(checks, backend.capabilities))
    except MxrefError as err:
        pipe.send(Refused(str(err), isinstance(err, LoadError)))
        return
    pipe.send(loaded)
    subject = Subject(backend)
    while True:
        try:
            numbers, subject.shrink = pipe.recv()
        except EOFError:
            return
        for i in numbers:
            pipe.send((i, result_of(checks[i], subject)))


def _end_with_parent(alive: int) -> None:
    """End this process and its children when the parent has ended, in whatever way."""
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)
