"""A quantization to be asked of a backend: its expected blocks, and where an answer differs from them.

A judge compares two answers block by block; each clause has its own, `all_of_it` compares every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxref.capabilities import Capabilities
from mxref.conformance.checking import Needs, Op, Subject, block_format, declares
from mxref.formats import BlockFormat, ElementFormat, Negatives
from mxref.layouts.packed import unpack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.plan import QuantPlan, dtype_name, plan_quantize
from mxref.quantization import plan_tensor_scale, quantize
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding

_DEFAULT = OperandSpec()


def _read_only(x: NDArray[Any]) -> NDArray[Any]:
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "every second row and column": lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
    "rows out of the middle": lambda x: np.pad(x, [(33, 32), (0, 0)])[33:-32],
    "columns out of the middle": lambda x: np.pad(x, [(0, 0), (8, 24)])[:, 8:-24],
    "columns from an odd one on": lambda x: np.pad(x, [(0, 0), (33, 62)])[:, 33:-62],
    "first axes swapped": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "last axis of stride 2": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "first row repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": _read_only,
}
"""How an array may lie in memory beside C order; all but "first row repeated" keep the values."""
_NUMPY_ONLY = ("backwards", "first row repeated", "read-only")
"""Layouts that PyTorch cannot take from NumPy."""
Place = tuple[int, int]
"""Stored row and number of a block."""


class Blocks(NamedTuple):
    """Codes and scales by row and block, and the scale of the tensor above them."""

    codes: NDArray[np.uint8]
    """Element codes [R, B, k]."""
    scales: NDArray[np.uint8]
    """Scale codes [R, B]."""
    tensor: int | None = None
    """The float32 bits of the tensor's scale; None where the format has none."""

    @classmethod
    def of(cls, q: MXArray) -> Blocks:
        """Return the blocks of an MXArray of NumPy arrays."""
        element, k = q.format.element, q.format.k
        blocks = q.length // k
        none = np.empty((0, 0, k), np.uint8)
        codes = unpack(np.asarray(q.codes), element).reshape(-1, blocks, k) if blocks else none
        tensor = None if q.tensor_scale is None else int(np.asarray(q.tensor_scale).view(np.uint32)[0])
        return cls(codes, np.asarray(q.scales).reshape(codes.shape[:2]), tensor)


@dataclass(frozen=True, eq=False)
class Request:
    """Arguments of a quantization."""

    op: ClassVar = Op.QUANTIZE
    x: NDArray[Any]
    spec: OperandSpec
    axis: int = -1
    rng: Stream | None = None
    origin: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    pad: bool = False
    layout: str = ""
    """One of `LAYOUTS`, or nothing for C order."""
    amax: float | None = None
    """The placement's amax, a float32; None takes the array's own, where the format needs one."""

    @property
    def format(self) -> BlockFormat:
        """The block format that is made."""
        return block_format(self.spec)

    @property
    def element(self) -> ElementFormat:
        """The element format of the treatment."""
        return self.format.element

    def array(self) -> NDArray[Any]:
        """Return the input: a fresh array, so that a backend that writes to it spoils no other check."""
        x = self.x.copy()
        return LAYOUTS[self.layout](x) if self.layout else x

    @property
    def placement(self) -> Placement:
        """Where the array lies in the larger tensor, and its random stream."""
        amax = None if self.amax is None else np.array([self.amax], np.float32)
        return Placement(self.rng, self.origin, self.global_shape, amax=amax)

    def placement_for(self, subject: Subject) -> Placement:
        """Return the placement with its array as the backend's own."""
        at = self.placement
        return at if at.amax is None else replace(at, amax=subject.give(at.amax))

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `quantize`."""
        return {"axis": self.axis, "placement": self.placement, "pad": self.pad}

    def arguments_for(self, subject: Subject) -> dict[str, Any]:
        """Keyword arguments of the backend's `quantize`."""
        return self.arguments | {"placement": self.placement_for(subject)}

    @cached_property
    def plan(self) -> QuantPlan:
        """The plan of the quantization."""
        return plan_quantize(self.x.shape, self.spec, self.axis, self.placement, self.pad)

    @cached_property
    def tensor_amax(self) -> float | None:
        """The largest magnitude of the tensor, given or its own; None where the format has no scale of the tensor."""
        if not self.format.tensor_scale:
            return None
        amax, _ = plan_tensor_scale(self.array(), self.plan, self.placement)
        return float(amax[0])

    @cached_property
    def expected(self) -> MXArray:
        """The reference's answer."""
        return quantize(self.array(), self.spec, **self.arguments)

    @cached_property
    def expected_blocks(self) -> Blocks:
        """The reference's answer, block by block."""
        return Blocks.of(self.expected)

    @property
    def needs(self) -> Needs:
        """The capabilities that the request uses."""
        spec = self.spec
        needs: list[tuple[str, Any]] = [
            ("formats", spec.format), ("in_dtypes", dtype_name(self.x)), ("scale_rules", spec.scale_rule),
            ("roundings", spec.rounding), ("blocks", spec.block), ("arithmetics", spec.arithmetic),
            ("four_over_six", spec.four_over_six),
        ]  # fmt: skip
        if spec.hadamard:
            needs.append(("hadamard_sizes", spec.hadamard))
        if spec.prescale:
            needs.append(("prescale", True))
        if spec.rounding is Rounding.SR:
            needs += [("native_sr", False), ("max_sr_bits", spec.sr_bits)]
        if self.layout in _NUMPY_ONLY:
            needs.append(("arrays", "numpy"))
        return tuple(needs)

    def declared(self, capabilities: Capabilities) -> bool:
        """Return whether a backend of these capabilities declares the request."""
        return all(declares(capabilities, name, value) for name, value in self.needs)

    def elements_before(self, row: int, block: int) -> int:
        """Return how many elements of the global tensor come before the block's Hadamard group."""
        plan = self.plan
        start = int(plan.global_rows()[row]) * plan.global_length + plan.first
        return start + block // (plan.unit // self.format.k) * plan.unit

    def ask(self, subject: Subject) -> MXArray:
        """Return the backend's answer as it comes."""
        return subject.backend.quantize(subject.give(self.array()), self.spec, **self.arguments_for(subject))

    def answer(self, subject: Subject) -> Blocks:
        """Return the backend's answer, block by block.

        Raises:
            MalformedAnswer: the answer's shape, axis or another field is wrong.
        """
        got = as_numpy(subject, self.ask(subject))
        want = self.expected
        for name in ("shape", "axis", "block", "prescale", "rotation", "format"):
            if getattr(got, name) != getattr(want, name):
                raise MalformedAnswer(
                    f"{name} of the MXArray is {getattr(got, name)}, expected {getattr(want, name)}"
                )
        return Blocks.of(got)

    def wrong(self, subject: Subject) -> NDArray[np.bool_]:
        """Return which blocks [R, B] of the backend's answer are wrong; errors as `answer`."""
        return all_of_it(self.answer(subject), self.expected_blocks)[0]

    def describe(self) -> dict[str, str]:
        """Return the request in words: what differs from the defaults, and the array."""
        out = {
            name: str(getattr(self.spec, name))
            for name in OperandSpec.__dataclass_fields__
            if getattr(self.spec, name) != getattr(_DEFAULT, name) or name in ("scale_rule", "rounding")
        }
        x = self.array()
        out |= {"dtype": dtype_name(x), "shape": str(x.shape), "axis": str(self.axis)}
        if self.layout:
            out["layout"] = self.layout
        uses_random = self.spec.rounding is Rounding.SR or self.spec.signs != _DEFAULT.signs
        for name in ("origin", "global_shape", "amax", *(("rng",) if uses_random else ())):
            if getattr(self, name) is not None:
                out[name] = str(getattr(self, name))
        if self.pad:
            out["pad"] = "True"
        return out


class MalformedAnswer(Exception):
    """An answer that cannot be compared block by block, or contradicts itself."""


Judge = Callable[[Blocks, Blocks], tuple[NDArray[np.bool_], int]]
"""Given got and want: which blocks [R, B] are wrong, and how many were looked at."""


def all_of_it(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
    """Judge every bit of every block."""
    wrong = (got.scales != want.scales) | (got.codes != want.codes).any(axis=-1) | (got.tensor != want.tensor)
    return wrong, wrong.size


def scales_only(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
    """Judge the shared scales."""
    wrong = got.scales != want.scales
    return wrong, wrong.size


def as_numpy(subject: Subject, q: MXArray) -> MXArray:
    """Return an MXArray with NumPy arrays inside."""
    tensor = None if q.tensor_scale is None else subject.take(q.tensor_scale)
    return replace(q, codes=subject.take(q.codes), scales=subject.take(q.scales), tensor_scale=tensor)


def magnitude_codes(codes: NDArray[np.uint8], element: ElementFormat) -> NDArray[np.uint8]:
    """Return the codes of the magnitudes of elements; that of the lowest in two's complement is its sign bit."""
    if element.negatives is Negatives.TWOS_COMPLEMENT:
        return np.where(codes & element.sign, -codes, codes)
    return codes & np.uint8(element.sign - 1)


def plainest(wrong: NDArray[np.bool_], want: Blocks, made: BlockFormat) -> tuple[int, int]:
    """Return row and number of the wrong block that is easiest to read: not all zeros, its scale nearest to 1."""
    places = np.argwhere(wrong)
    distance = np.abs(want.scales[wrong].astype(np.int64) - made.scale.one_code)
    zero = ~magnitude_codes(want.codes[wrong], made.element).any(axis=-1)  # a block of zeros shows the least
    row, block = places[int(np.lexsort((distance, zero))[0])]
    return int(row), int(block)


def tile_rows(request: Request, row: int) -> range:
    """Return the rows that share the scale of a row's blocks."""
    if not request.spec.block.is_tile:
        return range(row, row + 1)
    rows = request.spec.block.rows
    # The axis before the block axis is the last of the rows, so a tile's rows are consecutive.
    return range(row // rows * rows, row // rows * rows + rows)


def unit_rows(request: Request, row: int, block: int) -> NDArray[Any]:
    """Return what the block depends on: its Hadamard group, over all rows of a tile, block axis last."""
    plan = request.plan
    rows = np.moveaxis(request.array(), plan.axis, -1).reshape(plan.rows, -1)
    if plan.length > rows.shape[1]:
        rows = np.pad(rows, [(0, 0), (0, plan.length - rows.shape[1])])
    start = block * request.format.k // plan.unit * plan.unit
    tile = tile_rows(request, row)
    return rows[tile.start : tile.stop, start : start + plan.unit]


def alone(request: Request, place: Place) -> tuple[Request, Place]:
    """Return a block as a request of its own, at the origin, and its place there."""
    row, block = place
    x = np.ascontiguousarray(unit_rows(request, row, block))
    inside = block % (request.plan.unit // request.format.k)
    found = Request(x, request.spec, rng=request.rng, amax=request.tensor_amax)
    return found, (row - tile_rows(request, row)[0], inside)
