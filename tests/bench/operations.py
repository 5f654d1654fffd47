"""Every operation on matrices, timed against copying the same matrix, after its bits were checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import mxref
from bench.goals import SMALLER
from bench.timing import Timing, in_turns
from mxref import Backend, MXArray, OperandSpec, Stream
from mxref.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mxref.placement import Placement
from mxref.steps.scale import EXPONENT_RULES

SLAB = 64
"""Rows (columns, along axis 0) at either end whose bits are compared with the reference."""
PLAIN, H16, H32 = OperandSpec(), OperandSpec(hadamard=16), OperandSpec(hadamard=32)
SR = OperandSpec(rounding="sr")  # type: ignore[arg-type]
E4M3_PLAIN = OperandSpec(format=MXFP8_E4M3)
STREAM = Stream(seed=1, step=2)
REFERENCE = mxref.get_backend("reference")
USUAL = ("quantize float32", "quantize SR", "quantize H16")
"""Rows of MXFP4 that are timed with the formats in `SMALLER` too."""
READ_TWICE = "read twice, nothing else"

Matrix = NDArray[Any]


class BitsDiffer(Exception):
    """A backend that is not right is not timed."""


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    label: str
    run: Callable[[Backend, Matrix, MXArray], Any]
    """Of the backend, the matrix, and the matrix quantized along axis 1."""
    check: Callable[[Any, Matrix, slice], tuple[Any, Any]]
    """Of the result, the matrix, and a slab: the result's part and the reference's."""
    dtype: str = "float32"
    copied: str = "input"
    """Which array `np.copyto` copies: the larger one."""
    reads: BlockFormat = MXFP4
    """Format of the quantized matrix."""
    copies: int = 1
    """How many copies it is compared with: as many as it has results."""


def _quantize(label: str, spec: OperandSpec, dtype: str = "float32", axis: int = 1) -> Operation:
    def check(q: MXArray, x: Matrix, slab: slice) -> tuple[Any, Any]:
        return _parts(q, slab), _expected(x, spec, axis, slab)

    return Operation(
        label,
        lambda b, x, _: b.quantize(x, spec, axis=axis, placement=Placement(_stream(spec))),
        check,
        dtype,
    )


def _in(made: BlockFormat) -> Iterator[Operation]:
    """Yield the rows of a format that every kernel of its kind has."""
    for label, treatment in (("", {}), (" SR", {"rounding": "sr"}), (" H16", {"hadamard": 16})):
        yield _quantize(f"quantize {made.title}{label}", OperandSpec(format=made, **treatment))  # type: ignore[arg-type]
    plain = OperandSpec(format=made)
    yield _values(
        f"dequantize {made.title} float32", lambda b, _, q: b.dequantize(q), "float32", "result", plain
    )


def _with_amax(label: str, spec: OperandSpec) -> Operation:
    """Return a quantization that is given the largest magnitude of the tensor, and need not look for it."""

    def run(b: Backend, x: Matrix, q: MXArray) -> MXArray:
        return b.quantize(x, spec, placement=Placement(_stream(spec), amax=_LARGEST[id(x)]))

    return replace(_quantize(label, spec), run=run)


_LARGEST: dict[int, Matrix] = {}
"""The largest magnitude of a matrix that is being measured, float32 [1], by its identity."""


def _dual(label: str, specs: tuple[OperandSpec, OperandSpec]) -> Operation:
    def check(found: tuple[MXArray, MXArray], x: Matrix, slab: slice) -> tuple[Any, Any]:
        expected = [_expected(x, spec, axis, slab) for spec, axis in zip(specs, (1, 0), strict=True)]
        return [_parts(q, slab) for q in found], expected

    return Operation(label, lambda b, x, _: b.quantize_dual(x, specs), check, copies=2)


def _values(
    label: str,
    run: Callable[[Backend, Matrix, MXArray], Any],
    dtype: str,
    copied: str,
    spec: OperandSpec = PLAIN,
) -> Operation:
    def check(values: Matrix, x: Matrix, slab: slice) -> tuple[Any, Any]:
        expected = REFERENCE.fake_quantize(x[slab], spec, dtype=dtype, placement=_place(x, spec, 1, slab))
        return _bits(values[slab]), _bits(expected)

    return Operation(label, run, check, copied=copied, reads=spec.format)


def _check_hadamard(values: Matrix, x: Matrix, slab: slice) -> tuple[Any, Any]:
    return _bits(values[slab]), _bits(REFERENCE.hadamard(x[slab], 16))


OPERATIONS = (
    _quantize("quantize float32", PLAIN),
    _quantize("quantize bfloat16", PLAIN, "bfloat16"),
    *(_quantize(f"quantize {rule}", OperandSpec(scale_rule=rule)) for rule in EXPONENT_RULES if rule != "floor"),
    _quantize("quantize H16", H16),
    _quantize("quantize bfloat16 H16", H16, "bfloat16"),
    _quantize("quantize H32", H32),
    _quantize("quantize SR", SR),
    _quantize("quantize H16 SR", replace(H16, rounding=SR.rounding)),
    _quantize("quantize axis 0", PLAIN, axis=0),
    _quantize("quantize 32x32", OperandSpec(block="32x32")),  # type: ignore[arg-type]
    _dual("quantize_dual, twice", (PLAIN, PLAIN)),
    _dual("quantize_dual H16, twice", (H16, H16)),
    _values("fake_quantize", lambda b, x, _: b.fake_quantize(x, PLAIN), "float32", "input"),
    _values("dequantize float32", lambda b, _, q: b.dequantize(q), "float32", "result"),
    _values("dequantize bfloat16", lambda b, _, q: b.dequantize(q, "bfloat16"), "bfloat16", "result"),
    Operation("hadamard 16", lambda b, x, _: b.hadamard(x, 16), _check_hadamard),
    *_in(MXFP8_E4M3),
    _quantize("quantize MXFP8 E5M2", OperandSpec(format=MXFP8_E5M2)),
    _quantize("quantize MXFP8 E4M3 bfloat16", E4M3_PLAIN, "bfloat16"),
    _quantize("quantize MXFP8 E4M3 axis 0", E4M3_PLAIN, axis=0),
    _dual("quantize_dual MXFP8 E4M3, twice", (E4M3_PLAIN, E4M3_PLAIN)),
    _values(
        "dequantize MXFP8 E4M3 bfloat16", lambda b, _, q: b.dequantize(q, "bfloat16"), "bfloat16", "result",
        E4M3_PLAIN,
    ),
    *_in(MXFP6_E2M3),
    *_in(MXFP6_E3M2),
    *_in(NVFP4),
    _with_amax("quantize NVFP4, amax given", OperandSpec(format=NVFP4)),
    _with_amax("quantize NVFP4 SR, amax given", OperandSpec(format=NVFP4, rounding="sr")),  # type: ignore[arg-type]
    _quantize("quantize NVFP4 axis 0", OperandSpec(format=NVFP4), axis=0),
)  # fmt: skip


def inputs(size: int) -> dict[str, Matrix]:
    """Return heavy-tailed matrices: zeros and constants would flatter a quantizer."""
    x = np.random.default_rng(0).standard_t(3, (size, size)).astype(np.float32)
    return {"float32": x, "bfloat16": x.astype(ml_dtypes.bfloat16)}


def measure(
    backend: Backend, size: int, seconds: float, threads: int, formats: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a row for every operation, each timed for about so many seconds.

    If `formats`, those of the formats in `SMALLER` and in `USUAL`, and what reading alone takes.

    Raises:
        BitsDiffer: a result that is not the reference's.
    """
    matrices = inputs(size)
    _LARGEST.update({id(x): np.array([np.abs(x.astype(np.float32)).max()]) for x in matrices.values()})
    stored = {
        made: backend.quantize(matrices["float32"], OperandSpec(format=made))
        for made in {operation.reads for operation in OPERATIONS}
    }
    for operation in OPERATIONS:
        shown = operation.label in USUAL or any(title in operation.label for title in SMALLER)
        if formats and not shown:
            continue
        x, quantized = matrices[operation.dtype], stored[operation.reads]
        result = operation.run(backend, x, quantized)
        check_bits(backend.name, operation, result, x)
        source = _raw(x if operation.copied == "input" else result)
        target = np.empty_like(source)
        ours, copy = in_turns(
            seconds,
            lambda o=operation, x=x, q=quantized: o.run(backend, x, q),
            lambda s=source, t=target: np.copyto(t, s),
        )
        yield _row(operation.label, backend.name, size, threads, source.nbytes, ours, copy, operation.copies)
    if formats:
        yield _reading(matrices["float32"], backend.name, seconds, threads)
    else:
        yield from _casts(matrices["float32"], seconds, threads)


def _reading(x: Matrix, name: str, seconds: float, threads: int) -> dict[str, Any]:
    """Return the row of reading a matrix twice, as a quantizer does that looks for the largest magnitude itself."""
    target, bits = np.empty_like(x), x.view(np.int32)
    reading, copy = in_turns(seconds, lambda: (bits.max(), bits.max()), lambda: np.copyto(target, x))
    return _row(READ_TWICE, name, len(x), threads, x.nbytes, reading, copy)


def _casts(x: Matrix, seconds: float, threads: int) -> Iterator[dict[str, Any]]:
    """Yield rows of PyTorch's casts to eight bits, which neither find nor apply scales."""
    tensor, target = torch.from_numpy(x), np.empty_like(x)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        theirs, copy = in_turns(seconds, lambda d=dtype: tensor.to(d), lambda: np.copyto(target, x))
        label = f"cast to {str(dtype).removeprefix('torch.')}, no scales"
        yield _row(label, "torch", len(x), threads, x.nbytes, theirs, copy)


def _row(
    label: str,
    name: str,
    size: int,
    threads: int,
    copied_bytes: int,
    ours: Timing,
    copy: Timing,
    copies: int = 1,
) -> dict[str, Any]:
    return {
        "operation": label, "backend": name, "size": size, "threads": threads,
        **asdict(ours), "copy_ms": copy.min_ms, "copy_cpu_ms": copy.cpu_ms,
        "ratio": copies * copy.min_ms / ours.min_ms, "cpu_ratio": copies * copy.cpu_ms / ours.cpu_ms,
        "gb_per_s": copied_bytes / ours.min_ms / 1e6,
    }  # fmt: skip


def check_bits(name: str, operation: Operation, result: Any, x: Matrix) -> None:
    """Raise BitsDiffer unless the result is the reference's at both ends."""
    for slab in (slice(0, SLAB), slice(len(x) - SLAB, len(x))):
        found, expected = operation.check(result, x, slab)
        if not _same(found, expected):
            raise BitsDiffer(f"{name}: {operation.label} differs from the reference; nothing is timed")


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, (list, tuple)):
        return all(_same(f, e) for f, e in zip(found, expected, strict=True))
    return bool(np.array_equal(found, expected))


def _parts(q: MXArray, slab: slice) -> tuple[Matrix, Matrix]:
    return q.codes[slab], q.scales[slab]


def _expected(x: Matrix, spec: OperandSpec, axis: int, slab: slice) -> tuple[Matrix, Matrix]:
    """Return the reference's codes and scales of a slab of rows (columns, along axis 0) in its place."""
    part = x[slab] if axis == 1 else x[:, slab]
    q = REFERENCE.quantize(part, spec, axis=axis, placement=_place(x, spec, axis, slab))
    return q.codes, q.scales


def _place(x: Matrix, spec: OperandSpec, axis: int, slab: slice) -> Placement:
    """Return the place of a slab, with the largest magnitude of the whole where the format asks for it."""
    assert isinstance(spec.format, BlockFormat)
    amax = REFERENCE.plan(x, spec, axis=axis, placement=Placement(_stream(spec))).tensor_amax
    origin = (slab.start, 0) if axis == 1 else (0, slab.start)
    return Placement(_stream(spec), origin=origin, global_shape=x.shape, amax=amax)


def _stream(spec: OperandSpec) -> Stream | None:
    return STREAM if spec.rounding == "sr" else None


def _raw(x: Matrix) -> Matrix:
    """Return an array as integers: NumPy copies a bfloat16 array element by element."""
    return x.view(f"u{x.dtype.itemsize}")


_bits = _raw
