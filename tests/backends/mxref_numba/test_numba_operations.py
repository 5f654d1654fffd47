"""The Numba backend: what holds for every operation, and the kit cannot see."""

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
    MXArray,
    OperandSpec,
)
from mxref.placement import Placement

numba = pytest.importorskip("numba")
from numba_checks import (
    BACKEND,
    SR_SPEC,
    STREAM,
    normal,
    operand,
)


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
    monkeypatch.setattr("mxref_numba.threads.worker_count", lambda elements: workers)
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


def test_without_numba_the_import_names_it() -> None:
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "try:\n    import mxref_numba\n"
        "except ImportError as err:\n    print(err.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "numba"
