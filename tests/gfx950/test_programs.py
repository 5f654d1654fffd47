"""Small programs of many kinds, compiled for gfx950 and executed in the software model, against NumPy.

They reach what the backend's kernels use little: reductions and scans across lanes, data-dependent loops, 64-bit
integers, float16, transposes through the LDS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl

from gfx950.driver import on_model

pytestmark = [
    pytest.mark.study,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]


@triton.jit
def reduce_and_scan(x, total, largest, prefix, N: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, N)
    v = tl.load(x + row * N + i)
    tl.store(total + row, tl.sum(v, axis=0))
    tl.store(largest + row, tl.max(v, axis=0))
    tl.store(prefix + row * N + i, tl.cumsum(v, axis=0))


@triton.jit
def sort_rows(x, out, N: tl.constexpr):
    i = tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, tl.sort(tl.load(x + i), dim=1))


@triton.jit
def transpose(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(x + r[:, None] * COLUMNS + c[None, :])
    tl.store(out + c[:, None] * ROWS + r[None, :], tl.trans(tile))


@triton.jit
def steps_to_one(x, out, n, B: tl.constexpr):
    """Count the steps of 3n + 1 to 1: every lane loops as often as it needs."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, i < n, 1).to(tl.int64)
    count = tl.zeros([B], tl.int32)
    while tl.max(v, axis=0) > 1:
        count += (v > 1).to(tl.int32)
        v = tl.where(v > 1, tl.where(v % 2 == 0, v // 2, 3 * v + 1), v)
    tl.store(out + i, count, i < n)


@triton.jit
def wide_integers(a, b, out, B: tl.constexpr):
    i = tl.arange(0, B)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x * y + (x >> (y & 63)) - (y << (x & 31)))
    tl.store(out + B + i, tl.where(x < y, x, y) ^ (x | ~y))
    tl.store(out + 2 * B + i, tl.umulhi(x.to(tl.uint64), y.to(tl.uint64)).to(tl.int64))
    tl.store(out + 3 * B + i, (x.to(tl.uint32) // (y.to(tl.uint32) | 1)).to(tl.int64))


@triton.jit
def half_floats(a, b, out, B: tl.constexpr):
    i = tl.arange(0, B)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + B + i, x * y - y)
    tl.store(out + 2 * B + i, tl.minimum(x, y))
    tl.store(out + 3 * B + i, (x.to(tl.float32) * 3 + y.to(tl.float32)).to(tl.float16))


@triton.jit
def narrow_integers(a, b, out, B: tl.constexpr):
    i = tl.arange(0, B)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + B + i, (x * y) >> 3)
    tl.store(out + 2 * B + i, tl.maximum(x, y) & ~(x << 1))


@triton.jit
def converted(x, out, small, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(out + i, v.to(tl.int32))
    tl.store(out + B + i, tl.floor(v).to(tl.int32))
    tl.store(out + 2 * B + i, v.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(out + 3 * B + i, tl.fma(v, v, -v).to(tl.int32, bitcast=True))
    tl.store(small + i, v.to(tl.int8))


@triton.jit
def shared_out(x, out, n, B: tl.constexpr):
    """Every program takes each piece that its number says, until there are none."""
    for start in range(tl.program_id(0) * B, n, tl.num_programs(0) * B):
        i = start + tl.arange(0, B)
        tl.store(out + i, tl.load(x + i, i < n) + tl.num_programs(0), i < n)


def launch(kernel: Any, grid: int, *args: Any, **constants: Any) -> None:
    """Execute a kernel on NumPy arrays, in place."""
    tensors = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args]
    with on_model() as launched:
        kernel[(grid,)](*tensors, enable_fp_fusion=False, **constants)
    assert len(launched) == 1


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("n", [64, 512])
def test_reductions_and_scans(n: int) -> None:
    x = RNG.integers(-1000, 1000, (3, n)).astype(np.int32)
    total, largest, prefix = np.zeros(3, np.int32), np.zeros(3, np.int32), np.zeros_like(x)
    launch(reduce_and_scan, 3, x, total, largest, prefix, N=n)
    assert total.tolist() == x.sum(axis=1).tolist()
    assert largest.tolist() == x.max(axis=1).tolist()
    assert (prefix == x.cumsum(axis=1)).all()


def test_sorting() -> None:
    x = RNG.integers(-(1 << 31), 1 << 31, (4, 32)).astype(np.int32)
    out = np.zeros_like(x)
    launch(sort_rows, 1, x, out, N=32)
    assert (out == np.sort(x, axis=1)).all()


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_transposition(dtype: type[np.integer]) -> None:
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, (32, 64), dtype)
    out = np.zeros((64, 32), dtype)
    launch(transpose, 1, x, out, ROWS=32, COLUMNS=64)
    assert (out == x.T).all()


def test_a_loop_that_ends_when_the_data_says() -> None:
    def steps(v: int) -> int:
        count = 0
        while v > 1:
            v, count = (v // 2 if v % 2 == 0 else 3 * v + 1), count + 1
        return count

    x = RNG.integers(1, 500, 600).astype(np.int32)
    out = np.zeros(600, np.int32)
    launch(steps_to_one, 3, x, out, 600, B=256)
    assert out.tolist() == [steps(int(v)) for v in x]


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_know_how_many_they_are(programs: int) -> None:
    x = RNG.integers(0, 1000, 500).astype(np.int32)
    out = np.zeros_like(x)
    launch(shared_out, programs, x, out, 500, B=64)
    assert (out == x + programs).all()


def test_wide_integers() -> None:
    a, b = (RNG.integers(-(1 << 63), 1 << 63, 256, np.int64) for _ in range(2))
    out = np.zeros((4, 256), np.int64)
    launch(wide_integers, 1, a, b, out, B=256)
    assert (out[0] == a * b + (a >> (b & 63)) - (b << (a & 31))).all()
    assert (out[1] == np.minimum(a, b) ^ (a | ~b)).all()
    pairs = [(int(x) % 2**64, int(y) % 2**64) for x, y in zip(a, b, strict=True)]
    assert [int(v) % 2**64 for v in out[2]] == [x * y >> 64 for x, y in pairs]
    assert out[3].tolist() == [x % 2**32 // (y % 2**32 | 1) for x, y in pairs]


def test_half_floats() -> None:
    a, b = (RNG.integers(0, 1 << 16, 256, np.uint16).view(np.float16) for _ in range(2))
    out = np.zeros((4, 256), np.float16)
    launch(half_floats, 1, a, b, out, B=256)
    with np.errstate(all="ignore"):
        fused = (a.astype(np.float32) * np.float32(3) + b.astype(np.float32)).astype(np.float16)
        wanted = np.stack([a + b, a * b - b, np.fmin(a, b), fused])
    nan = np.isnan(out) & np.isnan(wanted)
    assert ((out == wanted) | nan).all()


def test_narrow_integers() -> None:
    a, b = (RNG.integers(-(1 << 15), 1 << 15, 512).astype(np.int16) for _ in range(2))
    out = np.zeros((3, 512), np.int16)
    launch(narrow_integers, 1, a, b, out, B=512)
    assert (out[0] == a + b).all()
    assert (out[1] == (a * b) >> 3).all()
    assert (out[2] == np.maximum(a, b) & ~(a << 1)).all()


def test_conversions() -> None:
    x = np.concatenate(
        [RNG.uniform(-1000, 1000, 248), [0.5, -0.5, 2.5, -0.0, 1e-40, 1.00390625, 1.01171875, 127.9]]
    )
    x = x.astype(np.float32)
    out, small = np.zeros((4, 256), np.int32), np.zeros(256, np.int8)
    launch(converted, 1, x, out, small, B=256)
    u = x.view(np.uint32)
    assert (out[0] == x.astype(np.int32)).all()
    assert (out[1] == np.floor(x).astype(np.int32)).all()
    assert (out[2].view(np.uint32) == ((u + 0x7FFF + ((u >> 16) & 1)) >> 16 << 16)).all()
    exact = (
        x.astype(np.float64) * x - x
    )  # 48 bits, and one more for the difference: no rounding before this one
    assert (out[3].view(np.float32) == exact.astype(np.float32)).all()
    inside = np.abs(x) < 128
    assert (small[inside] == np.trunc(x[inside]).astype(np.int8)).all()
