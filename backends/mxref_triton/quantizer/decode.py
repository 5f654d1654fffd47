"""Values from packed codes: one thread decodes a word of eight elements of MXFP4, or a quad of any other format."""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxref.formats import CANONICAL_NAN, E2M1, E8M0
from mxref.mxarray import MXArray
from mxref_triton.lane.quads import decode_code, load_quads, to_half
from mxref_triton.lane.registers import join_last
from mxref_triton.lane.rounding import decode_element
from mxref_triton.lane.scale import power_of_code, value_of_scale
from mxref_triton.launch import INTERPRETED, check_device, launch, power_of_two_from, tiles_of
from mxref_triton.operands import rows_of

_WORDS = 1 << 16 if INTERPRETED else 512
QUAD_TYPES = {4: torch.int16, 6: torch.uint8, 8: torch.int32}
"""In which quads are read, by the bits of their codes."""
_NAN = tl.constexpr(CANONICAL_NAN)
_NAN_CODE = tl.constexpr(E8M0.nan_code)


@triton.jit(do_not_specialize=["words"])
def _dequantize(codes, scales, out, words, K: tl.constexpr, HALF: tl.constexpr, WORDS: tl.constexpr):
    """Decode WORDS words per program into float32 bits, or into bfloat16 bits two to a word."""
    base = tl.program_id(0).to(tl.int64) * WORDS
    i = tl.arange(0, WORDS)
    mask = base + i < words
    word = tl.load(codes + base + i, mask=mask, other=0).to(tl.uint32, bitcast=True)
    PER_BLOCK: tl.constexpr = K // 8
    code = tl.load(scales + base // PER_BLOCK + i // PER_BLOCK, mask=mask, other=0).to(tl.int32)
    scale = power_of_code(code)
    out_words = ()
    for e in tl.static_range(8):
        bits = tl.where(code == _NAN_CODE, _NAN, decode_element(word, e, scale)).to(tl.uint32)
        out_words = out_words + (bits,)
    if HALF:
        pairs = ()
        for e in tl.static_range(4):
            pairs = pairs + ((out_words[2 * e] >> 16) | (out_words[2 * e + 1] & 0xFFFF0000),)
        out_words = pairs
    COUNT: tl.constexpr = 4 if HALF else 8
    lanes = tl.arange(0, COUNT)[None, :]
    target = out + base * COUNT + (i[:, None] * COUNT + lanes)
    tl.store(target, join_last(out_words).to(tl.int32, bitcast=True), mask=mask[:, None])


@triton.jit(do_not_specialize=["quads"])
def _dequantize_quads(
    codes, scales, tensor, out, exceeded, quads,
    E: tl.constexpr, S: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, CHECKED: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Decode quads like `_dequantize` its words; CHECKED sets a word where bfloat16 is not exact."""
    base = tl.program_id(0).to(tl.int64) * QUADS
    i = tl.arange(0, QUADS)
    mask = base + i < quads
    quad = load_quads(codes, base, i, mask, E)
    PER_BLOCK: tl.constexpr = K // 4
    code = tl.load(scales + base // PER_BLOCK + i // PER_BLOCK, mask=mask, other=0).to(tl.int32)
    scale = value_of_scale(code, S)
    if tensor is not None:
        tensor = tl.load(tensor)
    out_words = ()
    for e in tl.static_range(4):
        out_words = out_words + (decode_code(quad, e, scale, tensor, E),)
    if HALF:
        rounded = ()
        for e in tl.static_range(4):
            # If CHECKED, inexact values are not used.
            rounded = rounded + (out_words[e] >> 16 if CHECKED else to_half(out_words[e]),)
        if CHECKED:
            lost = mask != mask
            for e in tl.static_range(4):
                magnitude = (quad >> (E.bits * e)) & (E.sign - 1)
                overflowed = ((rounded[e] & 0x7FFF) == 0x7F80) & (magnitude <= E.max_code)
                lost = lost | overflowed | ((out_words[e] & 0xFFFF) != 0)
            # All programs that store, store the same value.
            tl.store(exceeded, 1, tl.max(lost.to(tl.int32), 0) != 0)
        out_words = (rounded[0] | (rounded[1] << 16), rounded[2] | (rounded[3] << 16))
    COUNT: tl.constexpr = 2 if HALF else 4
    lanes = tl.arange(0, COUNT)[None, :]
    target = out + base * COUNT + (i[:, None] * COUNT + lanes)
    tl.store(target, join_last(out_words).to(tl.int32, bitcast=True), mask=mask[:, None])


def dequantize(
    q: MXArray, dtype: str, exceeded: torch.Tensor | None = None, with_tensor_scale: bool = True
) -> torch.Tensor:
    """Return the values of an MXArray in its own shape; in memory the block axis is the last.

    Args:
        q: codes and scales of any strides.
        dtype: `float32` or `bfloat16`.
        exceeded: int32 [1] that becomes 1 if bfloat16 does not hold a value of elements of 8 bits; it overflows, or
            lies below bfloat16's smallest step.
        with_tensor_scale: whether values are multiplied by the scale of the tensor.
    """
    codes, scales = rows_of(q)
    check_device(codes)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    out = torch.empty((*q.rows_shape, q.length), dtype=kind, device=codes.device)
    made = q.format
    by_word = made.element is E2M1 and made.scale is E8M0
    words = out.numel() // (8 if by_word else 4)
    tile = power_of_two_from(words, _WORDS) if words and INTERPRETED else _WORDS
    half = dtype == "bfloat16"
    tensor = q.tensor_scale if with_tensor_scale else None
    if words and by_word:
        launch(
            _dequantize, (tiles_of(words, tile),), codes.view(torch.int32), scales, out.view(torch.int32), words,
            K=made.k, HALF=half, WORDS=tile,
        )  # fmt: skip
    elif words:
        launch(
            _dequantize_quads, (tiles_of(words, tile),),
            codes.view(QUAD_TYPES[made.element.bits]), scales, tensor, out.view(torch.int32),
            scales if exceeded is None else exceeded, words,
            E=made.element, S=made.scale, K=made.k, HALF=half, CHECKED=exceeded is not None, QUADS=tile,
        )  # fmt: skip
    return out[..., : q.shape[q.axis]].movedim(-1, q.axis)
