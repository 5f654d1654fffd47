"""Each class of crafted blocks finds a fault that nothing else in the kit finds: in one of many specialised kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mxref import BlockShape
from mxref.conformance import CLAUSES, check, suite
from mxref.conformance.requests import crafted
from mxref.formats import MXFP4, MXFP8_E4M3
from mxref.reference import ReferenceBackend
from mxref.steps.rounding import apply_prescale
from mxref.steps.scale import scale_exponent
from usual import usual

INF, SIGN = np.uint32(crafted.INFINITY_BITS), np.uint32(crafted.SIGN)


class OneKernel(ReferenceBackend):
    """Wrong in the kernel of one scale rule, rounding, prescale and zero byte, for some blocks."""

    def __init__(self, wrong, **kernel):
        self.wrong, self.kernel = wrong, {"block": BlockShape.ROW, "hadamard": 0, **kernel}

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        other = any(getattr(plan.spec, key) != value for key, value in self.kernel.items())
        if other or x.dtype != np.float32 or plan.length != x.shape[plan.axis] or not x.size:
            return codes, scales
        blocks = np.ascontiguousarray(np.moveaxis(x, plan.axis, -1)).reshape(*scales.shape, plan.format.k)
        with np.errstate(all="ignore"):
            scaled = np.ldexp(np.abs(blocks), -scale_exponent(scales)[..., None])
            scaled = apply_prescale(scaled, plan.format.element) if plan.spec.prescale else scaled
        return codes, scales ^ self.wrong(blocks.view(np.uint32), scaled).astype(np.uint8)


def only_in_the_last_lanes(bits, scaled):
    special = (bits & ~SIGN) >= INF
    return special[..., -8:].any(-1) & ~special[..., :-8].any(-1)


def nan_among_zeros(bits, scaled):
    magnitude = bits & ~SIGN
    return (magnitude > INF).any(-1) & ((magnitude == 0).sum(-1) == bits.shape[-1] - 1)


def infinities_that_cancel(bits, scaled):
    return (bits == INF).any(-1) & (bits == INF | SIGN).any(-1)


def sign_of_the_least_number(bits, scaled):
    return (bits == SIGN | 1).any(-1) & (bits.max(-1) > SIGN) & ((bits & ~SIGN).max(-1) >= crafted.FLT_MAX)


def an_ulp_above_a_power_of_two(bits, scaled):
    largest = (bits & ~SIGN).max(-1)
    return (largest & 0x7FFFFF == 1) & (largest < INF)


def half_a_step_above_the_largest(bits, scaled):
    """Where the exponent of the scale is large: golden vectors have others."""
    return (scaled == 464).any(-1) & ((bits & ~SIGN).max(-1) > 227 << 23)


def element(value):
    return lambda bits, scaled: (scaled == np.float32(value)).any(-1)


CEIL = {"scale_rule": "ceil", "rounding": "rne", "zero_scale": 127, "prescale": False}
SATURATING = CEIL | {"scale_rule": "floor", "zero_scale": 0}
PRESCALED = {"scale_rule": "floor", "rounding": "rna", "zero_scale": 127, "prescale": True}
FAULTS = {
    "0x.* at ": (only_in_the_last_lanes, CEIL, MXFP4),
    "zeros and one ": (nan_among_zeros, CEIL, MXFP4),
    "both infinities": (infinities_that_cancel, CEIL, MXFP4),
    "negative underflow": (sign_of_the_least_number, CEIL, MXFP4),
    "amax ": (an_ulp_above_a_power_of_two, CEIL, MXFP4),
    "ties X": (element(0.25), CEIL, MXFP4),
    "ties of ": (element(2.5), PRESCALED, MXFP4),
    "saturating": (half_a_step_above_the_largest, SATURATING, MXFP8_E4M3),
}


@pytest.fixture
def without(monkeypatch):
    """Leaves a class of crafted blocks out."""
    caches = (crafted.crafted_blocks, crafted.crafted_tensors, suite._checks)
    collect = crafted._crafted

    def leave_out(pattern):
        def rest(rows):
            whole = any(name.startswith("ties") for name, _ in rows)  # else the blocks of a threshold
            return collect([row for row in rows if not (whole and re.match(pattern, row[0]))])

        monkeypatch.setattr(crafted, "_crafted", rest)
        for cache in caches:
            cache.cache_clear()

    yield leave_out
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("name", usual(FAULTS, "ties X", "saturating"))
def test_without_its_class_of_crafted_blocks_a_fault_is_not_seen(name, without):
    wrong, kernel, made = FAULTS[name]
    backend = OneKernel(wrong, **kernel)

    def found():
        clauses = set(CLAUSES) - {"conformance.dual"}
        report = check(
            backend, ops=["quantize"], level="quick", formats=[made.name], clauses=clauses, shrink=False
        )
        return [(failure.clause, failure.check) for failure in report.failures]

    assert found()
    without(name)
    assert found() == []


def test_every_crafted_block_has_a_fault():
    for made in (MXFP4, MXFP8_E4M3):
        assert all(
            any(re.match(name, each) for name in FAULTS) for each in crafted.crafted_blocks(made).names
        )
