"""How golden vectors write numbers: hex words, code digits, digests, and inputs made from a seed by integers alone.

Everything here can be repeated in a few lines of C, which is why no floating-point arithmetic takes part.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import FileFormatError
from mxref.formats import CANONICAL_NAN, MXFP4
from mxref.steps.random import philox4x32
from mxref.steps.scale import INFINITY_BITS

INPUT_TAG = 0x76656374
"""Fourth counter word of generated inputs; no stream of rounding bits reaches it in a vector."""

_LEAVES_GRID = 0x00780000
_MANTISSA_AND_SIGN = 0x807FFFFF
_EXPONENT_BITS = 23
_LADDER_STEPS = 31
_DIGITS = np.full(256, 255, np.uint8)
"""The values of the characters that are hex digits; 255 for others."""
for _characters in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _DIGITS[list(_characters)] = range(16)


class InputRule(StrEnum):
    """How element i of a generated tensor follows from its random word w."""

    RAW = "raw"
    """The word itself: NaN and Inf occur."""
    FINITE = "finite"
    """The word, bit 30 cleared where its exponent field is 255."""
    WINDOW = "window"
    """Sign and mantissa of the word, exponent field base + (bits 23 to 25 of the word)."""
    GRID = "grid"
    """As `window`, but for the top four mantissa bits cleared: many ties."""
    LADDER = "ladder"
    """As `window` with base 8 * ((i / 32) mod 31): every block in another range, from subnormals up."""


def input_words(seed: int, tensor: int, count: int) -> NDArray[np.uint32]:
    """Return the random words of generated inputs: word i is word i mod 4 of a Philox call.

    Args:
        seed: key of the call, 64 bits, low word first.
        tensor: which input of the record, counter word 2.
        count: number of words.

    Returns:
        uint32 [count]; the call's counter is (i / 4 low, i / 4 high, tensor, INPUT_TAG).
    """
    calls = np.arange(-(-count // 4), dtype=np.uint64)
    counter = np.zeros((calls.size, 4), np.uint32)
    counter[:, 0] = calls & np.uint64(0xFFFFFFFF)
    counter[:, 1] = calls >> np.uint64(32)
    counter[:, 2] = tensor
    counter[:, 3] = INPUT_TAG
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:count]


def generated_bits(rule: InputRule, base: int, seed: int, count: int) -> NDArray[np.uint32]:
    """Return the float32 bits of a generated tensor, row-major, uint32 [count]; `base` serves `window` and `grid`."""
    w = input_words(seed, 0, count)
    if rule is InputRule.RAW:
        return w
    if rule is InputRule.FINITE:
        spoiled = w & np.uint32(INFINITY_BITS) == INFINITY_BITS
        return np.where(spoiled, w & np.uint32(0xBFFFFFFF), w)
    low = w >> np.uint32(_EXPONENT_BITS) & np.uint32(7)
    kept = w & np.uint32(_MANTISSA_AND_SIGN)
    if rule is InputRule.LADDER:
        block = np.arange(count, dtype=np.uint32) // np.uint32(MXFP4.k)
        low = low + np.uint32(8) * (block % np.uint32(_LADDER_STEPS))
    else:
        low = low + np.uint32(base)
        if rule is InputRule.GRID:
            kept = kept & np.uint32(0x80000000 | _LEAVES_GRID)
    bits: NDArray[np.uint32] = kept | low << np.uint32(_EXPONENT_BITS)
    return bits


def generated_operand(
    seed: int, tensor: int, rows: int, length: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the packed codes [rows, length / 2] and scale codes [rows, length / 32] of a generated operand.

    Nibble j (low first) of word i is the code of element 8 i + j; scale code i is 119 + (word i mod 16) of
    the words of tensor + 1.
    """
    words = input_words(seed, tensor, rows * length // 8)
    codes = words.astype("<u4").view(np.uint8).reshape(rows, length // 2)
    scales = 119 + (input_words(seed, tensor + 1, rows * length // MXFP4.k) & 15)
    return codes, scales.astype(np.uint8).reshape(rows, length // MXFP4.k)


def words_text(bits: Any) -> str:
    """Return 32-bit words as eight hex digits each, separated by spaces."""
    return np.asarray(bits).reshape(-1).astype(">u4").tobytes().hex(" ", 4)


def float_words(values: Any) -> NDArray[np.uint32]:
    """Return the float32 bits of float32 or narrower values, every NaN as the canonical one, flat."""
    narrow = np.ascontiguousarray(np.asarray(values).astype(np.float32)).reshape(-1)
    bits = narrow.view(np.uint32).copy()
    bits[np.isnan(narrow)] = CANONICAL_NAN
    return bits


def parse_words(text: str, count: int | None, where: str) -> NDArray[np.uint32]:
    """Return the words of `words_text`, uint32; FileFormatError unless there are `count` of them (None: any)."""
    words = text.split()
    if count is not None and len(words) != count:
        raise FileFormatError(f"{where}: {len(words)} words, expected {count}")
    try:
        if {*map(len, words)} <= {8}:
            return np.frombuffer(bytes.fromhex("".join(words)), ">u4").astype(np.uint32)
        return np.array([int(word, 16) for word in words], np.uint32)
    except (ValueError, OverflowError) as err:
        raise FileFormatError(f"{where}: not hex words of 32 bits: {err}") from err


def parse_digits(text: str, width: int, count: int | None, where: str) -> NDArray[np.uint8]:
    """Return codes of `width` hex digits each, uint8; FileFormatError unless there are `count` of them."""
    if len(text) % width or (count is not None and len(text) != count * width):
        raise FileFormatError(
            f"{where}: {len(text)} hex digits, expected {'a multiple of ' * (count is None)}{(count or 1) * width}"
        )
    digits: NDArray[Any] = _DIGITS[np.frombuffer(text.encode(errors="replace"), np.uint8)]
    if width <= 2 and digits.size == len(text) and not (digits > 15).any():
        return digits if width == 1 else digits[::2] << 4 | digits[1::2]
    try:
        return np.array([int(text[i : i + width], 16) for i in range(0, len(text), width)], np.uint8)
    except ValueError as err:
        raise FileFormatError(f"{where}: not hex digits: {err}") from err


def digits_text(codes: Any, width: int) -> str:
    """Return integer codes as `width` hex digits each, without separators, in the order of the flat array."""
    flat = np.asarray(codes).reshape(-1)
    if flat.dtype == np.uint8 and width <= 2:
        text = flat.tobytes().hex()
        if width == 2 or not text[::2].strip("0"):
            return text[2 - width :: 3 - width]
    return "".join([f"{int(code):0{width}x}" for code in flat.tolist()])


def digest(array: NDArray[Any]) -> str:
    """Return the SHA-256 of an array's bytes, row-major, little-endian, in hex."""
    data = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return hashlib.sha256(data.tobytes()).hexdigest()
