"""Recording: the operands, the answers and the products of chosen layers, in a file for `mxref conform --replay`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.conformance.recorded import Call, Recording, check_name, save_recording
from mxref_torch.checks.watching import (
    Names,
    machine,
    module_of,
    recorded_product,
    recorded_quantization,
    refuse_capture,
    watched,
    whole,
)
from mxref_torch.errors import LayerError
from mxref_torch.names import some
from mxref_torch.operators import Multiplied, Quantized

MAX_BYTES = 1 << 30
"""Most bytes that a recording may hold."""


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
    names, path = Names(module_of(model)), check_name(file)
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
