"""Part a: every float32 bit pattern through element rounding, alone and inside whole quantizations.

A block's scale is fixed by its first element, the largest amax that a scale rule maps to a chosen byte; the
other 31 elements sweep all magnitudes up to it, which are all that can meet this byte under the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from sys import modules
from typing import Any
from unittest import mock

import numpy as np

import mxref
import oracle
from exhaustive.families import FAMILIES, NUMBA, element_of, packed, prefix, subjects, unpacked
from exhaustive.kernels import grid_numbers, sr_codes, sr_edge, sr_integers
from exhaustive.steps import code_steps, largest_amax, oracle_code
from exhaustive.sweep import FLT_MAX, Codes, Finding, Patterns, Span, Sweep, compare
from mxref import OperandSpec, Rounding, ScaleRule, Stream
from mxref.formats import MXFP4, BlockFormat
from mxref.placement import Placement
from mxref.steps.rounding import round_magnitude
from oracle import random as oracle_random

DIRECT_CHUNK = 1 << 14
"""Elements per call of the reference: its temporaries stay in the second-level cache."""
ROWS = {"reference": 1 << 9, "numba": 1 << 13}
"""Blocks per call of `quantize`."""

STREAM = Stream(seed=0xC0FFEE123456789, step=70_001, layer=1_234_567, operand=4)
KEY = np.array(
    [
        STREAM.seed & 0xFFFFFFFF,
        STREAM.seed >> 32,
        STREAM.layer << 8 & 0xFFFFFFFF | STREAM.operand,
        STREAM.step,
    ],
    np.uint32,
)
ORACLE_STREAM = (STREAM.seed, STREAM.step, STREAM.layer, STREAM.operand)

Quantize = Callable[..., mxref.MXArray]
Round = Callable[..., Codes]


# ---- the function that rounds, on every magnitude v ----


@dataclass(frozen=True)
class Random:
    """Which integer each element gets under SR."""

    name: str
    fixed: int | None = None
    up: bool | None = None
    """For the two sides of the threshold: whether the integer is the first to go up or the last to stay."""


def randoms(bits: int) -> dict[str, Random]:
    """The choices of r that are swept, by name."""
    top = (1 << bits) - 1
    return {
        "0": Random("r = 0", fixed=0),
        "1": Random("r = 1", fixed=1),
        "top": Random(f"r = {top}", fixed=top),
        "philox": Random("r from Philox"),
        "stays": Random("r = last that stays", up=False),
        "goes": Random("r = first that goes up", up=True),
    }


def direct(
    rounding: Rounding,
    bits: int = 16,
    choice: str = "",
    round_function: Round = round_magnitude,
    block_format: BlockFormat = MXFP4,
) -> Sweep:
    """`round_magnitude` on every finite magnitude; under SR with the integers `randoms(bits)[choice]`."""
    span = Span(0, FLT_MAX, DIRECT_CHUNK)
    label = {"rne": "RNE", "rna": "RNA", "rtz": "RTZ", "sr": f"SR, R = {bits}"}[rounding.value]
    random = randoms(bits)[choice] if rounding is Rounding.SR else None
    fixed = random.fixed if random else None
    # v is |x| under X = 1, which is byte 127.
    element = element_of(block_format)
    grid = grid_numbers(element)
    known = not random or fixed is not None
    steps = code_steps(127, rounding.value, fixed, bits, element) if known else None
    integers = np.full(span.size, fixed or 0, np.uint32) if random else None
    offsets = np.arange(span.size, dtype=np.uint32)

    def check(chunk: int) -> Finding | None:
        base = span.base(chunk)
        magnitudes = offsets + np.uint32(base)
        if steps is not None:
            want: Codes | int = steps.values(base, span.size)
        else:
            assert random is not None
            assert integers is not None
            want = np.empty(span.size, np.uint8)
            if random.up is None:
                sr_integers(base, KEY, bits, integers)
                sr_codes(magnitudes, 127, integers, bits, grid, want)
            else:
                sr_edge(magnitudes, 127, bits, random.up, grid, integers, want)
        got = round_function(magnitudes.view(np.float32), rounding, block_format.element, integers, bits)
        return compare(got, want, lambda at: f"v = {base + at:#010x}")

    edges = steps if steps is not None else code_steps(127, "rtz", element=element)
    return Sweep(
        "a",
        "mxref.steps.rounding.round_magnitude",
        f"{prefix(block_format)}{label}{f', {random.name}' if random else ''}: all finite v",
        span.cases,
        span.chunks,
        check,
        tuple({c for s in edges.starts.tolist() for c in span.around(s)}),
    )


# ---- quantize, on every magnitude that can share a block with the pin ----


def quantized(
    subject: str,
    quantize: Quantize,
    rounding: Rounding,
    rule: oracle.Rule,
    byte: int,
    *,
    bits: int = 16,
    both_signs: bool = True,
    forced: bool = False,
    block_format: BlockFormat = MXFP4,
) -> Sweep:
    """`quantize` under one scale byte, with both signs of every magnitude or with one that alternates.

    `forced`: for byte 254, which no rule gives; the reference's `scale_code` is replaced by a constant.
    """
    element = element_of(block_format)
    grid, sign_place = grid_numbers(element), np.uint8(element.bits - 1)
    pin = FLT_MAX if forced else largest_amax(byte, rule, element)
    rows = ROWS[subject]
    span = Span(0, pin, rows * 31)
    passes = 2 if both_signs else 1
    spec = OperandSpec(format=block_format, scale_rule=ScaleRule(rule), rounding=rounding, sr_bits=bits)
    stochastic = rounding is Rounding.SR
    steps = None if stochastic else code_steps(byte, rounding.value, element=element)
    chunks = passes * span.chunks

    offsets = np.arange(span.size, dtype=np.uint32).reshape(rows, 31)
    negative = (offsets & np.uint32(1)).astype(bool)
    patterns = np.empty((rows, 32), np.uint32)
    patterns[:, 0] = pin
    wide = patterns.reshape(-1, 256)
    want = np.empty((rows, 32), np.uint8)
    integers = np.empty(wide.size, np.uint32)

    def check(chunk: int) -> Finding | None:
        turn, index = divmod(chunk, span.chunks)
        signs = negative ^ bool(turn)
        base = span.base(index)
        np.add(offsets, np.uint32(base), out=patterns[:, 1:])
        if stochastic:
            sr_integers(chunk * wide.size, KEY, bits, integers)
            sr_codes(patterns.reshape(-1), byte, integers, bits, grid, want.reshape(-1))
        else:
            assert steps is not None
            values = steps.values(base, span.size)
            want[:, 0] = steps.at(np.array([pin], np.uint32))[0]
            want[:, 1:] = values if isinstance(values, int) else values.reshape(rows, 31)
        want[:, 1:] |= signs.view(np.uint8) << sign_place
        patterns[:, 1:] |= signs.astype(np.uint32) << np.uint32(31)
        placement = Placement()
        if stochastic:
            placement = Placement(STREAM, (chunk * wide.shape[0], 0), (chunks * wide.shape[0], 256))
        with _forced_scale(byte) if forced else nullcontext():
            q = quantize(wide.view(np.float32), spec, placement=placement)
        return compare_blocks(q, byte, want, patterns)

    edges = steps or code_steps(byte, "rtz", element=element)
    near = {c for s in edges.starts.tolist() if s <= pin for c in span.around(s)}
    label = {"rne": "RNE", "rna": "RNA", "rtz": "RTZ", "sr": f"SR, R = {bits}, r from Philox"}[rounding.value]
    how = "scale_code replaced" if forced else f"rule {rule}"
    signs = "both signs" if both_signs else "signs alternating"
    return Sweep(
        "a",
        function_name(subject),
        f"{prefix(block_format)}{label}, byte {byte} ({how}): all magnitudes up to {pin:#010x}, {signs}",
        passes * span.cases,
        chunks,
        check,
        tuple(c + turn * span.chunks for c in near for turn in range(passes)),
    )


def function_name(subject: str) -> str:
    """How the table names the function `quantize` of a subject."""
    return "mxref.quantize" if subject == "reference" else f"{subject}: quantize"


def _forced_scale(byte: int) -> AbstractContextManager[Any]:
    # `mxref.quantize` is a function that has the name of its module.
    return mock.patch.object(
        modules["mxref.quantization"],
        "scale_code",
        lambda amax, rule, element, scale: np.full(amax.shape, byte, np.uint8),
    )


def compare_blocks(q: mxref.MXArray, byte: int, want: Codes, patterns: Patterns) -> Finding | None:
    """Compare codes [N, 32] and the one scale byte of all blocks; `patterns` are the inputs, to name a fault."""
    stored = q.codes.reshape(len(want), -1)
    if np.array_equal(stored, packed(want, q.format)) and (q.scales == byte).all():
        return None
    wrong_scale = compare(q.scales.reshape(-1), byte, lambda at: f"scale of block {at}")
    if wrong_scale is not None:
        return wrong_scale
    return compare(unpacked(stored, q.format), want, lambda at: f"x = {int(patterns.flat[at]):#010x}")


# ---- what never reaches rounding ----


def nonfinite(subject: str, quantize: Quantize, block_format: BlockFormat = MXFP4) -> Sweep:
    """Every NaN and infinity, each alone in a block of ones at a place that changes: byte 255 and codes 0."""
    rows = ROWS[subject]
    half = 0x800000 // rows
    offsets = np.arange(rows, dtype=np.uint32)
    patterns = np.full((rows, 32), 0x3F800000, np.uint32)
    zeros = np.zeros((rows, 32), np.uint8)

    def check(chunk: int) -> Finding | None:
        sign, part = divmod(chunk, half)
        patterns[:, chunk % 32] = offsets + np.uint32(sign << 31 | oracle.INF32 + part * rows)
        q = quantize(patterns.reshape(-1, 256).view(np.float32), OperandSpec(format=block_format))
        finding = compare_blocks(q, oracle.NAN_BYTE, zeros, patterns)
        patterns[:, chunk % 32] = 0x3F800000
        return finding

    domain = f"{prefix(block_format)}all 2^24 NaN and Inf patterns, each in a block of its own"
    return Sweep("a", function_name(subject), domain, 2 * half * rows, 2 * half, check)


# ---- the expected side of SR, against the oracle ----


def formula(block_format: BlockFormat = MXFP4) -> Sweep:
    """The integer formula of SR and the random integers, against the scalar oracle: no part of mxref runs."""
    rng = np.random.default_rng(2026)
    element = element_of(block_format)
    steps = _threshold_cases(element)
    below = 0x41000000 if element == oracle.E2M1 else oracle.round_f32(2 * element.largest)
    draws = [
        (int(m), int(b), int(r) & ((1 << bits) - 1), bits)
        for bits in (16, 22)
        for m, b, r in zip(
            np.concatenate([rng.integers(0, FLT_MAX + 1, 5000), rng.integers(0x3A000000, below, 25000)]),
            np.concatenate([rng.integers(0, 255, 5000), np.full(25000, 127)]),
            rng.integers(0, 1 << 22, 30000),
            strict=True,
        )
    ]
    indices = [8 * int(i) for i in rng.integers(0, 1 << 40, 200)]

    def check(chunk: int) -> Finding | None:
        if chunk == 2:
            return _compare_integers(indices)
        cases = (steps, draws)[chunk]
        got = _formula_codes(cases, grid_numbers(element))
        want = np.array(
            [oracle_code(m, byte, "sr", r, bits, element) for m, byte, r, bits in cases], np.uint8
        )
        return compare(got, want, lambda at: f"(|x|, byte, r, R) = {cases[at]}")

    return Sweep(
        "a",
        "the expected side of SR",
        f"{prefix(block_format)}against the oracle: every threshold +-1 ulp for R = 1 to 5 and every r; "
        "random for R = 16, 22",
        len(steps) + len(draws) + 2 * 8 * len(indices),
        3,
        check,
        (0, 1, 2),
    )


def _threshold_cases(element: oracle.Element) -> list[tuple[int, int, int, int]]:
    """All r at every threshold and beside it; with many gaps, those of the two lowest and the highest binades."""
    gaps = list(zip(element.grid, element.grid[1:], strict=False))
    per_binade = 1 << element.mantissa_bits
    if len(gaps) > 8:
        gaps = [*gaps[: 3 * per_binade], *gaps[-per_binade:]]
    cases = []
    for bits in range(1, 6):
        for low, high in gaps:
            for t in range(1 << bits):
                at = oracle.round_f32(low + (high - low) * Fraction(t, 1 << bits))
                near = {max(at + d, 0) for d in (-1, 0, 1)}
                cases += [(p, 127, r, bits) for p in sorted(near) for r in range(1 << bits)]
    return cases


def _formula_codes(cases: list[tuple[int, int, int, int]], grid: tuple[int, int, int, int]) -> Codes:
    magnitudes, bytes_, integers, widths = np.array(cases, np.uint32).T
    codes = np.empty(len(cases), np.uint8)
    for byte, bits in sorted({(byte, bits) for _, byte, _, bits in cases}):
        here = (bytes_ == byte) & (widths == bits)
        found = np.empty(int(here.sum()), np.uint8)
        sr_codes(magnitudes[here], byte, integers[here], bits, grid, found)
        codes[here] = found
    return codes


def _compare_integers(indices: list[int]) -> Finding | None:
    for bits in (16, 22):
        got = np.empty(8, np.uint32)
        for first in indices:
            sr_integers(first, KEY, bits, got)
            want = [oracle_random.sr_integer(*ORACLE_STREAM, first + j, bits) for j in range(8)]
            if got.tolist() != want:
                return Finding(1, f"integers of element {first}, R = {bits}: got {got.tolist()}, want {want}")
    return None


def sweeps(family: str = "mxfp4") -> Iterator[Sweep]:
    """Yield all sweeps of part a."""
    deterministic = (Rounding.RNE, Rounding.RNA, Rounding.RTZ)
    for block_format in FAMILIES[family]:
        yield formula(block_format)
        for rounding in deterministic:
            yield direct(rounding, block_format=block_format)
        edges = ("stays", "goes")
        for choice in randoms(16) if block_format == MXFP4 else edges:
            yield direct(Rounding.SR, 16, choice, block_format=block_format)
        for choice in ("philox", *edges) if block_format == MXFP4 else edges:
            yield direct(Rounding.SR, 22, choice, block_format=block_format)
        quantizers = {"reference": mxref.quantize, "numba": NUMBA.quantize}
        for subject in subjects(block_format):
            yield nonfinite(subject, quantizers[subject], block_format)
        yield from _quantizations(block_format)


def _quantizations(block_format: BlockFormat) -> Iterator[Sweep]:
    """Yield the sweeps of whole quantizations; those of MXFP8 cover the Numba backend only, at a few scale bytes."""
    reference, numba = mxref.quantize, NUMBA.quantize
    highest = 254 - element_of(block_format).largest_exponent
    if block_format != MXFP4:
        if "numba" in subjects(block_format):
            fp8_pins: tuple[tuple[oracle.Rule, int], ...] = (("floor", 0), ("even", 127), ("floor", highest))
            for rule, byte in fp8_pins:
                for rounding in Rounding:
                    yield quantized("numba", numba, rounding, rule, byte, block_format=block_format)
        return
    pins: list[tuple[oracle.Rule, int]] = [
        ("floor", 0), ("floor", 1), ("rceil", 126), ("floor", 127), ("floor", highest), ("even", highest + 1),
    ]  # fmt: skip
    for rule, byte in pins:
        for rounding in Rounding:
            both = byte <= 1 or (byte in (127, 252) and rounding is Rounding.RNE)
            if byte != 126 or rounding is Rounding.RNE:
                yield quantized("reference", reference, rounding, rule, byte, both_signs=both)
            yield quantized("numba", numba, rounding, rule, byte)
        yield quantized("numba", numba, Rounding.SR, rule, byte, bits=22)
    yield quantized("reference", reference, Rounding.SR, "floor", 127, bits=22, both_signs=False)
    for rounding in (Rounding.RNE, Rounding.RNA, Rounding.RTZ):
        yield quantized("reference", reference, rounding, "even", 254, both_signs=False, forced=True)
