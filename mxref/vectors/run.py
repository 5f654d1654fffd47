"""One golden vector through a backend: the operation, and its results as the record's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mxref.backend import Backend, within_range
from mxref.errors import FileFormatError, NonfiniteError, UnsupportedError
from mxref.formats import BLOCK_FORMATS
from mxref.gemm import bounded_tolerance
from mxref.layouts.packed import from_ml_dtypes, pack, to_ml_dtypes, unpack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference
from mxref.steps.hadamard import SignPolicy, draw_rotation
from mxref.steps.random import philox4x32, random_integers
from mxref.steps.rounding import Rounding
from mxref.vectors import BACKEND_OPS, DEFAULT, Mismatch, Record, RecordOp, load_vectors
from mxref.vectors.data import (
    code_digits,
    digest,
    digits_text,
    float_words,
    parse_digits,
    parse_words,
    record_format,
    record_number,
    record_operand,
    record_stream,
    record_tensor,
    words_text,
)

_WIDTH = {"scales": 2, "packed": 2}
_EXCHANGED = BLOCK_FORMATS[DEFAULT]
"""The format of records that pack, unpack and exchange codes."""


def run_record(record: Record, backend: Backend) -> Mismatch | None:
    """Run one record through a backend and return the first difference, or None where all is as it must be.

    NaN results compare equal whatever their bits; every other bit counts. `bounded` GEMMs compare with the
    tolerance of the error class that the backend declares.

    Raises:
        UnsupportedError: the backend does not declare what the record asks for, or the operation belongs to
            the reference (Philox, packing), whose effect other records show through a backend.
        FileFormatError: a record whose inputs do not fit together.
    """
    if record.op not in BACKEND_OPS and not isinstance(backend, ReferenceBackend):
        raise UnsupportedError(
            f"{record.op.value} is no operation of a backend; quantize records show its effect"
        )
    got = _RUN[record.op](record, backend)
    if record.inputs.get("profile") == GemmProfile.BOUNDED:
        return _outside(record, backend, got["c"])
    if "c_sha256" in record.expected or "y_sha256" in record.expected:
        got = {f"{k}_sha256": digest(parse_words(v, None, record.id)) for k, v in got.items()}
    for name, want in record.expected.items():
        if got.get(name) != want:
            return _first_difference(record, name, got.get(name), want)
    return None


def verify_vectors(
    chapter: str | None = None, directory: str | Path | None = None
) -> tuple[int, list[Mismatch]]:
    """Recompute the vectors of a chapter, or all of them, with the reference.

    Returns:
        The number of records, and the first difference of each that differs.

    Raises:
        FileFormatError: a missing or damaged file, or a record whose inputs mean nothing; it is named.
    """
    records = load_vectors(chapter, directory)
    found = []
    for record in records:
        try:
            found.append(run_record(record, reference))
        except FileFormatError:
            raise
        except (
            KeyError,
            TypeError,
            ValueError,
        ) as err:  # the reference refuses what a valid record never asks
            raise FileFormatError(f"{record.id}: damaged inputs: {type(err).__name__}: {err}") from err
    return len(records), [mismatch for mismatch in found if mismatch]


def _on(backend: Backend, q: MXArray) -> MXArray:
    codes, scales = backend.from_numpy(q.codes), backend.from_numpy(q.scales)
    tensor_scale = None if q.tensor_scale is None else backend.from_numpy(q.tensor_scale)
    return MXArray(codes, scales, q.shape, q.axis, q.block, q.prescale, q.rotation, q.format, tensor_scale)


def _amax(record: Record, backend: Backend) -> Any:
    amax = record_number(record, "tensor_amax")
    return None if amax is None else backend.from_numpy(amax)


def _tensor_scale(q: MXArray, backend: Backend) -> dict[str, str]:
    """Return the result `tensor_scale`, for a format that has one."""
    if q.tensor_scale is None:
        return {}
    return {"tensor_scale": words_text(float_words(backend.to_numpy(q.tensor_scale)))}


def _scale(record: Record, backend: Backend) -> dict[str, str]:
    amax = parse_words(record.inputs["amax"], None, f"{record.id}: amax")
    k = record_format(record).k
    x = np.zeros((amax.size, k), np.float32)
    # The amax of block i stands at element i mod k, with its sign set in every other block.
    at = np.arange(amax.size)
    x.view(np.uint32)[at, at % k] = amax | (at % 2 << 31).astype(np.uint32)
    placement = Placement(amax=_amax(record, backend))
    q = backend.quantize(backend.from_numpy(x), record.spec, placement=placement)
    return {"scales": digits_text(backend.to_numpy(q.scales), 2), **_tensor_scale(q, backend)}


def _quantize(record: Record, backend: Backend) -> dict[str, str]:
    i, spec = record.inputs, record.spec
    if spec.rounding is Rounding.SR and backend.capabilities.native_sr:
        raise UnsupportedError(
            f"backend {backend.name!r} declares native_sr: its bits are tested by statistics"
        )
    try:
        q = backend.quantize(
            backend.from_numpy(record_tensor(record)),
            spec,
            axis=i.get("axis", -1),
            placement=Placement(
                record_stream(record),
                origin=i.get("origin") and tuple(i["origin"]),
                global_shape=i.get("global_shape") and tuple(i["global_shape"]),
                amax=_amax(record, backend),
            ),
            pad=i.get("pad", False),
        )
    except NonfiniteError:
        return {"error": "nonfinite"}
    codes, scales, tensor = backend.to_numpy(q.codes), backend.to_numpy(q.scales), _tensor_scale(q, backend)
    if "codes_sha256" in record.expected:
        return {"scales_sha256": digest(scales), "codes_sha256": digest(codes), **tensor}
    made = record_format(record)
    elements = unpack(codes, made.element)
    return {"scales": digits_text(scales, 2), "codes": digits_text(elements, code_digits(made)), **tensor}


def _dequantize(record: Record, backend: Backend) -> dict[str, str]:
    i, made = record.inputs, record_format(record)
    scales = parse_digits(i["scales"], 2, None, f"{record.id}: scales")
    codes = parse_digits(i["codes"], code_digits(made), scales.size * made.k, f"{record.id}: codes")
    shape = tuple(i.get("shape", (scales.size, made.k)))
    axis = i.get("axis", len(shape) - 1)
    rows = shape[:axis] + shape[axis + 1 :]
    packed = pack(codes.reshape(*rows, -1), made.element)
    tensor = record_number(record, "tensor_scale")
    q = MXArray(packed, scales.reshape(*rows, -1), shape, axis, format=made, tensor_scale=tensor)
    return {"y": words_text(float_words(backend.to_numpy(backend.dequantize(_on(backend, q), i["out"]))))}


def _hadamard(record: Record, backend: Backend) -> dict[str, str]:
    i = record.inputs
    x = backend.from_numpy(record_tensor(record))
    y = backend.hadamard(x, i["n"], int(i["signs"], 16), axis=i.get("axis", -1))
    return {"y": words_text(float_words(backend.to_numpy(y)))}


def _gemm(record: Record, backend: Backend) -> dict[str, str]:
    a, b = record_operand(record, "a"), record_operand(record, "b")
    profile = GemmProfile(record.inputs["profile"])
    if profile is GemmProfile.BOUNDED:
        finite = [int(q.scales[q.scales != q.format.scale.nan_code].max(initial=0)) for q in (a, b)]
        largest, declared = max(finite), backend.capabilities.bounded_max_scale
        if largest > declared:
            raise UnsupportedError(
                f"backend {backend.name!r} declares bounded_max_scale = {declared}, the record has {largest}"
            )
    left, right, out = _on(backend, a), _on(backend, b), record.inputs["out"]
    c = within_range(backend, lambda: backend.scaled_gemm(left, right, profile=profile, out_dtype=out))
    return {"c": words_text(float_words(backend.to_numpy(c)))}


def _philox(record: Record, backend: Backend) -> dict[str, str]:
    counter = parse_words(record.inputs["counter"], 4, f"{record.id}: counter")
    low, high = parse_words(record.inputs["key"], 2, f"{record.id}: key").tolist()
    return {"words": words_text(philox4x32(counter, (low, high)))}


def _integers(record: Record, backend: Backend) -> dict[str, str]:
    i, stream = record.inputs, record_stream(record)
    assert stream is not None
    rows = np.array([i["row"]], np.int64)
    r = random_integers(rows, i["first"], i["count"], i["length"], stream, i["sr_bits"])
    return {"r": words_text(r)}


def _signs(record: Record, backend: Backend) -> dict[str, str]:
    n = record.inputs["n"]
    rotation = draw_rotation(n, SignPolicy(record.inputs["policy"]), record_stream(record))
    return {"signs": f"{rotation.signs:0{max(1, n // 4)}x}"}


def _pack(record: Record, backend: Backend) -> dict[str, str]:
    made = record_format(record)
    codes = parse_digits(record.inputs["codes"], code_digits(made), None, record.id)
    return {"packed": digits_text(pack(codes, made.element), 2)}


def _unpack(record: Record, backend: Backend) -> dict[str, str]:
    made = record_format(record)
    packed = parse_digits(record.inputs["packed"], 2, None, record.id)
    return {"codes": digits_text(unpack(packed, made.element), code_digits(made))}


def _exchange(record: Record, backend: Backend) -> dict[str, str]:
    packed = parse_digits(record.inputs["packed"], 2, None, f"{record.id}: packed")
    scales = parse_digits(record.inputs["scales"], 2, None, f"{record.id}: scales")
    elements, factors = to_ml_dtypes(packed, scales, _EXCHANGED)
    back = from_ml_dtypes(elements, factors, _EXCHANGED)
    if not (np.array_equal(back[0], packed) and np.array_equal(back[1], scales)):
        return {"elements": "not the same bits on the way back"}
    return {"elements": words_text(float_words(elements)), "factors": words_text(float_words(factors))}


_RUN: dict[RecordOp, Callable[[Record, Backend], dict[str, str]]] = {
    RecordOp.SCALE: _scale,
    RecordOp.QUANTIZE: _quantize,
    RecordOp.DEQUANTIZE: _dequantize,
    RecordOp.HADAMARD: _hadamard,
    RecordOp.SCALED_GEMM: _gemm,
    RecordOp.PHILOX: _philox,
    RecordOp.INTEGERS: _integers,
    RecordOp.SIGNS: _signs,
    RecordOp.PACK: _pack,
    RecordOp.UNPACK: _unpack,
    RecordOp.EXCHANGE: _exchange,
}


def _first_difference(record: Record, name: str, got: str | None, want: str) -> Mismatch:
    """Return where two results of one key part: word by word, or code by code."""
    if got is None or name.endswith("sha256") or name in ("signs", "error"):
        return Mismatch(record, name, -1, got or "absent", want)
    width = code_digits(record_format(record)) if name == "codes" else _WIDTH.get(name)
    ours, theirs = (
        text.split() if width is None else [text[i : i + width] for i in range(0, len(text), width)]
        for text in (got, want)
    )
    if len(ours) != len(theirs):
        return Mismatch(record, name, -1, f"{len(ours)} items", f"{len(theirs)} items")
    at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    return Mismatch(record, name, at, ours[at], theirs[at])


def _outside(record: Record, backend: Backend, got: str) -> Mismatch | None:
    """Return the first result of a `bounded` GEMM that lies outside the tolerance around the exact one.

    The record holds the real sum rounded to the output type, so half a unit of that is added.
    """
    a, b = record_operand(record, "a"), record_operand(record, "b")
    shape = (record.inputs["m"], record.inputs["n"])
    want = parse_words(record.expected["c"], shape[0] * shape[1], f"{record.id}: c").view(np.float32)
    ours = parse_words(got, want.size, f"{record.id}: c").view(np.float32)
    bound = bounded_tolerance(a, b, backend.capabilities.bounded_class, record.inputs["out"]).reshape(-1)
    units = 65_536 if record.inputs["out"] == "bfloat16" else 1  # of float32 in one of the output type
    with np.errstate(invalid="ignore"):
        near = np.abs(ours.astype(np.float64) - want) <= bound + np.spacing(np.abs(want)) * units / 2
    good = near | (ours == want) | (np.isnan(ours) & np.isnan(want))
    if good.all():
        return None
    at = int(np.argmin(good))
    return Mismatch(record, "c", at, f"{ours[at]:.9g}", f"{want[at]:.9g} within {bound[at]:.3g}")
