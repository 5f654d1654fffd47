"""A simulated GPU: tensors without data that claim to be on it, and launches that only compile.

The backend's host code runs unchanged. It sees torch tensors on device cuda:0, picks tiles, strides and
specializations as it does on the real machine, and launches; Triton compiles the kernel for the target, and stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Machine:
    """The properties of a GPU for which the backend and Triton ask."""

    name: str
    target: GPUTarget
    capability: tuple[int, int]
    hip: str | None
    """torch.version.hip, which ROCm's torch has; it has to be set before the backend is imported."""
    architecture: str
    """gcnArchName of the device's properties; empty on NVIDIA."""
    warp: int
    """Threads of a warp, or of a wavefront."""
    processors: int
    """Multiprocessors, or compute units."""


MACHINES = {
    "gfx950": Machine(
        "gfx950", GPUTarget("hip", "gfx950", 64), (9, 5), "ahead of time", "gfx950:sramecc+:xnack-", 64, 256
    ),
    "sm_90": Machine("sm_90", GPUTarget("cuda", 90, 32), (9, 0), None, "", 32, 132),
}


@dataclass(frozen=True)
class Launch:
    """A launch that was compiled."""

    kernel: str
    """Name of the kernel's function."""
    programs: int
    compiled: Any
    """Triton's compiled kernel."""


class _Driver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, machine: Machine) -> None:
        self._target = machine.target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class _WithoutData(TorchFunctionMode):
    """Tensors are made on torch's device `meta`, which has shapes and strides only, and claim to be on cuda:0."""

    _DEVICE = torch.device("cuda", 0)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # A getter is a new object each time, equal to the others.
        if func == torch.Tensor.device.__get__:
            return self._DEVICE
        if func is torch.Tensor.data_ptr:  # memory as torch allocates it, aligned
            return args[0].storage_offset() * args[0].element_size()
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def become(machine: Machine) -> None:
    """Make torch and Triton describe a machine for the rest of this process; import the backend afterwards."""
    torch.version.hip = machine.hip
    properties: Any = SimpleNamespace(
        gcnArchName=machine.architecture, name=machine.name, multi_processor_count=machine.processors
    )
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: machine.capability
    torch.cuda.get_device_properties = lambda device=None: properties
    triton.runtime.driver.set_active(_Driver(machine))


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Yield a list to which every launch in the block adds itself, compiled and not run."""
    run = JITFunction.run
    seen: list[Launch] = []

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **named)
        seen.append(Launch(self.__name__, math.prod(grid), compiled))
        return compiled

    JITFunction.run = compile_only
    try:
        with _WithoutData():
            yield seen
    finally:
        JITFunction.run = run
