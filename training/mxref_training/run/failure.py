"""Unexpected exceptions, most often a backend's: one line for the user, the traceback in the run's log."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Protocol

from torch import nn

from mxref.backend import Backend
from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_linears
from mxref_training.errors import RunError
from mxref_training.run.folder import RunFolder


class _Run(Protocol):
    """As much of a run in progress as a message needs."""

    @property
    def step(self) -> int: ...

    @property
    def model(self) -> nn.Module: ...


@dataclass
class Failures:
    """The facts about a run that an exception ended."""

    folder: RunFolder
    backend: Backend
    steps: int
    """Length of the run."""
    run: _Run | None = None
    """The run, as soon as it exists."""

    @contextmanager
    def explained(self) -> Iterator[Failures]:
        """Have an exception of the block that is no `MxrefError` end in RunError, its traceback in the run's log.

        `SystemExit` is such an exception too: a backend must not end the program. `KeyboardInterrupt` passes.

        Raises:
            RunError: names the exception, and operation, layer and backend as far as the stack shows them.
        """
        try:
            yield self
        except MxrefError:
            raise
        except (Exception, SystemExit) as err:
            raise RunError(
                f"the run stopped {self._when()}: {self._what(err)}; {self._log(err)}; {self._next()}"
            ) from err

    def _when(self) -> str:
        return f"after {self.run.step} of {self.steps} steps" if self.run else "before its first step"

    def _next(self) -> str:
        saved = self.folder.store.latest()
        return f"the same command goes on from step {saved}" if saved else "the same command starts it again"

    def _what(self, err: BaseException) -> str:
        frames = [frame for frame, _ in traceback.walk_tb(err.__traceback__)]
        operation, text = _operation(frames, self.backend), raised_text(err)
        if operation is None:
            return text
        place = ", ".join([*self._layer(frames), *_role_or_tensor(frames)])
        where = f"{operation} ({place})" if place else operation
        return f"backend {self.backend.name!r} failed in {where}: {text}"

    def _layer(self, frames: list[FrameType]) -> Iterator[str]:
        held = [frame.f_locals.get(name) for frame in frames for name in ("self", "layer")]
        layers = [layer for layer in held if isinstance(layer, MXLinear)]
        if layers and self.run:
            names = named_linears(self.run.model).items()
            yield from (f"layer {name}" for name, module in names if module is layers[-1])

    def _log(self, err: BaseException) -> str:
        """Add the traceback to the run's log; return where it is."""
        log = self.folder.log
        text = f"--- {datetime.now(UTC).isoformat(timespec='seconds')}\n{''.join(traceback.format_exception(err))}"
        try:
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as problem:
            return f"its traceback is lost, because {log} cannot be written ({problem.strerror})"
        return f"its traceback is in {log}"


def _operation(frames: list[FrameType], backend: Backend) -> str | None:
    """Return the backend's operation that failed: a method of it, or an operator that could not use its answer."""
    methods = [frame for frame in frames if frame.f_locals.get("self") is backend]
    operators = [frame for frame in _of_operators(frames) if "impl" in frame.f_locals]
    found = methods or operators
    return found[0].f_code.co_name if found else None


def _role_or_tensor(frames: list[FrameType]) -> list[str]:
    """Return the role of the GEMM that failed, or the tensor that was quantized."""
    roles = [frame.f_locals.get("role") for frame in _of_operators(frames)]
    tensors = [
        frame.f_locals.get("tensor") for frame in frames if isinstance(frame.f_locals.get("self"), MXLinear)
    ]
    return [text for found in (roles, tensors) for text in found if isinstance(text, str)][:1]


def _of_operators(frames: list[FrameType]) -> list[FrameType]:
    return [
        frame for frame in frames if str(frame.f_globals.get("__name__")).startswith("mxref_torch.operators")
    ]
