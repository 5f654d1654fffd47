"""Where kernels run, and the options that all of them are compiled with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.jit import JITFunction

from mxref.errors import UnsupportedError

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU under Triton's interpreter; read once, when they are decorated."""

DEVICE = "cpu" if INTERPRETED else "cuda"

WARP = 64 if torch.version.hip else 32
"""Threads of a warp, or of a wavefront."""

WARPS = 4
"""Warps of a program that does not ask for another number."""


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU of compute capability 9.0."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def check_device(x: torch.Tensor) -> None:
    """Raise UnsupportedError unless a tensor is on the device where kernels run."""
    if x.device.type != DEVICE:
        raise UnsupportedError(
            f"backend 'triton' does not declare {x.device} in devices (declared: {DEVICE}); "
            f"move the tensor there: x.to({DEVICE!r})"
        )


_RUN = JITFunction.run
"""Triton's own launcher, which tools replace to observe launches."""
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Kernels that were started before, with their constants, by the arguments for which they were compiled."""


def kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the properties of arguments for which Triton specializes a kernel on an NVIDIA GPU; None if unknown here.

    It is no coarser than Triton's: types, alignment to 16, and the integer 1.
    """
    out: list[Any] = []
    for x in arguments:
        if isinstance(x, torch.Tensor):
            out.append((x.dtype, x.data_ptr() % 16))
        elif type(x) is int:
            out.append((x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31, x < 1 << 63))
        elif type(x) is float or x is None:
            out.append(type(x))
        else:
            return None
    return tuple(out)


def _is_watched() -> bool:
    """Return whether a tool, such as a profiler, has registered for launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return JITFunction.run is not _RUN or any(
        hook is not None and getattr(hook, "calls", True) for hook in hooks
    )


def _start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Start a kernel. If it was started with similar arguments before, skip Triton's inspection of arguments and
    globals. The inspection takes up to 150 us, more than the kernel itself in small models.
    """
    on_nvidia = arguments[0].is_cuda and torch.version.hip is None
    kind = kinds(arguments) if on_nvidia and not _is_watched() else None
    if kind is None:
        kernel[grid](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    key = kernel, device, kind, tuple(constants.items())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        rest = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(constants[name] for name in rest)
        return
    compiled, values = found
    stream = triton.runtime.driver.active.get_current_stream(device)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *values
    )


_INTERPRETER = threading.Lock()


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Let one thread use the interpreter, which keeps the place of the running program in a global variable."""
    with _INTERPRETER, np.errstate(all="ignore"):  # overflow and NaN are valid results
        yield


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the device of its first argument.

    Contraction is off for all of them: a product that is contracted into a sum has other bits.
    """
    device: contextlib.AbstractContextManager[Any]
    if INTERPRETED:
        device = _interpreter()
    elif arguments[0].device.index == torch.cuda.current_device():
        device = contextlib.nullcontext()
    else:
        device = torch.cuda.device(arguments[0].device)
    with device:
        _start(kernel, grid, arguments, {"num_warps": WARPS, "enable_fp_fusion": False} | constants)


def signed_word(word: int) -> int:
    """Return the low 32 bits of an integer as int32 has them: kernels are compiled for one type of it."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def tiles_of(length: int, tile: int) -> int:
    """Return how many tiles cover a length; Triton's own function is made for kernels, and takes microseconds here."""
    return -(-length // tile)


def power_of_two_from(needed: int, limit: int) -> int:
    """Return the smallest power of two that is at least `needed`, but at most `limit`, itself one."""
    return min(limit, 1 << (needed - 1).bit_length())
