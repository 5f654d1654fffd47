"""The GEMM of MXFP4 for AVX-512 VNNI: tiles of 6 x 32.

The 12 vectors of sums and 12 of dots stay in registers over all blocks, together with two vectors of B.
A block costs each vector eight VPDPBUSD and one FMA on the same units: the bound is 8/9 of the rate of VPDPBUSD.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from mxref_numba.compiled import float_of
from mxref_numba.gemm.dots import Vnni
from mxref_numba.gemm.tiled import Kernels, intrinsics
from mxref_numba.gemm.tiling import Tiling
from mxref_numba.vector.native import Native

TILING = Tiling(lanes=16, rows=6, vectors=2, dots=Vnni(), masks=True)

_emit_left, _emit_right, _emit_tile = intrinsics(TILING)


@Native
def _pack_left(codes, scales, blocks, record, row, found, found_pitch):
    _emit_left(codes, scales, blocks, record, row, found, found_pitch)


@Native
def _pack_right(codes, code_pitch, scales, scale_pitch, last, blocks, record, found, found_pitch):
    _emit_right(codes, code_pitch, scales, scale_pitch, last, blocks, record, found, found_pitch)


@Native
def _multiply(left, right, blocks, how, factor, out, pitch, height, width):
    _emit_tile(
        left, right, blocks, how & 1 != 0, float_of(factor), out, pitch, height, width, how & 2 != 0
    )


KERNELS = Kernels(TILING, _pack_left, _pack_right, _multiply)
