"""The GEMM of the Numba backend, with every set of kernels that the CPU can run, bit for bit."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numba_checks import REFERENCE, bits, operand
from numpy.typing import NDArray

from mxref import GemmProfile, MXArray
from mxref.formats import E2M1
from mxref.layouts.packed import pack
from mxref.mxarray import PreparedArray
from places import TESTS
from strategies import Block, K, gemm_operands

pytest.importorskip("numba")

from mxref_numba.backend import NumbaBackend
from mxref_numba.gemm import packed_tiles
from mxref_numba.gemm.packed_panels import tiling_of
from mxref_numba.path import KernelPath, available
from mxref_numba.vector.target import TARGETS

BACKENDS = {path: NumbaBackend(path) for path in available()}
SIZES = (1, 5, 6, 7, 31, 32, 33, 65)

Bits = NDArray[Any]

VECTORS = [path for path in BACKENDS if path in TARGETS]
on_vectors = pytest.mark.parametrize("path", VECTORS)


WITHOUT_VNNI = "avx2 without AVX-VNNI"


@pytest.fixture(params=[*KernelPath, WITHOUT_VNNI])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NumbaBackend:
    path = KernelPath.AVX2 if request.param == WITHOUT_VNNI else request.param
    if path not in BACKENDS:
        pytest.skip(f"the CPU, as Numba sees it, has no {path}")
    if request.param == WITHOUT_VNNI:
        if not TARGETS[path].features:
            pytest.skip("the path avx2 of this CPU is without AVX-VNNI")
        monkeypatch.setitem(TARGETS, path, replace(TARGETS[path], features=""))
    return BACKENDS[path]


def of(elements: NDArray[np.uint8], scales: NDArray[np.uint8]) -> MXArray:
    return MXArray(pack(elements, E2M1), scales, elements.shape, 1)


def check(
    backend: NumbaBackend, a: MXArray, b: MXArray, dtypes: tuple[str, ...] = ("float32", "bfloat16")
) -> Bits:
    """Return the float32 result after comparison with the reference."""
    for dtype in dtypes:
        got, expected = (one.scaled_gemm(a, b, out_dtype=dtype) for one in (backend, REFERENCE))
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(bits(got), bits(expected))
    return backend.scaled_gemm(a, b)


@pytest.mark.clause("gemm.ordered", "gemm.output", "gemm.block_dot")
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("scales", [(120, 134), (0, 255)])
def test_every_edge_of_a_tile(backend: NumbaBackend, m: int, scales: tuple[int, int]) -> None:
    lengths = itertools.cycle((K, 2 * K, 5 * K))
    for n, k in zip(SIZES, lengths, strict=False):
        check(backend, operand(m, k, *scales, seed=1), operand(n, k, *scales, seed=2))


def test_every_sum_of_scales_around_the_limits_of_a_power(backend: NumbaBackend) -> None:
    """Where 2^(eA + eB - 2) leaves the normal numbers: largest, smallest and cancelling dots, and sums of them."""
    ones = np.tile(np.uint8([7] * K + [1] + [0] * (K - 1) + [9] * K + [15] * K), (6, 1))
    ones[3:] ^= 8
    a_codes = np.uint8([0, 1, 64, 65, 127, 253, 254])
    for total in [*range(125, 136), *range(226, 236), *range(370, 390), 0, 1, 507, 508]:
        pairs = [(int(code), total - int(code)) for code in a_codes if 0 <= total - int(code) <= 254]
        for left, right in pairs:
            a = of(ones, np.full((6, 4), left, np.uint8))
            b = of(ones[::-1].copy(), np.full((6, 4), right, np.uint8))
            check(backend, a, b, ("float32",))


@pytest.mark.parametrize("total", [382, 383, 384, 385])
def test_terms_beyond_float32_that_cancel_or_are_zero(backend: NumbaBackend, total: int) -> None:
    """1.5 * 2^127 and then -1/4 * 2^(total - 254), or a block whose products cancel under that scale."""
    a_elements, b_elements = np.zeros((2, 2 * K), np.uint8), np.zeros((1, 2 * K), np.uint8)
    a_elements[:, 0], b_elements[0, 0] = 7, 6  # 6 * 4
    a_elements[0, K], b_elements[0, K] = 1, 9  # 1/2 * -1/2
    a_elements[1, K : K + 2], b_elements[0, K + 1] = (1, 1), 1  # 1/2 * -1/2 + 1/2 * 1/2
    a = of(a_elements, np.array([[250, 254]] * 2, np.uint8))
    out = check(backend, a, of(b_elements, np.array([[127, total - 254]], np.uint8)), ("float32",))
    assert out[1, 0] == np.float32(1.5 * 2.0**127)
    assert np.isfinite(out[0, 0]) == (total <= 384)


def test_one_row_that_needs_wide_sums_among_others(backend: NumbaBackend) -> None:
    a, b = operand(40, 128, 110, 140, seed=6), operand(70, 128, 110, 140, seed=7)
    for row, code in ((0, 1), (17, 254), (39, 0)):
        a.scales[row] = code
    b.scales[5, 2], b.scales[69, 0] = 2, 253
    check(backend, a, b)


def test_scales_of_blocks_that_are_nothing_do_not_count(backend: NumbaBackend) -> None:
    a, b = operand(9, 160, 120, 130, seed=8), operand(35, 160, 120, 130, seed=9)
    expected = check(backend, a, b).copy()
    for q in (a, b):
        zero = ~(q.codes.reshape(*q.scales.shape, -1) & 0x77).any(axis=-1)
        assert zero.any()
        q.scales[zero] = np.resize(np.uint8([0, 254]), zero.sum())
    np.testing.assert_array_equal(bits(check(backend, a, b)), bits(expected))


def test_infinity_stays_and_negative_underflow_keeps_its_sign(backend: NumbaBackend) -> None:
    one, minus = np.uint8([2] + [0] * (K - 1)), np.uint8([10] + [0] * (K - 1))
    up_down, down_up = np.tile(np.r_[one, minus], (7, 1)), np.tile(np.r_[minus, one], (7, 1))
    huge, unit = np.full((7, 2), 254, np.uint8), np.full((7, 2), 255 - 127, np.uint8)
    ones = np.tile(one, (7, 2))
    for elements, sign in ((up_down, 1), (down_up, -1)):
        out = check(backend, of(elements, huge), of(ones, unit))
        assert (out == sign * np.inf).all()
    tiny = np.zeros((7, 1), np.uint8)
    assert (bits(check(backend, of(up_down[:, K:], tiny), of(up_down[:, :K], tiny))) == 1 << 31).all()
    assert not bits(check(backend, of(np.tile(minus, (7, 2)) & 8, huge), of(ones, huge))).any()


@settings(max_examples=150, deadline=None)
@given(gemm_operands())
def test_drawn_rows(operands: tuple[list[Block], list[Block]]) -> None:
    a, b = (
        of(
            np.array([block[1] for block in blocks], np.uint8).reshape(1, -1),
            np.array([block[0] for block in blocks], np.uint8).reshape(1, -1),
        )
        for blocks in operands
    )
    for one in BACKENDS.values():
        check(one, a, b)


# ---- where operands lie ----


@pytest.mark.clause("conformance.arrays")
def test_operands_of_any_strides(backend: NumbaBackend) -> None:
    a, b = operand(65, 128, 100, 255, seed=15), operand(67, 128, 100, 140, seed=16)

    def strided(q: MXArray, how: str) -> MXArray:
        codes, scales = q.codes, q.scales
        if how == "every other row, from the last":
            codes, scales = codes[::-2], scales[::-2]
        elif how == "columns of a longer row":
            codes, scales = (np.tile(x, 2)[:, : x.shape[1]] for x in (codes, scales))
        else:
            codes, scales = (np.asfortranarray(x) for x in (codes, scales))
        return MXArray(codes, scales, (len(codes), q.length), 1)

    for how in ("every other row, from the last", "columns of a longer row", "columns first"):
        check(backend, strided(a, how), strided(b, how))
    for q in (a, b):
        q.codes.flags.writeable = q.scales.flags.writeable = False
    check(backend, a, b)


@on_vectors
def test_rows_far_apart_are_read_where_they_lie(path: KernelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = operand(64, 128, 100, 140, seed=17)
    q = MXArray(whole.codes[::3], whole.scales[::3], (22, 128), 1)
    expected = check(BACKENDS[path], q, q)  # after it Numba has compiled everything, and needs NumPy no more
    monkeypatch.delattr(np, "ascontiguousarray")
    np.testing.assert_array_equal(bits(BACKENDS[path].scaled_gemm(q, q)), bits(expected))


@on_vectors
@pytest.mark.parametrize("records", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_parts_that_caches_hold(
    path: KernelPath, records: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and ranges of few panels, the last ones cut off."""
    a, b = operand(45, 96, 0, 255, seed=18), operand(170, 96, 100, 140, seed=19)
    (group, reach), tiling = records, tiling_of(TARGETS[path])
    monkeypatch.setattr(packed_tiles, "_GROUP_BYTES", group * 3 * tiling.left_record)
    monkeypatch.setattr(packed_tiles, "_RANGE_BYTES", reach * 3 * tiling.right_record)
    check(BACKENDS[path], a, b)


# ---- prepared operands ----


@pytest.mark.parametrize("profile", [GemmProfile.ORDERED, GemmProfile.BOUNDED])
def test_a_layout_is_read_in_place_of_codes(backend: NumbaBackend, profile: GemmProfile) -> None:
    a, b = operand(23, 96, 110, 130, seed=22), operand(40, 96, 110, 130, seed=23)
    layout = backend.prepare(b, profile=profile).layout
    hollow = PreparedArray.of(replace(b, codes=np.zeros_like(b.codes)), backend.name, profile, layout)
    full, got = (backend.scaled_gemm(a, q, profile=profile) for q in (b, hollow))
    np.testing.assert_array_equal(bits(got), bits(full))


def test_each_path_has_its_own_name(backend: NumbaBackend) -> None:
    """Or one would read the other's layout."""
    assert [one.name for one in BACKENDS.values()].count(backend.name) == 1


# ---- threads ----


def test_two_threads_give_the_bits_of_one() -> None:
    code = """
import itertools, numba
from test_numba_gemm import BACKENDS, bits, operand
a, b = operand(521, 256, 90, 160, seed=28), operand(263, 256, 90, 160, seed=29)
a.scales[400, 3] = 255
for backend in BACKENDS.values():
    results = []
    for threads in (1, 2):
        numba.set_num_threads(threads)
        variants = itertools.product((b, backend.prepare(b)), ("float32", "bfloat16"))
        results.append([bits(backend.scaled_gemm(a, q, out_dtype=dtype)) for q, dtype in variants])
    assert all((one == two).all() for one, two in zip(*results, strict=True)), backend.name
    print(backend.name, results[1][0].size)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=os.path.dirname(__file__),
        env=os.environ | {"PYTHONPATH": str(TESTS), "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [part for one in BACKENDS.values() for part in (one.name, str(521 * 263))]
