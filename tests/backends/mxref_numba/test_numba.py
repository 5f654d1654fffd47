"""Quantization by the Numba backend: strides, every 16-bit input and drawn blocks, which the kit does not ask for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mxref import (
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
from numba_checks import BACKEND, DTYPES, SR_SPEC, check_quantize, normal


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
