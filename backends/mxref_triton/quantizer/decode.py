"""Values from packed codes: one thread decodes a word of eight elements."""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxref.formats import CANONICAL_NAN, E8M0
from mxref.mxarray import MXArray
from mxref_triton.lane.registers import join_last
from mxref_triton.lane.rounding import decode_element, value_scale
from mxref_triton.launch import INTERPRETED, check_device, launch, tiles_of
from mxref_triton.operands import rows_of

_WORDS = 1 << 16 if INTERPRETED else 512
_NAN = tl.constexpr(CANONICAL_NAN)
_NAN_CODE = tl.constexpr(E8M0.nan_code)


@triton.jit(do_not_specialize=["words"])
def _dequantize(codes, scales, out, words, HALF: tl.constexpr, WORDS: tl.constexpr):
    """Decode WORDS words per program into float32 bits, or into bfloat16 bits two to a word."""
    base = tl.program_id(0).to(tl.int64) * WORDS
    i = tl.arange(0, WORDS)
    mask = base + i < words
    word = tl.load(codes + base + i, mask=mask, other=0).to(tl.uint32, bitcast=True)
    code = tl.load(scales + base // 4 + i // 4, mask=mask, other=0).to(tl.int32)
    scale = value_scale(code)
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


def dequantize(q: MXArray, dtype: str) -> torch.Tensor:
    """Return the values of an MXArray in its own shape; in memory the block axis is the last.

    Args:
        q: codes and scales of any strides.
        dtype: `float32` or `bfloat16`, which hold every value but for overflow to Inf.
    """
    codes, scales = rows_of(q)
    check_device(codes)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    out = torch.empty((*q.rows_shape, q.length), dtype=kind, device=codes.device)
    words = codes.numel() // 4
    if words:
        launch(
            _dequantize, (tiles_of(words, _WORDS),), codes.view(torch.int32), scales, out.view(torch.int32), words,
            HALF=dtype == "bfloat16", WORDS=_WORDS,
        )  # fmt: skip
    return out[..., : q.shape[q.axis]].movedim(-1, q.axis)
