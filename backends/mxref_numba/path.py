"""Which set of kernels runs: the portable ones, or those written for vectors of 512 or 256 bits."""

from __future__ import annotations

import os
from enum import StrEnum
from functools import cache

from numba.core.registry import cpu_target

from mxref.errors import BackendError, SettingError

VARIABLE = "MXREF_NUMBA_PATH"
"""The environment variable that names a path."""


class KernelPath(StrEnum):
    """A set of kernels; all give the same bits."""

    PORTABLE = "portable"
    """Plain Numba, on any CPU."""
    AVX512 = "avx512"
    """LLVM vector code of 512 bits, on CPUs of the generation of Ice Lake or Zen 4 and later."""
    AVX2 = "avx2"
    """LLVM vector code of 256 bits, on CPUs of the generation of Haswell or Zen and later."""


REQUIRED = {
    KernelPath.AVX512: ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512vnni"),
    KernelPath.AVX2: ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"),
    KernelPath.PORTABLE: (),
}
"""The CPU features that a path needs, by LLVM's names; the fastest path first."""


@cache
def missing(path: KernelPath) -> tuple[str, ...]:
    """Return the features that the path needs and for which Numba does not compile."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return tuple(name for name in REQUIRED[path] if f"+{name}" not in features)


def available() -> tuple[KernelPath, ...]:
    """Return the paths that Numba's target CPU can run, the fastest first."""
    return tuple(path for path in REQUIRED if not missing(path))


def choose(path: str) -> tuple[KernelPath, str]:
    """Return a path and why it was chosen: the one of that name.

    For `auto` it is the one that MXREF_NUMBA_PATH names, or without this variable the fastest one.

    Raises:
        BackendError: no path has the name, or the CPU cannot run it.
        SettingError: the same for the name in the variable.
    """
    variable = os.environ.get(VARIABLE) if path == "auto" else None
    asked = variable or path
    if asked == "auto":
        return available()[0], _why_no_faster()
    if problem := _problem(asked):
        raise SettingError(f"{VARIABLE}={problem}") if variable else BackendError(f"kernel path {problem}")
    return KernelPath(asked), f"{VARIABLE}={asked}" if variable else "asked for by name"


def _problem(path: str) -> str:
    if path not in list(KernelPath):
        return f"{str(path)!r} is not one of auto, {', '.join(KernelPath)}"
    if path not in available():
        return (
            f"{str(path)!r} needs a CPU with {', '.join(missing(KernelPath(path)))}, which Numba does not find here; "
            f"use one of {', '.join(available())}, or auto"
        )
    return ""


def _why_no_faster() -> str:
    best = available()[0]
    faster = list(REQUIRED)[: list(REQUIRED).index(best)]
    if not faster:
        return "the fastest"
    needs = (f"{path} needs {', '.join(missing(path))}" for path in faster)
    return f"the fastest that this CPU can run: {'; '.join(needs)}"
