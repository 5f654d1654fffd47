"""Operators of block formats: they make operands along one axis of a matrix or along both, and multiply them.

An operand travels as its tensors: packed codes uint8 [rows, K * bits / 8], scale codes uint8 [rows, K / k], and, where
the format has a scale of the tensor, that scale, float32 [1]. What `prepare` made of them may follow.

The function before each operator gives compilers the shapes and types of its results: change both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mxref.backend import Backend
from mxref.mxarray import MXArray, PreparedArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.operators import (
    Multiplied,
    Quantized,
    backends,
    block_format,
    block_unit,
    count,
    draws,
    operator,
    parse_spec,
    step_on_device,
    watchers,
)


def _empty(x: torch.Tensor, row_spec: str, column_spec: str) -> list[torch.Tensor]:
    """Return the tensors of one or two operands, of the right shapes and without values."""
    made = []
    for axis, treatment in (
        (axis, parse_spec(text)) for axis, text in ((1, row_spec), (0, column_spec)) if text
    ):
        format, unit = block_format(treatment), block_unit(treatment)
        length = -(-x.shape[axis] // unit) * unit
        shapes = (x.shape[1 - axis], format.code_bytes(length)), (x.shape[1 - axis], length // format.k)
        made += [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
        made += [x.new_empty(1, dtype=torch.float32)] * format.tensor_scale
    return made


@dataclass(frozen=True)
class _Request:
    """A quantization along one axis."""

    axis: int
    spec: OperandSpec
    placement: Placement
    pad: bool

    def amax(self, x: Any, impl: Backend) -> Any:
        """Return the largest finite magnitude of a matrix after signs and transform, float32 [1] of the backend.

        Implements: linear.tensor_scale
        """
        whole = replace(self.placement, origin=None, global_shape=None)
        return impl.plan(x, self.spec, axis=self.axis, placement=whole, pad=self.pad).tensor_amax


def _amaxes(requests: Sequence[_Request], x: Any, impl: Backend) -> list[Any]:
    """Return `amax` of each request whose format has a scale of the tensor, and None of the others.

    Without a transform it is the same along both axes, so the matrix is read once for both.
    """
    found: dict[tuple[Any, ...], Any] = {}
    amaxes: list[Any] = []
    for request in requests:
        spec = request.spec
        if not block_format(spec).tensor_scale:
            amaxes.append(None)
            continue
        key = spec.format, spec.arithmetic, spec.four_over_six, request.axis if spec.hadamard else None
        if key not in found:
            found[key] = request.amax(x, impl)
        amaxes.append(found[key])
    return amaxes


def _requests(
    x: torch.Tensor,
    batch_place: torch.Tensor,
    texts: tuple[str, str],
    streams: tuple[torch.Tensor | None, torch.Tensor | None],
    region: torch.Tensor,
    tokens: bool,
) -> list[_Request]:
    """Return the quantizations that are asked for, along axis 1 and then along axis 0."""
    made = []
    for axis, text, stream in zip((1, 0), texts, streams, strict=True):
        if stream is not None:
            spec = parse_spec(text)
            placement = _placement(x, batch_place, spec, stream, region, tokens)
            made.append(_Request(axis, spec, placement, tokens and axis == 0))
    return made


@operator(like=lambda x: x.new_empty(2, dtype=torch.float32))
def tensor_amax(
    x: torch.Tensor,
    batch_place: torch.Tensor,
    backend: str,
    row_spec: str,
    column_spec: str,
    row_stream: torch.Tensor | None,
    column_stream: torch.Tensor | None,
    region: torch.Tensor,
    tokens: bool,
) -> torch.Tensor:
    """Return the largest finite magnitudes of a matrix from which the scales of the tensor follow, float32 [2].

    Args and order are those of `quantize`: along axis 1 and along axis 0, after signs and transform; 0 where no
    operand with a scale of the tensor is asked for. Ranks that share a tensor take the largest of theirs.
    """
    impl, found = backends[backend], x.new_zeros(2, dtype=torch.float32)
    requests = _requests(x, batch_place, (row_spec, column_spec), (row_stream, column_stream), region, tokens)
    filled = _whole_blocks(x, requests[-1])
    for request, amax in zip(requests, _amaxes(requests, to_backend(filled, impl), impl), strict=True):
        if amax is not None:
            found[1 - request.axis] = from_backend(amax, impl)[0]
    return found


@operator(like=_empty)
def quantize(
    x: torch.Tensor,
    batch_place: torch.Tensor,
    backend: str,
    row_spec: str,
    column_spec: str,
    row_stream: torch.Tensor | None,
    column_stream: torch.Tensor | None,
    region: torch.Tensor,
    tokens: bool,
    amax: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return a matrix in block formats along axis 1, along axis 0, or both from one read where the backend has it.

    Args:
        x: float32, bfloat16 or float16 [M, N], any strides.
        batch_place: from `operators.batch_place`, on the CPU.
        backend: key from `register_backend`.
        row_spec: treatment along axis 1, from `spec_text`; empty, and without a stream: none along this axis.
        column_spec: likewise along axis 0.
        row_stream: from `stream_words`.
        column_stream: likewise.
        region: where `x` lies in the layer's whole tensor, from `region_words`.
        tokens: whether axis 0 is tokens, as in activations and gradients. `batch_place` then says where they lie, and
            blocks along them are filled up with zeros.
        amax: of the whole tensors of which `x` is a part, as of `tensor_amax`; None: those of `x` itself.

    Returns:
        The tensors of the operand along axis 1 and then of that along axis 0: block axis last, K its padded length.
    """
    impl = backends[backend]
    requests = _requests(x, batch_place, (row_spec, column_spec), (row_stream, column_stream), region, tokens)
    filled = _whole_blocks(x, requests[-1])
    source = to_backend(filled, impl)
    if amax is None:
        amaxes = _amaxes(requests, source, impl)
    else:
        amaxes = [to_backend(amax[1 - request.axis :][:1], impl) for request in requests]
    for i, (request, largest) in enumerate(zip(requests, amaxes, strict=True)):
        if block_format(request.spec).tensor_scale:
            requests[i] = replace(request, placement=replace(request.placement, amax=largest))
    if len(requests) == 2:
        row, column = requests
        made: tuple[MXArray, ...] = impl.quantize_dual(
            source,
            (row.spec, column.spec),
            placements=(row.placement, column.placement),
            pads=(False, tokens),
        )
    else:
        (one,) = requests
        made = (impl.quantize(source, one.spec, axis=one.axis, placement=one.placement, pad=one.pad),)
    for watcher in watchers:
        for each, q in zip(requests, made, strict=True):
            watcher.quantized(Quantized(impl, filled, each.spec, each.axis, each.placement, each.pad, q))
    results = [[from_backend(part, impl) for part in stored(q)] for q in made]
    if len(requests) == 2:  # the rows that were added for the other axis
        results[0][:2] = [t[: x.shape[0]] for t in results[0][:2]]
    return [t for tensors in results for t in tensors]


def stored(q: MXArray) -> list[Any]:
    """Return the arrays of an operand."""
    return [q.codes, q.scales] + ([] if q.tensor_scale is None else [q.tensor_scale])


def _placement(
    x: torch.Tensor,
    batch_place: torch.Tensor,
    spec: OperandSpec,
    stream: torch.Tensor,
    region: torch.Tensor,
    tokens: bool,
) -> Placement:
    """Return the random stream of an operand and, under SR, where it lies in the global tensor.

    Only SR depends on the place; anything else may be split into parts of any length. Where nothing is drawn,
    the stream names the operand alone.
    """
    low, high, layer, operand = stream.tolist()
    if not draws(spec):
        return Placement(Stream(0, 0, 0, operand))
    step, first, total = batch_place.tolist()
    source = Stream(low | high << 32, step, layer, operand)
    if spec.rounding is not Rounding.SR:
        return Placement(source, step=None if spec.signs is SignPolicy.FIXED else step_on_device())
    row, column, rows, columns = region.tolist()
    if tokens:
        row, rows = first, total
    whole = None
    if rows >= 0 or columns >= 0:
        whole = rows if rows >= 0 else x.shape[0], columns if columns >= 0 else x.shape[1]
    return Placement(source, (row, column), whole, step=step_on_device())


def _whole_blocks(x: torch.Tensor, request: _Request) -> torch.Tensor:
    """Return a matrix whose tokens, along axis 0, fill whole blocks: with zeros, where others may follow in the step.

    A backend itself fills up the end of a step alone.
    """
    placement, missing = request.placement, -x.shape[0] % block_unit(request.spec) if request.pad else 0
    if not missing or placement.global_shape is None or placement.origin is None:
        return x
    ends = placement.origin[0] + x.shape[0] >= placement.global_shape[0]
    return x if ends else torch.nn.functional.pad(x.detach(), (0, 0, 0, missing))


def _empty_layout(
    q: Sequence[torch.Tensor], backend: str, spec: str, length: int, profile: str
) -> list[torch.Tensor]:
    shapes = tuple(tuple(int(n) for n in t.shape) for t in q)
    layout = _layout_of(backends[backend], shapes, spec, int(length), profile)
    return [q[0].new_empty(shape, dtype=dtype) for shape, dtype in layout]


@operator(like=_empty_layout)
def prepare(
    q: Sequence[torch.Tensor], backend: str, spec: str, length: int, profile: str
) -> list[torch.Tensor]:
    """Return the layout that a backend's GEMM reads in place of an operand's codes: none where it reads codes.

    `q` has the operand's tensors, `spec` is as in `quantize`, `length` and `profile` as in `scaled_gemm`.
    """
    impl = backends[backend]
    prepared = impl.prepare(_operand(q, parse_spec(spec), length, impl), profile=GemmProfile(profile))
    if not isinstance(prepared, PreparedArray):
        return []
    # An operator's results must not share memory with its arguments or with each other.
    taken = {t.untyped_storage().data_ptr() for t in q}
    layout = []
    for part in prepared.layout:
        tensor = from_backend(part, impl)
        start = tensor.untyped_storage().data_ptr()
        layout.append(tensor.clone() if start in taken else tensor)
        taken.add(start)
    return layout


@lru_cache(maxsize=256)
def _layout_of(
    impl: Backend, shapes: tuple[tuple[int, ...], ...], spec: str, length: int, profile: str
) -> list[tuple[torch.Size, torch.dtype]]:
    """Return shapes and types of a layout. Only the backend knows them, so it makes the layout of zeros."""
    treatment = parse_spec(spec)
    # Its kernels read memory, so real memory is allocated.
    with unset_fake_temporarily():
        zeros = [np.zeros(shape, np.uint8) for shape in shapes[:2]]
        zeros += [np.zeros(shape, np.float32) for shape in shapes[2:]]
        q = _array([impl.from_numpy(each) for each in zeros], treatment, (shapes[0][0], length))
        prepared = impl.prepare(q, profile=GemmProfile(profile))
        layout = prepared.layout if isinstance(prepared, PreparedArray) else ()
        return [(t.shape, t.dtype) for t in (from_backend(part, impl) for part in layout)]


def _empty_product(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], out_dtype: str) -> torch.Tensor:
    return a[0].new_empty((a[0].shape[0], b[0].shape[0]), dtype=getattr(torch, out_dtype))


@operator(like=_empty_product)
def scaled_gemm(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    out_dtype: str,
    role: str,
    tally: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return A B^T [M, N] of two operands quantized along the contraction axis, and count it.

    Args:
        a: the operand's tensors, with M rows, and what `prepare` made of them, or nothing.
        b: likewise, with N rows.
        backend: key from `register_backend`.
        a_spec: treatment that made A, from `spec_text`.
        b_spec: treatment that made B.
        length: contraction length before padding, at most K.
        profile: the GEMM profile.
        out_dtype: `float32` or `bfloat16`.
        role: the linear layer's GEMM that this is.
        tally: handle from `register_census`; None counts nowhere.
    """
    impl = backends[backend]
    first, second = _operands(a, b, impl, (a_spec, b_spec), length, profile)
    out = impl.scaled_gemm(first, second, profile=GemmProfile(profile), out_dtype=out_dtype)
    count(tally, role, (first.format, second.format), a[0].shape[0], length)
    for watcher in watchers:
        watcher.multiplied(Multiplied(impl, first, second, GemmProfile(profile), out_dtype, role, out))
    return from_backend(out, impl)


@operator(like=lambda: None, changes="onto")
def add_product(
    onto: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    role: str,
    tally: torch.Tensor | None = None,
) -> None:
    """Add A B^T to an array in place, and count the GEMM.

    `onto`, float32 [M, N] and contiguous, becomes fl32(onto + A B^T); the rest is as in `scaled_gemm`. If the backend
    raises an error, `onto` is as it was.
    """
    impl = backends[backend]
    first, second = _operands(a, b, impl, (a_spec, b_spec), length, profile)
    impl.add_product(first, second, to_backend(onto, impl), profile=GemmProfile(profile))
    count(tally, role, (first.format, second.format), a[0].shape[0], length)


def _empty_values(q: Sequence[torch.Tensor], spec: str) -> torch.Tensor:
    rows, blocks = q[1].shape
    return q[0].new_empty((rows, blocks * block_format(parse_spec(spec)).k), dtype=torch.float32)


@operator(like=_empty_values)
def dequantize(q: Sequence[torch.Tensor], backend: str, spec: str) -> torch.Tensor:
    """Return the values of a matrix that was quantized along axis 1 and not padded, float32 [M, K]."""
    impl, treatment = backends[backend], parse_spec(spec)
    array = _operand(q, treatment, q[1].shape[1] * block_format(treatment).k, impl)
    return from_backend(impl.dequantize(array, "float32"), impl)


@operator(like=lambda product, out_dtype: torch.empty_like(product, dtype=getattr(torch, out_dtype)))
def gained(product: torch.Tensor, gain: float, narrow: bool, out_dtype: str) -> torch.Tensor:
    """Return fl32(product * gain), a float32 of any shape, in a type; `narrow`: rounded to bfloat16 first.

    It is an operator because a compiler would fuse the multiplication with an addition behind it, and leave out the
    rounding to a type that is widened again.
    """
    out = product * gain
    return (out.to(torch.bfloat16) if narrow else out).to(getattr(torch, out_dtype))


def _operands(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    impl: Backend,
    texts: tuple[str, str],
    length: int,
    profile: str,
) -> tuple[MXArray, MXArray]:
    """Return both operands of a product as the backend takes them."""
    made = []
    for tensors, text in zip((a, b), texts, strict=True):
        spec = parse_spec(text)
        own = 2 + block_format(spec).tensor_scale
        q = _operand(tensors[:own], spec, length, impl)
        if layout := tuple(to_backend(part, impl) for part in tensors[own:]):
            q = PreparedArray.of(q, impl.name, profile, layout)
        made.append(q)
    return made[0], made[1]


def _operand(tensors: Sequence[torch.Tensor], spec: OperandSpec, length: int, impl: Backend) -> MXArray:
    """Return an operand as the backend takes it."""
    return _array([to_backend(t, impl) for t in tensors], spec, (tensors[0].shape[0], length))


def _array(tensors: Sequence[Any], spec: OperandSpec, shape: tuple[int, int]) -> MXArray:
    """Return an operand of a backend's arrays.

    The random signs need not travel: one spec and one stream per GEMM role gave both operands the same.
    """
    codes, scales, *scale = tensors
    return MXArray(codes, scales, shape, 1, spec.block, spec.prescale, None, block_format(spec), *scale)
