"""Scales with a mantissa: the tensor's scale, the block's and the element's quotient, real or in float32.

The specification rounds each real quotient once. Implementations compute it by two or three float32 operations, in
orders of their own that round differently; each order is a choice here, so that its bits can be reproduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat
from mxref.steps.rounding import nearest_code
from mxref.steps.scale import scale_value

F32 = np.float32
_LARGEST = np.finfo(F32).max
_TINY = np.finfo(F32).tiny

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]


class Arithmetic(StrEnum):
    """How quotients by scales with a mantissa are computed."""

    REAL = "real"
    """Real numbers, rounded once."""
    TE = "te"
    """Transformer Engine from 2.14 on."""
    TE_2_13 = "te_2_13"
    """Transformer Engine 2.8 to 2.13, and arXiv 2509.25149."""
    TORCHAO = "torchao"
    """torchao."""
    MODELOPT = "modelopt"
    """NVIDIA's Model Optimizer."""
    COMPRESSED_TENSORS = "compressed_tensors"
    """compressed-tensors, of float32 weights."""
    GGML = "ggml"
    """llama.cpp, whose blocks have no scale of the tensor."""


@dataclass(frozen=True)
class TensorScale:
    """The largest finite magnitude of a tensor and the scale that follows from it, float32."""

    amax: np.float32
    scale: np.float32
    """t, by which decoded values are multiplied; 1 where the format has no scale of the tensor."""


NO_TENSOR_SCALE = TensorScale(F32(0), F32(1))


def tensor_scale(
    amax: np.float32, made: BlockFormat, arithmetic: Arithmetic = Arithmetic.REAL, top: float | None = None
) -> TensorScale:
    """Return the scale t of a tensor with this largest finite magnitude: the largest block then has the scale `top`.

    In real numbers t is amax / (M top) rounded to float32, but at least 2^-149, and 1 where amax is 0. `top` is S by
    default, the largest scale.

    Source: arXiv 2509.25149, which rounds the inverse instead.

    Implements: scale.tensor, scale.arithmetic
    """
    with np.errstate(all="ignore"):
        if arithmetic is not Arithmetic.REAL:
            return TensorScale(amax, F32(_ORDERS[arithmetic].tensor(amax, made)))
        quotient = F32(float(amax) / (made.element.max_value * (top or made.scale.max_value)))
    return TensorScale(amax, F32(1) if amax == 0 else max(quotient, F32(2.0**-149)))


def block_quotient(
    amax: Floats,
    made: BlockFormat,
    tensor: TensorScale,
    arithmetic: Arithmetic = Arithmetic.REAL,
    largest: float | None = None,
) -> Wide:
    """Return what is rounded to the scale format, of the finite amax of each block, any shape.

    In real numbers it is amax over `largest`, M by default, and over t.

    M has at most 8 significant bits and t 24, so the real divisor is exact. A real quotient that is no midpoint of the
    scales differs from every one by more than a float64 rounds.

    Implements: scale.rule.nearest, scale.arithmetic
    """
    if arithmetic is Arithmetic.REAL:
        real: Wide = amax.astype(np.float64) / ((largest or made.element.max_value) * float(tensor.scale))
        return real
    with np.errstate(all="ignore"):
        ordered: Wide = _ORDERS[arithmetic].block(amax, tensor, made).astype(np.float64)
    return ordered


def scale_code_of_quotient(
    amax: Floats,
    made: BlockFormat,
    tensor: TensorScale,
    arithmetic: Arithmetic = Arithmetic.REAL,
    largest: float | None = None,
) -> NDArray[np.uint8]:
    """Return the code nearest to amax / (M t), ties to the even code; above the largest scale it saturates.

    Args:
        amax: of each block, float32, finite, any shape.
        made: the format of the blocks, whose scales have a mantissa.
        tensor: its A and t.
        arithmetic: the real quotient, or an order of float32 operations, whose cast may differ.
        largest: of the real quotient, in place of M.

    Returns:
        Scale codes, uint8, same shape; 0, whose value is 0, where the real quotient is at most half the smallest scale.

    Implements: scale.rule.nearest, scale.underflow, scale.arithmetic
    """
    quotient = block_quotient(amax, made, tensor, arithmetic, largest)
    if arithmetic is Arithmetic.REAL:
        return nearest_code(quotient, _grid(made))
    with np.errstate(all="ignore"):
        return _ORDERS[arithmetic].cast(quotient, made)


def quotient(
    magnitude: Floats, scales: NDArray[np.uint8], made: BlockFormat, tensor: TensorScale,
    arithmetic: Arithmetic = Arithmetic.REAL,
) -> NDArray[Any]:  # fmt: skip
    """Return magnitudes over X t: in float64, or in float32 by an order of operations; 0 where a real X is 0.

    The divisor has at most 28 bits, so a quotient in float64 lies on the same side of every point of the grid, and of
    every step of SR, as the real one.

    Args:
        magnitude: float32 [..., K].
        scales: scale codes of the elements, uint8 [..., K].
        made: the block format.
        tensor: its A and t.
        arithmetic: the real quotient, or an order of float32 operations.

    Implements: rounding.quotient, scale.underflow, scale.arithmetic
    """
    value = scale_value(scales, made.scale)
    if arithmetic is Arithmetic.REAL:
        return _over(magnitude, value * float(tensor.scale))
    with np.errstate(all="ignore"):
        scaled = _ORDERS[arithmetic].element(magnitude, value.astype(F32), tensor, made)
    return np.where(magnitude == 0, F32(0), np.minimum(scaled, _LARGEST))


def _over(magnitude: Floats, divisor: Wide) -> Wide:
    """Return quotients in float64, 0 where the divisor is 0."""
    return np.divide(magnitude, divisor, out=np.zeros(magnitude.shape), where=divisor != 0)


def _largest(made: BlockFormat) -> np.float32:
    """Return M."""
    return F32(made.element.max_value)


def _most(made: BlockFormat) -> float:
    """Return M S."""
    return made.element.max_value * made.scale.max_value


def _grid(made: BlockFormat) -> Wide:
    """Return the scales, ascending."""
    return np.array(made.scale.values[: made.scale.max_code + 1])


# ---- orders of float32 operations ----


@dataclass(frozen=True)
class _Order:
    """An order of float32 operations."""

    tensor: Callable[[np.float32, BlockFormat], Any]
    """t of A."""
    block: Callable[[Floats, TensorScale, BlockFormat], Any]
    """What is rounded to the scale format, of the blocks' amax."""
    cast: Callable[[Wide, BlockFormat], NDArray[np.uint8]]
    """The scale codes of what `block` gives."""
    element: Callable[[Floats, Floats, TensorScale, BlockFormat], Any]
    """What is rounded to the element, of magnitudes and the values of their scales."""


def _nearest_from(least: float) -> Callable[[Wide, BlockFormat], NDArray[np.uint8]]:
    """Return the cast to the nearest scale of at least `least`, which is also that of 0 / 0."""
    return lambda quotient, made: nearest_code(np.fmax(quotient, least), _grid(made))


def _te_inverse(amax: np.float32, made: BlockFormat) -> np.float32:
    return F32(1) if amax == 0 else np.minimum(F32(_most(made)) / amax, _LARGEST)


def _te_element(x: Floats, s: Floats, tensor: TensorScale, made: BlockFormat) -> Any:
    return x * np.minimum(F32(1) / (s * (F32(1) / _te_inverse(tensor.amax, made))), _LARGEST)


def _modelopt_cast(quotient: Wide, made: BlockFormat) -> NDArray[np.uint8]:
    return _nearest_from(2.0**-9)(np.where(quotient > 0, quotient, 1.0), made)


def _ct_inverse(amax: np.float32, made: BlockFormat) -> np.float32:
    # PyTorch divides a number of Python by a tensor as the product with the tensor's reciprocal.
    inverse = F32(1) / np.maximum(amax, _TINY) * F32(_most(made))
    return inverse if np.isfinite(inverse) else F32(1)


def _ct_cast(quotient: Wide, made: BlockFormat) -> NDArray[np.uint8]:
    code = nearest_code(quotient, _grid(made))
    return np.where(code == 0, nearest_code(np.array([0.125]), _grid(made)), code)


def _ggml_cast(quotient: Wide, made: BlockFormat) -> NDArray[np.uint8]:
    """Return the code of the nearest scale, halves up; the largest code for each that has the largest exponent.

    Below the smallest normal scale a float32 sum with 1/2 decides, and gives a subnormal scale.
    """
    grid, scale = _grid(made), made.scale
    first_normal = 1 << scale.mantissa_bits
    steps = (quotient * 2.0**-scale.unit_exponent).astype(F32) + F32(0.5)
    normal = np.searchsorted((grid[:-1] + grid[1:]) / 2, quotient, side="right")
    code = np.where(quotient < grid[first_normal], np.minimum(steps, first_normal - 1), normal)
    return np.where(grid[code.astype(int)] >= 2.0**scale.max_exponent, scale.max_code, code).astype(np.uint8)


def _ggml_element(x: Floats, s: Floats, tensor: TensorScale, made: BlockFormat) -> Any:
    v, grid = _over(x, s.astype(np.float64)), np.array(made.element.magnitudes)
    return np.where(np.isin(v, (grid[:-1] + grid[1:]) / 2), np.nextafter(v, 0), v)


_ORDERS = {
    Arithmetic.TE: _Order(
        tensor=lambda amax, made: F32(1) / _te_inverse(amax, made),
        block=lambda a, tensor, made: a * (_te_inverse(tensor.amax, made) * (F32(1) / _largest(made))),
        cast=_nearest_from(0),
        element=_te_element,
    ),
    Arithmetic.TE_2_13: _Order(
        tensor=lambda amax, made: F32(1) / _te_inverse(amax, made),
        block=lambda a, tensor, made: a / _largest(made) * _te_inverse(tensor.amax, made),
        cast=_nearest_from(0),
        element=_te_element,
    ),
    Arithmetic.TORCHAO: _Order(
        tensor=lambda amax, made: amax / F32(_most(made)),
        block=lambda a, tensor, made: a / _largest(made) / tensor.scale,
        cast=_nearest_from(2.0**-6),
        element=lambda x, s, tensor, made: x * (F32(1) / tensor.scale / s),
    ),
    Arithmetic.MODELOPT: _Order(
        tensor=lambda amax, made: amax / F32(_most(made)),
        block=lambda a, tensor, made: a / (_largest(made) * tensor.scale),
        cast=_modelopt_cast,
        element=lambda x, s, tensor, made: x / (s * tensor.scale),
    ),
    Arithmetic.COMPRESSED_TENSORS: _Order(
        tensor=lambda amax, made: F32(1) / _ct_inverse(amax, made),
        block=lambda a, tensor, made: _ct_inverse(tensor.amax, made) * (a / _largest(made)),
        cast=_ct_cast,
        element=lambda x, s, tensor, made: x / (s / _ct_inverse(tensor.amax, made)),
    ),
    Arithmetic.GGML: _Order(
        tensor=lambda amax, made: F32(1),
        block=lambda a, tensor, made: a / _largest(made),
        cast=_ggml_cast,
        element=_ggml_element,
    ),
}
