"""Planted faults, which every kind of sweep must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mxref
from mxref import GemmProfile, Rounding, ScaleRule
from mxref.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.placement import Placement
from mxref.steps.rounding import round_magnitude
from mxref.steps.scale import bump_above

pytest.importorskip("numba")

from exhaustive import decodes, dots, elements, halves, scales
from exhaustive.families import NUMBA, subjects
from exhaustive.sweep import Sweep, run

QUANTIZE = {"reference": mxref.quantize, "numba": NUMBA.quantize}
FORMATS = pytest.mark.parametrize("block_format", [MXFP4, MXFP8_E4M3, MXFP8_E5M2], ids=str)
SPOT = 0x3F8ABCDE
"""A magnitude of about 1.08, near no threshold, where faults are planted."""
ONLY_CORNERS = 1 << 40


def faults(sweep: Sweep, every: int = ONLY_CORNERS) -> tuple[int, str]:
    result = run(sweep, every)
    return result.faults, result.first


# ---- the expected side ----


@pytest.mark.parametrize(("block_format", "fault"), [(MXFP4, "integer"), (MXFP8_E5M2, "threshold")], ids=str)
def test_a_wrong_formula_of_sr_is_noticed(monkeypatch, block_format, fault):
    if fault == "threshold":
        monkeypatch.setattr(elements, "_formula_codes", _one_too_high)
    else:
        monkeypatch.setattr(elements, "ORACLE_STREAM", (*elements.ORACLE_STREAM[:3], 5))
    assert faults(elements.formula(block_format))[0] > 0


def _one_too_high(cases, grid, formula=elements._formula_codes):
    return formula([(magnitude, byte, r + 1, bits) for magnitude, byte, r, bits in cases], grid)


# ---- planted faults: elements ----


@FORMATS
def test_one_wrong_code_at_one_pattern_is_noticed_by_the_sweep_of_the_rounding(block_format):
    def faulty(v, rounding, element, random, bits):
        codes = round_magnitude(v, rounding, element, random, bits)
        codes[v.view(np.uint32) == SPOT] ^= 1
        return codes

    for rounding, choice in ((Rounding.RNE, ""), (Rounding.SR, "0"), (Rounding.SR, "goes")):
        sweep = elements.direct(rounding, 16, choice, faulty, block_format)
        finding = sweep.check(SPOT // elements.DIRECT_CHUNK)
        assert finding is not None
        assert finding.count == 1
        assert finding.first.startswith(f"v = {SPOT:#010x}: got ")
        assert sweep.check(SPOT // elements.DIRECT_CHUNK + 1) is None


@pytest.mark.parametrize(("choice", "offset"), [("stays", 1), ("goes", -1)])
def test_sr_off_by_one_is_noticed(choice, offset):
    def faulty(v, rounding, element, random, bits):
        moved = (random.astype(np.int64) + offset).astype(np.uint32)
        return round_magnitude(v, rounding, element, moved, bits)

    assert faults(elements.direct(Rounding.SR, 22, choice, faulty))[0] > 1000


def _spoil(quantize: Callable[..., mxref.MXArray], pattern: int, scales: bool = False) -> Any:
    """`quantize` with one wrong code, or scale, where the input is `pattern`."""

    def faulty(x, spec, **where):
        q = quantize(x, spec, **where)
        hit = np.argwhere(x.view(f"u{x.itemsize}") == pattern)
        codes, bytes_ = q.codes.copy(), q.scales.copy()
        for row, column in hit:
            if scales:
                bytes_[row, column // 32] ^= 1
            else:
                per_byte = 8 // q.format.element.bits
                codes[row, column // per_byte] ^= 1 << 4 * (column % per_byte)
        return replace(q, codes=codes, scales=bytes_)

    return faulty


@pytest.mark.parametrize("scales", [False, True], ids=["code", "scale"])
@pytest.mark.parametrize("subject", QUANTIZE)
def test_one_wrong_code_or_scale_in_a_block_is_noticed(subject, scales):
    spoiled = _spoil(QUANTIZE[subject], SPOT | 0x80000000, scales)
    sweep = elements.quantized(subject, spoiled, Rounding.RNE, "floor", 127)
    at = SPOT // (elements.ROWS[subject] * 31)
    found = [f for f in (sweep.check(at), sweep.check(at + sweep.chunks // 2)) if f is not None]
    assert [f.count for f in found] == [1]
    assert ("got 126, want 127" in found[0].first) == scales


def test_random_integers_of_another_place_are_noticed():
    def at_the_origin(x, spec, *, placement):
        return NUMBA.quantize(x, spec, placement=Placement(placement.stream))

    assert faults(elements.quantized("numba", at_the_origin, Rounding.SR, "floor", 1))[0] > 1000


def test_a_nonfinite_pattern_that_is_missed_is_noticed():
    pattern = 0xFFC00000
    sweep = elements.nonfinite("reference", _spoil(mxref.quantize, pattern, scales=True))
    rows = elements.ROWS["reference"]
    finding = sweep.check((pattern >> 31) * sweep.chunks // 2 + (pattern & 0x7FFFFF) // rows)
    assert finding is not None
    assert finding.count == 1
    assert finding.first.endswith("got 254, want 255")


# ---- planted faults: scales ----


@pytest.mark.parametrize(("rule", "offset"), [("rceil", -1), ("even", 1)])
@FORMATS
def test_a_bump_bound_off_by_one_is_noticed(short_chunks, block_format, rule, offset):
    element = block_format.element
    bound = bump_above(ScaleRule(rule), element) + offset

    def faulty(amax, rule, element):
        above = (amax & np.uint32(0x7FFFFF)) > bound
        return np.maximum((amax >> 23).astype(np.int64) - element.max_exponent + above, 0).astype(np.uint8)

    def faulty_blocks(x, spec):
        q = NUMBA.quantize(x, spec)
        amax = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(*q.scales.shape, 32).max(axis=-1)
        return replace(q, scales=faulty(amax, rule, element))

    # One amax in each of the binades whose byte the clamp leaves alone: 253 for E2M1.
    binades = 255 - element.max_exponent
    assert faults(scales.direct(rule, faulty, block_format))[0] == binades
    if "numba" in subjects(block_format):
        assert faults(scales.blocks(rule, faulty_blocks, block_format))[0] == binades


# ---- planted faults: 16-bit inputs, decodes, dots ----


@pytest.mark.parametrize(("subject", "dtype"), list(zip(QUANTIZE, halves.DTYPES, strict=True)))
def test_one_wrong_code_or_scale_of_a_16_bit_value_is_noticed(subject, dtype):
    half, quantize = 0x3E11, QUANTIZE[subject]
    for spoil_scale in (False, True):
        spoiled = _spoil(quantize, half, spoil_scale)
        sweep = halves.amax(subject, spoiled, dtype, "floor")
        finding = sweep.check(half // halves.CHUNK * 3)
        assert finding is not None
        assert finding.count == 1
        assert finding.first.startswith(f"{dtype} {half:#06x}: ")
    sweep = halves.elements(subject, _spoil(quantize, half), dtype, Rounding.SR)
    with_it = [byte for byte, (_, pin) in halves.pins(dtype).items() if pin > half]
    finding = sweep.check(list(halves.pins(dtype)).index(with_it[0]))
    assert finding is not None
    assert finding.count == 1


def test_wrong_decodes_are_noticed():
    def faulty(q, dtype):
        values = mxref.dequantize(q, dtype)
        values[255, 3] = 0
        values[200, 8] = 0  # code 8 is -0
        return values

    sweep = decodes.decode("reference", faulty, "bfloat16")
    assert faults(sweep) == (2, f"byte 200, code 8: got 0, want {1 << 15}")


def test_a_nan_code_that_decodes_to_a_number_is_noticed():
    def faulty(q, dtype):
        values = mxref.dequantize(q, dtype)
        values[np.isnan(values) & (q.codes == 0x7F) & (np.repeat(q.scales, 32, axis=1) == 9)] = 480.0
        return values

    sweep = decodes.decode("reference", faulty, "float32", MXFP8_E4M3)
    assert faults(sweep) == (2, f"byte 9, code 127: got {0x43F00000}, want {0x7FC00000}")


def test_products_of_infinity_and_zero_that_are_zero_are_noticed():
    def faulty(a, b, *, profile):
        out = mxref.scaled_gemm(a, b, profile=profile)
        infinite = (a.codes == 0x7C).any(axis=1)[:, None] & (b.codes == 0).all(axis=1)
        return np.where(infinite, np.float32(0), out)

    sweep = dots.all_pairs("reference", faulty, "ordered", (MXFP8_E5M2, MXFP8_E5M2))
    finding = sweep.check(7)
    assert finding is not None
    assert finding.count == 1


def _dequantize_first(a, b, *, profile, out_dtype="float32"):
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out = mxref.dequantize(a) @ mxref.dequantize(b).T
    out.view(np.uint32)[np.isnan(out)] = 0x7FC00000
    return out


def _one_ulp_off(a, b, *, profile, out_dtype="float32"):
    out = mxref.scaled_gemm(a, b, profile=GemmProfile.ORDERED, out_dtype=out_dtype)
    out[7, 9] = np.nextafter(out[7, 9], np.float32(1e9))
    return out


@pytest.mark.parametrize("make", ["single", "two_pairs", "two_blocks"])
def test_faults_of_a_gemm_are_noticed(make):
    def sweep(gemm):
        if make == "single":
            return dots.single_pairs("reference", gemm, "ordered", "float32", 1)
        if make == "two_pairs":
            return dots.two_pairs("reference", gemm, "ordered", [(2, 30)], dots.ENDS, "one pair of places")
        return dots.two_blocks("reference", gemm, "ordered")

    one = sweep(_one_ulp_off)
    finding = one.check(one.chunks // 2)
    assert finding is not None
    assert finding.count == 1
    assert "element (7, 9)" in finding.first
    first = sweep(_dequantize_first)
    assert first.check(first.chunks - 1) is not None, "an overflow of dequantized operands"


def test_exact_and_ordered_are_told_apart():
    def ordered(a, b, *, profile, out_dtype="float32"):
        return mxref.scaled_gemm(a, b, profile="ordered", out_dtype=out_dtype)

    sweep = dots.two_blocks("reference", ordered, "exact")
    chunk = dots.ENDS.index(-150) * len(dots.ENDS) + dots.ENDS.index(-149)
    assert sweep.check(chunk) is not None
