"""A function on arrays or tensors: wrapped as a backend of one treatment, and the checks of that treatment.

The function may return codes and scales in any layout of `mxref.layouts.foreign`, or values, from which the codes are
found. The values that it is given are those of the whole suite. A failure counts under the clause that decides its
first wrong bit, unless a plainer request shows that the transform, the tiles, the input type or the strides are at
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arrays import described
from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.conformance.blame import blame
from mxref.conformance.checking import Check, Plan, Subject
from mxref.conformance.checks.places import permuted
from mxref.conformance.checks.sweep import crafted_tiles, every_bfloat16
from mxref.conformance.clauses import storage_clause
from mxref.conformance.dump import compare_arrays, on_host, on_host_bytes
from mxref.conformance.finding import Blamed, quantize_check
from mxref.conformance.outcome import CheckResult
from mxref.conformance.replay import RecordedQuantization
from mxref.conformance.requests.crafted import any_bits, crafted_blocks, heavy_tailed, tame
from mxref.conformance.requests.decoding import differs
from mxref.conformance.requests.quantizing import Blocks, MalformedAnswer, Place, Request
from mxref.errors import DtypeError, ShapeError, UnsupportedError
from mxref.formats import E8M0, BlockFormat, Negatives
from mxref.layouts.foreign import Layout
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.plan import QuantPlan, dtype_name
from mxref.quantization import dequantize, quantize_planned
from mxref.recipe import GemmProfile
from mxref.steps.hadamard import Rotation
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding

_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


class Stored(NamedTuple):
    """Codes and scales as a function stores them."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]


class FunctionBackend(Backend):
    """Quantizes by a function of a matrix; declares the treatment of that function and nothing else."""

    def __init__(self, function: Callable[[Any], Any], ways: Ways, keep: bool = False) -> None:
        """Wrap a function of a matrix that returns codes and scales, an MXArray, or the dequantized matrix.

        With `keep`, every call and its answer is kept for `recorded`.
        """
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function, self.ways, spec = function, ways, ways.plan.base
        self._keep, self._calls = keep, list[RecordedQuantization]()
        self.capabilities = Capabilities(
            formats=frozenset({ways.plan.format}), scale_rules=frozenset({spec.scale_rule}),
            roundings=frozenset({spec.rounding}), max_sr_bits=spec.sr_bits, blocks=frozenset({spec.block}),
            hadamard_sizes=frozenset({spec.hadamard} - {0}), prescale=spec.prescale,
            arithmetics=frozenset({spec.arithmetic}), four_over_six=frozenset({spec.four_over_six}),
            in_dtypes=frozenset(ways.dtypes), dequantize_dtypes=frozenset(), gemms=frozenset(),
            devices=frozenset({(ways.device or "cpu").partition(":")[0]}),
            arrays="numpy" if ways.device is None else "torch",
        )  # fmt: skip

    def from_numpy(self, array: NDArray[Any]) -> Any:
        """Return an array in the type and on the device that the function takes."""
        if self.ways.device is None:
            return array
        import torch

        array = np.array(array)  # torch needs writable memory
        narrow = array.dtype == ml_dtypes.bfloat16
        tensor = torch.from_numpy(array.view(np.int16) if narrow else array)
        return (tensor.view(torch.bfloat16) if narrow else tensor).to(self.ways.device)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Return an input or a result of the function as a NumPy array."""
        return on_host(array)

    def quantize(self, x: Any, spec: Any, **arguments: Any) -> MXArray:
        """Quantize by the function; the result is on the host."""
        plan = self.plan(x, spec, **arguments)
        given = np.array(self.to_numpy(x)) if self._keep else None  # before the function may write to it
        stored = self._quantize(x, plan)
        q = plan.array(*stored)
        if given is not None:
            request = Request(given, plan.spec, plan.axis, self.ways.stream)
            self._calls.append(RecordedQuantization({}, request, *stored))
        return q

    @property
    def recorded(self) -> tuple[RecordedQuantization, ...]:
        """The calls that were answered. They are joined to larger matrices where no bit depends on another row."""
        spec = self.ways.plan.base
        if spec.block.is_tile or spec.rounding is Rounding.SR:
            return tuple(self._calls)
        alike: dict[tuple[str, int, int], list[RecordedQuantization]] = {}
        for call in self._calls:
            x, axis = call.request.x, call.request.axis
            alike.setdefault((dtype_name(x), axis, x.shape[axis]), []).append(call)
        return tuple(map(_joined, alike.values()))

    def _quantize(self, x: Any, plan: QuantPlan) -> Stored:
        if plan.spec != self.ways.plan.base or plan.length != plan.shape[plan.axis]:
            raise UnsupportedError(f"{self.name} is a function of one treatment, and pads nothing")
        same = plan.axis == self.ways.axis
        answer = self.answer(x if same else self.from_numpy(np.ascontiguousarray(self.to_numpy(x).T)))
        if not isinstance(answer, Stored):
            return self._from_values(answer, plan.array(*quantize_planned(self.to_numpy(x), plan)))
        parts = zip(self.ways.layouts, answer, strict=True)
        return Stored(*(layout.read(part, plan.rows, plan.length, plan.format) for layout, part in parts))

    def answer(self, matrix: Any) -> Any:
        """Return what the function makes of a matrix: codes and scales as stored bytes, or whatever else it is."""
        answer = self.function(matrix)
        if isinstance(answer, MXArray):
            answer = answer.codes, answer.scales
        if isinstance(answer, tuple | list) and len(answer) == 2:
            return Stored(*map(on_host_bytes, answer))
        return answer

    def _from_values(self, answer: Any, want: MXArray) -> Stored:
        """Return codes and scales of a dequantized matrix, as near to the reference's as its values allow."""
        if not hasattr(answer, "dtype") or not hasattr(answer, "shape"):
            raise DtypeError(
                f"{self.name} returned {described(answer)}: return (codes, scales), or the dequantized matrix"
            )
        values, shape = on_host(answer), want.shape if want.axis == self.ways.axis else want.shape[::-1]
        if values.shape != shape or values.dtype not in _FLOATS:
            raise ShapeError(
                f"{self.name} returned {values.dtype} {values.shape}: (codes, scales), or the dequantized matrix "
                f"{shape} in a float type, expected"
            )
        return codes_of_values(values if self.ways.axis == 1 else values.T, want)

    # Nothing is declared for the other operations, so they are never called.

    def _dequantize(self, q: MXArray, dtype: str) -> Any:
        raise NotImplementedError

    def _hadamard(self, x: Any, rotation: Rotation, axis: int) -> Any:
        raise NotImplementedError

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> Any:
        raise NotImplementedError


def _joined(calls: list[RecordedQuantization]) -> RecordedQuantization:
    """Return calls whose matrices have the same length along the same block axis as one."""
    request = calls[0].request
    x = np.concatenate([call.request.x for call in calls], axis=1 - request.axis)
    codes, scales = (np.concatenate([getattr(call, part) for call in calls]) for part in ("codes", "scales"))
    return RecordedQuantization({}, replace(request, x=x), codes, scales)


def codes_of_values(values: NDArray[Any], want: MXArray) -> Stored:
    """Return codes and scales that dequantize to values [R, K], block axis last.

    A block whose values are those of the reference's answer `want` gets its codes. Any other gets the scale nearest to
    the reference's under which all of its values are on the grid.

    Raises:
        MalformedAnswer: the values of a block are not on the grid under any scale.
    """
    made = want.format
    codes, scales, _ = Blocks.of(want)
    codes, scales = codes.copy(), scales.copy()
    got = values.astype(np.float64).reshape(codes.shape)
    right = np.moveaxis(dequantize(want, "float32"), want.axis, -1).reshape(codes.shape).astype(np.float64)
    wrong = differs(got, right)
    for row, block in np.argwhere(wrong.any(axis=-1)):
        found = _nearest_block(got[row, block], int(scales[row, block]), made)
        if found is None:
            at = int(np.flatnonzero(wrong[row, block])[0])
            raise MalformedAnswer(
                f"the values of block {block} of row {row} are not elements of {made.title} times one power of two: "
                f"element {at} is {got[row, block, at]:.9g}, expected {right[row, block, at]:.9g}"
            )
        codes[row, block], scales[row, block] = found
    return Stored(pack(codes.reshape(len(codes), -1), made.element), scales)


def _nearest_block(
    values: NDArray[np.float64], byte: int, made: BlockFormat
) -> tuple[NDArray[np.uint8], int] | None:
    """Return codes and scale of a block's values, None where there are none within 8 of a scale byte."""
    if np.isnan(values).all():
        return np.zeros(len(values), np.uint8), E8M0.nan_code
    grid = np.array(made.element.magnitudes)
    negative, element = np.signbit(values), made.element
    for other in sorted(range(max(byte - 8, 0), min(byte + 9, E8M0.nan_code)), key=lambda b: abs(b - byte)):
        with np.errstate(over="ignore"):  # the largest values dequantize to Inf
            points = np.ldexp(grid, other - E8M0.bias).astype(np.float32).astype(np.float64)
        code = np.searchsorted(points, np.abs(values)).clip(max=len(grid) - 1)
        if (points[code] == np.abs(values)).all():
            magnitude = code.astype(np.uint8)
            if element.negatives is Negatives.TWOS_COMPLEMENT:
                return np.where(negative, -magnitude, magnitude), other
            return magnitude | np.where(negative, np.uint8(element.sign), np.uint8(0)), other
    return None


# ---- the checks ----

_SIZES = ((1, 1), (3, 3), (33, 1), (130, 2), (7, 40))
"""Rows and units of the block axis."""
_PROTOCOL = "conformance.protocol"


@dataclass(frozen=True)
class Ways:
    """How a function is called, and the checks of its treatment that follow."""

    plan: Plan
    """The plan whose base is the treatment."""
    axis: int
    """The block axis of the matrices that it is given, 0 or 1."""
    layouts: tuple[Layout, Layout]
    """Of the codes and of the scales that it returns."""
    device: str | None
    """Where its tensors lie; None for NumPy arrays."""
    stream: Stream | None
    """The random stream whose bits it draws."""
    dtypes: tuple[str, ...]
    """Input types."""
    finite: bool
    """Whether blocks with NaN or Inf are left out."""
    strided: bool
    """Whether it is also given views of larger arrays."""
    rows: int
    """The number of rows is a multiple of this."""
    unit: int
    """The length of the block axis is a multiple of this."""

    def checks(self) -> Iterator[Check]:
        """Yield the checks of the treatment."""
        yield self.first()
        for clause in (storage_clause(self.plan.element), "packing.scales"):
            yield self.order(clause)
        if self.plan.base.hadamard:
            yield _of_clause("hadamard.order", "one value per Hadamard group", self.impulses)
        for dtype in self.dtypes:
            for title, x in self.values():
                yield self.found(f"{title}, {dtype}", self.request(x, dtype))
        for rows, units in _SIZES:
            shape = (rows * self.rows, units * self.unit)
            x = tame(np.random.default_rng(rows), shape, made=self.plan.format)
            yield self.found(f"shape {shape}", self.request(x, self.dtypes[0]))
        if self.strided:
            for layout in ("transposed", "every second row and column", "columns out of the middle"):
                yield self.in_layout(layout)

    def values(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield titles and matrices, block axis last, that fit into the multiples."""
        plan, rng = self.plan, np.random.default_rng(self.plan.seed)
        crafted = crafted_blocks(plan.format, plan.full).x
        if self.finite:
            crafted = crafted[np.isfinite(crafted).all(axis=1)]
        yield "crafted blocks", self.fitted(crafted)
        if plan.full:
            yield "every bfloat16", self.fitted(every_bfloat16(plan))
        if plan.base.block.is_tile:
            shape = 2 * np.lcm(plan.format.k, self.rows), 2 * self.unit
            yield "tiles", crafted_tiles(rng, tuple(map(int, shape)), 1, plan.format.k)
        shape = 4 * self.rows, 4 * self.unit
        for number in range(40 if plan.full else 4):
            yield f"any bits {number}", any_bits(rng, shape, self.finite, element=plan.element)
            yield f"heavy tails {number}", heavy_tailed(rng, shape)
            yield f"normal draws {number}", rng.standard_normal(shape).astype(np.float32)

    def fitted(self, blocks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return blocks [N, k] as a matrix whose rows are `unit` long, the last ones filled up with ones."""
        flat = blocks.reshape(-1)
        filled = np.concatenate([flat, np.ones(-flat.size % (self.rows * self.unit), np.float32)])
        return filled.reshape(-1, self.unit)

    def request(self, x: NDArray[Any], dtype: str, **rest: Any) -> Request:
        """Return the request for a matrix whose block axis is last."""
        turned = np.ascontiguousarray(x if self.axis == 1 else x.T)
        typed = replace(self.plan, dtype=dtype).cast(turned)
        if self.finite:  # here, because a narrow type may hold less
            typed = np.where(np.isfinite(typed.astype(np.float32)), typed, typed.dtype.type(1))
        return Request(typed, self.plan.base, axis=self.axis, rng=self.stream, **rest)

    @property
    def impulses(self) -> Request:
        """One power of two in each Hadamard group: its transform has equal magnitudes, which every rule keeps."""
        n = self.plan.base.hadamard
        x = np.zeros((np.lcm(n, self.rows), self.unit), np.float32)
        for group in range(self.unit // n):
            x[np.arange(len(x)), group * n + np.arange(len(x)) % n] = 4.0**group
        return self.request(x, self.dtypes[0])

    def first(self) -> Check:
        """Return the check that the function answers at all, and in the layout that was named."""
        shape = 3 * self.rows, 5 * self.unit  # not square: a transposed answer shows
        x = tame(np.random.default_rng(19), shape, made=self.plan.format)
        request, title = self.request(x, self.dtypes[0]), "the first call"

        def run(subject: Subject) -> CheckResult:
            backend = subject.watched.backend
            assert isinstance(backend, FunctionBackend)
            stored = backend.answer(subject.give(request.array()))
            if not isinstance(stored, Stored):
                with suppress(MalformedAnswer):  # wrong values
                    request.answer(subject)
                return CheckResult(1)
            names = tuple(layout.name for layout in self.layouts)
            found = compare_arrays(request.x, *stored, request.spec, self.axis, names, request.rng, False)
            failure = found.failure
            if failure and failure.clause in (storage_clause(self.plan.element), "packing.scales"):
                message = "; ".join([failure.message, *map(str.strip, found.hints)])
                return CheckResult(found.blocks, replace(failure, message=message))
            return CheckResult(found.blocks)

        return Check(_PROTOCOL, title, request, run, raised=_PROTOCOL)

    def order(self, clause: str) -> Check:
        """Return the check of right codes, or scales, in the wrong order.

        It passes if the transform is wrong, because a wrong transform can look like any order.
        """
        shape = (16 * self.rows, 8 * self.unit if clause == "packing.scales" else self.unit)
        request = self.request(tame(np.random.default_rng(17), shape, made=self.plan.format), self.dtypes[0])

        def spoiled(subject: Subject) -> bool:
            subject.once(request, lambda: request.answer(subject))
            return bool(self.plan.base.hadamard) and _wrong(subject, self.impulses)

        return _unless(spoiled, permuted(clause, request))

    def found(self, title: str, request: Request) -> Check:
        """Return the check of a request whose failure determines the clause."""
        spec = request.spec

        def blamed(subject: Subject, got: Blocks, place: Place) -> str:
            decided = blame(request, got, place)
            if spec.hadamard and _wrong(subject, self.impulses):
                return "hadamard.order"
            if spec.block.is_tile and decided.startswith("scale."):
                even = np.full((np.lcm(request.format.k, self.rows), self.unit), 4.0)
                clause, control = "scale.block.tile", self.request(even, self.dtypes[0])
            elif dtype_name(request.x) != "float32" and "float32" in self.dtypes:
                clause, control = "conventions.inputs", replace(request, x=request.x.astype(np.float32))
            else:
                return decided
            return decided if _wrong(subject, control) else clause

        return _of_clause(f"rounding.{spec.rounding.value}", title, request, blamed)

    def in_layout(self, layout: str) -> Check:
        """Return the check of another layout in memory; it fails only if the answer is right for a contiguous copy."""
        x = tame(np.random.default_rng(5), (4 * self.rows, 2 * self.unit), made=self.plan.format)
        plain = self.request(x, self.dtypes[0])
        check = _of_clause("quantize.strides", layout, replace(plain, layout=layout))
        return _unless(lambda subject: _wrong(subject, plain), check)


def _of_clause(clause: str, title: str, request: Request, blamed: Blamed | None = None) -> Check:
    """Return the check of a request; what the function raises breaks the protocol."""
    return replace(quantize_check(clause, title, request, blamed=blamed), raised=_PROTOCOL)


def _unless(spoiled: Callable[[Subject], bool], check: Check) -> Check:
    """Return a check that passes where something plainer is wrong, or raises: other checks name that fault."""

    def run(subject: Subject) -> CheckResult:
        try:
            if spoiled(subject):
                return CheckResult(0)
        except Exception:
            return CheckResult(0)
        return check.run(subject)

    return replace(check, run=run)


def _wrong(subject: Subject, request: Request) -> bool:
    return bool(request.wrong(subject).any())
