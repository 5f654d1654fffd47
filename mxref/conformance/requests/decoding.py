"""A dequantization to be asked of a backend, arrays of drawn codes, and how values are compared and shown.

Values are compared bit by bit, except that any NaN is equal to any NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import Needs, Op, Subject
from mxref.formats import CANONICAL_NAN, BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.quantization import dequantize
from mxref.recipe import OperandSpec

DTYPES = ("float64", "float32", "bfloat16")
LAYOUTS = ("codes not contiguous", "codes in Fortran order", "scales in Fortran order")
"""How codes and scales may lie in memory, beside C order."""


@dataclass(frozen=True, eq=False)
class Decoding:
    """Arguments of a dequantization."""

    op: ClassVar = Op.DEQUANTIZE
    q: MXArray
    dtype: str
    layout: str = ""
    """One of `LAYOUTS`, or nothing."""

    @cached_property
    def expected(self) -> NDArray[Any]:
        """The reference's answer."""
        return dequantize(self.q, self.dtype)

    def answer(self, subject: Subject) -> NDArray[Any]:
        """Return the backend's answer.

        Raises:
            ValueError: the result has another shape or type than it should.
        """
        values = subject.take(subject.backend.dequantize(given(subject, self.q, self.layout), self.dtype))
        if values.shape != self.expected.shape or values.dtype != self.expected.dtype:
            raise ValueError(
                f"the result is {values.dtype} {values.shape}, expected {self.expected.dtype} {self.expected.shape}"
            )
        return values

    @property
    def needs(self) -> Needs:
        """The capabilities that the request uses."""
        return ("formats", self.q.format), ("dequantize_dtypes", self.dtype)

    def describe(self) -> dict[str, str]:
        """Return the request in words."""
        named = {} if self.q.format == OperandSpec().format else {"format": str(self.q.format)}
        return named | {
            "dtype": self.dtype, "shape": str(self.q.shape), "axis": str(self.q.axis),
            **tensor_words("tensor scale", self.q),
            **({"layout": self.layout} if self.layout else {}),
        }  # fmt: skip


def tensor_words(name: str, q: MXArray) -> dict[str, str]:
    """Return the scale of the tensor in words under a name, where there is one."""
    return {} if q.tensor_scale is None else {name: shown(np.asarray(q.tensor_scale)[0])}


def given(subject: Subject, q: MXArray, layout: str = "") -> MXArray:
    """Return an MXArray of the backend's own arrays, fresh ones, in C order or one of `LAYOUTS`."""

    def fresh(name: str, a: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if layout == "codes not contiguous":  # nor are the scales
            return np.repeat(a, 2, axis=0)[::2]
        return a.copy(order="F" if layout.startswith(name) else "C")

    codes, scales = (subject.give(fresh(n, np.asarray(getattr(q, n)))) for n in ("codes", "scales"))
    tensor = None if q.tensor_scale is None else subject.give(np.array(q.tensor_scale))
    return MXArray(codes, scales, q.shape, q.axis, q.block, q.prescale, q.rotation, q.format, tensor)


def no_tensor_scale(made: BlockFormat) -> NDArray[np.float32] | None:
    """Return the scale of the tensor that changes nothing, for a format that has one."""
    return np.ones(1, np.float32) if made.tensor_scale else None


def differs(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where values differ in any bit, any NaN being equal to any NaN; float64 or narrower."""
    if want.dtype == np.float64:
        same = (got.view(np.uint64) == want.view(np.uint64)) | (np.isnan(got) & np.isnan(want))
        return np.asarray(~same)
    return np.asarray(float_bits(got) != float_bits(want))


def first_place(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the place of the first wrong value."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def drawn_array(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    axis: int,
    length: int,
    scales: tuple[int, int] = (-27, 23),
    *,
    made: BlockFormat,
) -> MXArray:
    """Return an MXArray of drawn codes of numbers; `scales` is the half-open range of scale codes from that of 1."""
    rows = list(shape)
    rows.pop(axis)
    codes = drawn_codes(rng, rows, length, made)
    low, high = (made.scale.one_code + offset for offset in scales)
    drawn = rng.integers(low, high, (*rows, length // made.k)).astype(np.uint8)
    return MXArray(codes, drawn, shape, axis, format=made, tensor_scale=no_tensor_scale(made))


def drawn_codes(
    rng: np.random.Generator, rows: Sequence[int], length: int, made: BlockFormat
) -> NDArray[np.uint8]:
    """Return drawn packed codes of rows of `length` elements, all of them numbers."""
    codes = rng.integers(0, 256, (*rows, made.code_bytes(length)), np.uint8)
    element = made.element
    special = ~np.isfinite(element.values)
    if special.any():  # a special code without its highest exponent bit is a number
        elements = unpack(codes, element)
        codes = pack(np.where(special[elements], elements & (element.sign >> 1 ^ 0xFF), elements), element)
    return codes


def float_bits(x: NDArray[np.generic]) -> NDArray[np.uint32]:
    """Return values as float32 bits, every NaN as the canonical one."""
    wide = x.astype(np.float32)
    bits: NDArray[np.uint32] = np.where(np.isnan(wide), np.uint32(CANONICAL_NAN), wide.view(np.uint32))
    return bits


def shown(value: Any) -> str:
    """Return a float with its bits."""
    scalar = np.asarray(value)
    bits = int(scalar.view(f"u{scalar.itemsize}"))
    return f"{float(scalar):g} (0x{bits:0{2 * scalar.itemsize}x})"
