"""Part c: every bfloat16 and every float16 through whole quantizations, as amax and as an element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

import mxref
import oracle
from exhaustive.elements import KEY, STREAM, compare_blocks, function_name
from exhaustive.families import FAMILIES, NUMBA, element_of, packed, prefix, subjects
from exhaustive.kernels import grid_numbers, sr_codes, sr_integers
from exhaustive.steps import code_steps
from exhaustive.sweep import SIGN, Finding, Patterns, Sweep, compare
from mxref import OperandSpec, Rounding, ScaleRule
from mxref.formats import MXFP4, BlockFormat
from mxref.placement import Placement

CHUNK = 4096
DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

Quantize = Callable[..., mxref.MXArray]


@cache
def float32_bits(dtype: str) -> Patterns:
    """The float32 bits of all 65,536 values of a 16-bit type, in the order of their own bits."""
    if dtype == "bfloat16":
        return np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    return np.array([_widen(half) for half in range(1 << 16)], np.uint32)


def _widen(half: int) -> int:
    sign, exponent, mantissa = half >> 15 << 31, half >> 10 & 31, half & 1023
    if exponent == 31:
        return sign | oracle.INF32 | mantissa << 13
    count = (mantissa | 1024) << (exponent - 1) if exponent else mantissa  # in units of 2^-24
    return sign | oracle.round_f32(Fraction(count, 1 << 24))


def amax(
    subject: str, quantize: Quantize, dtype: str, rule: oracle.Rule, block_format: BlockFormat = MXFP4
) -> Sweep:
    """Every value as the only one of its block that is not zero, NaN and Inf included; RNE, RNA and RTZ."""
    roundings = (Rounding.RNE, Rounding.RNA, Rounding.RTZ)
    parts = (1 << 16) // CHUNK
    wide = float32_bits(dtype)
    zero_scale = 127 if rule == "even" else 0

    def check(chunk: int) -> Finding | None:
        part, turn = divmod(chunk, len(roundings))
        rounding = roundings[turn]
        halves = np.arange(part * CHUNK, (part + 1) * CHUNK, dtype=np.uint16)
        patterns = np.zeros((CHUNK, 32), np.uint16)
        codes = np.zeros((CHUNK, 32), np.uint8)
        scales = np.empty(CHUNK, np.uint8)
        for i, bits in enumerate(wide[halves].tolist()):
            patterns[i, i % 32] = halves[i]
            scales[i], (codes[i, i % 32], _) = oracle.quantize_block(
                [bits, 0], rule, rounding.value, zero_scale=zero_scale, element=element_of(block_format)
            )
        spec = OperandSpec(
            format=block_format, scale_rule=ScaleRule(rule), rounding=rounding, zero_scale=zero_scale
        )
        q = quantize(patterns.view(DTYPES[dtype]), spec)
        wrong = compare(q.scales.reshape(-1), scales, lambda at: f"{dtype} {int(halves[at]):#06x}: scale")
        stored = packed(codes, block_format)
        width = stored.shape[1]
        return wrong or compare(
            q.codes, stored, lambda at: f"{dtype} {int(halves[at // width]):#06x}: byte {at % width}"
        )

    domain = f"{prefix(block_format)}{dtype}, rule {rule}: all 65,536 values as amax; RNE, RNA, RTZ"
    chunks = parts * len(roundings)
    return Sweep("c", function_name(subject), domain, (1 << 16) * len(roundings), chunks, check)


@cache
def pins(dtype: str, element: oracle.Element = oracle.E2M1) -> dict[int, tuple[oracle.Rule, int]]:
    """For every byte that the type can reach: a rule, and the bits of the largest value that gets the byte."""
    wide = float32_bits(dtype)
    largest: dict[int, tuple[oracle.Rule, int]] = {}
    rules: tuple[oracle.Rule, ...] = (
        "even",
        "floor",
    )  # FLOOR, the later one, except for the byte that it misses
    for rule in rules:
        found: dict[int, tuple[oracle.Rule, int]] = {}
        for half in range(1, 0x8000):
            bits = int(wide[half])
            if bits < oracle.INF32:
                found[oracle.shared_scale(bits, rule, element)] = (rule, half)
        largest |= found
    return dict(sorted(largest.items()))


def elements(
    subject: str, quantize: Quantize, dtype: str, rounding: Rounding, block_format: BlockFormat = MXFP4
) -> Sweep:
    """Every value, with both signs, beside the largest value of every byte that it can meet."""
    element = element_of(block_format)
    wide, by_byte = float32_bits(dtype), pins(dtype, element)
    bytes_ = list(by_byte)
    magnitudes = np.arange(1 << 16, dtype=np.uint16) & np.uint16(0x7FFF)

    def check(chunk: int) -> Finding | None:
        byte = bytes_[chunk]
        rule, pin = by_byte[byte]
        swept = np.flatnonzero(magnitudes <= pin).astype(np.uint16)
        patterns = np.zeros((-(-swept.size // (31 * 8)) * 8, 32), np.uint16)
        patterns[:, 0] = pin
        filled = np.zeros(patterns[:, 1:].size, np.uint16)
        filled[: swept.size] = swept
        patterns[:, 1:] = filled.reshape(-1, 31)
        bits = wide[patterns]
        size = (bits & np.uint32(SIGN - 1)).reshape(-1)
        want = np.empty(bits.shape, np.uint8)
        placement = Placement()
        if rounding is Rounding.SR:
            integers = np.empty(bits.size, np.uint32)
            sr_integers(0, KEY, 16, integers)
            sr_codes(size, byte, integers, 16, grid_numbers(element), want.reshape(-1))
            placement = Placement(STREAM)
        else:
            want.reshape(-1)[:] = code_steps(byte, rounding.value, element=element).at(size)
        want |= (bits >> np.uint32(31) << np.uint32(element.bits - 1)).astype(np.uint8)
        spec = OperandSpec(format=block_format, scale_rule=ScaleRule(rule), rounding=rounding)
        q = quantize(patterns.view(DTYPES[dtype]).reshape(-1, 256), spec, placement=placement)
        return compare_blocks(q, byte, want, bits)

    cases = sum(2 * (pin + 1) for _, pin in by_byte.values())
    mode = "SR, R = 16, r from Philox" if rounding is Rounding.SR else rounding.value.upper()
    label = f"{prefix(block_format)}{dtype}, {mode}: all values under every byte {bytes_[0]} to {bytes_[-1]}"
    return Sweep("c", function_name(subject), label, cases, len(bytes_), check)


def sweeps(family: str = "mxfp4") -> Iterator[Sweep]:
    """Yield all sweeps of part c."""
    quantizers: dict[str, Quantize] = {"reference": mxref.quantize, "numba": NUMBA.quantize}
    for block_format in FAMILIES[family]:
        for dtype in DTYPES:
            for subject in subjects(block_format):
                for rule in oracle.RULES:
                    yield amax(subject, quantizers[subject], dtype, rule, block_format)
                for rounding in Rounding:
                    yield elements(subject, quantizers[subject], dtype, rounding, block_format)
