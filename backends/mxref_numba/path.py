"""Which set of kernels runs: the portable ones, or those written for vectors of 512 or 256 bits."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from numba.core.registry import cpu_target

from mxref.errors import BackendError


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
    KernelPath.AVX2: ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
    KernelPath.PORTABLE: (),
}
"""The CPU features that a path needs, by LLVM's names; the fastest path first."""


@cache
def available() -> tuple[KernelPath, ...]:
    """Return the paths that the CPU which Numba compiles for can run, the fastest first."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return tuple(path for path, needed in REQUIRED.items() if {f"+{name}" for name in needed} <= {*features})


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
            f"kernel path {path!r} needs a CPU with {', '.join(REQUIRED[KernelPath(path)])}; "
            f"this one, as Numba sees it, can run {', '.join(available())}: pass one of these, or 'auto'"
        )
    return KernelPath(path)
