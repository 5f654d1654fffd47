"""Observes what a backend does to memory and to its process.

`Watched` stands between the checks and a backend. Every array goes in as a view of a larger one whose other elements
are poisoned: 0xFF bytes, which are NaN as floats and as scale codes. After each call the poison and the operands must
be as they were, results must have memory of their own, and results that earlier calls gave must still hold what they
held. Small results are kept for the whole run, and looked at again in turns.

`Copies` ends a forked copy of this process before it returns into the code that called the backend.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.mxarray import MXArray, PreparedArray

CLAUSE, FUSED_CLAUSE = "conformance.protocol", "conformance.dual"
_FUSED = ("quantize_dual", "fake_quantize", "prepare", "add_product")
_OPERANDS = {
    "quantize": ("x",), "dequantize": ("q",), "hadamard": ("x",), "scaled_gemm": ("a", "b"), "quantize_dual": ("x",),
    "fake_quantize": ("x",), "prepare": ("q",), "add_product": ("a", "b"),
}  # fmt: skip
"""The operations, and what their first arguments are, which they may not change. `add_product` writes to its third."""
MARGIN = 256
"""Poisoned elements before and after an array."""
_ALIGNMENT, _OFF = 64, 16
"""NumPy and PyTorch promise multiples of 16 bytes. This address is no multiple of 64: kernels that need one fail."""
_ROOMS = 8
_KEPT, _KEPT_BYTES = 8, 16 << 20
_OLD_BYTES, _ALL_OLD_BYTES = 1 << 18, 128 << 20
"""The largest result that is kept for the whole run, and what all of them may take."""
_AGAIN = 2
"""Old results that are looked at after a call: more than a call returns."""


class _Held(NamedTuple):
    """An array of the backend and the bytes that it must keep."""

    name: str
    """What it is, or for a result the operation that returned it."""
    array: Any
    held: bytes
    clause: str = ""
    """The clause of the operation that returned it."""


class Watched:
    """A backend with its public operations. Each call is checked for faults of memory; `faults` lists them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        """The backend itself, for calls from several threads, which cannot be watched."""
        self.calls = 0
        """Calls that were answered."""
        self._rooms: deque[_Held] = deque(maxlen=_ROOMS)
        self._kept: deque[_Held] = deque()
        self._old: deque[_Held] = deque()
        self._old_bytes = 0
        self.faults: list[tuple[str, str]] = []
        """The clause and the message of each fault since `start`."""

    def __getattr__(self, name: str) -> Any:
        """Return an operation of the backend, watched, or whatever else the backend has of that name."""
        return partial(self._call, name) if name in _OPERANDS else getattr(self.backend, name)

    def start(self) -> None:
        """Forget the faults and the arrays of the check before; its results are still kept."""
        self._rooms.clear()
        self.faults.clear()

    def from_numpy(self, array: NDArray[Any]) -> Any:
        """Return an array as the backend's own kind, with poisoned memory around it."""
        room, view = _surrounded(array)
        given = self.backend.from_numpy(view)
        if isinstance(given, np.ndarray) or not hasattr(given, "as_strided"):
            self._rooms.append(_Held("", room, room.tobytes()))
            return given
        room, given = _surrounded_tensor(given)
        self._rooms.append(_Held("", room, self._bytes(room)))
        return given

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Return the result of an operation, after a look at its operands and at all results that are kept."""
        clause = FUSED_CLAUSE if name in _FUSED else CLAUSE
        written = arguments[2] if name == "add_product" else None
        operands = zip(_OPERANDS[name], arguments, strict=False)  # what follows the operands is no operand
        before = [
            _Held(operand + part, array, self._bytes(array))
            for operand, value in operands
            for part, array in arrays_of(value)
        ]
        try:
            result = getattr(self.backend, name)(*arguments, **named)
        finally:
            self._inspect(clause, name, before, written)
        self.calls += 1
        self._look_again()
        if name != "prepare":  # whose result may share memory with its operand
            self._keep(clause, name, before, result)
        return result

    def look(self, clause: str, name: str) -> None:
        """Record a fault for each change that calls of the backend itself, which are not watched, have made."""
        self._inspect(clause, name, [], None)

    def _inspect(self, clause: str, name: str, before: list[_Held], written: Any) -> None:
        """Record a fault for each change that a call must not make."""
        changed = False
        for each in before:
            if count := _differing(self._bytes(each.array), each.held):
                changed = True
                self._fault(clause, f"{name} changed {count} bytes of its operand {each.name}")
        for i, room in enumerate(self._rooms):
            now = self._bytes(room.array)
            if now == room.held:
                continue
            self._rooms[i] = room._replace(held=now)
            margin = MARGIN * room.array.dtype.itemsize
            if now[:margin] != room.held[:margin] or now[-margin:] != room.held[-margin:]:
                self._fault(clause, f"{name} wrote outside of its arrays")
            elif not changed and (written is None or not _overlap(written, room.array)):
                self._fault(clause, f"{name} wrote to memory that it was not given, or between elements")
        for i, kept in enumerate(self._kept):
            now = self._bytes(kept.array)
            if count := _differing(now, kept.held):
                self._fault(clause, f"{name} changed {count} bytes of a result that {kept.name} had returned")
                self._kept[i] = kept._replace(held=now)

    def _keep(self, clause: str, name: str, before: list[_Held], result: Any) -> None:
        """Record a fault for each result without memory of its own, and keep the results for later checks."""
        results = [array for _, array in arrays_of(result) if 0 not in tuple(array.shape)]
        for array in results:
            owners = [f"its operand {each.name}" for each in before if _overlap(array, each.array)]
            held = [kept for kept in self._kept if _overlap(array, kept.array)]
            owners += [f"a result that {kept.name} had returned" for kept in held]
            if owners:
                self._fault(clause, f"{name} returned the memory of {owners[0]}")
        for array in results:
            content = self._bytes(array)
            if len(content) <= _KEPT_BYTES:
                self._kept.append(_Held(name, array, content, clause))
        while len(self._kept) > _KEPT:
            old = self._kept.popleft()
            if len(old.held) <= _OLD_BYTES and self._old_bytes + len(old.held) <= _ALL_OLD_BYTES:
                self._old.append(old)
                self._old_bytes += len(old.held)

    def _look_again(self) -> None:
        """Record a fault for each of the next old results that has changed since it was returned."""
        for _ in range(min(_AGAIN, len(self._old))):
            old = self._old.popleft()
            now = self._bytes(old.array)
            if now != old.held:
                message = f"a call has changed a result that {old.name} had returned long before"
                self._fault(old.clause, message)
            self._old.append(old._replace(held=now))

    def _fault(self, clause: str, message: str) -> None:
        if (clause, message) not in self.faults:
            self.faults.append((clause, message))

    def _bytes(self, array: Any) -> bytes:
        return np.asarray(array if isinstance(array, np.ndarray) else self.backend.to_numpy(array)).tobytes()


def arrays_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of an operand or a result: of an array, an MXArray or a pair of them; and which they are.

    Of a prepared array's layout, only NumPy arrays are known.
    """
    if isinstance(value, tuple):
        for part in value:
            yield from arrays_of(part)
    elif isinstance(value, MXArray):
        yield from ((" (codes)", value.codes), (" (scales)", value.scales))
        if value.tensor_scale is not None:
            yield " (tensor scale)", value.tensor_scale
        for i, array in enumerate(value.layout if isinstance(value, PreparedArray) else ()):
            if isinstance(array, np.ndarray):
                yield f" (layout {i})", array
    elif hasattr(value, "shape"):
        yield "", value


def _differing(now: bytes, held: bytes) -> int:
    """Return how many bytes differ."""
    if now == held:
        return 0
    return int(np.count_nonzero(np.frombuffer(now, np.uint8) != np.frombuffer(held, np.uint8)))


def _overlap(a: Any, b: Any) -> bool:
    """Return whether two arrays of one library have an element's memory in common."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b)  # compared by their bounds, because operands have separate memory
    if hasattr(a, "data_ptr") and hasattr(b, "data_ptr") and a.device == b.device:
        (first, end), (other, other_end) = (
            (t.data_ptr(), t.data_ptr() + _span(t) * t.element_size()) for t in (a, b)
        )
        return bool(first < other_end and other < end)
    return False


def _span(tensor: Any) -> int:
    """Return the number of elements of memory between a tensor's first and last, both included."""
    lengths = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    return 0 if 0 in tensor.shape else 1 + sum((n - 1) * stride for n, stride in lengths)


def _surrounded(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return poisoned memory, and in its middle an array of the same elements, strides and flags."""
    size = array.dtype.itemsize
    low, high = byte_bounds(array) if array.size else (0, 0)
    start = array.__array_interface__["data"][0] - low if array.size else 0
    span = (high - low) // size
    room = np.empty(span + 2 * MARGIN + _ALIGNMENT // size, array.dtype)
    first = room.__array_interface__["data"][0] + MARGIN * size
    skipped = (_OFF - first) % _ALIGNMENT // size
    room = room[skipped : skipped + span + 2 * MARGIN]
    room.view(np.uint8)[:] = 0xFF
    # The types of ml_dtypes offer no buffer; integers of their size do.
    memory = room.view(f"u{size}") if array.dtype.kind == "V" else room
    view: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, MARGIN * size + start, array.strides)
    view[...] = array
    view.flags.writeable = array.flags.writeable
    return room, view


def _surrounded_tensor(tensor: Any) -> tuple[Any, Any]:
    """Return poisoned memory on a tensor's device, and in its middle a tensor of the same elements and strides."""
    poison = float("nan") if tensor.is_floating_point() else 0xFF
    room = tensor.new_full((_span(tensor) + 2 * MARGIN,), poison)
    view = room.as_strided(tuple(tensor.shape), tensor.stride(), MARGIN)
    view.copy_(tensor)
    return room, view


_PATIENCE = 2000
"""Milliseconds for a copy to come back: it runs what this process ran after the fork."""


class Copies:
    """A context that ends every forked copy of this process that leaves it; `returned` tells whether there was one.

    A copy that ends by itself, or lives on, does no harm and is not counted.
    """

    def __init__(self) -> None:
        self.returned = False

    def __enter__(self) -> Self:
        if not hasattr(os, "fork"):
            return self
        self._process = os.getpid()
        self._read, self._write = os.pipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not hasattr(os, "fork"):
            return
        if os.getpid() != self._process:
            os.write(self._write, b".")
            os._exit(0)
        # A copy holds the other end of the pipe until it ends: without one this reads the end at once.
        os.close(self._write)
        poll = select.poll()
        poll.register(self._read, select.POLLIN | select.POLLHUP)
        self.returned = bool(poll.poll(_PATIENCE)) and bool(os.read(self._read, 1))
        os.close(self._read)
