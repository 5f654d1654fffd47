"""All paths of the Numba backend as one: each call runs on every path that this CPU has, and all must agree.

A test then compares one result with the reference, whose time is most of such a test's.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mxref import MXArray
from mxref_numba import path
from mxref_numba.backend import NumbaBackend


def _bytes(result: Any) -> list[bytes]:
    if isinstance(result, tuple):
        return [part for each in result for part in _bytes(each)]
    arrays = (result.codes, result.scales) if isinstance(result, MXArray) else (result,)
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


class EveryPath:
    """A backend whose operations run on every path and return the bits that all gave."""

    def __init__(self) -> None:
        self.backends = [NumbaBackend(each) for each in path.available()]

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            first, *others = self.backends
            result = getattr(first, operation)(*arguments, **options)
            bits = _bytes(result)
            for backend in others:
                same = _bytes(getattr(backend, operation)(*arguments, **options)) == bits
                assert same, f"{operation} on {backend.path} differs from {first.path}"
            return result

        return run
