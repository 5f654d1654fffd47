"""A backend in one file: one scale rule, one rounding, and every bit right."""

import ml_dtypes
import numpy as np

from mxref import Backend, BlockShape, Capabilities, GemmProfile, Rounding, ScaleRule
from mxref.capabilities import every_gemm
from mxref.formats import E2M1, MXFP4
from mxref.layouts.packed import pack, unpack


class ToyBackend(Backend):
    name = "toy"
    capabilities = Capabilities(
        scale_rules=frozenset({ScaleRule.FLOOR}),
        roundings=frozenset({Rounding.RNE}),
        blocks=frozenset({BlockShape.ROW}),
        hadamard_sizes=frozenset(),
        prescale=False,
        in_dtypes=frozenset({"float32"}),
        dequantize_dtypes=frozenset({"float32"}),
        gemms=every_gemm({GemmProfile.ORDERED}, {MXFP4}),
        gemm_dtypes=frozenset({"float32"}),
    )

    def _quantize(self, x, plan):
        x = np.moveaxis(x, plan.axis, -1)
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, plan.length - x.shape[-1])])
        x = x.reshape(*x.shape[:-1], plan.length // 32, 32)  # [rows..., blocks, 32]
        amax = np.abs(x).max(axis=-1, keepdims=True)  # a NaN anywhere makes it NaN
        spoiled = ~np.isfinite(amax)
        exponent = np.frexp(np.where(spoiled, 0, amax))[1] - 3  # floor(log2) - 2
        exponent = np.maximum(exponent, -127)
        scales = np.where(amax == 0, plan.spec.zero_scale, exponent + 127)
        scaled = np.ldexp(np.where(spoiled, 0, x).astype(np.float64), -exponent)
        codes = scaled.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)  # RNE
        codes = np.where(spoiled, np.uint8(0), codes).reshape(*x.shape[:-2], plan.length)
        return pack(codes, E2M1), np.where(spoiled, 255, scales)[..., 0].astype(np.uint8)

    def _values(self, q):
        """Return elements [rows..., blocks, 32] and scales [rows..., blocks], float64, exact."""
        elements = unpack(q.codes, E2M1).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        scales = np.where(q.scales == 255, np.nan, np.ldexp(1.0, q.scales.astype(np.int32) - 127))
        return elements.reshape(*q.scales.shape, 32), scales

    def _dequantize(self, q, dtype):
        elements, scales = self._values(q)
        values = (elements * scales[..., None]).reshape(*q.rows_shape, q.length)
        with np.errstate(over="ignore"):
            return np.moveaxis(values[..., : q.shape[q.axis]].astype(np.float32), -1, q.axis)

    def _hadamard(self, x, rotation, axis):
        raise AssertionError("no size is declared, so this is never called")

    def _scaled_gemm(self, a, b, profile, out_dtype):
        (pa, sa), (pb, sb) = self._values(a), self._values(b)
        total = np.zeros((len(pa), len(pb)), np.float32)
        for k in range(pa.shape[1]):  # blocks in ascending order: the profile `ordered`
            term = (pa[:, k] @ pb[:, k].T) * sa[:, None, k] * sb[:, k]
            with np.errstate(over="ignore"):
                total = (total.astype(np.float64) + term).astype(np.float32)
        return total


backend = ToyBackend()
