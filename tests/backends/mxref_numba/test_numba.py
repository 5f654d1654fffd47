"""Quantization by the Numba backend against the reference, bit for bit, on everything that it declares."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mxref import (
    BlockShape,
    OperandSpec,
    Rounding,
    ScaleRule,
    SignPolicy,
    Stream,
)
from mxref.errors import NonfiniteError
from mxref.formats import Nonfinite
from mxref.placement import Placement
from mxref.steps.hadamard import SIZES
from strategies import K, any_blocks

numba = pytest.importorskip("numba")
from numba_checks import BACKEND, DTYPES, SR_SPEC, STREAM, check_dequantize, check_quantize, crafted, normal


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BlockShape)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("rule", [*ScaleRule, ScaleRule(">1.3"), ScaleRule(">=1")])
def test_crafted_blocks(rule: ScaleRule, rounding: Rounding, block: BlockShape, dtype: Any) -> None:
    for prescale in (False, True):
        spec = OperandSpec(scale_rule=rule, rounding=rounding, block=block, prescale=prescale)
        check_quantize(crafted(dtype, 64), spec)
        check_quantize(crafted(dtype).T, spec, axis=0)


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 8, 15, 16, 17, 21, 22])
def test_sr_bits(bits: int, prescale: bool) -> None:
    x = crafted(np.float32, 96)
    codes = check_quantize(x, OperandSpec(rounding=Rounding.SR, sr_bits=bits, prescale=prescale)).codes
    toward_zero = BACKEND.quantize(x, OperandSpec(rounding=Rounding.RTZ, prescale=prescale)).codes
    assert (codes != toward_zero).any()


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("policy", [SignPolicy.NONE, SignPolicy.PER_STEP_LAYER])
@pytest.mark.parametrize("n", SIZES)
def test_hadamard_then_quantize(n: int, policy: SignPolicy) -> None:
    for rounding in (Rounding.RNE, Rounding.SR):
        spec = OperandSpec(hadamard=n, signs=policy, rounding=rounding)
        check_quantize(crafted(np.float32, 256), spec)
        check_quantize(normal(5, 768, dtype=ml_dtypes.bfloat16), spec)
    check_quantize(normal(512, 33), OperandSpec(hadamard=n, signs=policy), axis=0)
    check_quantize(normal(64, 512), OperandSpec(hadamard=n, signs=policy, block=BlockShape.TILE))


@pytest.mark.parametrize("zero_scale", [0, 127])
@pytest.mark.parametrize("block", BlockShape)
def test_zero_blocks_keep_signs(zero_scale: int, block: BlockShape) -> None:
    x = np.zeros((64, 64), np.float32)
    x[::3] = -0.0
    x[40, 40] = 1
    check_quantize(x, OperandSpec(zero_scale=zero_scale, block=block))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sixteen_bit_input(dtype: Any) -> None:
    if dtype is np.float32:  # its top halves: all bfloat16 values
        x = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for rule in ScaleRule:
        check_quantize(x.reshape(-1, K), OperandSpec(scale_rule=rule))
        check_quantize(x.reshape(K, -1), OperandSpec(scale_rule=rule), axis=0)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nonfinite_is_refused_when_asked(bad: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    with pytest.raises(NonfiniteError, match=r"\(1, 1\)"):
        BACKEND.quantize(x, OperandSpec(nonfinite=Nonfinite.RAISE))
    assert BACKEND.quantize(x, OperandSpec()).scales.tolist() == [[125, 125], [125, 255], [125, 125]]


def _layouts() -> dict[str, tuple[NDArray[Any], int]]:
    base = normal(96, 320, seed=3)
    cube = normal(4, 6, 64, 32, seed=4)
    return {
        "one row": (base[0], 0),
        "one row of two axes": (base[:1], 1),
        "one column": (base[:, :1], 0),
        "33 rows": (base[:33], 1),
        "several panels": (normal(70, 640), 1),
        "axis 0": (base, 0),
        "axis 0 of a Fortran array": (np.asfortranarray(base), 0),
        "axis 1 of a transpose": (base.T[:, :96], 1),
        "rows reversed": (base[::-1], 1),
        "columns reversed": (base[:, ::-1], 1),
        "both reversed, axis 0": (base[::-1, ::-1], 0),
        "every third row": (base[::3], 1),
        "every second column": (base[:, ::2], 1),
        "columns from 7 on": (base[:, 7:71], 1),
        "axis 0 of a slice": (base[:, 5:40], 0),
        "repeated row": (np.broadcast_to(base[0], (40, 320)), 1),
        "repeated value": (np.broadcast_to(base[0, 0], (3, 64)), 1),
        "repeated column, axis 0": (np.broadcast_to(base[:, :1], (96, 20)), 0),
        "4-d, last axis": (cube, 3),
        "4-d, axis 2": (cube, -2),
        "4-d, permuted": (cube.transpose(3, 0, 2, 1), 2),
        "4-d, axis 0 of a permutation": (cube.transpose(2, 3, 1, 0), 0),
        "4-d, sliced leading axes": (cube[::2, 1:4], 3),
        "4-d, lengths of one": (cube[:1, :, None, :, :1], 3),
        "5-d, repeated": (np.broadcast_to(cube[:, :, None], (4, 6, 3, 64, 32)), 4),
    }


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(_layouts()))
def test_strides(name: str, dtype: Any) -> None:
    x, axis = _layouts()[name]
    if dtype is not np.float32:  # the same strides, scaled to the type
        narrow = np.ascontiguousarray(x).astype(dtype)
        holder = np.empty(tuple(2 * n for n in x.shape), dtype)
        view = holder[tuple(slice(None, None, -2 if s < 0 else 2) for s in x.strides)]
        view[...] = narrow
        x = view
    x.flags.writeable = False
    for spec in (OperandSpec(), SR_SPEC):
        check_quantize(x, spec, axis=axis)


@pytest.mark.parametrize("axis", [-1, -2])
def test_tiles_in_three_dimensions(axis: int) -> None:
    x = normal(3, 64, 96)
    for view in (x, x[::-1], x.transpose(0, 2, 1), x[:, ::-1, 32:]):
        check_quantize(view, OperandSpec(block=BlockShape.TILE), axis=axis)


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (0, 0), (2, 0, 32), (2, 32, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.float32)
    for axis in range(x.ndim):
        if shape[axis] % 64 in (0, 32):
            q = check_quantize(x, OperandSpec(), axis=axis)
            assert BACKEND.dequantize(q).shape == shape
            assert BACKEND.hadamard(x, 32, axis=axis).shape == shape


@pytest.mark.parametrize("length", [1, 2, 31, 33, 250, 257, 300])
@pytest.mark.parametrize("n", [0, 16, 256])
def test_padding(length: int, n: int) -> None:
    for axis, shape in ((1, (37, length)), (0, (length, 37))):
        for rounding in (Rounding.RNE, Rounding.SR):
            q = check_quantize(
                normal(*shape), OperandSpec(rounding=rounding, hadamard=n), axis=axis, pad=True
            )
            check_dequantize(q)


@pytest.mark.parametrize("bits", [16, 22])
def test_shards_see_the_random_bits_of_the_whole(bits: int) -> None:
    x = normal(64, 192)
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    for axis in (0, 1):
        shape, origin = (300, 512), (128, 64)
        q = check_quantize(x, spec, Placement(STREAM, origin, shape), axis=axis)
        part = (slice(32, 64), slice(96, 192))
        shard = check_quantize(x[part], spec, Placement(STREAM, (160, 160), shape), axis=axis)
        codes = q.codes[32:, 48:] if axis else q.codes[96:, 16:]
        np.testing.assert_array_equal(shard.codes, codes)


@pytest.mark.parametrize("bits", [16, 17])
def test_random_groups_beyond_32_bits(bits: int) -> None:
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    check_quantize(normal(8, 64), spec, Placement(STREAM, (2**36 - 5, 1024), (2**36 + 3, 4096)))
    check_quantize(normal(64, 8), spec, Placement(STREAM, (2**40, 3), (2**40 + 64, 11)), axis=0)


@st.composite
def specs(draw: st.DrawFn) -> OperandSpec:
    hadamard = draw(st.sampled_from((0, *SIZES[:6])))
    return OperandSpec(
        scale_rule=draw(st.sampled_from(ScaleRule)),
        rounding=draw(st.sampled_from(Rounding)),
        sr_bits=draw(st.integers(1, 22)),
        zero_scale=draw(st.sampled_from((0, 127))),
        prescale=draw(st.booleans()),
        hadamard=hadamard,
        signs=draw(st.sampled_from(SignPolicy)) if hadamard else SignPolicy.NONE,
    )


@settings(max_examples=150, deadline=None)
@given(x=any_blocks(64), spec=specs(), operand=st.integers(0, 5))
def test_drawn_blocks(x: NDArray[np.float32], spec: OperandSpec, operand: int) -> None:
    stream = Stream(seed=2**64 - 1, step=2**32 - 1, layer=2**24 - 1, operand=operand)
    check_quantize(x, spec, Placement(stream))
