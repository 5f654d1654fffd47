"""A process with everything imported, from which commands are forked: `python -m faults.server`, with the shim loaded.

A line of JSON on standard input gives a command, its fault and where its output goes; a line of standard output
answers with how the process ended.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ablation_fakes import in_process
from faults import planted
from faults.scenario import scenarios, write_inputs
from mxref.cli import main
from mxref.discovery import get_backend
from mxref_training import checkpoint
from mxref_training.lab.queue import Queue
from mxref_training.report.ladder import page
from mxref_training.trainer import train

LATER = (
    "encodings.ascii",
    "jinja2",
    "mxref_training.lab.branches",
    "mxref_training.lab.queue",
    "mxref_training.lab.study",
    "mxref_training.cli.ablate",
    "mxref_training.cli.ablate_pages",
    "mxref_training.cli.train",
    "mxref_training.report.branches",
    "mxref_training.trainer",
    "numpy.ctypeslib",
    "numpy.random",
    "rich.progress",
    "rich.table",
    "tokenizers",
    "tomli_w",
    "torch._inductor",
)
"""What the commands import when they run, so that a forked one need not."""


class AtOnce:
    """In place of a thread: its work is done when it starts, so that operations have one order."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False

    def join(self) -> None:
        """Return, because there is nothing to wait for."""


def run(request: dict[str, Any]) -> int:
    """Run a command in this process and return its exit code."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= request["environment"]
    if request["plant"]:
        getattr(planted, request["plant"])()
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.shim_arm(
        request["root"].encode(), request["mode"], ctypes.c_long(request["at"]), request["record"].encode()
    )
    try:
        main(request["command"])
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def rehearse() -> None:
    """Give the two commands once, elsewhere: what a process makes at its first run need not be made in every fork."""
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        inputs = Path(folder)
        write_inputs(inputs)
        for name in ("train", "ablate"):
            root = inputs / name
            command = next(found.command for found in scenarios(inputs, root) if found.name == name)
            with (
                patch.dict(os.environ, XDG_CACHE_HOME=str(root / "cache")),
                redirect_stdout(nowhere),
                redirect_stderr(nowhere),
            ):
                failed = main(list(command), standalone_mode=False)
            assert not failed, f"{command} ended with {failed}"


def serve() -> None:
    """Answer requests until standard input ends."""
    torch.set_num_threads(1)
    get_backend("reference")
    for module in LATER:
        import_module(module)
    # Drawing writes no file, and would take longer than all else.
    page.curves_svg = page.overheads_svg = lambda results: "<svg/>"  # type: ignore[assignment]
    checkpoint.Thread = AtOnce  # type: ignore[assignment,misc]
    # The process that is killed trains the runs itself.
    Queue.__call__ = lambda queue, *given, **more: in_process(train, get_backend(queue.backend))(
        *given, **more
    )  # type: ignore[method-assign]
    rehearse()
    # A child that collects garbage would go through all that is imported, and copy it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(run(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
