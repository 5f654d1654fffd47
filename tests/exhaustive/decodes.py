"""Part d: every element code under every scale byte, decoded to every type."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mxref
import oracle
from exhaustive.families import FAMILIES, NUMBA, element_of, packed, prefix, subjects
from exhaustive.sweep import Codes, Finding, Sweep, compare
from mxref import MXArray
from mxref.formats import MXFP4, BlockFormat

NAN64 = 0x7FF8000000000000
_WORDS = {"float64": np.uint64, "float32": np.uint32, "bfloat16": np.uint16}

Dequantize = Callable[[MXArray, str], NDArray[Any]]


def array(codes: Codes, scales: Codes, block_format: BlockFormat = MXFP4) -> MXArray:
    """Codes [N, K] and scale bytes [N, K / k] as they are stored."""
    return MXArray(packed(codes, block_format), scales, codes.shape, 1, format=block_format)


def _float64_bits(byte: int, code: int, element: oracle.Element) -> int:
    scale, kind = oracle.scale_value(byte), element.kind(code)
    if scale is None or kind == "nan":
        return NAN64
    # A value has few significant bits, so float() is exact.
    value = float("inf") if kind == "infinite" else float(abs(element.value(code)) * scale)
    bits: int = struct.unpack("<Q", struct.pack("<d", value))[0]
    return bits | (code >= element.sign) << 63


_ORACLE = {
    "float64": _float64_bits,
    "float32": oracle.dequantize_f32,
    "bfloat16": oracle.dequantize_bf16,
}


@cache
def _table(dtype: str, element: oracle.Element) -> NDArray[np.uint64]:
    """The oracle's decodes, [bytes, codes]."""
    codes = range(2 * element.sign)
    return np.array(
        [[_ORACLE[dtype](byte, code, element) for code in codes] for byte in range(256)], np.uint64
    )


def decode(subject: str, dequantize: Dequantize, dtype: str, block_format: BlockFormat = MXFP4) -> Sweep:
    """All decodes; every code stands at an even and at an odd place, the other way round in a second row."""
    element = element_of(block_format)
    count = 2 * element.sign
    codes = (np.arange(max(count, 32)) % count).astype(np.uint8)
    rows = np.concatenate([np.tile(codes, (256, 1)), np.tile(np.roll(codes, 1), (256, 1))])
    scales = np.repeat(np.tile(np.arange(256, dtype=np.uint8), 2)[:, None], codes.size // 32, axis=1)

    def check(chunk: int) -> Finding | None:
        values = dequantize(array(rows, scales, block_format), dtype)
        nan = np.isnan(values.astype(np.float64))
        bits = values.view(_WORDS[dtype]).astype(np.uint64)
        if dtype == "float64":  # the canonical NaN is defined for float32 and bfloat16
            bits = np.where(nan, np.uint64(NAN64), bits)
        want = _table(dtype, element)[scales[:, 0, None], rows]
        return compare(
            bits, want, lambda at: f"byte {int(scales[at // codes.size, 0])}, code {int(rows.flat[at])}"
        )

    function = "mxref.dequantize" if subject == "reference" else f"{subject}: dequantize"
    domain = f"{prefix(block_format)}{dtype}: all 256 x {count} byte and code pairs"
    return Sweep("d", function, domain, 256 * count, 1, check)


def sweeps(family: str = "mxfp4") -> Iterator[Sweep]:
    """Yield all sweeps of part d."""
    for block_format in FAMILIES[family]:
        for dtype in _ORACLE:
            yield decode("reference", mxref.dequantize, dtype, block_format)
            if dtype != "float64" and "numba" in subjects(block_format):
                yield decode("numba", NUMBA.dequantize, dtype, block_format)
