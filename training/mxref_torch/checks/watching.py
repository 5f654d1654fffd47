"""What watches the operators of block formats: a recording holds their answers, and a shadow compares a share of them.

The shadow lets the reference repeat operations and compares them bit by bit. It draws them by a generator of its own,
and no bit of the run depends on it. Of a large matrix some whole blocks are compared, at drawn places, so that the cost
of a comparison has a limit. Files of both are for `mxref conform --replay`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.arrays import as_array
from mxref.backend import Backend
from mxref.conformance.archive import check_name
from mxref.conformance.replay import (
    Call,
    RecordedProduct,
    RecordedQuantization,
    Recording,
    save_recording,
    where_text,
)
from mxref.conformance.requests.multiplying import Product
from mxref.conformance.requests.quantizing import Request
from mxref.discovery import loaded_as
from mxref.formats import Nonfinite
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.errors import LayerError, ShadowError
from mxref_torch.layer.linear import require_converted
from mxref_torch.names import some
from mxref_torch.operators import Multiplied, Quantized

MAX_BYTES = 1 << 30
"""Most bytes that a recording may hold."""
WHOLE_ELEMENTS = 1 << 18
"""A matrix of at most so many elements is compared whole, a larger one in `PARTS` parts."""
PARTS = 8
_ROWS, _LENGTH = 32, 1024
"""Rows of a part and, at least, its elements along the block axis."""
WHOLE_TERMS = 1 << 19
"""A product of at most so many block products is compared whole, of a larger one `_ROWS` x `_ROWS` results."""

Part = tuple[slice, slice]
"""A rectangle of a matrix; it may end beyond the matrix."""
_ALL: Part = slice(0, None), slice(0, None)


def _rectangle(start: Sequence[int], sides: Sequence[int]) -> Part:
    (row, column), (rows, columns) = start, sides
    return slice(row, row + rows), slice(column, column + columns)


def _recorded_quantization(call: Quantized, part: Part, where: dict[str, str]) -> RecordedQuantization:
    """Return a part of a quantization as a recording holds it: at its place, and on the host."""
    x = as_array(call.x.detach()[part].cpu().contiguous())
    first = (part[0].start, part[1].start)
    origin = tuple(o + f for o, f in zip(call.placement.origin or (0, 0), first, strict=True))
    shape = call.placement.global_shape or tuple(call.x.shape)
    # The policy "raise" has been applied already; here only the bits matter.
    spec = replace(call.spec, nonfinite=Nonfinite.NAN_BLOCK)
    amax = None if call.placement.amax is None else float(call.placement.amax[0])
    request = Request(x, spec, call.axis, call.stream, origin, shape, call.pad, amax=amax)
    rows, along = part if call.axis == 1 else part[::-1]
    start, stop, made = along.start, along.start + request.plan.length, call.q.format
    codes = call.q.codes[rows, made.code_bytes(start) : made.code_bytes(stop)]
    scales = call.q.scales[rows, start // made.k : stop // made.k]
    return RecordedQuantization(where, request, _host(codes), _host(scales), _host_scale(call.q))


def _recorded_product(call: Multiplied, part: Part, where: dict[str, str]) -> RecordedProduct:
    """Return a part of a product, with the rows of the operands that it needs, as a recording holds it."""
    a, b = (_rows(q, rows) for q, rows in zip((call.a, call.b), part, strict=True))
    error_class = call.backend.capabilities.bounded_class
    product = Product(a, b, call.profile, call.out_dtype, error_class=error_class)
    return RecordedProduct(where, product, _host(call.product[part]))


def _rows(q: MXArray, rows: slice) -> MXArray:
    codes, scales = _host(q.codes[rows]), _host(q.scales[rows])
    return MXArray(
        codes, scales, (len(codes), q.shape[1]), 1, q.block, q.prescale, q.rotation, q.format, _host_scale(q)
    )


def _host_scale(q: MXArray) -> NDArray[Any] | None:
    return None if q.tensor_scale is None else _host(q.tensor_scale)


def _host(array: Any) -> NDArray[Any]:
    """Return an array of any backend as a NumPy array of its own memory."""
    if isinstance(array, torch.Tensor):
        array = as_array(array.detach().cpu().contiguous())
    return np.array(array)


def _save(file: Path, backend: str, calls: tuple[Call, ...], reason: str = "") -> None:
    """Write operations with the device and the version of torch: another machine may read them."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    save_recording(file, Recording(backend, calls, reason, {"device": device, "torch": torch.__version__}))


class LayerWatcher:
    """Watches the operators for the layers of a model, and names the layer that they work for."""

    def __init__(self, model: Any) -> None:
        self.layers = require_converted(model)
        self._by_index = {layer.index: (name, layer) for name, layer in self.layers.items()}
        self._reading: tuple[int, str] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the operators call this object during the block."""
        operators.watchers.append(self)
        try:
            yield
        finally:
            operators.watchers.remove(self)

    def reading(self, layer: int, tensor: str) -> None:
        """Take note of the layer and the tensor that the next operators work for. Compiled layers do not tell."""
        self._reading = layer, tensor

    def of_quantization(self, call: Quantized) -> dict[str, str]:
        """Return layer, role, tensor and step of a quantization, as far as they are known; LayerError in a capture."""
        if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise LayerError(
                "a shadow or a recording cannot look into a CUDA graph, whose replays call no Python: "
                "run the step without a graph, or without the shadow"
            )
        stream, where = call.stream, self._where()
        if stream is not None:
            role, own = next((role, o) for role in GemmRole for o in OPERANDS[role] if o.id == stream.operand)
            where |= {"role": role.value, "tensor": own.tensor}
            if call.random:
                return where | self._layer(stream.layer)
        if self._reading is None or self._reading[0] not in self._by_index:
            return where
        index, tensor = self._reading
        _, layer = self._by_index[index]
        inputs, outputs = layer.in_features, layer.out_features
        shape = {"x": (None, inputs), "w": (outputs, inputs), "dy": (None, outputs)}[tensor]
        if any(want not in (None, got) for want, got in zip(shape, call.x.shape, strict=True)):
            return where  # of a compiled layer, after one that is not
        return where | self._layer(index)

    def of_product(self, role: str) -> dict[str, str]:
        """Return layer, role and step of a GEMM, as far as they are known."""
        return self._where() | (self._layer(self._reading[0]) if self._reading else {}) | {"role": role}

    def _where(self) -> dict[str, str]:
        # A treatment that draws nothing has the same stream at every step.
        return {"step": str(next(iter(self.layers.values())).context.step)}

    def _layer(self, index: int) -> dict[str, str]:
        return {"layer": self._by_index[index][0] if index in self._by_index else f"number {index}"}


class Recorder(LayerWatcher):
    """Holds what the operators did for the layers of some names."""

    def __init__(self, model: Any, globs: Collection[str], max_bytes: int) -> None:
        super().__init__(model)
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in self.layers):
                raise LayerError(
                    f"layers: {glob!r} matches no converted layer; there are {some(self.layers)}"
                )
        self._globs, self.max_bytes = globs, max_bytes
        self.backend = ""
        self.calls: list[Call] = []
        self._bytes = 0

    def quantized(self, call: Quantized) -> None:
        """Keep a quantization of a chosen layer."""
        if self._chosen(where := self.of_quantization(call)):
            held = _recorded_quantization(call, _ALL, where)
            self._keep(call, held, held.request.x, held.codes, held.scales)

    def multiplied(self, call: Multiplied) -> None:
        """Keep a GEMM of a chosen layer."""
        if self._chosen(where := self.of_product(call.role)):
            held = _recorded_product(call, _ALL, where)
            self._keep(call, held, held.product.a.codes, held.product.b.codes, held.result)

    def _chosen(self, where: dict[str, str]) -> bool:
        return any(fnmatchcase(where.get("layer", ""), glob) for glob in self._globs)

    def _keep(self, call: Quantized | Multiplied, held: Call, *arrays: NDArray[Any]) -> None:
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes > self.max_bytes:
            raise LayerError(
                f"the recording is above {self.max_bytes:,} bytes: choose fewer layers by `layers`, or a smaller batch"
            )
        self.backend = call.backend.name
        self.calls.append(held)


@contextmanager
def record(
    model: Any, file: str | Path, layers: Collection[str] = ("*",), *, max_bytes: int = MAX_BYTES
) -> Iterator[Recorder]:
    """Record what the block formats' operators do for chosen layers during the block, and write it to a file.

    Each quantization is kept with its values, treatment, place and answer, each GEMM with its operands and product.
    A Wgrad that is added to a gradient in place has no product of its own and is left out.

    Args:
        model: a converted model, or what `convert` returned; not compiled: compiled layers do not tell which one works.
        file: where to write; the name ends in .npz. Nothing is written if the block raises.
        layers: globs over names of layers.
        max_bytes: the largest size that is kept in memory.

    Yields:
        What was recorded so far, in `calls`.

    Raises:
        LayerError: no such layer, or none that ran; or more than `max_bytes`.
        FileFormatError: a name that does not end in .npz, or a file that cannot be written.
    """
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    recorder, path = Recorder(model, layers, max_bytes), check_name(file)
    with recorder.watching():
        yield recorder
    if not recorder.calls:
        raise LayerError(
            f"none of the layers {', '.join(layers)} ran in a block format outside compiled code: record a step of "
            "the model as it is before torch.compile"
        )
    _save(path, recorder.backend, tuple(recorder.calls))


class Shadow(LayerWatcher):
    """What a shadow has compared so far."""

    def __init__(self, model: Any, share: float, seed: int, file: Path) -> None:
        super().__init__(model)
        self.share, self.file = share, file
        self.quantizations = self.elements = 0
        """Quantizations that were compared, each whole or in parts, and elements of these."""
        self.products = self.results = 0
        """GEMMs that were compared, and elements of these."""
        # A generator for each, so that which operations are drawn does not depend on the shapes.
        self._operations, self._places = np.random.default_rng(seed).spawn(2)

    def __str__(self) -> str:
        """Return the counts as a sentence."""
        return (
            f"the shadow compared {self.quantizations:,} quantizations ({self.elements:,} elements) and "
            f"{self.products:,} GEMMs ({self.results:,} results) with the reference: no difference"
        )

    def quantized(self, call: Quantized) -> None:
        """Compare a quantization if it is drawn; one whose random bits are the hardware's own cannot be compared."""
        where = self.of_quantization(call)
        native = call.spec.rounding is Rounding.SR and call.backend.capabilities.native_sr
        if not self._drawn() or native:
            return
        for part in self._parts(tuple(call.x.shape), call.axis, operators.block_unit(call.spec)):
            recorded = _recorded_quantization(call, part, where)
            self._compare(recorded, "quantization", call.backend)
            self.elements += recorded.request.x.size
        self.quantizations += 1

    def multiplied(self, call: Multiplied) -> None:
        """Compare a GEMM if it is drawn; under `bounded` many answers are right, and it is not compared."""
        if call.profile is GemmProfile.BOUNDED or not self._drawn():
            return
        a, part, sides = call.a, _ALL, (_ROWS, _ROWS)
        shape = a.shape[0], call.b.shape[0]
        if math.prod(shape) * (a.length // a.format.k) > WHOLE_TERMS:
            part = _rectangle(self._start(shape, sides), sides)
        recorded = _recorded_product(call, part, self.of_product(call.role))
        self._compare(recorded, "GEMM", call.backend)
        self.products += 1
        self.results += recorded.result.size

    def _drawn(self) -> bool:
        """Return whether the next operation is compared."""
        return bool(self._operations.random() < self.share)

    def _start(self, shape: Sequence[int], sides: Sequence[int]) -> tuple[int, ...]:
        """Return a drawn place in a matrix, a multiple of `sides`."""
        return tuple(
            int(self._places.integers(-(-n // side))) * side for n, side in zip(shape, sides, strict=True)
        )

    def _parts(self, shape: tuple[int, ...], axis: int, unit: int) -> list[Part]:
        """Return what of a matrix is compared: all of it, or drawn parts of whole blocks and tiles, one at the end."""
        if math.prod(shape) <= WHOLE_ELEMENTS:
            return [_ALL]
        sides = [_ROWS, _ROWS]
        sides[axis] = -(-_LENGTH // unit) * unit
        end = tuple((length - 1) // side * side for length, side in zip(shape, sides, strict=True))
        starts = {end} | {self._start(shape, sides) for _ in range(1, PARTS)}
        return [_rectangle(start, sides) for start in sorted(starts)]

    def _compare(self, call: Call, kind: str, backend: Backend) -> None:
        failure = call.failure
        if failure is None:
            return
        reason = f"{kind} of {where_text(call.where)} differs from the reference under {failure.clause}"
        _save(self.file, backend.name, (call,), reason)
        name = loaded_as(backend) or "path/to/file.py:object"
        raise ShadowError(
            f"backend {backend.name!r}: the {reason}: {failure.message}, expected {failure.expected}, got "
            f"{failure.got}; the run is stopped, and the operation is in {self.file}: "
            f"{shlex.join(['mxref', 'conform', '--replay', str(self.file), '--backend', name])} shows it"
        )


@contextmanager
def shadow(
    model: Any, share: float = 1e-3, *, file: str | Path = "shadow.npz", seed: int = 0
) -> Iterator[Shadow]:
    """Compare a share of the block's quantizations, and products under `exact` and `ordered`, with the reference.

    Args:
        model: a converted model, or what `convert` returned.
        share: of the operations, 0 to 1. Matrices of more than 2^18 elements are compared in 8 parts of about
            2^15 elements.
        file: where the first operation that differs is written, for `mxref conform --replay`; the name ends in .npz.
        seed: of the draw of operations.

    Yields:
        What was compared so far; `str` of it is a sentence.

    Raises:
        ShadowError: an answer differs from the reference's. It names step, layer, role, block and clause.
        LayerError: a share outside 0 to 1, a model that is not converted, or a step in a CUDA graph.
        FileFormatError: a name that does not end in .npz, or whose folder cannot be written.
    """
    if not 0 <= share <= 1:
        raise LayerError(f"share = {share} is outside 0 .. 1; 1e-3 compares one operation in a thousand")
    watcher = Shadow(model, share, seed, check_name(file))
    with watcher.watching():
        yield watcher
