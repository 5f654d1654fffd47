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


@dataclass(frozen=True)
class TensorScale:
    """The largest finite magnitude of a tensor and the scale that follows from it, float32."""

    amax: np.float32
    scale: np.float32
    """t, by which decoded values are multiplied; 1 where the format has no scale of the tensor."""


NO_TENSOR_SCALE = TensorScale(F32(0), F32(1))


@dataclass(frozen=True)
class _Order:
    """An order of float32 operations. M is the largest element, S the largest scale; the tensor's A and t are given."""

    tensor: Callable[[np.float32, float], np.float32]
    """t of A and M S."""
    block: Callable[[Floats, TensorScale, float, float], Any]
    """What is rounded to the scale format, of the blocks' amax, the tensor, M, and M S."""
    element: Callable[[Floats, Floats, TensorScale, float], Floats]
    """What is rounded to the element, of magnitudes, their scale's value, the tensor, and M S."""
    least: float = 0.0
    """The smallest scale that is stored."""
    zero: float | None = None
    """The scale that is stored in place of 0."""


def _te_inverse(amax: np.float32, most: float) -> np.float32:
    inverse = np.minimum(F32(most) / amax, _LARGEST)
    return F32(1) if amax == 0 else inverse


def _te_element(x: Floats, s: Floats, tensor: TensorScale, most: float) -> Floats:
    inverse = _te_inverse(tensor.amax, most)
    scaled: Floats = x * np.minimum(F32(1) / (s * (F32(1) / inverse)), _LARGEST)
    return scaled


def _ct_inverse(amax: np.float32, most: float) -> np.float32:
    inverse = F32(most) / np.maximum(amax, _TINY)
    return inverse if np.isfinite(inverse) else F32(1)


_ORDERS = {
    Arithmetic.TE: _Order(
        lambda amax, most: F32(1) / _te_inverse(amax, most),
        lambda a, tensor, m, most: a * (_te_inverse(tensor.amax, most) * (F32(1) / F32(m))),
        _te_element,
    ),
    Arithmetic.TE_2_13: _Order(
        lambda amax, most: F32(1) / _te_inverse(amax, most),
        lambda a, tensor, m, most: (a / F32(m)) * _te_inverse(tensor.amax, most),
        _te_element,
    ),
    Arithmetic.TORCHAO: _Order(
        lambda amax, most: amax / F32(most),
        lambda a, tensor, m, most: (a / F32(m)) / tensor.scale,
        lambda x, s, tensor, most: x * ((F32(1) / tensor.scale) / s),
        least=2.0**-6,
    ),
    Arithmetic.MODELOPT: _Order(
        lambda amax, most: amax / F32(most),
        lambda a, tensor, m, most: a / (F32(m) * tensor.scale),
        lambda x, s, tensor, most: x / (s * tensor.scale),
        least=2.0**-9,
        zero=1.0,
    ),
    Arithmetic.COMPRESSED_TENSORS: _Order(
        lambda amax, most: F32(1) / _ct_inverse(amax, most),
        lambda a, tensor, m, most: _ct_inverse(tensor.amax, most) * (a / F32(m)),
        lambda x, s, tensor, most: x / (s / _ct_inverse(tensor.amax, most)),
        zero=0.125,
    ),
}


def tensor_scale(
    amax: np.float32, made: BlockFormat, arithmetic: Arithmetic = Arithmetic.REAL
) -> TensorScale:
    """Return the scale t of a tensor with this largest finite magnitude: the largest block then has the largest scale.

    In real numbers t is amax / (M S) rounded to float32, but at least 2^-149, and 1 where amax is 0.

    Source: arXiv 2509.25149, which rounds the inverse instead.

    Implements: scale.tensor, scale.arithmetic
    """
    most = made.element.max_value * made.scale.max_value
    with np.errstate(all="ignore"):
        if arithmetic is not Arithmetic.REAL:
            return TensorScale(amax, F32(_ORDERS[arithmetic].tensor(amax, most)))
        quotient = F32(float(amax) / most)
    return TensorScale(amax, F32(1) if amax == 0 else max(quotient, F32(2.0**-149)))


def scale_code_of_quotient(
    amax: Floats, made: BlockFormat, tensor: TensorScale, arithmetic: Arithmetic = Arithmetic.REAL
) -> NDArray[np.uint8]:
    """Return the code nearest to amax / (M t), ties to the even code; above the largest scale it saturates.

    Args:
        amax: of each block, float32, finite, any shape.
        made: the format of the blocks, whose scales have a mantissa.
        tensor: its A and t.
        arithmetic: the real quotient, or an order of float32 operations.

    Returns:
        Scale codes, uint8, same shape; 0, whose value is 0, where the real quotient is at most half the smallest scale.

    Implements: scale.rule.nearest, scale.underflow, scale.arithmetic
    """
    most, grid = made.element.max_value, np.array(made.scale.values[: made.scale.max_code + 1])
    if arithmetic is Arithmetic.REAL:
        # M has at most 8 significant bits and t 24, so the divisor is exact. A quotient that is no midpoint of the
        # grid differs from every one by more than a float64 rounds.
        return nearest_code(amax.astype(np.float64) / (most * float(tensor.scale)), grid)
    order = _ORDERS[arithmetic]
    with np.errstate(all="ignore"):
        quotient = order.block(amax, tensor, most, most * made.scale.max_value).astype(np.float64)
    if order.least and order.zero is not None:
        quotient = np.where(quotient == 0, order.zero, quotient)
    code = nearest_code(np.maximum(quotient, order.least), grid)
    if not order.least and order.zero is not None:
        code[code == 0] = nearest_code(np.array([order.zero]), grid)[0]
    return code


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
        divisor = value * float(tensor.scale)
        return np.divide(magnitude, divisor, out=np.zeros(magnitude.shape), where=divisor != 0)
    with np.errstate(all="ignore"):
        most = made.element.max_value * made.scale.max_value
        scaled = _ORDERS[arithmetic].element(magnitude, value.astype(F32), tensor, most)
    return np.where(magnitude == 0, F32(0), np.minimum(scaled, _LARGEST))
