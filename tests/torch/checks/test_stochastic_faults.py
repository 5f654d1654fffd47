"""Faults of stochastic rounding that its check at the start of a run must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxref import quantization
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref.steps.random import random_integers
from mxref_torch import check_stochastic_rounding
from mxref_torch.errors import LayerError

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


def nothing(r: Integers, plan: Any, arguments: Any) -> Integers:
    return r


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


@pytest.mark.parametrize("table", TABLES)
def test_without_a_fault_it_passes(table: str) -> None:
    check_stochastic_rounding(Drawing(nothing), recipe_from_table(TABLES[table]))
