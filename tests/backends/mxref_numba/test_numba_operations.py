"""The Numba backend: Hadamard, dequantization, and what holds for every operation."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxref import (
    BlockShape,
    GemmProfile,
    MXArray,
    OperandSpec,
    UnsupportedError,
)
from mxref.formats import CANONICAL_NAN, E2M1
from mxref.layouts.packed import pack
from mxref.placement import Placement
from mxref.steps.hadamard import SIZES

numba = pytest.importorskip("numba")
from numba_checks import (
    BACKEND,
    DTYPES,
    REFERENCE,
    SR_SPEC,
    STREAM,
    check_dequantize,
    crafted,
    normal,
    operand,
)

Bits = NDArray[Any]


def bits_of(x: NDArray[Any]) -> Bits:
    """Bit patterns with every NaN made the same: those of a transform have no canonical payload."""
    bits = np.array(x).view(f"u{x.dtype.itemsize}")
    bits[np.isnan(x.astype(np.float64))] = CANONICAL_NAN >> (32 - 8 * x.dtype.itemsize)
    return bits


@pytest.mark.parametrize("n", SIZES)
def test_hadamard(n: int) -> None:
    signs = int.from_bytes(np.random.default_rng(n).bytes(n // 8 or 1), "little") & (1 << n) - 1
    inputs = [(crafted(np.float32, 256), 1), (normal(512, 35), 0), (normal(3, 256, 5)[:, ::-1], 1)]
    inputs += [(normal(7, 512, dtype=dtype), 1) for dtype in DTYPES[1:]]
    for x, axis in inputs:
        for pattern in (0, signs):
            got, expected = (b.hadamard(x, n, pattern, axis=axis) for b in (BACKEND, REFERENCE))
            assert got.dtype == np.float32
            assert got.shape == x.shape
            np.testing.assert_array_equal(bits_of(got), bits_of(expected))


@pytest.mark.clause("conformance.capabilities")
def test_dequantize_every_code_at_every_scale() -> None:
    scales = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.tile(pack(np.tile(np.arange(16, dtype=np.uint8), 2), E2M1), (256, 1))
    check_dequantize(MXArray(codes, scales, (256, 32), 1))
    check_dequantize(MXArray(codes, scales, (32, 256), 0))
    check_dequantize(MXArray(codes[::-1], scales[::-1], (256, 31), 1))  # padded, and of negative strides
    check_dequantize(MXArray(codes.reshape(4, 64, 16), scales.reshape(4, 64, 1), (4, 32, 64), 1))


def _operations() -> dict[str, Callable[[], Any]]:
    x = normal(67, 320)
    a, b = operand(131, 128, 100, 255, seed=1), operand(270, 128, 100, 140, seed=2)
    return {
        "quantize": lambda: BACKEND.quantize(x, SR_SPEC, placement=Placement(STREAM)),
        "quantize, padded": lambda: BACKEND.quantize(x, OperandSpec(), axis=0, pad=True),
        "quantize, tiles": lambda: BACKEND.quantize(x[:64], OperandSpec(block=BlockShape.TILE)),
        "dequantize": lambda: BACKEND.dequantize(a),
        "dequantize, bfloat16": lambda: BACKEND.dequantize(a, "bfloat16"),
        "hadamard": lambda: BACKEND.hadamard(x, 64, 5),
        "gemm": lambda: BACKEND.scaled_gemm(a, b),
        "gemm, bfloat16": lambda: BACKEND.scaled_gemm(a, b, out_dtype="bfloat16"),
        "gemm, wide exponents": lambda: BACKEND.scaled_gemm(a, operand(9, 128, 0, 254, seed=3)),
    }


def _bytes(result: Any) -> list[bytes]:
    arrays = (result.codes, result.scales) if isinstance(result, MXArray) else (result,)
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


@pytest.mark.parametrize("name", list(_operations()))
def test_every_byte_of_a_result_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = _operations()[name]
    expected = _bytes(operation())  # compiles, which must see the true numpy.empty
    empty = np.empty

    for poison in (0x00, 0xA5, 0xFF):

        def poisoned(*args: Any, poison: int = poison, **kwargs: Any) -> NDArray[Any]:
            out = empty(*args, **kwargs)
            out.view(np.uint8)[...] = poison
            return out

        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", poisoned)
            got = operation()
        assert _bytes(got) == expected


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", list(_operations()))
def test_results_do_not_depend_on_the_number_of_threads(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = _operations()[name]
    expected = _bytes(operation())
    monkeypatch.setattr("mxref_numba.compiled.worker_count", lambda elements: workers)
    assert _bytes(operation()) == expected


def _no_copy() -> dict[str, tuple[NDArray[Any], int]]:
    x = normal(512, 1024)
    return {
        "as it is": (x, 1),
        "axis 0": (x, 0),
        "transpose": (x.T, 1),
        "reversed": (x[::-1, ::-1], 1),
        "reversed, axis 0": (x[::-1, ::-1], 0),
        "columns of a wider array": (normal(512, 2048)[:, 512:1536], 1),
        "permuted": (x.reshape(8, 64, 1024).transpose(1, 0, 2), 2),
        "permuted, axis 0": (x.reshape(64, 8, 1024).transpose(0, 2, 1), 0),
        "bfloat16 transpose": (x.astype(ml_dtypes.bfloat16).T, 1),
        "float16": (x.astype(np.float16), 0),
    }


@pytest.mark.parametrize("name", list(_no_copy()))
def test_inputs_are_not_copied(name: str) -> None:
    x, axis = _no_copy()[name]
    BACKEND.quantize(x, OperandSpec(), axis=axis)
    tracemalloc.start()
    try:
        q = BACKEND.quantize(x, OperandSpec(), axis=axis)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < q.codes.nbytes + q.scales.nbytes + x.nbytes // 4  # panels, whatever the size


@pytest.mark.clause("conformance.unsupported", evidence="known answer")
def test_undeclared_is_refused() -> None:
    q = operand(4, 32, 100, 140, seed=1)
    with pytest.raises(UnsupportedError, match="gemms"):
        BACKEND.scaled_gemm(q, q, profile=GemmProfile.EXACT)
    with pytest.raises(UnsupportedError, match="dequantize_dtypes"):
        BACKEND.dequantize(q, "float64")


def test_without_numba_the_import_names_it() -> None:
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "try:\n    import mxref_numba\n"
        "except ImportError as err:\n    print(err.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "numba"
