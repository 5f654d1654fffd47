"""Which of two sets of kernels runs: the portable ones, or those written for vectors of 512 bits."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from numba.core.registry import cpu_target

from mxref.errors import BackendError

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512vnni")


class KernelPath(StrEnum):
    """A set of kernels; both give the same bits."""

    PORTABLE = "portable"
    """Plain Numba, on any CPU."""
    AVX512 = "avx512"
    """LLVM vector code, on CPUs of the generation of Ice Lake or Zen 4 and later."""


@cache
def available() -> tuple[KernelPath, ...]:
    """Return the paths that the CPU which Numba compiles for can run, the fastest first."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if all(f"+{feature}" in features for feature in _AVX512):
        return KernelPath.AVX512, KernelPath.PORTABLE
    return (KernelPath.PORTABLE,)


def choose(path: str) -> KernelPath:
    """Return the path of that name, or the fastest one for `auto`.

    Raises:
        BackendError: no path has the name, or the CPU cannot run it.
    """
    if path == "auto":
        return available()[0]
    if path not in list(KernelPath):
        raise BackendError(f"kernel path {path!r} is not one of auto, {', '.join(KernelPath)}")
    if path not in available():
        raise BackendError(
            f"kernel path {path!r} needs a CPU with {', '.join(_AVX512)}; "
            f"this one, as Numba sees it, can run {', '.join(available())}: pass one of these, or 'auto'"
        )
    return KernelPath(path)
