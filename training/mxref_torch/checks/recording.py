"""Recording: the operands, the answers and the products of chosen layers, in a file for `mxref conform --replay`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
from mxref.conformance.recorded import (
    Call,
    RecordedProduct,
    RecordedQuantization,
    Recording,
    check_name,
    save_recording,
)
from mxref.conformance.requests.encoding import Request
from mxref.conformance.requests.product import Product
from mxref.formats import Nonfinite
from mxref.mxarray import MXArray
from mxref.roles import OPERANDS, GemmRole
from mxref_torch import operators
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import converted
from mxref_torch.names import some
from mxref_torch.operators import Multiplied, Quantized

MAX_BYTES = 1 << 30
"""Most bytes that a recording may hold."""

Part = tuple[slice, slice]
"""A rectangle of a matrix."""


def recorded_quantization(call: Quantized, part: Part, where: dict[str, str]) -> RecordedQuantization:
    """Return a part of a quantization as a recording holds it: at its place, and on the host."""
    x = as_array(call.x.detach()[part].cpu().contiguous())
    first = (part[0].start, part[1].start)
    origin = tuple(o + f for o, f in zip(call.placement.origin or (0, 0), first, strict=True))
    shape = call.placement.global_shape or tuple(call.x.shape)
    # The policy "raise" has been applied already; here only the bits matter.
    spec = replace(call.spec, nonfinite=Nonfinite.NAN_BLOCK)
    request = Request(x, spec, call.axis, call.stream, origin, shape, call.pad)
    rows, along = part if call.axis == 1 else part[::-1]
    start, stop, made = along.start, along.start + request.plan.length, call.q.format
    codes = call.q.codes[rows, made.code_bytes(start) : made.code_bytes(stop)]
    scales = call.q.scales[rows, start // made.k : stop // made.k]
    return RecordedQuantization(where, request, host(codes), host(scales))


def recorded_product(call: Multiplied, part: Part, where: dict[str, str]) -> RecordedProduct:
    """Return a part of a product, with the rows of the operands that it needs, as a recording holds it."""
    a, b = (_rows(q, rows) for q, rows in zip((call.a, call.b), part, strict=True))
    error_class = call.backend.capabilities.bounded_class
    product = Product(a, b, call.profile, call.out_dtype, error_class=error_class)
    return RecordedProduct(where, product, host(call.product[part]))


def host(array: Any) -> NDArray[Any]:
    """Return an array of any backend as a NumPy array of its own memory."""
    if isinstance(array, torch.Tensor):
        array = as_array(array.detach().cpu().contiguous())
    return np.array(array)


def whole(shape: tuple[int, ...]) -> Part:
    """Return the rectangle that is all of a matrix."""
    return slice(0, shape[0]), slice(0, shape[1])


def _rows(q: MXArray, rows: slice) -> MXArray:
    codes, scales = host(q.codes[rows]), host(q.scales[rows])
    return MXArray(codes, scales, (len(codes), q.shape[1]), 1, q.block, q.prescale, q.rotation, q.format)


class Names:
    """The layers of a model by index, and which of them the operators work for."""

    def __init__(self, model: Any) -> None:
        layers = converted(model)
        if not layers:
            raise LayerError(
                "the model has no converted layer: call mxref_torch.convert(model, recipe) first"
            )
        self._names = {layer.index: name for name, layer in layers.items()}
        self._sizes = {layer.index: (layer.in_features, layer.out_features) for layer in layers.values()}
        self._context = next(iter(layers.values())).context
        self._reading: tuple[int, str] | None = None
        self.known = tuple(layers)
        """Names of the converted layers."""

    def reading(self, layer: int, tensor: str) -> None:
        """Take note of the layer and the tensor that the next operators work for. Compiled layers do not tell."""
        self._reading = layer, tensor

    def of_quantization(self, call: Quantized) -> dict[str, str]:
        """Return layer, role, tensor and step of a quantization, as far as they are known."""
        stream, where = call.stream, self._step()
        if stream is not None:
            role, tensor = _operand(stream.operand)
            where |= {"role": role, "tensor": tensor}
            if call.random:
                return where | self._layer(stream.layer)
        if self._reading is None:
            return where
        layer, tensor = self._reading
        inputs, outputs = self._sizes.get(layer, (-1, -1))
        shape = {"x": (None, inputs), "w": (outputs, inputs), "dy": (None, outputs)}[tensor]
        if any(want not in (None, got) for want, got in zip(shape, call.x.shape, strict=True)):
            return where  # of a compiled layer, after one that is not
        return where | self._layer(layer)

    def of_product(self, role: str) -> dict[str, str]:
        """Return layer, role and step of a GEMM, as far as they are known."""
        return self._step() | (self._layer(self._reading[0]) if self._reading else {}) | {"role": role}

    def _step(self) -> dict[str, str]:
        """Return the step of the context: a treatment that draws nothing has the same stream at every step."""
        return {"step": str(self._context.step)}

    def _layer(self, index: int) -> dict[str, str]:
        return {"layer": self._names.get(index, f"number {index}")}


def _operand(number: int) -> tuple[str, str]:
    return next((role.value, o.tensor) for role in GemmRole for o in OPERANDS[role] if o.id == number)


@contextmanager
def watched(watcher: operators.Watcher) -> Iterator[None]:
    """Have the operators call a watcher during the block."""
    operators.watchers.append(watcher)
    try:
        yield
    finally:
        operators.watchers.remove(watcher)


def refuse_capture(x: torch.Tensor) -> None:
    """Raise LayerError where a CUDA graph is being captured: its replays would not be looked at."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise LayerError(
            "a shadow or a recording cannot look into a CUDA graph, whose replays call no Python: "
            "run the step without a graph, or without the shadow"
        )


def machine() -> dict[str, str]:
    """Return the device and the version of torch, for a file that another machine reads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__}


class Recorder:
    """Holds what the operators did for the layers of some names."""

    def __init__(self, names: Names, layers: Collection[str], max_bytes: int) -> None:
        self.names, self.layers, self.max_bytes = names, layers, max_bytes
        self.backend = ""
        self.calls: list[Call] = []
        self._bytes = 0

    def reading(self, layer: int, tensor: str) -> None:
        """Take note of the layer at work."""
        self.names.reading(layer, tensor)

    def quantized(self, call: Quantized) -> None:
        """Keep a quantization of a chosen layer."""
        where, x = self.names.of_quantization(call), call.x
        if self._chosen(where):
            refuse_capture(x)
            held = recorded_quantization(call, whole(tuple(x.shape)), where)
            self._keep(held, call.backend, x.numel() * (x.element_size() + 1))

    def multiplied(self, call: Multiplied) -> None:
        """Keep a GEMM of a chosen layer."""
        where = self.names.of_product(call.role)
        if self._chosen(where):
            shape = call.a.shape[0], call.b.shape[0]
            size = 4 * shape[0] * shape[1] + (shape[0] + shape[1]) * call.a.length
            self._keep(recorded_product(call, whole(shape), where), call.backend, size)

    def _chosen(self, where: dict[str, str]) -> bool:
        return any(fnmatchcase(where.get("layer", ""), glob) for glob in self.layers)

    def _keep(self, call: Call, backend: Backend, size: int) -> None:
        self._bytes += size
        if self._bytes > self.max_bytes:
            raise LayerError(
                f"the recording is above {self.max_bytes:,} bytes: choose fewer layers by `layers`, or a smaller batch"
            )
        self.backend = backend.name
        self.calls.append(call)


@contextmanager
def record(
    model: Any, file: str | Path, layers: Collection[str] = ("*",), *, max_bytes: int = MAX_BYTES
) -> Iterator[Recorder]:
    """Record what the block formats' operators do for chosen layers during the block, and write it to a file.

    Each quantization is kept with its values, treatment, place and answer, each GEMM with its operands and product.
    A Wgrad that is added to a gradient in place has no product of its own and is left out.

    Args:
        model: a converted model, or what `convert` returned; not compiled, because compiled layers do not tell
            which of them is at work.
        file: where to write; the name ends in .npz. Nothing is written if the block raises.
        layers: globs over names of layers.
        max_bytes: the largest size that is kept in memory.

    Yields:
        What was recorded so far, in `calls`.

    Raises:
        LayerError: no such layer, or none that ran; or more than `max_bytes`.
        FileFormatError: a name that does not end in .npz, or a file that cannot be written.
    """
    names, path = Names(model), check_name(file)
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    for glob in layers:
        if not any(fnmatchcase(name, glob) for name in names.known):
            raise LayerError(f"layers: {glob!r} matches no converted layer; there are {some(names.known)}")
    recorder = Recorder(names, layers, max_bytes)
    with watched(recorder):
        yield recorder
    if not recorder.calls:
        raise LayerError(
            f"none of the layers {', '.join(layers)} ran in a block format outside compiled code: record a step of "
            "the model as it is before torch.compile"
        )
    save_recording(path, Recording(recorder.backend, tuple(recorder.calls), facts=machine()))
