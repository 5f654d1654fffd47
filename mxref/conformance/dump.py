"""Compares the codes and scales that a kernel wrote with the reference, and finds which treatment would give them.

The hints are guesses for the reader: they name layouts and treatments under which all bytes would be equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arrays import as_array, described
from mxref.conformance.checking import block_format
from mxref.conformance.clauses import storage_clause
from mxref.conformance.finding import answer_failure
from mxref.conformance.outcome import Failure, Judgement, printable_lines
from mxref.conformance.requests.quantizing import Blocks, Request, all_of_it
from mxref.dialects import dialects_of
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.formats import BlockFormat
from mxref.layouts.foreign import elements, fitting, layouts_of, stored_bytes
from mxref.mxarray import MXArray
from mxref.plan import check_input
from mxref.recipe import UNTURNED, OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SIZES
from mxref.steps.quotient import Arithmetic
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule, rules_of

ANY = "any"
"""The name that tries every layout."""
_SAMPLE_BLOCKS = 4096
_THRESHOLDS = (ScaleRule(">=1.75"),)
"""Rules without a name: compressed-tensors and AITER's Triton kernels take that of EVEN in MXFP4 for MXFP8 too."""


@dataclass(frozen=True)
class Comparison(Judgement):
    """What differs between a kernel's bytes and the reference's."""

    blocks: int
    """Blocks that were compared."""
    wrong: int
    """Blocks with another code or another scale."""
    wrong_scales: int
    """Blocks with another scale."""
    layout: tuple[str, str]
    """Layouts of codes and of scales under which they were read."""
    failure: Failure | None = None
    """The first differing block."""
    hints: tuple[str, ...] = ()
    """Layouts and treatments under which the bytes would be equal."""

    @property
    def ok(self) -> bool:
        """Whether every byte is equal."""
        return self.failure is None

    def __str__(self) -> str:
        """Return the comparison as lines."""
        read = f"layout {self.layout[0]}, {self.layout[1]}"
        if self.failure is None:
            return f"equal: the codes and scales of {self.blocks:,} blocks ({read})"
        head = f"{self.wrong:,} of {self.blocks:,} blocks differ, {self.wrong_scales:,} of them in the scale ({read})"
        return printable_lines("\n".join([head, *self.hints, str(self.failure)]))


def compare_arrays(
    x: Any,
    codes: Any,
    scales: Any,
    spec: OperandSpec,
    axis: int,
    names: tuple[str, ...],
    stream: Stream | None,
    pad: bool,
) -> Comparison:
    """Return what differs; arguments and errors as in `mxref.check.compare`."""
    values = on_host(x)
    check_input(values)
    request = Request(values, spec, axis, stream, pad=pad)
    codes, scales = on_host_bytes(codes), on_host_bytes(scales)
    layouts, got = _read(request, codes, scales, names)
    got = got._replace(tensor=request.expected_blocks.tensor)  # which no kernel is asked for
    failure, want = answer_failure(request, got, "the kernel's bytes"), request.expected_blocks
    if failure is None:
        return Comparison(want.scales.size, 0, 0, layouts)
    (wrong, _), wrong_scales = all_of_it(got, want), got.scales != want.scales
    hints: list[str] = []
    for part, stored, layout, clause in (
        ("scales", scales, layouts[1], "packing.scales"), ("codes", codes, layouts[0], storage_clause(request.element)),
    ):  # fmt: skip
        equal = _equal(request, part, stored)
        if layout in equal:
            hints.insert(0, f"  all {part} are equal")
        elif equal:  # so the layout is to blame
            hints.insert(0, f"  all {part} are equal under --layout {equal[0]}")
            failure = replace(failure, clause=clause)
    if (other := _other_treatment(request, got)) is not None:
        hints.append(f"  all bytes are those of {other}")
    return Comparison(wrong.size, int(wrong.sum()), int(wrong_scales.sum()), layouts, failure, tuple(hints))


def _read(
    request: Request, codes: NDArray[np.uint8], scales: NDArray[np.uint8], names: tuple[str, ...]
) -> tuple[tuple[str, str], Blocks]:
    """Return layouts of codes and scales, and the blocks; ShapeError names the layouts that fit if these do not."""
    plan = request.plan
    if ANY in names:
        if len(names) > 1:
            raise RecipeError(
                f"layout {ANY} tries every layout; leave out {', '.join(n for n in names if n != ANY)}"
            )
        equal = _equal(request, "codes", codes), _equal(request, "scales", scales)
        names = tuple(found[0] for found in equal if found)
    layouts, read = layouts_of(names), list[NDArray[np.uint8]]()
    for layout, stored in zip(layouts, (codes, scales), strict=True):
        try:
            read.append(layout.read(stored, plan.rows, plan.length, plan.format))
        except ShapeError as err:
            fit = ", ".join(
                name for name, _ in fitting(layout.part, stored, plan.rows, plan.length, plan.format)
            )
            way_out = f"the layouts that fit are {fit}" if fit else "no known layout fits"
            raise ShapeError(
                f"{layout.part} do not fit x of shape {plan.shape} along axis {plan.axis} under layout "
                f"{layout.name}: {err}; {way_out}; check the axis too"
            ) from err
    return (layouts[0].name, layouts[1].name), Blocks(elements(read[0], plan.format), read[1])


def _equal(request: Request, part: str, stored: NDArray[np.uint8]) -> list[str]:
    """Return the names of the layouts under which stored bytes are the reference's."""
    plan = request.plan
    want = getattr(request.expected, part).reshape(plan.rows, -1)
    fit = fitting(part, stored, plan.rows, plan.length, plan.format)
    return [name for name, read in fit if np.array_equal(read, want)]


def treatment_of(x: NDArray[Any], array: MXArray) -> str | None:
    """Return the treatment that gives the bytes of an array, of those without random bits; None if none is known."""
    spec, got = OperandSpec(format=array.format), Blocks.of(array)
    amaxes: list[float | None] = [None]
    if array.tensor_scale is not None:
        # A stack may take another largest magnitude than this tensor's. It is found from the scale, which is rounded:
        # as a bfloat16, which most stacks compute in, it is exact.
        top = np.float32(array.format.element.max_value * array.format.scale.max_value)
        found = np.asarray(array.tensor_scale)[0] * top
        amaxes += [float(found.astype(ml_dtypes.bfloat16)), float(found)]
    for amax in amaxes:
        request = Request(x, spec, array.axis, pad=array.length != array.shape[array.axis], amax=amax)
        if _same(got, request.expected_blocks):
            return f"the defaults of {array.format.title}"
        if (other := _other_treatment(request, got)) is not None:
            return other
    return None


def _other_treatment(request: Request, got: Blocks) -> str | None:
    """Return the treatment that gives the kernel's bytes and differs least from the requested one."""
    plan, k = request.plan, request.format.k
    # The first rows rule out most treatments at once.
    rows = min(max(_SAMPLE_BLOCKS // max(plan.length // k, 1) // k, 1) * k, plan.rows)
    x = np.ascontiguousarray(np.moveaxis(request.array(), plan.axis, -1).reshape(plan.rows, -1)[:rows])
    first = got._replace(codes=got.codes[:rows], scales=got.scales[:rows])
    for text, spec in other_treatments(request.spec):
        other = replace(request, spec=spec)
        try:
            if other.plan.length != plan.length:
                continue
        except (RecipeError, ShapeError):
            continue
        few = Request(x, spec, rng=request.rng, pad=request.pad, amax=other.tensor_amax)
        # Under SR the first rows alone have other random bits.
        sampled = spec.rounding is Rounding.SR or _same(first, few.expected_blocks)
        if sampled and _same(got, other.expected_blocks):
            return text
    return None


def _same(got: Blocks, want: Blocks) -> bool:
    """Return whether codes and scales are equal; no kernel is asked for the scale of the tensor."""
    return not all_of_it(got._replace(tensor=want.tensor), want)[0].any()


def other_treatments(spec: OperandSpec) -> Iterator[tuple[str, OperandSpec]]:
    """Yield the dialects, then changes of one choice, then of two. SR is left out: its stream is not known."""
    made = block_format(spec)
    for name, treatment in dialects_of(made).items():
        if treatment.rounding is not Rounding.SR:
            yield f"the dialect {name}", treatment
    for changes in _changes(spec, made):
        text = ", ".join(f"{key} = {getattr(value, 'value', value)}" for key, value in changes.items())
        try:
            yield text, replace(spec, **changes)
        except RecipeError:
            continue


def _changes(spec: OperandSpec, made: BlockFormat) -> Iterator[dict[str, Any]]:
    choices: dict[str, Iterable[Any]] = {
        "scale_rule": (*rules_of(made.scale), *_THRESHOLDS[: made.scale.powers]),
        "rounding": [r for r in Rounding if r is not Rounding.SR],
        "zero_scale": (0, made.scale.one_code), "prescale": (False, True), "hadamard": (0, *SIZES),
        "block": (made.row, made.tile), "arithmetic": (spec.arithmetic,) if made.scale.powers else tuple(Arithmetic),
        "four_over_six": (FourOverSix.OFF,) if made.scale.powers else tuple(FourOverSix),
    }  # fmt: skip
    single: list[dict[str, Any]] = [
        # Without a transform there are no signs.
        {key: value, **(UNTURNED if key == "hadamard" and not value else {})}
        for key, values in choices.items()
        for value in values
        if value != getattr(spec, key)
    ]
    yield from single
    yield from (one | other for one, other in combinations(single, 2) if one.keys().isdisjoint(other))


def on_host(array: Any) -> NDArray[Any]:
    """Return an array or a tensor of any device as a NumPy array."""
    found = as_array(array.detach().cpu() if hasattr(array, "detach") else array)
    return np.asarray(found)


def on_host_bytes(array: Any) -> NDArray[np.uint8]:
    """Return codes or scales as bytes, whatever one-byte type of NumPy, ml_dtypes or torch they have.

    Raises:
        DtypeError: an object without a type and a shape. ShapeError: elements of more than one byte.
    """
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise DtypeError(f"codes and scales must be arrays of bytes, got {described(array)}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and array.element_size() == 1:
        array = array.detach().contiguous().view(torch.uint8)
    return stored_bytes(on_host(array))
