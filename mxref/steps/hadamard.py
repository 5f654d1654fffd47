"""The Hadamard transform in float32, one defined operation at a time, and its random signs (RHT).

The specification fixes the order of operations. Float32 addition is not associative, so a transform
computed as a matrix product, or with its stages swapped, gives different bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.arrays import as_array, described
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.steps.random import SIGN_OPERAND, Stream, check_operand, first_bits

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


class SignPolicy(StrEnum):
    """When the random signs of a Hadamard transform are drawn."""

    NONE = "none"
    """No random signs: the deterministic transform, of all +1 or of a given vector."""
    FIXED = "fixed"
    """Once: drawn as at step 0, layer 0."""
    PER_STEP = "per_step"
    """At every optimizer step, the same for all layers."""
    PER_STEP_LAYER = "per_step_layer"
    """At every optimizer step and for every layer."""


@dataclass(frozen=True)
class Rotation:
    """A Hadamard transform of size n after signs; bit i of `signs` set means d_i = -1."""

    n: int
    signs: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "signs"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, index(value))
            except TypeError:
                raise RecipeError(f"Hadamard {name} must be an integer, got {value!r}") from None
        if self.n not in SIZES:
            raise RecipeError(f"Hadamard size {self.n} is not one of {', '.join(map(str, SIZES))}")
        if not 0 <= self.signs < 1 << self.n:
            raise RecipeError(f"Hadamard signs {self.signs:#x} do not fit in {self.n} bits")

    def vector(self) -> NDArray[np.float32]:
        """Return the signs d as +1 and -1, float32 [n]."""
        return np.array([-1.0 if self.signs >> i & 1 else 1.0 for i in range(self.n)], np.float32)


@dataclass(frozen=True)
class LateRotation:
    """A Hadamard transform of size n whose signs a device drew; only the device knows the step that they belong to."""

    n: int
    stream: Stream
    """Stream of the signs; its step is 0, and the device's takes its place."""


def sign_bits(vector: str) -> int:
    """Return given signs, a text of `+` and `-`, as a number with bit i set where d_i = -1.

    Raises:
        RecipeError: another character.

    Implements: hadamard.vector
    """
    for i, sign in enumerate(vector):
        if sign not in "+-":
            raise RecipeError(f"sign_vector has {sign!r} at place {i}; it is made of '+' and '-'")
    return sum(1 << i for i, sign in enumerate(vector) if sign == "-")


def draw_rotation(n: int, policy: SignPolicy, stream: Stream | None, vector: str | None = None) -> Rotation:
    """Return the rotation of size n for a GEMM, with signs from the policy and the operand's stream.

    Both operands of a GEMM get the same signs, because the stream of signs belongs to the GEMM.

    Args:
        n: size of the transform.
        policy: when random signs are drawn.
        stream: the operand's stream; without random signs it is not read.
        vector: given signs, n of them; without random signs only.

    Raises:
        RecipeError: random signs without the stream of an operand, or a size that is not a power of two from 2 to 256.

    Implements: hadamard.signs, hadamard.policy, hadamard.vector
    """
    if policy is SignPolicy.NONE:
        return Rotation(n, sign_bits(vector) if vector else 0)
    return _drawn(n, sign_stream(policy, stream))


def sign_stream(policy: SignPolicy, stream: Stream | None) -> Stream:
    """Return the stream of the signs that an operand of a stream gets under a policy other than `none`.

    Raises:
        RecipeError: no stream, or one that is not an operand's.

    Implements: hadamard.policy
    """
    if stream is None:
        raise RecipeError(
            f"signs = {policy.value!r} needs a random stream: "
            "pass placement=Placement(Stream(seed, step, layer, operand))"
        )
    step = 0 if policy is SignPolicy.FIXED else stream.step
    layer = stream.layer if policy is SignPolicy.PER_STEP_LAYER else 0
    return Stream(stream.seed, step, layer, SIGN_OPERAND + check_operand(stream).role)


# Both operands of a GEMM and all micro-batches need the same rotation.
@lru_cache(maxsize=4096)
def _drawn(n: int, stream: Stream) -> Rotation:
    return Rotation(n, first_bits(n, stream))


def norm_factor(n: int) -> np.float32:
    """Return fl32(1/sqrt(n)), exact for n = 4, 16, 64 and 256.

    Implements: hadamard.factor
    """
    return np.float32(1.0 / np.sqrt(np.float64(n)))


def _transform(x: Any, rotation: Any) -> tuple[NDArray[np.float32], Rotation]:
    """Return both arguments after checking their types; DtypeError, ShapeError or RecipeError if one is wrong."""
    x = as_array(x)
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        found = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise DtypeError(f"the Hadamard transform takes a float32 array, got {found}; convert it first")
    if not x.ndim:
        raise ShapeError("the Hadamard transform needs an axis, got a scalar")
    if isinstance(rotation, Rotation):
        return x, rotation
    try:
        return x, Rotation(index(rotation))
    except TypeError:
        raise RecipeError(
            f"expected a Rotation or a size, got {described(rotation)}; pass one, as in mxref.Rotation(16)"
        ) from None


def hadamard(x: Any, rotation: Rotation | int) -> NDArray[np.float32]:
    """Return x with each group of n consecutive elements of the last axis multiplied by d and H_n.

    Args:
        x: float32 [..., K], K a multiple of n; a NumPy array or a PyTorch tensor on the CPU.
        rotation: size and signs, or a size without signs.

    Returns:
        float32 [..., K]. A NaN or Inf in the input makes its whole group NaN or Inf. An intermediate overflow gives
        Inf or NaN in every output that depends on it.

    Raises:
        DtypeError: another input type.
        ShapeError: K is not a multiple of n.
        RecipeError: a size that is not a power of two from 2 to 256.

    Implements: hadamard.size, hadamard.order, hadamard.factor, hadamard.float32, hadamard.nonfinite,
    conventions.arithmetic
    """
    v, rotation = _transform(x, rotation)
    n = rotation.n
    if v.shape[-1] % n:
        raise ShapeError(
            f"Hadamard: axis length {v.shape[-1]} is not a multiple of the size {n}; pad it or choose another size"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        y = v.reshape(-1, n) * rotation.vector()
        h = 1
        while h < n:
            pairs = y.reshape(-1, n // (2 * h), 2, h)
            s, t = pairs[:, :, 0], pairs[:, :, 1]
            y = np.empty_like(pairs)
            np.add(s, t, out=y[:, :, 0])
            np.subtract(s, t, out=y[:, :, 1])
            h *= 2
        y = y.reshape(v.shape) * norm_factor(n)
    return y


def inverse_hadamard(y: Any, rotation: Rotation | int) -> NDArray[np.float32]:
    """Return the inverse transform: H_n, then the signs. It rounds again, so the result is not bit-exact.

    Args:
        y: float32 [..., K], K a multiple of n; as in `hadamard`.
        rotation: size and signs that were applied, or a size without signs.

    Returns:
        float32 [..., K].

    Implements: hadamard.inverse
    """
    v, rotation = _transform(y, rotation)
    x = hadamard(v, Rotation(rotation.n))
    return (x.reshape(-1, rotation.n) * rotation.vector()).reshape(x.shape)
