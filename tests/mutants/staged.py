"""The reference in stages, each of which a planted fault may replace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from mutants.kept_answers import answered, array_key, operand_key
from mxref import Capabilities, GemmProfile, MXArray
from mxref import hadamard as transform
from mxref.block_dots import block_dots
from mxref.formats import E2M1, MXFP4, Negatives
from mxref.gemm import prescale_product
from mxref.layouts.packed import pack
from mxref.reference import ReferenceBackend
from mxref.steps.four_over_six import FourOverSix, choose, lower_largest
from mxref.steps.hadamard import Rotation
from mxref.steps.quotient import Arithmetic, TensorScale, quotient, scale_code_of_quotient
from mxref.steps.random import random_integers
from mxref.steps.rounding import apply_prescale, round_magnitude
from mxref.steps.scale import magnitude_bits, scale_code, scale_exponent, scale_value

GRID = np.array(E2M1.magnitudes)

TIES = (GRID[1:] + GRID[:-1]) / 2

INF = 0x7F800000

VALUES = np.array([*GRID, *-GRID], np.float32)


class Staged(ReferenceBackend):
    """The reference, stage by stage, in any block format."""

    name = "mutant"
    changed = False
    """Whether a stage is replaced; backends without a changed stage share their answers."""

    def __init_subclass__(cls):
        stages = {name for name in vars(Staged) if not name.startswith("_")} - {"name", "changed"}
        cls.changed = any(getattr(cls, name) is not getattr(Staged, name) for name in stages)

    def _quantize(self, x, plan):
        self.plan_now, self.dtype_now = plan, x.dtype
        if self.changed:
            return self._in_stages(x, plan)
        tensor = b"" if plan.tensor_scale is None else plan.tensor_scale.tobytes()
        return answered((plan, tensor, array_key(x)), lambda: self._in_stages(x, plan))

    def _in_stages(self, x, plan):
        spec, k = plan.spec, plan.format.k
        v = np.moveaxis(x, plan.axis, -1)
        v = self.rows(self.widen(v), plan)
        bits = magnitude_bits(v).reshape(len(v), plan.length // k, k)
        amax = self.amax(bits, v, spec)  # [rows, blocks]
        spoiled = self.spoiled(amax, bits, spec)
        magnitude = np.where(spoiled[..., None], 0, bits).astype(np.uint32).view(np.float32)
        finite = np.where(spoiled, np.uint32(0), amax)
        scales = self.scale(finite, spec)
        if spec.four_over_six is not FourOverSix.OFF:
            scales = self.choose(magnitude, finite, scales, spec)
        if spec.arithmetic is Arithmetic.REAL:
            scales = np.where(amax == 0, self.zero(spec), scales).astype(np.uint8)
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            scaled = self.scaled(magnitude, scales)
            if spec.prescale:
                scaled = self.prescale(scaled)
        random = self.integers(plan).reshape(bits.shape) if plan.stream else None
        codes = self.round(scaled, spec, random).astype(np.uint8)
        codes = self.sign(codes, np.signbit(v).reshape(bits.shape))
        codes, scales = self.nan(codes, scales, spoiled, v.reshape(bits.shape))
        shape = (*plan.rows_shape, plan.length)
        return self.pack(codes.reshape(shape)), scales.reshape(*shape[:-1], plan.length // k)

    @property
    def element(self):
        return self.plan_now.format.element

    def widen(self, x):
        return x.astype(np.float32)

    def rows(self, v, plan):
        if plan.length > v.shape[-1]:
            v = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, plan.length - v.shape[-1])])
        v = v.reshape(plan.rows, plan.length)
        return self.rotate(v, plan.rotation) if plan.rotation else v

    def rotate(self, v, rotation):
        (rotated,) = answered((rotation, array_key(v)), lambda: (transform(v, rotation),))
        return rotated

    def amax(self, bits, v, spec):
        amax = bits.max(axis=-1)
        if spec.block.is_tile:
            rows = spec.block.rows
            tiles = amax.reshape(len(amax) // rows, rows, amax.shape[-1]).max(axis=1)
            amax = np.repeat(tiles, rows, axis=0)
        return amax

    def spoiled(self, amax, bits, spec):
        return amax >= INF

    def scale(self, amax, spec):
        if spec.format.scale.powers:
            return scale_code(amax, spec.scale_rule, spec.format.element)
        return scale_code_of_quotient(amax.view(np.float32), spec.format, self.tensor, spec.arithmetic)

    def choose(self, magnitude, amax, six, spec):
        made, tensor, rows = spec.format, self.tensor, magnitude.reshape(len(six), -1)
        four = scale_code_of_quotient(amax.view(np.float32), made, tensor, largest=lower_largest(made))
        return choose(rows, six, four, made, tensor, spec.four_over_six, spec.block.rows)

    @property
    def tensor(self):
        plan = self.plan_now
        return TensorScale(plan.tensor_amax[0], plan.tensor_scale[0])

    def zero(self, spec):
        return spec.zero_scale

    def scaled(self, magnitude, scales):
        made = self.plan_now.format
        if not made.scale.powers:
            each = np.broadcast_to(scales[..., None], magnitude.shape)
            return quotient(magnitude, each, made, self.tensor, self.plan_now.spec.arithmetic)
        return np.ldexp(magnitude.astype(np.float64), -scale_exponent(scales)[..., None]).astype(np.float32)

    def prescale(self, v):
        return apply_prescale(v, self.element)

    def stream(self, plan):
        return plan.stream

    def integers(self, plan):
        rows, stream = self.rows_index(plan), self.stream(plan)
        where = plan.first, plan.length, plan.global_length, stream, plan.spec.sr_bits
        (integers,) = answered((where, array_key(rows)), lambda: (random_integers(rows, *where),))
        return integers

    def rows_index(self, plan):
        return plan.global_rows()

    def round(self, v, spec, random):
        return round_magnitude(v, spec.rounding, spec.format.element, random, spec.sr_bits)

    def sign(self, codes, negative):
        if self.element.negatives is Negatives.TWOS_COMPLEMENT:
            return np.where(negative, -codes, codes)
        return codes | negative.astype(np.uint8) * np.uint8(self.element.sign)

    def nan(self, codes, scales, spoiled, v):
        nan_code = self.plan_now.format.scale.nan_code
        scales = np.where(spoiled, nan_code, scales).astype(np.uint8)
        return np.where(spoiled[..., None], 0, codes).astype(np.uint8), scales

    def pack(self, codes):
        return pack(codes, self.element)

    def _scaled_gemm(self, a, b, profile, out_dtype):
        exact = profile is GemmProfile.EXACT
        multiply = super()._scaled_gemm if exact else self._product_in_stages
        if self.changed and not exact:
            return multiply(a, b, profile, out_dtype)
        key = profile, out_dtype, operand_key(a), operand_key(b)
        (product,) = answered(key, lambda: (multiply(a, b, profile, out_dtype),))
        return product

    def _product_in_stages(self, a, b, profile, out_dtype):
        with np.errstate(all="ignore"):
            acc = (self.accumulate(a, b) * self.undo_of(a, b)).astype(np.float32)
            out = self.narrow(self.tensor_scaled(acc, a, b), out_dtype)
        spoiled = self.nan_rows(a, b)
        out[spoiled] = np.nan
        return out

    def accumulate(self, a, b):
        acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
        for dot in block_dots(a, b):
            acc = self.add_dot(acc, dot, a, b)
        return acc

    def add_dot(self, acc, dot, a, b):
        if {a.format, b.format} == {MXFP4}:  # float64 holds every sum that decides
            return self.add(acc, dot.approximate())
        return dot.added_to(acc)

    def add(self, acc, term):
        return (acc.astype(np.float64) + term).astype(np.float32)

    def undo_of(self, a, b):
        if {a.format, b.format} == {MXFP4}:
            return self.undo(int(a.prescale) + int(b.prescale))
        return np.float32(1 / prescale_product(a, b))

    def undo(self, prescaled):
        return (np.float32(1), np.float32(4 / 3), np.float32(16 / 9))[prescaled]

    def tensor_scaled(self, acc, a, b):
        for q in (a, b):
            acc = acc if q.tensor_scale is None else acc * q.tensor_scale[0]
        return acc

    def narrow(self, acc, out_dtype):
        return acc if out_dtype == "float32" else acc.astype(ml_dtypes.bfloat16)

    def nan_rows(self, a, b):
        spoiled_a, spoiled_b = (np.isnan(scale_value(q.scales, q.format.scale)).any(axis=1) for q in (a, b))
        return spoiled_a[:, None] | spoiled_b


def staged(**stages: Any) -> Callable[[], ReferenceBackend]:
    """A backend with some stages replaced by functions of (self, ...)."""
    return lambda: type("Mutant", (Staged,), stages)()


def with_capabilities(**fields: Any) -> Capabilities:
    return replace(ReferenceBackend.capabilities, **fields)


def rotating(actual: Callable[[Any, Rotation], Any]):
    """A fault in both the transform alone and the one inside a quantization."""

    def make():
        class Rotating(Staged):
            def rotate(self, v, rotation):
                return actual(v, rotation)

            def _hadamard(self, x, rotation, axis):
                v = np.moveaxis(x, axis, -1).astype(np.float32)
                return np.moveaxis(actual(v, rotation), -1, axis)

        return Rotating()

    return make


def decoding(actual: Callable[[MXArray, str], Any]):
    class Decoding(Staged):
        def _dequantize(self, q, dtype):
            with np.errstate(all="ignore"):
                return actual(q, dtype)

    return Decoding


class ExactBy(Staged):
    """`exact` by a function of (self, a, b, out_dtype), called by one thread at a time: it may patch a module."""

    _alone = threading.Lock()

    def __init__(self, change: Callable[..., Any]) -> None:
        self.change = change

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if profile is not GemmProfile.EXACT:
            return super()._scaled_gemm(a, b, profile, out_dtype)
        with self._alone, np.errstate(all="ignore"):
            return self.change(self, a, b, out_dtype)
