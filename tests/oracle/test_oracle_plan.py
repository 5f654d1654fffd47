"""The oracle's plan against positions counted by hand, and the package's plans and random bits against the oracle's.

The reference, every backend and the conformance kit share `mxref.plan`, so a fault in it is the same for all of them
and shows only here and in the golden vectors, whose results are the oracle's.
"""

from dataclasses import replace

import numpy as np
import pytest

from differential import assert_same_blocks, oracle_quantize_array
from mxref import BlockShape, OperandSpec, Rounding, SignPolicy, Stream, get_backend, quantize
from mxref.errors import ShapeError
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from mxref.placement import Placement
from mxref.plan import plan_quantize
from mxref.steps.random import random_integers
from oracle import plan as oracle_plan
from oracle import random as oracle_random

STREAM = Stream(0xFEDCBA9876543210, step=0x01020304, layer=0xABCDEF, operand=3)
SR = OperandSpec(rounding=Rounding.SR)


# ---- the oracle's plan by itself ----


@pytest.mark.parametrize(
    ("length", "n", "stored"),
    [
        (0, 0, 0),
        (1, 0, 32),
        (32, 0, 32),
        (33, 16, 64),
        (32, 64, 64),
        (96, 64, 128),
        (160, 256, 256),
        (257, 256, 512),
    ],
)
def test_padded_lengths(length: int, n: int, stored: int) -> None:
    assert oracle_plan.padded(length, n) == stored


def test_an_element_s_index_is_its_place_in_the_padded_whole() -> None:
    # The whole is [4, 96, 3] along axis 1 under H64, so in storage [4, 3, 128]: every element counted one by one.
    numbers = np.arange(4 * 3 * 128).reshape(4, 3, 128)
    part = oracle_plan.place((2, 32, 2), 1, 64, origin=(1, 64, 1), whole=(4, 96, 3), pad=True)
    assert part.stored == 64
    rows = list(part.rows())
    assert rows == [(0, 0), (0, 1), (1, 0), (1, 1)]
    got = [[part.index(row, column) for column in range(64)] for row in rows]
    assert got == numbers[1:3, 1:3, 64:128].reshape(4, 64).tolist()
    assert part.source((1, 0), 31) == (1, 31, 0)
    assert part.source((1, 0), 32) is None


def test_signs_are_those_of_the_gemm() -> None:
    assert [oracle_plan.sign_id(operand) for operand in range(6)] == [6, 6, 7, 7, 8, 8]
    for operand in (6, 7, 8, -1):
        with pytest.raises(oracle_plan.Refused):
            oracle_plan.sign_id(operand)


# ---- plans ----


def both_plans(shape, axis, n, height, origin, whole, pad):
    """The oracle's place, or None where it refuses, and the package's plan, or None where that does."""
    spec = replace(SR, hadamard=n, block=BlockShape(f"{height}x32"))
    try:
        place = oracle_plan.place(shape, axis, n, height=height, origin=origin, whole=whole, pad=pad)
    except oracle_plan.Refused:
        place = None
    try:
        plan = plan_quantize(shape, spec, axis, Placement(STREAM, origin, whole), pad)
    except ShapeError:
        plan = None
    return place, plan


def assert_same_plan(place, plan):
    rows = list(place.rows())
    assert (plan.axis, plan.length, plan.rows) == (place.axis, place.stored, len(rows))
    assert plan.rows_shape == place.others(place.shape)
    assert plan.global_rows().tolist() == [place.row_index(row) for row in rows]
    starts = [row * plan.global_length + plan.first for row in plan.global_rows().tolist()]
    for row, start in zip(rows, starts, strict=True):
        for column in {0, plan.length - 1} if plan.length else ():
            assert start + column == place.index(row, column)


def drawn_request(rng):
    """A request of few axes, near the multiples at which it is refused; half of the draws are parts of a whole."""
    n = int(rng.choice([0, 0, 2, 16, 32, 64, 128, 256]))
    unit = max(32, n)
    axes = int(rng.choice([1, 2, 2, 3, 4]))
    axis = int(rng.integers(-axes, axes))
    height = int(rng.choice([1, 1, 1, 1, 2, 16, 32, 32, 128]))

    def near(multiple: int, exact: float) -> int:
        places = (0, 1, 2, 3)
        off = 0 if rng.random() < exact else int(rng.choice([-32, -1, 1, 8, 32, multiple // 2]))
        return max(multiple * int(rng.choice(places)) + off, 0)

    shape, origin, whole = [], [], []
    for i in range(axes):
        block = i == axis % axes
        tiled = height > 1 and axes > 1 and i == [j for j in range(axes) if j != axis % axes][-1]
        step = unit if block else height if tiled else 1
        shape.append(near(step, 0.6 if block else 0.9) if block or tiled else int(rng.integers(4)))
        origin.append(near(step, 0.9))
        whole.append(origin[-1] + shape[-1] + (near(step, 0.5) if rng.integers(2) else 0))
    part = rng.random() < 0.7
    if part and rng.random() < 0.1:
        whole[int(rng.integers(axes))] -= 1
    where = (tuple(origin), tuple(whole)) if part else (None, None)
    return tuple(shape), axis, n, height, *where, bool(rng.integers(2))


@pytest.mark.clause(
    "quantize.length", "quantize.padding", "quantize.parts", "random.index", "scale.block.tile"
)
def test_drawn_plans():
    rng = np.random.default_rng(14)
    accepted = refused = 0
    for _ in range(3000):
        request = drawn_request(rng)
        place, plan = both_plans(*request)
        assert (place is None) == (plan is None), request
        if place is None:
            refused += 1
        else:
            accepted += 1
            assert_same_plan(place, plan)
    assert min(accepted, refused) > 800, (accepted, refused)


PLACES = {
    "multiples of 32 that 64 does not divide": ((3, 96), 1, 64, None, None),
    "multiples of 32 that 256 does not divide": ((2, 288), 1, 256, None, None),
    "along axis 0 under H64": ((96, 3), 0, 64, None, None),
    "along axis 0 under H256": ((160, 2), 0, 256, None, None),
    "the last shard under H64": ((2, 32), 1, 64, (1, 64), (4, 96)),
    "the last shard under H256": ((2, 96), 1, 256, (2, 256), (5, 352)),
    "the last shard along axis 0": ((32, 2), 0, 64, (128, 3), (160, 6)),
    "a shard that is not the last": ((2, 128), 1, 64, (1, 0), (3, 160)),
    "a micro-batch of tokens": ((2, 3, 64), -1, 64, (2, 0, 0), (4, 3, 96)),
    "a micro-batch along the tokens": ((64, 5), 0, 64, (64, 0), (160, 5)),
    "the middle of three axes": ((2, 40, 3), 1, 16, (0, 32, 0), (2, 72, 3)),
    "a length of one": ((3, 1), 1, 0, (1, 32), (4, 33)),
}  # fmt: skip
"""Shapes, axes and Hadamard sizes of requests that pad, and where they lie."""


@pytest.mark.clause("random.index", "quantize.padding")
@pytest.mark.parametrize("name", PLACES)
def test_crafted_plans(name):
    shape, axis, n, origin, whole = PLACES[name]
    place, plan = both_plans(shape, axis, n, 1, origin, whole, True)
    assert_same_plan(place, plan)


# ---- random words ----


@pytest.mark.clause("random.index", "random.elements", "random.counter")
@pytest.mark.parametrize("bits", [16, 20])
@pytest.mark.parametrize("name", PLACES)
def test_random_words_of_a_plan(name, bits):
    shape, axis, n, origin, whole = PLACES[name]
    place, plan = both_plans(shape, axis, n, 1, origin, whole, True)
    got = random_integers(plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, bits)
    where = (STREAM.seed, STREAM.step, STREAM.layer, STREAM.operand)
    for stored, row in enumerate(place.rows()):
        columns = range(0, place.stored, 5)
        want = [oracle_random.sr_integer(*where, place.index(row, c), bits) for c in columns]
        assert got[stored, ::5].tolist() == want


@pytest.mark.clause("random.index", "quantize.padding", "quantize.axis", "hadamard.signs", "quantize.order")
@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("name", PLACES)
def test_quantizations_of_crafted_places(name, backend):
    shape, axis, n, origin, whole = PLACES[name]
    x = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    spec = replace(SR, hadamard=n, signs=SignPolicy.PER_STEP_LAYER if n else SignPolicy.NONE)
    q = get_backend(backend).quantize(
        x, spec, axis=axis, placement=Placement(STREAM, origin, whole), pad=True
    )
    want = oracle_quantize_array(x, spec, STREAM, axis=axis, origin=origin, global_shape=whole, pad=True)
    assert_same_blocks(unpack(q.codes, E2M1), q.scales, *want)


@pytest.mark.clause("random.index", "quantize.padding", "quantize.axis", "quantize.order")
def test_quantizations_of_drawn_places():
    rng = np.random.default_rng(41)
    compared = 0
    while compared < 40:
        shape, axis, n, height, origin, whole, pad = drawn_request(rng)
        if not 0 < np.prod(shape) <= 8192:
            continue
        block = BlockShape(f"{height}x32")
        spec = replace(SR, hadamard=n, block=block, sr_bits=int(rng.choice([16, 20])))
        where = {"axis": axis, "origin": origin, "global_shape": whole, "pad": pad}
        x = rng.standard_normal(shape).astype(np.float32)
        try:
            want = oracle_quantize_array(x, spec, STREAM, **where)
        except oracle_plan.Refused:
            continue
        placement = Placement(STREAM, origin, whole)
        q = quantize(x, spec, axis=axis, placement=placement, pad=pad)
        assert_same_blocks(unpack(q.codes, E2M1), q.scales, *want)
        compared += 1
