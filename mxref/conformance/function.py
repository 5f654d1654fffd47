"""Wraps a function on arrays or tensors as a backend of one treatment, so that the checks can call it.

It may return codes and scales in any layout of `mxref.layouts.foreign`, or values, from which the codes are found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arrays import as_array, described
from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.conformance.checking import block_format
from mxref.conformance.requests.quantizing import MalformedAnswer
from mxref.errors import DtypeError, ShapeError, UnsupportedError
from mxref.formats import E8M0, BlockFormat
from mxref.layouts.foreign import Layout, stored_bytes
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.plan import QuantPlan
from mxref.quantization import dequantize, quantize_planned
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import Rotation

_NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


class Stored(NamedTuple):
    """Codes and scales as a function stores them."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]


class FunctionBackend(Backend):
    """Quantizes by a function of a matrix; declares the treatment of that function and nothing else."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        spec: OperandSpec,
        axis: int,
        layouts: tuple[Layout, Layout],
        device: str | None,
        dtypes: frozenset[str],
    ) -> None:
        """Wrap a function.

        Args:
            function: of a matrix; returns codes and scales, an MXArray, or the dequantized matrix.
            spec: its treatment.
            axis: its block axis, 0 or 1.
            layouts: of the codes and of the scales that it returns.
            device: where its tensors lie; None for NumPy arrays.
            dtypes: input types that it takes.
        """
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function, self.spec, self.axis, self.layouts, self.device = function, spec, axis, layouts, device
        made = block_format(spec)
        self.capabilities = Capabilities(
            formats=frozenset({made}), scale_rules=frozenset({spec.scale_rule}),
            roundings=frozenset({spec.rounding}), max_sr_bits=spec.sr_bits, blocks=frozenset({spec.block}),
            hadamard_sizes=frozenset({spec.hadamard} - {0}), prescale=spec.prescale, in_dtypes=dtypes,
            dequantize_dtypes=frozenset(), gemms=frozenset(),
            devices=frozenset({(device or "cpu").partition(":")[0]}),
            arrays="numpy" if device is None else "torch",
        )  # fmt: skip

    def from_numpy(self, array: NDArray[Any]) -> Any:
        """Return an array in the type and on the device that the function takes."""
        if self.device is None:
            return array
        import torch

        array = np.array(array)  # torch needs writable memory
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(array).to(self.device)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Return an input or a result of the function as a NumPy array."""
        return on_host(array)

    def quantize(self, x: Any, spec: Any, **arguments: Any) -> MXArray:
        """Quantize by the function; the result is on the host."""
        plan = self.plan(x, spec, **arguments)
        return plan.array(*self._quantize(x, plan))

    def _quantize(self, x: Any, plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        if plan.spec != self.spec or plan.length != plan.shape[plan.axis]:
            raise UnsupportedError(f"{self.name} is a function of one treatment, and pads nothing")
        rows, made = plan.rows, plan.format
        matrix = x
        if len(plan.shape) != 2 or plan.axis != self.axis:
            host = np.moveaxis(self.to_numpy(x), plan.axis, -1).reshape(rows, -1)
            matrix = self.from_numpy(np.ascontiguousarray(host if self.axis == 1 else host.T))
        answer = self.answer(matrix)
        if isinstance(answer, Stored):
            codes, scales = (
                layout.read(part, rows, plan.length, made)
                for layout, part in zip(self.layouts, answer, strict=True)
            )
        else:
            codes, scales = self._from_values(answer, self.to_numpy(x), plan)
        return codes.reshape(*plan.rows_shape, -1), scales.reshape(*plan.rows_shape, -1)

    def answer(self, matrix: Any) -> Any:
        """Return what the function makes of a matrix: codes and scales as stored bytes, or whatever else it is."""
        answer = self.function(matrix)
        if isinstance(answer, MXArray):
            answer = answer.codes, answer.scales
        if isinstance(answer, tuple | list) and len(answer) == 2:
            return Stored(*map(on_host_bytes, answer))
        return answer

    def _from_values(self, answer: Any, x: NDArray[Any], plan: QuantPlan) -> tuple[Any, Any]:
        """Return codes and scales of a dequantized matrix, as near to the reference's as its values allow."""
        if not hasattr(answer, "dtype") or not hasattr(answer, "shape"):
            raise DtypeError(
                f"{self.name} returned {described(answer)}: return (codes, scales), or the dequantized matrix"
            )
        values = on_host(answer)
        shape = (plan.rows, plan.length) if self.axis == 1 else (plan.length, plan.rows)
        if values.shape != shape or values.dtype not in _NARROW:
            raise ShapeError(
                f"{self.name} returned {values.dtype} {values.shape}: (codes, scales), or the dequantized matrix "
                f"{shape} in a float type, expected"
            )
        values = values if self.axis == 1 else values.T
        want = plan.array(*quantize_planned(x, plan))
        held = np.moveaxis(dequantize(want, "float32"), plan.axis, -1).reshape(values.shape)
        return codes_of_values(values, held, want)

    # Nothing is declared for the other operations, so they are never called.

    def _dequantize(self, q: MXArray, dtype: str) -> Any:
        raise NotImplementedError

    def _hadamard(self, x: Any, rotation: Rotation, axis: int) -> Any:
        raise NotImplementedError

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> Any:
        raise NotImplementedError


def on_host(array: Any) -> NDArray[Any]:
    """Return an array or a tensor of any device as a NumPy array."""
    found = as_array(array.detach().cpu() if hasattr(array, "detach") else array)
    return np.asarray(found)


def on_host_bytes(array: Any) -> NDArray[np.uint8]:
    """Return codes or scales as bytes, whatever one-byte type of NumPy, ml_dtypes or torch they have.

    Raises:
        DtypeError: an object without a type and a shape. ShapeError: elements of more than one byte.
    """
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise DtypeError(f"codes and scales must be arrays of bytes, got {described(array)}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and array.element_size() == 1:
        array = array.detach().contiguous().view(torch.uint8)
    return stored_bytes(on_host(array))


def codes_of_values(
    values: NDArray[Any], held: NDArray[np.float32], want: MXArray
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes [R, K * bits / 8] and scales [R, K / k] that dequantize to values.

    A block whose values are those of the reference gets the reference's codes. Any other gets the scale nearest to
    the reference's under which all of its values are on the grid.

    Args:
        values: [R, K], float.
        held: the reference's values, float32 [R, K].
        want: the reference's answer.

    Raises:
        MalformedAnswer: the values of a block are not on the grid under any scale.
    """
    made: BlockFormat = want.format
    rows, k = len(values), made.k
    got = values.astype(np.float64).reshape(rows, -1, k)
    right = held.astype(np.float64).reshape(got.shape)
    codes = unpack(want.codes.reshape(rows, -1), made.element).reshape(got.shape)
    scales = want.scales.reshape(rows, -1).copy()
    same = ((got == right) & (np.signbit(got) == np.signbit(right))) | (np.isnan(got) & np.isnan(right))
    for row, block in np.argwhere(~same.all(axis=-1)):
        found = _nearest_block(got[row, block], int(scales[row, block]), made)
        if found is None:
            at = int(np.flatnonzero(~same[row, block])[0])
            raise MalformedAnswer(
                f"the values of block {block} of row {row} are not elements of {made.title} times one power of two: "
                f"element {at} is {got[row, block, at]:.9g}, expected {right[row, block, at]:.9g}"
            )
        codes[row, block], scales[row, block] = found
    return pack(codes.reshape(rows, -1), made.element), scales


def _nearest_block(
    values: NDArray[np.float64], byte: int, made: BlockFormat
) -> tuple[NDArray[np.uint8], int] | None:
    """Return codes and scale of a block's values, None where there are none within 8 of a scale byte."""
    if np.isnan(values).all():
        return np.zeros(len(values), np.uint8), E8M0.nan_code
    if np.isnan(values).any():
        return None
    grid = np.array(made.element.magnitudes)
    signs = np.where(np.signbit(values), np.uint8(made.element.sign), np.uint8(0))
    for other in sorted(range(max(byte - 8, 0), min(byte + 9, E8M0.nan_code)), key=lambda b: abs(b - byte)):
        with np.errstate(over="ignore"):  # the largest values dequantize to Inf
            points = np.ldexp(grid, other - E8M0.bias).astype(np.float32).astype(np.float64)
        code = np.searchsorted(points, np.abs(values)).clip(max=len(grid) - 1)
        if (points[code] == np.abs(values)).all():
            return code.astype(np.uint8) | signs, other
    return None
