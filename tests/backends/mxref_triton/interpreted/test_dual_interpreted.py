"""Both orientations are quantized from one read of memory where that gains something, and no other bits come of it."""

from typing import Any

import numpy as np
import pytest

from mxref import OperandSpec, Stream
from mxref.formats import MXFP4, MXFP4_E1M2, MXFP6_E2M3, MXFP8_E4M3, MXINT8, NVFP4
from mxref.placement import Placement
from mxref_triton import TritonBackend
from mxref_triton.quantizer import dispatch

BACKEND = TritonBackend()
PLAIN, H16 = OperandSpec(MXFP4), OperandSpec(MXFP4, hadamard=16)
CASES = {
    "mxfp4": ((PLAIN, H16), True, True),
    "mxfp4_e1m2": ((OperandSpec(MXFP4_E1M2),) * 2, True, True),
    "mxfp8": ((OperandSpec(MXFP8_E4M3),) * 2, True, True),
    "mxint8": ((OperandSpec(MXINT8),) * 2, True, True),
    "one of 6 bits": ((OperandSpec(MXFP6_E2M3), PLAIN), False, True),
    "nvfp4": ((OperandSpec(NVFP4),) * 2, False, True),
    "sr": ((PLAIN, OperandSpec(MXFP4, rounding="sr")), False, False),
    "h64": ((OperandSpec(MXFP4, hadamard=64), PLAIN), False, False),
}
"""Treatments along both axes, and whether they share a read on Hopper and elsewhere."""


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_read_is_shared_where_that_gains_something(name: str, hopper: bool, monkeypatch: Any) -> None:
    specs, on_hopper, elsewhere = CASES[name]
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: hopper)
    shared: list[int] = []
    both = dispatch.launch_both

    def launched(*given: Any) -> None:
        shared.append(1)
        both(*given)

    monkeypatch.setattr(dispatch, "launch_both", launched)
    x = BACKEND.from_numpy(np.random.default_rng(3).standard_normal((64, 128), np.float32))
    places = tuple(Placement(Stream(1, layer=2, operand=operand)) for operand in (0, 1))
    found = BACKEND.quantize_dual(x, specs, placements=places)
    assert bool(shared) == (on_hopper if hopper else elsewhere)
    for axis, q, spec, place in zip((1, 0), found, specs, places, strict=True):
        alone = BACKEND.quantize(x, spec, axis=axis, placement=place)
        assert bool((q.codes == alone.codes).all())
        assert bool((q.scales == alone.scales).all())
