"""`mxref train` as a rank that counts its graphs and may be stopped while one runs: `captured_runs.py FATE ARGUMENTS`.

FATE is `none`; `plain` for the same steps without graphs; or the name of a signal and a step, as in `SIGTERM@6`: the
last rank sends it to itself behind the start of this step, if the step is a graph and `torchrun` has not started the
rank again.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from gpu.captured_ranks import uncaptured
from mxref.cli import main
from mxref_torch.captured.operations import StepRunner
from mxref_training import steps
from mxref_training.distributed.connect import restarted

captures = 0
right_capture, right_run = StepRunner._captured, StepRunner.run


def counting(self: Any) -> Any:
    global captures
    captures += 1
    return right_capture(self)


def ending(self: Any) -> None:
    right_run(self)
    name, _, step = sys.argv[1].partition("@")
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    here = step and self._operations.context.step == int(step) and self._graph is not None
    if here and last and not restarted():
        os.kill(os.getpid(), signal.Signals[name])


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        steps.CapturedStep = uncaptured  # type: ignore[assignment, misc]
    StepRunner._captured = counting  # type: ignore[method-assign]
    StepRunner.run = ending  # type: ignore[method-assign]
    try:
        main(["train", *sys.argv[2:]], standalone_mode=True)
    finally:
        # In one write: both ranks end at the same time, and share a pipe.
        os.write(2, f"\nrank {os.environ['RANK']} captured {captures};\n".encode())
