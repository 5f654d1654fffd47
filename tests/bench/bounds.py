"""What limits the CPU quantizer: its kernels on data in the cache, and reading memory without any computation.

    NUMBA_NUM_THREADS=1 python -m bench.bounds

A slab of 128 rows in two widths stays in the second-level cache; the difference of their times, scaled up to the
whole matrix, is what an operation takes without waiting for memory.
"""

# A kernel has no annotations: Numba infers its types.

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from mxref import OperandSpec, get_backend

SIZE, ROWS, NARROW, WIDE = 4096, 128, 256, 1280
PLAIN, H16 = OperandSpec(), OperandSpec(hadamard=16)
OPERATIONS: dict[str, tuple[OperandSpec, int | None]] = {
    "quantize float32": (PLAIN, 1), "quantize H16": (H16, 1), "quantize axis 0": (PLAIN, 0),
    "quantize_dual": (PLAIN, None), "quantize_dual H16": (H16, None),
}  # fmt: skip
"""Treatment and axis; no axis is both."""


def fastest(work: Callable[[], Any], repeats: int) -> float:
    """Return the least milliseconds of `work`."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


@numba.njit(parallel=True, nogil=True)
def _largest_magnitudes(bits, width, shares):
    # Reads every element once, in runs of `width`, and does next to nothing with it.
    out = np.zeros(shares, np.int32)
    for share in numba.prange(shares):
        top = np.int32(0)
        for first in range(0, bits.shape[1], width):
            for r in range(share * bits.shape[0] // shares, (share + 1) * bits.shape[0] // shares):
                row = bits[r]
                for c in range(np.uint64(first), np.uint64(first + width)):
                    top = max(top, np.int32(row[c] & np.int32(0x7FFFFFFF)))
        out[share] = top
    return out


def main() -> None:
    """Print milliseconds for 4096 x 4096 float32."""
    backend = get_backend("numba")
    x = np.random.default_rng(0).standard_t(3, (SIZE, SIZE)).astype(np.float32)
    target = np.empty_like(x)

    def call(operation: str, a: Any) -> Any:
        spec, axis = OPERATIONS[operation]
        if axis is None:
            return backend.quantize_dual(a, (spec, spec))
        return backend.quantize(a, spec, axis=axis)

    threads = numba.get_num_threads()
    print(f"np.copyto, one thread           {fastest(lambda: np.copyto(target, x), 20):6.2f}")
    for width in (SIZE, 128):
        read = fastest(lambda w=width: _largest_magnitudes(x.view(np.int32), w, threads), 20)
        print(f"reading, {threads} threads, runs of {4 * width:5d} bytes {read:6.2f}")
    for operation in OPERATIONS:
        slabs = [np.ascontiguousarray(x[:ROWS, :width]) for width in (NARROW, WIDE)]
        # In turns, since what else the machine does comes and goes.
        turns = [[fastest(lambda s=s, o=operation: call(o, s), 30) for s in slabs] for _ in range(20)]
        narrow, wide = (min(times) for times in zip(*turns, strict=True))
        cached = (wide - narrow) * SIZE * SIZE / (ROWS * (WIDE - NARROW))
        whole = fastest(lambda o=operation: call(o, x), 12)
        print(f"{operation:20s} in cache {cached:6.2f}, whole {whole:6.2f}")


if __name__ == "__main__":
    main()
