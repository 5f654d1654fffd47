"""Operators of the GEMMs of block formats, each counted where it runs, and of what makes an operand ready for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mxref.backend import Backend
from mxref.errors import ShapeError
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.operators.registry import (
    backend_of,
    block_format,
    count,
    fake,
    operator,
    parse_spec,
    tokens_read,
)
from mxref_torch.operators.watch import Multiplied, watchers


@operator
def prepare(
    codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str, length: int, profile: str
) -> list[torch.Tensor]:
    """Return the layout that a backend's GEMM reads in place of an operand's codes: none where it reads codes.

    Args:
        codes: uint8 [rows, K * bits / 8].
        scales: uint8 [rows, K / k].
        backend: key from `register_backend`.
        spec: treatment that made the operand, from `spec_text`.
        length: contraction length before padding, at most K.
        profile: of the GEMMs to come.

    Raises:
        MxrefError: as `mxref.Backend.prepare`.
    """
    impl = backend_of(backend)
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


@fake(prepare)
def _(
    codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str, length: int, profile: str
) -> list[torch.Tensor]:
    shapes = tuple(tuple(int(n) for n in t.shape) for t in (codes, scales))
    return [
        codes.new_empty(shape, dtype=dtype)
        for shape, dtype in _layout_of(backend_of(backend), shapes, spec, int(length), profile)
    ]


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


@operator
def scaled_gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_layout: Sequence[torch.Tensor],
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_layout: Sequence[torch.Tensor],
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    out_dtype: str,
    role: str,
    tally: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return A B^T of two operands quantized along the contraction axis, and count it.

    Args:
        a_codes: uint8 [M, K * bits / 8].
        a_scales: uint8 [M, K / k].
        a_layout: what `prepare` made of A for this backend and profile, or nothing.
        b_codes: uint8 [N, K * bits / 8].
        b_scales: uint8 [N, K / k].
        b_layout: what `prepare` made of B for this backend and profile, or nothing.
        backend: key from `register_backend`.
        a_spec: treatment that made A, from `spec_text`.
        b_spec: treatment that made B.
        length: contraction length before padding, at most K.
        profile: the GEMM profile.
        out_dtype: `float32` or `bfloat16`.
        role: the linear layer's GEMM that this is.
        tally: handle from `register_census`; None counts nowhere.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ShapeError: operands that do not fit together.
        UnsupportedError: a profile or type that the backend does not declare.
    """
    impl = backend_of(backend)
    first, second = (a_codes, a_scales, a_layout), (b_codes, b_scales, b_layout)
    a, b = _operands(first, second, impl, (a_spec, b_spec), length, profile)
    out = impl.scaled_gemm(a, b, profile=GemmProfile(profile), out_dtype=out_dtype)
    count(tally, role, a.format, b.format, tokens_read(role, a_codes, length))
    for watcher in watchers:
        watcher.multiplied(Multiplied(impl, a, b, GemmProfile(profile), out_dtype, role, out))
    return from_backend(out, impl)


@fake(scaled_gemm)
def _(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_layout: Sequence[torch.Tensor],
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_layout: Sequence[torch.Tensor],
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    out_dtype: str,
    role: str,
    tally: torch.Tensor | None = None,
) -> torch.Tensor:
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[0]), dtype=getattr(torch, out_dtype))


@partial(operator, changes="onto")
def add_product(
    onto: torch.Tensor,
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_layout: Sequence[torch.Tensor],
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_layout: Sequence[torch.Tensor],
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    role: str,
    tally: torch.Tensor | None = None,
) -> None:
    """Add A B^T to an array in place, and count the GEMM.

    Args:
        onto: float32 [M, N], contiguous: it becomes fl32(onto + A B^T).
        a_codes: as in `scaled_gemm`, and so are the others.
        a_scales: of A.
        a_layout: what `prepare` made of A, or nothing.
        b_codes: of B.
        b_scales: of B.
        b_layout: what `prepare` made of B, or nothing.
        backend: key from `register_backend`.
        a_spec: treatment that made A.
        b_spec: treatment that made B.
        length: contraction length before padding.
        profile: the GEMM profile.
        role: the linear layer's GEMM that this is.
        tally: handle from `register_census`; None counts nowhere.

    Raises:
        MxrefError: as `mxref.Backend.add_product`; `onto` is then as it was.
    """
    impl = backend_of(backend)
    first, second = (a_codes, a_scales, a_layout), (b_codes, b_scales, b_layout)
    a, b = _operands(first, second, impl, (a_spec, b_spec), length, profile)
    impl.add_product(a, b, to_backend(onto, impl), profile=GemmProfile(profile))
    count(tally, role, a.format, b.format, tokens_read(role, a_codes, length))


@fake(add_product)
def _(onto: torch.Tensor, *_: object) -> None:
    return None


@operator
def dequantize(codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str) -> torch.Tensor:
    """Return the values of a matrix that was quantized along axis 1 and not padded, float32 [M, K].

    Args:
        codes: uint8 [M, K * bits / 8].
        scales: uint8 [M, K / k].
        backend: key from `register_backend`.
        spec: treatment that made it, from `spec_text`.

    Raises:
        MxrefError: as `mxref.Backend.dequantize`.
    """
    impl, treatment = backend_of(backend), parse_spec(spec)
    q = _operand(codes, scales, treatment, scales.shape[1] * block_format(treatment).k, impl)
    return from_backend(impl.dequantize(q, "float32"), impl)


@fake(dequantize)
def _(codes: torch.Tensor, scales: torch.Tensor, backend: str, spec: str) -> torch.Tensor:
    length = scales.shape[1] * block_format(parse_spec(spec)).k
    return codes.new_empty((codes.shape[0], length), dtype=torch.float32)


@operator
def gained(product: torch.Tensor, gain: float, narrow: bool, out_dtype: str) -> torch.Tensor:
    """Return fl32(product * gain), rounded to an output type.

    It is an operator because a compiler would fuse the multiplication with an addition behind it, and leave out the
    rounding to a type that is widened again.

    Args:
        product: float32, any shape.
        gain: a float32.
        narrow: whether to round to bfloat16 first.
        out_dtype: `float32` or `bfloat16`.
    """
    out = product * gain
    return (out.to(torch.bfloat16) if narrow else out).to(getattr(torch, out_dtype))


@fake(gained)
def _(product: torch.Tensor, gain: float, narrow: bool, out_dtype: str) -> torch.Tensor:
    return torch.empty_like(product, dtype=getattr(torch, out_dtype))


Stored = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]
"""Codes, scale codes and layout of an operand."""


def _operands(
    a: Stored, b: Stored, impl: Backend, texts: tuple[str, str], length: int, profile: str
) -> tuple[MXArray, MXArray]:
    """Return both operands of a product as the backend takes them; ShapeError if their transforms differ."""
    specs = parse_spec(texts[0]), parse_spec(texts[1])
    if len({(spec.hadamard, spec.signs, spec.sign_vector) for spec in specs}) > 1:
        raise ShapeError("scaled_gemm: operands carry different Hadamard transforms; both need the same one")
    made = []
    for (codes, scales, layout), spec in zip((a, b), specs, strict=True):
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
    shape = codes.shape[0], length
    return MXArray(
        to_backend(codes, impl),
        to_backend(scales, impl),
        shape,
        1,
        spec.block,
        spec.prescale,
        format=block_format(spec),
    )
