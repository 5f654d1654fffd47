"""Operators of the GEMMs, each counted where it runs, and of what makes an operand ready for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mxref.backend import Backend
from mxref.errors import ShapeError
from mxref.formats import BF16, FP8
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref.roles import GemmRole
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.operators.registry import backend_of, block_format, count, fake, operator, parse_spec
from mxref_torch.operators.watch import watchers


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
    """Return shapes and types of a layout. Only the backend knows them: it is asked for the layout of zeros."""
    treatment = parse_spec(spec)
    # Its kernels read memory, so it gets some.
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
    count(tally, role, a.format, b.format, _tokens(role, a_codes, length))
    for watcher in watchers:
        watcher.multiplied(impl, a, b, GemmProfile(profile), out_dtype, role, out)
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
    count(tally, role, a.format, b.format, _tokens(role, a_codes, length))


@fake(add_product)
def _(
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
    return None


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


def _tokens(role: str, a: torch.Tensor, length: int) -> int:
    """Return the tokens that a GEMM reads: Wgrad contracts over them, and the others have a row for each."""
    return length if role == GemmRole.WGRAD.value else a.shape[0]


@lru_cache(maxsize=4)
def _values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of the 256 codes of an FP8 type, float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _decode(q: torch.Tensor) -> torch.Tensor:
    """Return FP8 as float32 by a table: several times faster than torch's own cast of E4M3 on a CPU."""
    codes = q.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return _values(q.dtype).index_select(0, codes).view(q.shape)


_FP8_UNIT = 16
"""What cuBLAS wants N and K to be multiples of in FP8."""


@operator
def dense_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    role: str,
    tally: torch.Tensor | None = None,
    a_inverse: torch.Tensor | None = None,
    b_inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return A B^T of two BF16 or two FP8 operands, accumulated in float32, and count it.

    A Hopper multiplies FP8 operands by its FP8 matrix units without fast accumulation, within the error class
    `fp8-hopper`. Elsewhere they are decoded and multiplied without rounding: their values have at most 4 significant
    bits, which every matrix unit multiplies exactly.

    Args:
        a: [M, K], bfloat16, float8_e4m3fn or float8_e5m2.
        b: [N, K], likewise.
        role: the linear layer's GEMM that this is.
        tally: handle from `register_census`; None counts nowhere.
        a_inverse: fl32(1 / scale) of A in FP8, float32 scalar, by which the product is multiplied; None: it is not.
        b_inverse: that of B; both or none.

    Returns:
        [M, N]: bfloat16 (rounded once) from BF16 operands, and from FP8 where the inverses are given; else float32.
    """
    if a.dtype is torch.bfloat16:
        out = a @ b.T
        count(tally, role, BF16, BF16, _tokens(role, a, a.shape[1]))
        return out
    if a.device.type == "cpu":
        # Torch's CPU has no BF16 product with float32 output, and its _scaled_mm is twice as slow as this.
        out = _decode(a) @ _decode(b).T
    elif _multiplies_fp8(a, b):
        out = _by_fp8_units(a, b, a_inverse, b_inverse)
    else:
        out = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16).T, out_dtype=torch.float32)
    if a_inverse is not None and b_inverse is not None and out.dtype is not torch.bfloat16:
        out = (out * a_inverse * b_inverse).to(torch.bfloat16)
    count(tally, role, FP8, FP8, _tokens(role, a, a.shape[1]))
    return out


@fake(dense_gemm)
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    role: str,
    tally: torch.Tensor | None = None,
    a_inverse: torch.Tensor | None = None,
    b_inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = torch.bfloat16 if a.dtype is torch.bfloat16 or a_inverse is not None else torch.float32
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _multiplies_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the GPU's FP8 units multiply two operands."""
    whole = a.shape[0] > 0 and b.shape[0] > 0 and a.shape[1] > 0
    aligned = b.shape[0] % _FP8_UNIT == 0 and a.shape[1] % _FP8_UNIT == 0
    pair = torch.float8_e4m3fn in (a.dtype, b.dtype)  # cuBLAS has no product of two E5M2
    return whole and aligned and pair and _is_hopper(a.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _by_fp8_units(
    a: torch.Tensor, b: torch.Tensor, a_inverse: torch.Tensor | None, b_inverse: torch.Tensor | None
) -> torch.Tensor:
    """Return A B^T times the inverses in bfloat16, or without them in float32.

    cuBLAS multiplies by both scales at once. In float32 that would be another result than two multiplications give;
    rounded to bfloat16 it is one that some sum within the error class gives too.
    """
    dtype = torch.bfloat16
    if a_inverse is None or b_inverse is None:
        dtype, a_inverse, b_inverse = torch.float32, _one(a.device), _one(a.device)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype,
        use_fast_accum=False,
    )  # fmt: skip
