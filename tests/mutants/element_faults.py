"""Faults of rounding to the element grid, of signs and of the prescale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import GRID, TIES, Staged, staged
from mxref import Rounding
from mxref.formats import E2M1
from mxref.steps.rounding import apply_prescale, round_magnitude

_RNE = Rounding.RNE


def sign_lost_on(which: str):
    def sign(self, codes, negative):
        if which == "underflow":  # both -0 and what rounds to it
            negative = negative & (codes != 0)
        return codes | negative.astype(np.uint8) << 3

    return sign


def minus_zero_lost(self, x):
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32) + np.float32(0)


def mode(rounding: Rounding, actual: Callable[[Any], Any]):
    def round_(self, v, spec, random):
        return actual(v) if spec.rounding is rounding else Staged.round(self, v, spec, random)

    return round_


def floor_of_half_more(v):
    """floor(x + 0.5) in float32 at the element's precision, where 0.24999999 + 0.25 is already 0.5."""
    code = round_magnitude(v, Rounding.RNE, E2M1)
    return np.where((v < 0.5) & ((v + np.float32(0.25)) >= np.float32(0.5)) & (v != 0.25), 1, code)


def no_saturation(self, v, spec, random):
    codes = Staged.round(self, v, spec, random)
    return np.where(v > 7, 0, codes)


def prescale_in_bfloat16(self, v):
    narrow = v.astype(ml_dtypes.bfloat16).astype(np.float32)
    return (np.float32(0.75) * narrow).astype(ml_dtypes.bfloat16).astype(np.float32)


ELEMENT_MUTANTS = (
    Mutant("-0 to +0", "rounding.sign", "torch.sign in compressed-tensors", staged(widen=minus_zero_lost)),
    Mutant("underflow to +0", "rounding.sign", "Quark's C++ kernel", staged(sign=sign_lost_on("underflow"))),
    Mutant("ties away", "rounding.rne", "Quark torch and Triton, microxcaling, triton_kernels before 8110",
           staged(round=mode(_RNE, lambda v: round_magnitude(v, Rounding.RNA, E2M1)))),
    Mutant("ties toward zero", "rounding.rne", "ggml, FP-Quant's Triton kernel",
           staged(round=mode(_RNE, lambda v: np.searchsorted(TIES, v, side="left")))),
    Mutant("0.24999999 to 0.5", "rounding.rne", "microxcaling even: floor(|x| + 0.5) overflows the ulp",
           staged(round=mode(_RNE, floor_of_half_more))),
    Mutant("RNA to even", "rounding.rna", "a rounding mode that is ignored",
           staged(round=mode(Rounding.RNA, lambda v: round_magnitude(v, _RNE, E2M1)))),
    Mutant("RTZ to nearest", "rounding.rtz", "a rounding mode that is ignored",
           staged(round=mode(Rounding.RTZ, lambda v: round_magnitude(v, _RNE, E2M1)))),
    Mutant("no saturation", "rounding.saturate", "an encoder whose exponent overflows", staged(round=no_saturation)),
    Mutant("prescale missing", "rounding.prescale", "a flag that the kernel does not read",
           staged(prescale=lambda self, v: v)),
    Mutant("prescale in bfloat16", "rounding.prescale", "multiplication in the input type",
           staged(prescale=prescale_in_bfloat16)),
    Mutant("prescale after rounding", "rounding.prescale", "3/4 applied to what is rounded already",
           staged(prescale=lambda self, v: apply_prescale(GRID[round_magnitude(v, _RNE, E2M1)].astype('f4'), E2M1))),
)  # fmt: skip
