"""The check of stochastic rounding: it passes right backends, finds each planted fault, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from layer_setup import BACKENDS, SEED, recipe_of
from mxref import Stream, get_backend, quantization, quantize
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from mxref.placement import Placement
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref.steps.random import random_integers
from mxref_torch import check_stochastic_rounding
from mxref_torch.errors import LayerError


class Fault(ReferenceBackend):
    """A reference whose stochastic rounding is wrong in one way."""

    def __init__(self, fault):
        self.name = fault.__name__
        self.fault = fault

    def quantize(self, x, spec, **kwargs):
        return self.fault(super().quantize, x, spec, **kwargs)

    def quantize_dual(self, x, specs, *, placements, pads):
        return tuple(
            self.quantize(x, spec, axis=axis, placement=placement, pad=pad)
            for spec, axis, placement, pad in zip(specs, (1, 0), placements, pads, strict=True)
        )


def does_nothing(quantize, x, spec, **kwargs):
    return quantize(x, replace(spec, rounding="rne"), **kwargs)


def truncates(quantize, x, spec, **kwargs):
    return quantize(x, replace(spec, sr_bits=1), **kwargs)


def with_stream(placement, **fields):
    return replace(placement, stream=replace(placement.stream, **fields))


def step_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=with_stream(placement, step=0), **kwargs)


def operand_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=with_stream(placement, operand=0), **kwargs)


def seed_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=with_stream(placement, seed=0), **kwargs)


def place_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=Placement(placement.stream), **kwargs)


def place_but_amax_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=Placement(placement.stream, amax=placement.amax), **kwargs)


def no_prescale(quantize, x, spec, **kwargs):
    return quantize(x, replace(spec, prescale=False), **kwargs)


SR_TABLES = {
    "plain": {"all": {"rounding": "sr"}},
    "tseng": {"dialect": "tseng"},
    "per step": {"all": {"rounding": "sr", "hadamard": 16, "signs": "per_step"}},
    "few bits": {"all": {"rounding": "sr", "sr_bits": 1, "block": "32x32"}},
    "only wgrad": {"wgrad": {"x": {"rounding": "sr"}}},
    "nvfp4": {"all": {"format": "nvfp4", "rounding": "sr"}, "wgrad": {"hadamard": 16, "signs": "per_step"}},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SR_TABLES)
def test_stochastic_rounding_passes(name, backend):
    check_stochastic_rounding(get_backend(backend), recipe_of(SR_TABLES[name]))


@pytest.mark.parametrize(
    ("fault", "message", "table"),
    [
        (does_nothing, "wgrad.x .* 0.00 times the spread", "only wgrad"),
        (truncates, "spread|biased", "plain"),
        (step_is_ignored, "same bits for another step", "plain"),
        (operand_is_ignored, "same bits for another operand", "plain"),
        (seed_is_ignored, "same bits for another seed", "plain"),
        (place_is_ignored, "for a micro-batch", "plain"),
        (place_but_amax_is_ignored, "for a micro-batch", "nvfp4"),
        (no_prescale, "spread|biased", "tseng"),
    ],
)
def test_stochastic_rounding_that_is_wrong_is_caught(fault, message, table):
    with pytest.raises(LayerError, match=message):
        check_stochastic_rounding(Fault(fault), recipe_of(SR_TABLES[table]))


def test_signs_that_change_do_not_hide_bits_that_do_not():
    class OneStep(ReferenceBackend):
        name = "one step"

        def _quantize(self, x, plan):
            return super()._quantize(x, replace(plan, stream=replace(plan.stream, step=0)))

    with pytest.raises(LayerError, match="same bits for another step"):
        check_stochastic_rounding(OneStep(), recipe_of(SR_TABLES["per step"]))


@pytest.mark.parametrize("native", [False, True])
def test_stochastic_rounding_that_is_wrong_only_for_both_orientations_is_caught(native):
    class OneStream(ReferenceBackend):
        name = "one stream"

        def _quantize_dual(self, x, row, column):
            column = replace(column, spec=replace(column.spec, rounding="rne"), stream=None)
            return super()._quantize_dual(x, row, column)

    backend = OneStream()
    if native:
        backend.capabilities = replace(backend.capabilities, native_sr=True)
    with pytest.raises(LayerError, match="wgrad.dy .* times the spread"):
        check_stochastic_rounding(backend, recipe_of({"wgrad": {"dy": {"rounding": "sr"}}}))
    alone = {"dgrad": {"format": "bf16"}, "wgrad": {"dy": {"rounding": "sr"}}}
    check_stochastic_rounding(backend, recipe_of(alone))


@pytest.mark.clause("rounding.native_sr")
def test_bits_of_the_hardwares_own_are_taken_where_they_are_declared():
    class OwnBits(ReferenceBackend):
        """Draws other random bits at every call, as hardware does."""

        name = "own bits"
        seeds = np.random.default_rng(0)

        def _quantize(self, x, plan):
            stream = replace(plan.stream, seed=int(self.seeds.integers(1 << 63)))
            return super()._quantize(x, replace(plan, stream=stream))

    recipe = recipe_of(SR_TABLES["plain"])
    with pytest.raises(LayerError, match="other bits for a micro-batch"):
        check_stochastic_rounding(OwnBits(), recipe)
    declared = OwnBits()
    declared.capabilities = replace(declared.capabilities, native_sr=True)
    check_stochastic_rounding(declared, recipe)

    x = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    spec, stream = recipe.fprop.x, Stream(SEED)
    first, second = (declared.quantize(x, spec, placement=Placement(stream)) for _ in range(2))
    down = quantize(x, replace(spec, rounding="rtz"))
    assert (first.scales == down.scales).all()
    assert (first.codes != second.codes).any()
    steps = unpack(first.codes, E2M1).astype(int) - unpack(down.codes, E2M1)
    assert set(steps.ravel().tolist()) == {0, 1}


def test_recipes_without_sr_ask_nothing_of_the_backend():
    check_stochastic_rounding(Fault(does_nothing), recipe_of({"wgrad": {"format": "bf16", "rounding": "sr"}}))


Integers = NDArray[np.uint32]
TABLES = {
    "rows": {"dgrad": {"dy": {"rounding": "sr"}}, "wgrad": {"format": "bf16"}},
    "columns, H16": {"wgrad": {"hadamard": 16, "dy": {"rounding": "sr"}}, "dgrad": {"format": "bf16"}},
}  # fmt: skip


class Drawing(ReferenceBackend):
    """A reference whose random integers are changed before they are used."""

    def __init__(self, change: Callable[[Integers, Any, tuple[Any, ...]], Integers]) -> None:
        self.name, self.change = change.__name__, change

    def _quantize(self, x: Any, plan: Any) -> Any:
        def changed(*arguments: Any) -> Integers:
            return self.change(random_integers(*arguments), plan, arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantization, "random_integers", changed)
            return super()._quantize(x, plan)


def never_up(r: Integers, plan: Any, arguments: Any) -> Integers:
    return r * 0


def always_up(r: Integers, plan: Any, arguments: Any) -> Integers:
    return r * 0 + ((1 << plan.spec.sr_bits) - 1)


def a_sixteenth_up(r: Integers, plan: Any, arguments: Any) -> Integers:
    top = 1 << plan.spec.sr_bits
    return np.minimum(r + top // 16, top - 1)


def a_sixteenth_down(r: Integers, plan: Any, arguments: Any) -> Integers:
    return np.maximum(r.astype(np.int64) - (1 << plan.spec.sr_bits) // 16, 0).astype(r.dtype)


def pairs_share_bits(r: Integers, plan: Any, arguments: Any) -> Integers:
    return np.repeat(r[:, ::2], 2, axis=1)


def eight_share_bits(r: Integers, plan: Any, arguments: Any) -> Integers:
    return np.repeat(r[:, ::8], 8, axis=1)


def neighbours_are_opposite(r: Integers, plan: Any, arguments: Any) -> Integers:
    out = r.copy()
    out[:, 1::2] = (1 << plan.spec.sr_bits) - 1 - r[:, ::2]
    return out


def rows_share_bits(r: Integers, plan: Any, arguments: Any) -> Integers:
    return np.repeat(r[::2], 2, axis=0)[: len(r)]


def distant_rows_share_bits(r: Integers, plan: Any, arguments: Any) -> Integers:
    return r[np.arange(len(r)) % 2048]


def with_step(arguments: Any, step: int) -> Integers:
    rows, first, count, length, stream, bits = arguments
    return random_integers(rows, first, count, length, replace(stream, step=step), bits)


def steps_in_pairs(r: Integers, plan: Any, arguments: Any) -> Integers:
    return with_step(arguments, arguments[4].step & ~1)


def steps_repeat_after_16(r: Integers, plan: Any, arguments: Any) -> Integers:
    return with_step(arguments, arguments[4].step % 16)


def half_of_the_bits_repeat(r: Integers, plan: Any, arguments: Any) -> Integers:
    return np.where(np.arange(r.shape[1]) % 4 < 2, with_step(arguments, 0), r)


FAULTS = [
    (never_up, "0.00 times the spread"), (always_up, "0.00 times the spread"),
    (a_sixteenth_up, "is biased|times the spread"), (a_sixteenth_down, "is biased|times the spread"),
    (pairs_share_bits, r"elements \d+ and \d+ of a row"), (eight_share_bits, r"elements \d+ and \d+ of a row"),
    (neighbours_are_opposite, r"elements \d+ and \d+ of a row"),
    (rows_share_bits, "rows at distance 1 "), (distant_rows_share_bits, "rows at distance 2048 "),
    (steps_in_pairs, "same bits for another step"), (steps_repeat_after_16, "same bits for another step"),
    (half_of_the_bits_repeat, r"bits for another step that are not independent \(correlation 0.[3-7]"),
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_planted_fault_is_found(fault: Any, message: str, table: str) -> None:
    with pytest.raises(LayerError, match=f"by backend '{fault.__name__}' .*{message}"):
        check_stochastic_rounding(Drawing(fault), recipe_from_table(TABLES[table]))
