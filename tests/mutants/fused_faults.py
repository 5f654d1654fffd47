"""Faults of the fused operations, of prepared operands and of sums in place, in otherwise right backends."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import Staged
from mxref import GemmProfile, MXArray, PreparedArray
from mxref.formats import E2M1
from mxref.layouts.packed import pack, unpack
from mxref.steps.hadamard import Rotation

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


FUSED_MUTANTS = (
    Mutant("fake_quantize loses -0", "conformance.dual", "compressed-tensors' fake quantization", FakeInTheInputType),
    Mutant("dual from quantized values", "conformance.dual", "the second orientation quantized twice",
           DualFromQuantized),
    Mutant("dual with one stream", "conformance.dual", "TransformerEngine until 2487", DualOneStream),
    Mutant("dual with one rotation", "conformance.dual", "one draw of signs for both orientations", DualOneRotation),
    Mutant("dual without signs", "conformance.dual", "a transform of the other orientation without its signs",
           DualForgetsSigns),
    Mutant("dual without padding", "conformance.dual", "a last panel that is not cleared", DualForgetsPadding),
    Mutant("dual of whole blocks", "conformance.dual", "a grid of rows // 32", DualShort),
    Mutant("dual of local rows", "conformance.dual", "one orientation counted over the shard", DualLocalRows),
    Mutant("dual with one stride", "conformance.dual", "one padded length for both orientations", DualRowStride),
    Mutant("dual with one zero scale", "conformance.dual", "one treatment for both orientations", DualOneSpec),
    Mutant("dual with one block shape", "conformance.dual", "one amax for both orientations", DualOneBlockShape),
    Mutant("dual by memory order", "conformance.dual", "a pointer taken from a transposed view", DualOfMemory),
    Mutant("dual overwrites", "conformance.dual", "signs applied in place", DualOverwrites),
    Mutant("dual of nothing", "conformance.dual", "an amax over an empty matrix", DualNeedsARow),
    Mutant("fake_quantize keeps padding", "conformance.dual", "values in the stored length", FakeKeepsPadding),
    Mutant("fake_quantize lets NaN pass", "conformance.dual", "a fused path that sees no scales", FakeLetsNanPass),
    Mutant("layout loses NaN", "conformance.dual", "scale codes as exponents", LayoutLosesNan, ("gemm",)),
    Mutant("layout loses a scale", "conformance.dual", "a last block left out", LayoutLosesTheLastScale, ("gemm",)),
    Mutant("layout loses a sign", "conformance.dual", "a nibble's sign not extended", LayoutLosesASign, ("gemm",)),
    Mutant("layout without the 3/4", "conformance.dual", "a flag left behind", LayoutUndoesPrescale, ("gemm",)),
    Mutant("layout in one buffer", "conformance.dual", "scratch memory that is used again",
           LayoutInOneBuffer, ("gemm",)),
    Mutant("layout without its profile", "conformance.dual", "a cache by codes alone",
           LayoutWithoutItsProfile, ("gemm",)),
    Mutant("another backend's layout", "conformance.dual", "a layout taken on trust", TakesAnyLayout, ("gemm",)),
    Mutant("another profile's layout", "conformance.dual", "a layout taken on trust", TakesAnyProfile, ("gemm",)),
    Mutant("the layout of A", "conformance.dual", "the prepared operand taken for B", ReadsTheLayoutOfA, ("gemm",)),
    Mutant("codes dropped for a layout", "conformance.dual", "one copy in the GEMM's own order",
           PrepareTurnsTheCodes, ("gemm",)),
    Mutant("prepared in place", "conformance.dual", "NaN blocks cleared in the operand itself",
           PrepareInPlace, ("gemm",)),
    Mutant("prepares three axes", "conformance.dual", "a shape that is not looked at", PrepareTakesAnything, ("gemm",)),
    Mutant("sum that overwrites", "conformance.dual", "beta = 0 where 1 is meant", AddForgets, ("gemm",)),
    Mutant("sum added twice", "conformance.dual", "a kernel launched once more to be timed", AddTwice, ("gemm",)),
    Mutant("product added in bfloat16", "conformance.dual", "a gradient in the layer's type", AddInBfloat16, ("gemm",)),
    Mutant("sum in bfloat16", "conformance.dual", "an epilogue that narrows", AddSumInBfloat16, ("gemm",)),
    Mutant("sum as accumulator", "conformance.dual", "cuBLAS and MFMA: C is the first addend",
           AddStartsWithIt, ("gemm",)),
    Mutant("sum without NaN", "conformance.dual", "nan_to_num of a gradient", AddOntoNan, ("gemm",)),
    Mutant("sum keeps -0", "conformance.dual", "zero tiles that are skipped", AddLosesTheZero, ("gemm",)),
    Mutant("sum without the 4/3", "conformance.dual", "an epilogue in place of another", AddForgetsPrescale, ("gemm",)),
    Mutant("sum by another layout", "conformance.dual", "one kernel of two knows the layout",
           AddReadsMagnitudes, ("gemm",)),
    Mutant("sum by a pointer", "conformance.dual", "strides that are not looked at", AddTakesAnyOrder, ("gemm",)),
    Mutant("sum cleared first", "conformance.dual", "scratch memory in the array itself", AddClearsFirst, ("gemm",)),
)  # fmt: skip
