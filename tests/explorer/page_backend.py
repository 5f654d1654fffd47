"""The arithmetic of the explorer page as a backend: its JavaScript, run by the V8 engine of mini-racer.

`mxref conform --backend tests/explorer/page_backend.py:backend` checks it.
"""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from py_mini_racer import MiniRacer

from mxref import Arithmetic, Backend, Capabilities, FourOverSix, ScaleRule
from mxref.explain.link import EXPLORER
from mxref.formats import BLOCK_FORMATS
from mxref.tomlio import to_table

_CALLS = (Path(__file__).parent / "calls.js").read_text(encoding="utf-8")
_VIEWS = {
    "uint8": "Uint8Array", "uint16": "Uint16Array", "uint32": "Uint32Array", "int64": "BigInt64Array",
    "bfloat16": "Uint16Array", "float32": "Float32Array", "float64": "Float64Array",
}  # fmt: skip
_ALIGNED = 8


def script(name: str) -> str:
    """Return the text of one of the page's scripts."""
    return (EXPLORER / name).read_text(encoding="utf-8")


class Engine:
    """A V8 engine that has run some scripts, and a memory that it shares with NumPy."""

    def __init__(self, *scripts: str) -> None:
        self._racer = MiniRacer()
        self._memory: Any = b""
        self._in_use = Lock()
        for text in (*scripts, _CALLS):
            self._racer.eval(text)

    def call(self, function: str, *values: Any) -> Any:
        """Return what a function returns; arguments and result are JSON values."""
        arguments = ", ".join(map(json.dumps, values))
        return json.loads(self._racer.eval(f"JSON.stringify({function}({arguments}) ?? null)"))

    def fill(
        self, function: str, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]], *values: Any
    ) -> None:
        """Call a function on views of arrays: copies of the inputs, then places for the outputs, which are filled."""
        with self._in_use:  # one memory serves all calls
            self._fill(function, inputs, outputs, values)

    def _fill(
        self,
        function: str,
        inputs: list[NDArray[Any]],
        outputs: list[NDArray[Any]],
        values: tuple[Any, ...],
    ) -> None:
        places, end = [], 0
        for array in (*inputs, *outputs):
            places.append((_VIEWS[str(array.dtype)], end, array.size))
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        if end > len(self._memory):
            self._memory = self._racer.eval(f"memory = new ArrayBuffer({2 * end}); new Uint8Array(memory)")
        shared = np.frombuffer(self._memory, np.uint8)
        within = [
            shared[at : at + a.nbytes] for (_, at, _), a in zip(places, (*inputs, *outputs), strict=True)
        ]
        for array, place in zip(inputs, within, strict=False):
            place[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.call(function, places, *values)
        for array, place in zip(outputs, within[len(inputs) :], strict=True):
            array.reshape(-1).view(np.uint8)[:] = place


class PageBackend(Backend):
    """Everything that the page computes of a tensor; it multiplies no matrices."""

    name = "page"
    capabilities = Capabilities(
        scale_rules=frozenset(ScaleRule),
        scale_thresholds=True,
        formats=frozenset(BLOCK_FORMATS.values()),
        blocks=frozenset(shape for made in BLOCK_FORMATS.values() for shape in (made.row, made.tile)),
        arithmetics=frozenset(Arithmetic),
        four_over_six=frozenset(FourOverSix),
        in_dtypes=frozenset({"float32"}),
        dequantize_dtypes=frozenset({"float64", "float32", "bfloat16"}),
        gemms=frozenset(),
        gemm_dtypes=frozenset(),
    )

    def __init__(self, **changed: str) -> None:
        """Run the page's scripts; `changed` are others in their place, by the name of the file without `.js`."""
        self.engine = Engine(*(changed.get(name, script(f"{name}.js")) for name in ("orders", "mx")))

    def _quantize(self, x, plan):
        rows, made, padded = plan.rows_shape, plan.format, _padded(x, plan)
        codes = np.empty((*rows, made.code_bytes(plan.length)), np.uint8)
        scales = np.empty((*rows, plan.length // made.k), np.uint8)
        stream = plan.stream and plan.stream.__dict__ | {"seed": str(plan.stream.seed)}
        self.engine.fill(
            "quantizeArrays", [padded.view(np.uint32), plan.global_rows()], [codes, scales], plan.length,
            to_table(plan.spec), plan.rotation and _negative(plan.rotation), stream, str(plan.global_length),
            str(plan.first), _bits(plan.tensor_amax), _number(plan.tensor_scale),
        )  # fmt: skip
        return codes, scales

    def _tensor_scale(self, x, plan, placement):
        known, _ = super()._tensor_scale(x, plan, placement)  # refuses what has no amax
        t = np.empty(1, np.float32)
        self.engine.fill(
            "tensorScaleArrays", [_padded(x, plan).view(np.uint32)], [t], to_table(plan.spec),
            plan.spec.hadamard, plan.rotation and _negative(plan.rotation), _bits(placement.amax),
        )  # fmt: skip
        return known, t

    def _dequantize(self, q, dtype):
        stored = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
        values = np.empty((*q.rows_shape, q.length), stored)
        self.engine.fill(
            "dequantizeArrays", [q.codes, q.scales], [values], q.format.name, dtype, _number(q.tensor_scale)
        )
        return np.moveaxis(values[..., : q.shape[q.axis]], -1, q.axis)

    def _hadamard(self, x, rotation, axis):
        moved = np.moveaxis(x, axis, -1)
        values = np.empty(moved.shape, np.float32)
        self.engine.fill("transformArrays", [moved], [values], rotation.n, _negative(rotation))
        return np.moveaxis(values, -1, axis)

    def _scaled_gemm(self, a, b, profile, out_dtype):
        raise NotImplementedError("no GEMM is declared, so this is never called")


def _padded(x, plan):
    """Return the rows of an array along the block axis, [rows, length]."""
    moved = np.moveaxis(x, plan.axis, -1).reshape(plan.rows, x.shape[plan.axis])  # [rows, L]
    return np.pad(moved, [(0, 0), (0, plan.length - moved.shape[1])])


def _bits(amax):
    return None if amax is None else int(amax.view(np.uint32)[0])


def _number(t):
    return None if t is None else float(t[0])


def _negative(rotation):
    return [bool(rotation.signs >> i & 1) for i in range(rotation.n)]


def backend() -> PageBackend:
    """Return the backend of the page as it is."""
    return PageBackend()
