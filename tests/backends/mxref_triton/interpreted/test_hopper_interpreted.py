"""The packed arithmetic of Hopper with its few instructions done in NumPy, against the reference, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from interpreted.test_quantize_interpreted import (
    BACKEND,
    REFERENCE,
    STREAM,
    assert_same,
    crafted,
    heavy,
    tiny,
)
from mxref import OperandSpec
from mxref.placement import Placement
from mxref.steps.scale import EXPONENT_RULES
from mxref_triton.lane import hopper, unit
from mxref_triton.quantizer import dispatch

SHIFTS = (np.uint32(0), np.uint32(16))


def plain(constant):
    """A constant of a kernel as Python has it."""
    return getattr(constant, "value", constant)


def halves(word):
    """Lower and upper halves as float32, from the bits of bfloat16."""
    return [(word >> shift << np.uint32(16)).view(np.float32) for shift in SHIFTS]


def joined(low, high):
    return (low & np.uint32(0xFFFF)) | (high << np.uint32(16))


def rounded(x):
    """Bits of bfloat16, to nearest even; NaN is the one that the hardware gives."""
    bits = x.astype(np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest)


def fused(a, b, c):
    """Products of powers of two are exact in float64, and what their sums lose there is far below any tie."""
    with np.errstate(all="ignore"):
        each = [x.astype(np.float64) * y + z for x, y, z in zip(halves(a), halves(b), halves(c), strict=True)]
    return joined(*map(rounded, each))


def permuted(a, b, select):
    """PRMT: each nibble names one of eight bytes, and with its top bit set asks for the byte's sign only."""
    pool = [(w >> np.uint32(8 * i)) & np.uint32(0xFF) for w in (a, b) for i in range(4)]
    out = np.zeros_like(a)
    for i in range(4):
        nibble = select >> (4 * i) & 15
        byte = pool[nibble & 7]
        if nibble & 8:
            byte = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        out |= byte << np.uint32(8 * i)
    return out


def compared(a, b, pick):
    return joined(*(pick(a >> s & np.uint32(0xFFFF), b >> s & np.uint32(0xFFFF)) for s in SHIFTS))


def of_two(text, a, b):
    """Do the instruction in a text of assembly to two tensors of the interpreter."""
    mnemonic, *operands = plain(text).rstrip(";").split()
    x, y = a.handle.data, b.handle.data
    if mnemonic == "prmt.b32":
        out = permuted(x, y, int(operands[-1], 16))
    elif mnemonic == "mul.rn.bf16x2":
        out = fused(x, y, np.full_like(x, 0x80008000))
    else:
        out = compared(x, y, {"min.u16x2": np.minimum, "max.u16x2": np.maximum}[mnemonic])
    return tl.tensor(TensorHandle(out.astype(np.uint32), tl.uint32), a.type)


def fused_of_two(a, b, c):
    out = fused(a.handle.data, b.handle.data, np.full_like(a.handle.data, plain(c)))
    return tl.tensor(TensorHandle(out.astype(np.uint32), tl.uint32), a.type)


@pytest.fixture(autouse=True)
def packed(monkeypatch):
    """A machine that has the instructions; returns the set of functions that ran."""
    ran = set()

    def noted(name):
        function = getattr(hopper, name)

        def run(*arguments, **named):
            ran.add(name)
            return function(*arguments, **named)

        return run

    monkeypatch.setattr(dispatch, "packs_bfloat16", lambda device: True)
    monkeypatch.setattr(hopper, "_of_two", of_two)
    monkeypatch.setattr(hopper, "_fused", fused_of_two)
    for name in ("encode_pairs", "encode_two", "pairs_of"):
        monkeypatch.setattr(unit, name, noted(name))
    return ran


def check(x, spec, axis):
    got = BACKEND.quantize(BACKEND.from_numpy(x), spec, axis=axis, placement=Placement(STREAM))
    assert_same(got, REFERENCE.quantize(x, spec, axis=axis, placement=Placement(STREAM)))


def with_nonfinite(x):
    """NaN, Inf and -Inf in every other line, at another place of each block."""
    x = x.copy()
    rows = np.arange(0, x.shape[0], 33)
    x[rows, 0::4] = np.nan
    x[rows, 2::4] = np.where(rows % 2, np.inf, -np.inf).astype(np.float32)[:, None]
    return x


@pytest.mark.clause("rounding.rne", "scale.nonfinite")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rule", [*EXPONENT_RULES, ">1.3", ">=1", ">=1.9"])
def test_elements_as_they_are_read(rule, axis, packed):
    spec = OperandSpec(scale_rule=rule, zero_scale=127 * axis)
    for x in (crafted(ml_dtypes.bfloat16), tiny(ml_dtypes.bfloat16), with_nonfinite(heavy(1056, 64))):
        check(x, spec, axis)
    assert packed == {"encode_pairs" if axis else "encode_two"}


@pytest.mark.clause("rounding.rne", "hadamard.order", "scale.block.tile")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [0, 2, 16, 32, 64])
def test_elements_after_a_transform(n, axis, packed):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        if n == 0 and dtype is ml_dtypes.bfloat16:
            continue
        for rule in ("floor", "rceil"):
            check(np.resize(crafted(dtype), (128, 192)), OperandSpec(hadamard=n, scale_rule=rule), axis)
    check(np.resize(tiny(np.float32), (64, 64)), OperandSpec(hadamard=n, block="32x32"), axis)
    assert packed == {"pairs_of"}
