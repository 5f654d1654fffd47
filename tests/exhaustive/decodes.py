"""Part d: every element code under every scale byte, decoded to every type."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mxref
import oracle
from exhaustive.sweep import Codes, Finding, Sweep, compare
from mxref import MXArray

NAN64 = 0x7FF8000000000000
_WORDS = {"float64": np.uint64, "float32": np.uint32, "bfloat16": np.uint16}

Dequantize = Callable[[MXArray, str], NDArray[Any]]


def array(codes: Codes, scales: Codes) -> MXArray:
    """Codes [N, K] and scale bytes [N, K / 32] as they are stored, packed here and not by what is under test."""
    packed = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return MXArray(packed, scales, codes.shape, 1)


def _float64_bits(byte: int, code: int) -> int:
    scale = oracle.scale_value(byte)
    if scale is None:
        return NAN64
    value = abs(oracle.element_value(code)) * scale  # 4 significant bits: float() is exact
    bits: int = struct.unpack("<Q", struct.pack("<d", float(value)))[0]
    return bits | (code >> 3) << 63


_ORACLE = {
    "float64": _float64_bits,
    "float32": oracle.dequantize_f32,
    "bfloat16": oracle.dequantize_bf16,
}


def decode(subject: str, dequantize: Dequantize, dtype: str) -> Sweep:
    """All 256 x 16 decodes; every code stands at an even and at an odd place, the other way round in a second row."""
    codes = np.arange(32, dtype=np.uint8) % np.uint8(16)
    rows = np.concatenate([np.tile(codes, (256, 1)), np.tile(np.roll(codes, 1), (256, 1))])
    scales = np.tile(np.arange(256, dtype=np.uint8), 2)[:, None]
    table = np.array([[_ORACLE[dtype](byte, code) for code in range(16)] for byte in range(256)], np.uint64)

    def check(chunk: int) -> Finding | None:
        values = dequantize(array(rows, scales), dtype)
        nan = np.isnan(values.astype(np.float64))
        bits = values.view(_WORDS[dtype]).astype(np.uint64)
        if dtype == "float64":  # the canonical NaN is defined for float32 and bfloat16
            bits = np.where(nan, np.uint64(NAN64), bits)
        want = table[scales[:, 0, None], rows]
        return compare(bits, want, lambda at: f"byte {int(scales[at // 32, 0])}, code {int(rows.flat[at])}")

    function = "mxref.dequantize" if subject == "reference" else f"{subject}: dequantize"
    return Sweep("d", function, f"{dtype}: all 256 x 16 byte and code pairs", 256 * 16, 1, check)


def sweeps() -> Iterator[Sweep]:
    """Yield all sweeps of part d."""
    for dtype in _ORACLE:
        yield decode("reference", mxref.dequantize, dtype)
        if dtype != "float64":
            yield decode("numba", mxref.get_backend("numba").dequantize, dtype)
