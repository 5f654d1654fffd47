"""A quantizer in one file, with a fault planted in it: can you see which line is wrong?"""

import numpy as np

from mxref import Backend, BlockShape, Capabilities, Rounding, ScaleRule
from mxref.formats import E2M1
from mxref.layouts.packed import pack

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDPOINTS = (GRID[:-1] + GRID[1:]) / 2


class PlantedFault(Backend):
    name = "planted"
    capabilities = Capabilities(
        scale_rules=frozenset({ScaleRule.FLOOR}),
        roundings=frozenset({Rounding.RNE}),
        blocks=frozenset({BlockShape.ROW}),
        hadamard_sizes=frozenset(),
        prescale=False,
        in_dtypes=frozenset({"float32"}),
        dequantize_dtypes=frozenset(),  # no dequantization and no GEMM yet: one step at a time
        gemms=frozenset(),
    )

    def _quantize(self, x, plan):
        x = np.moveaxis(x, plan.axis, -1)
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, plan.length - x.shape[-1])])
        x = x.reshape(*x.shape[:-1], plan.length // 32, 32)  # [rows..., blocks, 32]
        amax = np.abs(x).max(axis=-1, keepdims=True)
        spoiled = ~np.isfinite(amax)  # one NaN or Inf makes a NaN block
        exponent = np.maximum(np.frexp(np.where(spoiled, 1, amax))[1] - 3, -127)  # floor(log2) - 2
        scales = np.where(spoiled, 255, np.where(amax == 0, plan.spec.zero_scale, exponent + 127))
        v = np.ldexp(np.where(spoiled, 0, np.abs(x)).astype(np.float64), -exponent)
        codes = np.searchsorted(MIDPOINTS, v, side="right").astype(np.uint8)  # to nearest
        codes |= np.where(np.signbit(x) & ~spoiled, np.uint8(8), np.uint8(0))
        return pack(codes.reshape(*x.shape[:-2], plan.length), E2M1), scales[..., 0].astype(np.uint8)

    def _dequantize(self, q, dtype):
        raise AssertionError("no type is declared, so this is never called")

    def _hadamard(self, x, rotation, axis):
        raise AssertionError("no size is declared, so this is never called")

    def _scaled_gemm(self, a, b, profile, out_dtype):
        raise AssertionError("no profile is declared, so this is never called")


backend = PlantedFault()
