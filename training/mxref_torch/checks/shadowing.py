"""The shadow: the reference repeats a share of a run's operations and compares them bit by bit.

Which operations are compared follows from their number alone, by a counter-based draw. No random state is read or
changed, and no bit of the run depends on the shadow. Of a large matrix some whole blocks are compared, at drawn
places, so that the cost of a comparison has a limit.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.conformance.recorded import (
    Call,
    RecordedQuantization,
    Recording,
    check_name,
    save_recording,
    where_text,
)
from mxref.conformance.replay import recorded_failure
from mxref.discovery import loaded_as
from mxref.recipe import GemmProfile
from mxref.steps.random import philox4x32
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.checks.recording import (
    Names,
    Part,
    machine,
    recorded_product,
    recorded_quantization,
    refuse_capture,
    watched,
    whole,
)
from mxref_torch.errors import LayerError, ShadowError
from mxref_torch.operators import Multiplied, Quantized

WHOLE_ELEMENTS = 1 << 18
"""A matrix of at most so many elements is compared whole, a larger one in `PARTS` parts."""
PARTS = 8
_ROWS, _LENGTH = 32, 1024
"""Rows of a part and, at least, its elements along the block axis."""
WHOLE_TERMS = 1 << 19
"""A product of at most so many block products is compared whole, of a larger one `_ROWS` x `_ROWS` results."""
_BATCH = 1024


@dataclass
class Shadow:
    """What a shadow has compared so far."""

    names: Names
    share: float
    seed: int
    file: Path
    seen: int = 0
    """Quantizations and GEMMs that ran."""
    quantizations: int = 0
    """Quantizations that were compared, each whole or in parts."""
    elements: int = 0
    """Elements of these that were compared."""
    products: int = 0
    """GEMMs that were compared."""
    results: int = 0
    """Elements of these that were compared."""
    _decisions: dict[int, NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Return the counts as a sentence."""
        return (
            f"the shadow compared {self.quantizations:,} quantizations ({self.elements:,} elements) and "
            f"{self.products:,} GEMMs ({self.results:,} results) with the reference: no difference"
        )

    def reading(self, layer: int, tensor: str) -> None:
        """Take note of the layer at work."""
        self.names.reading(layer, tensor)

    def quantized(self, call: Quantized) -> None:
        """Compare a quantization if it is drawn; one whose random bits are the hardware's own cannot be compared."""
        refuse_capture(call.x)
        native = call.spec.rounding is Rounding.SR and call.backend.capabilities.native_sr
        if not self._drawn() or native:
            return
        where = self.names.of_quantization(call)
        for part in self._parts(tuple(call.x.shape), call.axis, operators.block_unit(call.spec)):
            self._compare(recorded_quantization(call, part, where), call.backend)
            self.elements += _size(part)
        self.quantizations += 1

    def multiplied(self, call: Multiplied) -> None:
        """Compare a GEMM if it is drawn; under `bounded` many answers are right, and it is not compared."""
        if isinstance(call.product, torch.Tensor):
            refuse_capture(call.product)
        if call.profile is GemmProfile.BOUNDED or not self._drawn():
            return
        a, b = call.a, call.b
        part = whole((a.shape[0], b.shape[0]))
        if _size(part) * (a.length // a.format.k) > WHOLE_TERMS:
            first, second = (
                self._start(i, length, _ROWS) for i, length in enumerate((a.shape[0], b.shape[0]))
            )
            part = slice(first, first + _ROWS), slice(second, second + _ROWS)
            part = slice(first, min(part[0].stop, a.shape[0])), slice(second, min(part[1].stop, b.shape[0]))
        self._compare(recorded_product(call, part, self.names.of_product(call.role)), call.backend)
        self.products += 1
        self.results += _size(part)

    def _drawn(self) -> bool:
        """Return whether the next operation is compared: its number decides."""
        number, self.seen = self.seen, self.seen + 1
        batch, at = divmod(number, 4 * _BATCH)
        if batch not in self._decisions:
            counter = np.zeros((_BATCH, 4), np.uint32)
            counter[:, 0], counter[:, 1] = np.arange(_BATCH), batch & 0xFFFFFFFF
            words = philox4x32(counter, self._key).reshape(-1)
            self._decisions = {batch: words < np.uint64(round(self.share * 2**32))}
        return bool(self._decisions[batch][at])

    @property
    def _key(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32

    def _start(self, lane: int, length: int, step: int) -> int:
        """Return a drawn multiple of `step` below `length`, for the operation that was drawn last."""
        number = self.seen - 1
        counter = np.array([number & 0xFFFFFFFF, number >> 32, lane, 1], np.uint32)
        return int(philox4x32(counter, self._key)[0]) % -(-length // step) * step

    def _parts(self, shape: tuple[int, ...], axis: int, unit: int) -> list[Part]:
        """Return what of a matrix is compared: all of it, or drawn parts of whole blocks and tiles, one at the end."""
        if math.prod(shape) <= WHOLE_ELEMENTS:
            return [whole(shape)]
        steps = [_ROWS, _ROWS]
        steps[axis] = -(-_LENGTH // unit) * unit
        ends = tuple(-(-length // step) - 1 for length, step in zip(shape, steps, strict=True))
        starts = {(ends[0] * steps[0], ends[1] * steps[1])}
        for lane in range(2, 2 * PARTS, 2):
            places = (self._start(lane + i, shape[i], steps[i]) for i in (0, 1))
            starts.add((next(places), next(places)))
        return [
            (slice(r, min(r + steps[0], shape[0])), slice(c, min(c + steps[1], shape[1])))
            for r, c in sorted(starts)
        ]

    def _compare(self, call: Call, backend: Backend) -> None:
        failure = recorded_failure(call)
        if failure is None:
            return
        kind = "quantization" if isinstance(call, RecordedQuantization) else "GEMM"
        reason = f"{kind} of {where_text(call.where)} differs from the reference under {failure.clause}"
        save_recording(self.file, Recording(backend.name, (call,), reason, machine()))
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
    if not 0 <= seed < 1 << 64:
        raise LayerError(f"seed = {seed} is outside 0 .. 2^64 - 1")
    watcher = Shadow(Names(model), share, seed, check_name(file))
    with watched(watcher):
        yield watcher


def _size(part: Part) -> int:
    return math.prod(side.stop - side.start for side in part)
