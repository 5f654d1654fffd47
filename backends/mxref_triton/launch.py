"""Where kernels run, and the options that all of them are compiled with."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import triton

from mxref.errors import UnsupportedError

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU under Triton's interpreter; read once, when they are decorated."""

DEVICE = "cpu" if INTERPRETED else "cuda"

WARP = 64 if torch.version.hip else 32
"""Threads of a warp, or of a wavefront."""

WARPS = 4
"""Warps of a program that does not ask for another number."""


def check_device(x: torch.Tensor) -> None:
    """Raise UnsupportedError unless a tensor lies where kernels run."""
    if x.device.type != DEVICE:
        raise UnsupportedError(
            f"backend 'triton' does not declare {x.device} in devices (declared: {DEVICE}); "
            f"move the tensor there: x.to({DEVICE!r})"
        )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the device of its first argument.

    Contraction is off for all of them: a product that is contracted into a sum has other bits.
    """
    device: contextlib.AbstractContextManager[Any]
    if INTERPRETED:
        device = np.errstate(all="ignore")  # overflow and NaN are results here
    elif arguments[0].device.index == torch.cuda.current_device():
        device = contextlib.nullcontext()
    else:
        device = torch.cuda.device(arguments[0].device)
    with device:
        kernel[grid](*arguments, **{"num_warps": WARPS, "enable_fp_fusion": False} | constants)


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
