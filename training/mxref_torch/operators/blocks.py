"""Operators of block formats: they make operands along one axis of a matrix or along both, and multiply them.

The function before each operator gives compilers the shapes and types of its results: change both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    """Return codes and scale codes of the right shapes, without values."""
    made = []
    for axis, treatment in (
        (axis, parse_spec(text)) for axis, text in ((1, row_spec), (0, column_spec)) if text
    ):
        format, unit = block_format(treatment), block_unit(treatment)
        length = -(-x.shape[axis] // unit) * unit
        shapes = (x.shape[1 - axis], format.code_bytes(length)), (x.shape[1 - axis], length // format.k)
        made += [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
    return made


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

    Returns:
        For axis 1 and then for axis 0 packed codes uint8 [rows, K * bits / 8] and scale codes uint8 [rows, K / k],
        block axis last, K its padded length.
    """
    impl, axes, specs, placements = backends[backend], [], [], []
    for axis, text, stream in ((1, row_spec, row_stream), (0, column_spec, column_stream)):
        if stream is not None:
            axes.append(axis)
            specs.append(parse_spec(text))
            placements.append(_placement(x, batch_place, specs[-1], stream, region, tokens))
    filled = _whole_blocks(x, specs[-1], placements[-1]) if tokens and axes[-1] == 0 else x
    source, pads = to_backend(filled, impl), [tokens and axis == 0 for axis in axes]
    if len(axes) == 2:
        (row, column), (first, second) = specs, placements
        made: tuple[MXArray, ...] = impl.quantize_dual(
            source, (row, column), placements=(first, second), pads=(False, tokens)
        )
    else:
        made = (impl.quantize(source, specs[0], axis=axes[0], placement=placements[0], pad=pads[0]),)
    for watcher in watchers:
        for call in zip(specs, axes, placements, pads, made, strict=True):
            watcher.quantized(Quantized(impl, filled, *call))
    results = [from_backend(stored, impl) for q in made for stored in (q.codes, q.scales)]
    return [t[: x.shape[0]] for t in results[:2]] + results[2:] if len(axes) == 2 else results


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


def _whole_blocks(x: torch.Tensor, spec: OperandSpec, placement: Placement) -> torch.Tensor:
    """Return a matrix whose tokens, along axis 0, fill whole blocks: with zeros, where others may follow in the step.

    A backend itself fills up the end of a step alone.
    """
    missing = -x.shape[0] % block_unit(spec)
    if not missing or placement.global_shape is None or placement.origin is None:
        return x
    ends = placement.origin[0] + x.shape[0] >= placement.global_shape[0]
    return x if ends else torch.nn.functional.pad(x.detach(), (0, 0, 0, missing))


def _empty_layout(
    codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str, length: int, profile: str
) -> list[torch.Tensor]:
    shapes = tuple(tuple(int(n) for n in t.shape) for t in (codes, scales))
    parts = _layout_of(backends[backend], shapes, spec, int(length), profile)
    return [codes.new_empty(shape, dtype=dtype) for shape, dtype in parts]


@operator(like=_empty_layout)
def prepare(
    codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str, length: int, profile: str
) -> list[torch.Tensor]:
    """Return the layout that a backend's GEMM reads in place of an operand's codes: none where it reads codes.

    `codes`, `scales` and `spec` are as in `quantize`, `length` and `profile` as in `scaled_gemm`.
    """
    impl = backends[backend]
    prepared = impl.prepare(
        _operand(codes, scales, parse_spec(spec), length, impl), profile=GemmProfile(profile)
    )
    if not isinstance(prepared, PreparedArray):
        return []
    # An operator's results must not share memory with its arguments or with each other.
    taken = {t.untyped_storage().data_ptr() for t in (codes, scales)}
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
        codes, scales = (impl.from_numpy(np.zeros(shape, np.uint8)) for shape in shapes)
        shape, format = (shapes[0][0], length), block_format(treatment)
        q = MXArray(codes, scales, shape, 1, prescale=treatment.prescale, format=format)
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
        a: codes uint8 [M, K * bits / 8], scale codes uint8 [M, K / k], and what `prepare` made of them, or nothing.
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


def _empty_values(codes: torch.Tensor, scales: torch.Tensor, spec: str) -> torch.Tensor:
    length = scales.shape[1] * block_format(parse_spec(spec)).k
    return codes.new_empty((codes.shape[0], length), dtype=torch.float32)


@operator(like=_empty_values)
def dequantize(codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str) -> torch.Tensor:
    """Return the values of a matrix that was quantized along axis 1 and not padded, float32 [M, K]."""
    impl, treatment = backends[backend], parse_spec(spec)
    q = _operand(codes, scales, treatment, scales.shape[1] * block_format(treatment).k, impl)
    return from_backend(impl.dequantize(q, "float32"), impl)


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
    specs = parse_spec(texts[0]), parse_spec(texts[1])
    made = []
    for (codes, scales, *layout), spec in zip((a, b), specs, strict=True):
        q = _operand(codes, scales, spec, length, impl)
        if layout:
            parts = tuple(to_backend(part, impl) for part in layout)
            q = PreparedArray.of(q, impl.name, profile, parts)
        made.append(q)
    return made[0], made[1]


def _operand(
    codes: torch.Tensor, scales: torch.Tensor, spec: OperandSpec, length: int, impl: Backend
) -> MXArray:
    """Return an operand as the backend takes it.

    The random signs need not travel: one spec and one stream per GEMM role gave both operands the same.
    """
    stored = to_backend(codes, impl), to_backend(scales, impl)
    shape, format = (codes.shape[0], length), block_format(spec)
    return MXArray(*stored, shape, 1, spec.block, spec.prescale, format=format)
