"""`bounded` by BF16, class `fp32`: operands are decoded and multiplied into float32, and the sums are finished.

BF16 has 8 significant bits, and so holds every element times the scale of its block within the range of its exponents:
elements have at most 8, and those of NVFP4 at most 6 together with UE4M3, between 2^-10 and 2688. What leaves that
range is noticed where it is decoded. The scales of tensors and what undoes a prescale are applied to the float32 sums.

BLAS multiplies. On Hopper a kernel of our own does where sums are to be finished: it takes 3 to 7 % longer than BLAS,
and a pass over the sums takes longer than that.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mxref.formats import E2M1, E8M0, MXFP4
from mxref.mxarray import MXArray
from mxref_triton.launch import INTERPRETED, is_hopper, launch, tiles_of
from mxref_triton.memory import asking, empty
from mxref_triton.operands import rows_of
from mxref_triton.products.matrix_cores import MAX_SCALE
from mxref_triton.products.ordered import bits_of, finished, place_tile, store_bits, store_options, store_tile
from mxref_triton.products.scale_range import flag_scales
from mxref_triton.quantizer.decode import dequantize

_DECODED = 2
"""Arrays of a layout that holds decoded values; one that holds folded operands has three."""
_PART = 1 << 16 if INTERPRETED else 4096
"""Sums that a program finishes."""
_TILE = 128, 256, 64
"""Rows, columns and depth of a tile on Hopper."""
_GROUP = 8
"""Tiles along M that share their columns of B in the second-level cache."""
_ONE_SETTING = threading.RLock()
"""Held while a setting of the process is changed: of two threads, the second would restore what the first one set."""


@triton.jit
def _finish(
    sums, out, size, factor, a_tensor, b_tensor,
    SCALED: tl.constexpr, HALF: tl.constexpr, NAN: tl.constexpr, ONTO: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write sums to `out` as `store_tile` does; ONTO adds them to what it holds."""
    at = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    here = at < size
    acc = finished(tl.load(sums + at, here, 0.0), factor, SCALED, a_tensor, b_tensor)
    if ONTO:
        acc = acc + tl.load(out + at, here, 0).to(tl.float32, bitcast=True)
    bits = tl.where(acc != acc, NAN, acc.to(tl.int32, bitcast=True))
    store_bits(acc, bits, out + at, here, NAN, HALF)


@triton.jit
def _multiply_finish(
    out, a, b, rows, columns, length, factor, a_tensor, b_tensor,
    SCALED: tl.constexpr, HALF: tl.constexpr, NAN: tl.constexpr, ONTO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply decoded operands, given as descriptors that read zeros beyond their edges, one tile after another."""
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM) * tl.cdiv(columns, BN), tl.num_programs(0)):
        top, left = place_tile(tile, rows, columns, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, length, BK):
            acc = tl.dot(a.load([top, start]), b.load([left, start]).T, acc)
        store_tile(
            acc, out, top + row, left + column, rows, columns, factor, NAN, SCALED, HALF, a_tensor, b_tensor, ONTO
        )  # fmt: skip


def _decoded(q: MXArray, exceeded: torch.Tensor) -> torch.Tensor:
    """Return elements times the scales of their blocks in bfloat16 [rows, K].

    A word is set if bfloat16 does not hold one, but for E2M1 under E8M0, where `_flag_scales` looks at scales.
    """
    codes, scales = rows_of(q)
    rows = MXArray(codes, scales, (codes.shape[0], q.length), 1, format=q.format, tensor_scale=q.tensor_scale)
    return dequantize(rows, "bfloat16", exceeded, with_tensor_scale=False)


def decoded_layout(q: MXArray) -> tuple[torch.Tensor, ...]:
    """Return the decoded operand, and the word that says whether it is out of range, as a layout."""
    exceeded = torch.zeros(1, dtype=torch.int32, device=q.codes.device)
    _flag_scales(exceeded, q)
    return _decoded(q, exceeded), exceeded


def _flag_scales(word: torch.Tensor, *operands: MXArray) -> None:
    if scales := [q.scales for q in operands if q.format.element is E2M1 and q.format.scale is E8M0]:
        flag_scales(MAX_SCALE, word, *scales)


def multiply_decoded(
    a: MXArray,
    b: MXArray,
    out_dtype: str,
    word: torch.Tensor,
    layouts: Sequence[tuple[torch.Tensor, ...]],
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return A B^T of A [M, K] and B [N, K], checked operands, under `bounded`.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: `float32` or `bfloat16`.
        word: int32 [1], becomes 1 if an operand is out of BF16's range.
        layouts: what `decoded_layout` made of each operand; another layout, or none, is not read.
        onto: float32 [M, N], to which the product is added; it is returned then.
    """
    values = [layout[0] if len(layout) == _DECODED else None for layout in layouts]
    _flag_scales(word, *(q for q, value in zip((a, b), values, strict=True) if value is None))
    for layout, value in zip(layouts, values, strict=True):
        if value is not None:  # what was out of range when it was prepared concerns each of its GEMMs
            torch.maximum(word, layout[-1], out=word)
    left, right = (
        _decoded(q, word) if value is None else value for q, value in zip((a, b), values, strict=True)
    )
    dtype: torch.dtype = getattr(torch, out_dtype)
    options, factor = store_options(a, b, dtype)
    tensors = a.tensor_scale, b.tensor_scale
    finished = onto is None and not options["SCALED"] and tensors == (None, None)
    m, n = left.shape[0], right.shape[0]
    on_gpu = left.device.type == "cuda"
    if finished and options["HALF"] and on_gpu and torch.version.hip is None:
        with asking(m * n * 2, left.device), _one_rounding():
            return torch.mm(left, right.T)
    tiles = tiles_of(m, _TILE[0]) * tiles_of(n, _TILE[1])
    # A descriptor takes no axis of length 0.
    if left.numel() and is_hopper(left.device) and tiles >= _programs(left.device):
        out = empty((m, n), dtype, left.device) if onto is None else onto
        _multiply(left, right, out, factor, tensors, options | {"ONTO": onto is not None})
        return out
    with asking(m * n * 4, left.device):
        if on_gpu:
            sums = torch.mm(left, right.T, out_dtype=torch.float32)
        else:  # torch's CPU has no product of BF16 with float32 output
            sums = left.float() @ right.float().T
    # MXFP4 has no codes of NaN, and its NaN blocks need no canonical one.
    if finished and not options["HALF"] and a.format is MXFP4 and b.format is MXFP4:
        return sums
    fresh = empty((m, n), dtype, sums.device) if options["HALF"] else sums
    out = fresh if onto is None else onto
    if sums.numel():
        launch(
            _finish, (tiles_of(sums.numel(), _PART),),
            sums, bits_of(out), sums.numel(), factor, *tensors, ONTO=onto is not None, PART=_PART, **options,
        )  # fmt: skip
    return out


def _multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    factor: float,
    tensors: tuple[torch.Tensor | None, torch.Tensor | None],
    options: dict[str, Any],
) -> None:
    (m, length), n = left.shape, right.shape[0]
    rows, columns, depth = _TILE
    readers = (TensorDescriptor.from_tensor(t, [side, depth]) for t, side in ((left, rows), (right, columns)))
    programs = min(_programs(left.device), tiles_of(m, rows) * tiles_of(n, columns))
    launch(
        _multiply_finish, (programs,),
        bits_of(out), *readers, m, n, length, factor, *tensors,
        BM=rows, BN=columns, BK=depth, GROUP=_GROUP, num_warps=8, num_stages=3, **options,
    )  # fmt: skip


@cache
def _programs(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@contextlib.contextmanager
def _one_rounding() -> Iterator[None]:
    """Let BLAS round sums to bfloat16 once: by default it may add parts of a sum in that type."""
    matmul = torch.backends.cuda.matmul
    with _ONE_SETTING:
        if not matmul.allow_bf16_reduced_precision_reduction:
            yield  # as the user has set it, perhaps with more: sums that are not split along K
            return
        matmul.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = True
