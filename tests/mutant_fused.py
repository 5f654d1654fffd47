"""Faults of the fused operations, of prepared operands and of sums in place, planted beside right ones."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from mutant_stages import Staged
from mxref import GemmProfile, MXArray, PreparedArray
from mxref.formats import E2M1
from mxref.hadamard import Rotation
from mxref.packing import pack, unpack

# ---- both orientations ----


class Dual(Staged):
    """Both orientations, right: `row` and `column` are where faults go."""

    def _quantize_dual(self, x, row, column):
        return self.row(x, row, column), self.column(x, row, column)

    def row(self, x, row, column):
        return self._quantize(x, row)

    def column(self, x, row, column):
        return self._quantize(x, column)


class DualFromQuantized(Dual):
    def column(self, x, row, column):
        again = self._dequantize(row.array(*self._quantize(x, row)), "float32").astype(x.dtype)
        return self._quantize(again, column)


class DualOneStream(Dual):
    def column(self, x, row, column):
        return self._quantize(x, replace(column, stream=row.stream))


class DualOneRotation(Dual):
    def column(self, x, row, column):
        same = row.rotation and column.rotation and row.rotation.n == column.rotation.n
        return self._quantize(x, replace(column, rotation=row.rotation) if same else column)


class DualForgetsSigns(Dual):
    def column(self, x, row, column):
        rotation = column.rotation and Rotation(column.rotation.n)
        return self._quantize(x, replace(column, rotation=rotation))


class DualForgetsPadding(Dual):
    """Whole panels of rows, the last one filled with what it held before."""

    def column(self, x, row, column):
        missing = column.length - x.shape[0]
        return self._quantize(
            np.pad(x, [(0, missing), (0, 0)], mode="edge" if x.size else "constant"), column
        )


class DualShort(Dual):
    """Only whole blocks of rows: what is left over at the end stays zero."""

    def column(self, x, row, column):
        codes, scales = self._quantize(x, column)
        whole = x.shape[0] // 32
        return np.where(np.arange(codes.shape[1]) < 16 * whole, codes, 0).astype(np.uint8), scales


class DualLocalRows(Dual):
    def column(self, x, row, column):
        start = (column.origin[0], 0)
        return self._quantize(
            x, replace(column, origin=start, global_shape=(*column.global_shape[:1], x.shape[1]))
        )


class DualRowStride(Dual):
    """The random index of a column from the row's padded length."""

    def column(self, x, row, column):
        return self._quantize(x, replace(column, global_shape=(row.global_length, column.global_shape[1])))


class DualOneSpec(Dual):
    def column(self, x, row, column):
        return self._quantize(x, replace(column, spec=replace(column.spec, zero_scale=row.spec.zero_scale)))


class DualOneBlockShape(Dual):
    def column(self, x, row, column):
        return self._quantize(x, replace(column, spec=replace(column.spec, block=row.spec.block)))


class DualOfMemory(Dual):
    """Reads a matrix by its memory order."""

    def column(self, x, row, column):
        if x.flags.f_contiguous and not x.flags.c_contiguous:
            x = x.T.reshape(x.shape)
        return self._quantize(x, column)


class DualOverwrites(Dual):
    def column(self, x, row, column):
        if column.rotation and x.flags.writeable and x.shape[0] % column.rotation.n == 0:
            out = self._quantize(x, column)
            x *= np.tile(column.rotation.vector(), x.shape[0] // column.rotation.n)[:, None].astype(x.dtype)
            return out
        return self._quantize(x, column)


class DualNeedsARow(Dual):
    def row(self, x, row, column):
        x.max()  # as for one amax of the whole, of which an empty matrix has none
        return self._quantize(x, row)


class FakeInTheInputType(Staged):
    def _fake_quantize(self, x, plan, dtype):
        values = super()._fake_quantize(x, plan, dtype)
        return np.where(values == 0, np.zeros_like(values), values)


class FakeKeepsPadding(Staged):
    def _fake_quantize(self, x, plan, dtype):
        values = super()._fake_quantize(x, plan, dtype)
        missing = [(0, (plan.length - x.shape[i]) * (i == plan.axis)) for i in range(x.ndim)]
        return np.pad(values, missing)


class FakeLetsNanPass(Staged):
    def fake_quantize(self, x, spec, **arguments):
        return super().fake_quantize(x, replace(spec, nonfinite="nan_block"), **arguments)


# ---- prepared operands ----


class Laid(Staged):
    """Reads B from a layout, elements and scales apart, and rightly: `lay` and `read` are where faults go."""

    def _prepare(self, q, profile):
        return self.lay(q, profile)

    def lay(self, q, profile):
        return unpack(q.codes, E2M1).T.copy(), q.scales.T.copy()

    def read(self, b, layout):
        elements, scales = layout
        return MXArray(pack(elements.T, E2M1), scales.T, b.shape, b.axis, b.block, b.prescale, b.rotation)

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if isinstance(b, PreparedArray):
            b = self.read(b, b.layout)
        return super()._scaled_gemm(a, b, profile, out_dtype)


class LayoutLosesNan(Laid):
    """Scales as exponents: code 255 is one of them."""

    def lay(self, q, profile):
        elements, scales = super().lay(q, profile)
        return elements, np.minimum(scales, 254)


class LayoutLosesTheLastScale(Laid):
    def lay(self, q, profile):
        elements, scales = super().lay(q, profile)
        scales[-1:] = scales[:1]
        return elements, scales


class LayoutLosesASign(Laid):
    """-0.5 as doubled integers, with a nibble's sign not extended."""

    def lay(self, q, profile):
        elements, scales = super().lay(q, profile)
        return np.where(elements == 9, 1, elements).astype(np.uint8), scales


class LayoutUndoesPrescale(Laid):
    def read(self, b, layout):
        return replace(super().read(b, layout), prescale=False)


class LayoutInOneBuffer(Laid):
    """Every layout of a shape in the same memory."""

    def __init__(self):
        self.memory = {}

    def lay(self, q, profile):
        fresh = super().lay(q, profile)
        kept = self.memory.setdefault(q.codes.shape, fresh)
        for old, new in zip(kept, fresh, strict=True):
            old[:] = new
        return kept


class LayoutWithoutItsProfile(Laid):
    """Layouts found again by their codes, although that of `bounded` has its rows in another order."""

    def __init__(self):
        self.found = {}

    def lay(self, q, profile):
        order = -1 if profile is GemmProfile.BOUNDED else 1
        made = tuple(part[:, ::order] for part in super().lay(q, profile))
        return self.found.setdefault(q.codes.tobytes(), made)

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if isinstance(b, PreparedArray) and profile is GemmProfile.BOUNDED:
            b = PreparedArray.of(b, b.backend, b.profile, tuple(part[:, ::-1] for part in b.layout))
        return super()._scaled_gemm(a, b, profile, out_dtype)


class TakesAnyLayout(Laid):
    def scaled_gemm(self, a, b, *, profile="ordered", out_dtype="float32"):
        if (
            isinstance(b, PreparedArray)
            and len(b.layout) == 2
            and b.layout[0].shape == unpack(b.codes, E2M1).T.shape
        ):
            b = PreparedArray.of(b, self.name, profile, b.layout)
        return super().scaled_gemm(a, b, profile=profile, out_dtype=out_dtype)


class TakesAnyProfile(Laid):
    def scaled_gemm(self, a, b, *, profile="ordered", out_dtype="float32"):
        if isinstance(b, PreparedArray) and b.backend == self.name:
            b = PreparedArray.of(b, self.name, profile, b.layout)
        return super().scaled_gemm(a, b, profile=profile, out_dtype=out_dtype)


class ReadsTheLayoutOfA(Laid):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        if isinstance(a, PreparedArray) and a.length == b.length and a.shape == b.shape:
            b = self.read(b, a.layout)
        return super()._scaled_gemm(a, b, profile, out_dtype)


class PrepareTurnsTheCodes(Laid):
    """Keeps one copy only: that of the layout."""

    def prepare(self, q, *, profile="ordered"):
        made = super().prepare(q, profile=profile)
        turned = np.ascontiguousarray(q.codes[::-1])
        return PreparedArray.of(replace(q, codes=turned), self.name, profile, made.layout)


class PrepareInPlace(Laid):
    """Clears NaN blocks' scales in what it was given."""

    def lay(self, q, profile):
        out = super().lay(q, profile)
        q.scales[q.scales == 255] = 254
        return out


class PrepareTakesAnything(Laid):
    def prepare(self, q, *, profile="ordered"):
        return super().prepare(q, profile=profile) if len(q.shape) == 2 else q


# ---- products that are added in place ----


class Adding(Laid):
    """Adds in a kernel of its own, and rightly: `product` and `store` are where faults go."""

    def _add_product(self, a, b, onto, profile):
        with np.errstate(over="ignore", invalid="ignore"):
            self.store(onto, self.product(a, b, profile))

    def product(self, a, b, profile):
        return self._scaled_gemm(a, b, profile, "float32")

    def store(self, onto, product):
        onto[:] = onto + product


class AddForgets(Adding):
    def store(self, onto, product):
        onto[:] = product


class AddTwice(Adding):
    """A retried launch."""

    def store(self, onto, product):
        super().store(onto, product)
        super().store(onto, product)


class AddInBfloat16(Adding):
    def product(self, a, b, profile):
        return super().product(a, b, profile).astype(ml_dtypes.bfloat16).astype(np.float32)


class AddSumInBfloat16(Adding):
    def store(self, onto, product):
        onto[:] = (onto + product).astype(ml_dtypes.bfloat16)


class AddStartsWithIt(Adding):
    """What was held is the accumulator that the product starts from, and so is rounded after every block."""

    def _add_product(self, a, b, onto, profile):
        if b.prescale or a.prescale or (a.scales == 255).any() or (b.scales == 255).any():
            return super()._add_product(a, b, onto, profile)
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(a.scales.shape[1]):
                left, right = (
                    replace(
                        q, codes=q.codes[:, 16 * i : 16 * i + 16], scales=q.scales[:, i : i + 1],
                        shape=(q.scales.shape[0], 32), axis=1,
                    )
                    for q in (a, b.plain() if isinstance(b, PreparedArray) else b)
                )  # fmt: skip
                onto += self.product(left, right, profile)


class AddOntoNan(Adding):
    """Clears NaN and Inf of what was held."""

    def store(self, onto, product):
        onto[:] = np.nan_to_num(onto, posinf=0.0, neginf=0.0) + product


class AddLosesTheZero(Adding):
    """Skips products of zero, and with them the sign of -0 + 0."""

    def store(self, onto, product):
        onto[:] = np.where(product == 0, onto, onto + product)


class AddForgetsPrescale(Adding):
    def product(self, a, b, profile):
        return super().product(replace(a, prescale=False), b, profile)


class AddReadsMagnitudes(Adding):
    """Reads a layout as its GEMM does not."""

    def product(self, a, b, profile):
        if isinstance(b, PreparedArray):
            elements, scales = b.layout
            b = PreparedArray.of(b, b.backend, b.profile, (elements & 7, scales))
        return super().product(a, b, profile)


class AddTakesAnyOrder(Adding):
    """A pointer, whatever the strides."""

    def add_product(self, a, b, onto, *, profile="ordered"):
        whole = np.ascontiguousarray(onto)
        super().add_product(a, b, whole, profile=profile)
        onto[:] = whole


class AddClearsFirst(Adding):
    """Adds to zeros, and then what was held, whether the request was one or not."""

    def add_product(self, a, b, onto, *, profile="ordered"):
        held = onto.copy()
        onto[...] = 0
        super().add_product(a, b, onto, profile=profile)
        onto[...] = held + onto
