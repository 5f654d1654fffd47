"""The specification on CPUs, for speed: Numba kernels, held to the reference bit for bit."""

from mxref_numba.backend import NumbaBackend

__all__ = ["NumbaBackend"]
