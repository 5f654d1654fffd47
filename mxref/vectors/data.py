"""The numbers of golden vectors as arrays: hex words, codes, generated inputs, and the inputs of a record.

Words, digits and the rules of generated inputs are part of the vectors' format. Everything here can be repeated in a
few lines of C, which is why no floating-point arithmetic takes part. The functions named `record_...` make the arrays
that a backend takes from a record.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS, CANONICAL_NAN, MXFP4, BlockFormat, ElementFormat, Negatives
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.steps.random import Stream, philox4x32
from mxref.steps.scale import INFINITY_BITS
from mxref.tomlio import nearest
from mxref.vectors import DEFAULT, Record

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


_DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def record_format(record: Record, key: str = "format") -> BlockFormat:
    """Return the block format that a record names under a key: `format`, or `a_format` and `b_format` of products."""
    named = record.inputs.get(key, DEFAULT)
    if named not in BLOCK_FORMATS:
        raise FileFormatError(
            f"{record.id}: unknown block format {named!r}{nearest(str(named), BLOCK_FORMATS)}"
        )
    return BLOCK_FORMATS[named]


def code_digits(made: BlockFormat) -> int:
    """Return the hex digits in which records write a code of a format's elements."""
    return -(-made.element.bits // 4)


def code_of(value: float, element: ElementFormat) -> int:
    """Return the code of a value that the element has; -0 has its own where there is one."""
    code = element.magnitudes.index(abs(value))
    if math.copysign(1.0, value) > 0:
        return code
    complement = element.negatives is Negatives.TWOS_COMPLEMENT
    return -code % (2 * element.sign) if complement else code | element.sign


def record_stream(record: Record) -> Stream | None:
    """Return the random stream of a record, None where it names none."""
    i = record.inputs
    if "seed" not in i:
        return None
    return Stream(int(i["seed"], 16), i.get("step", 0), i.get("layer", 0), i.get("operand", 0))


def record_number(record: Record, name: str) -> NDArray[np.float32] | None:
    """Return an input of a record that is one float32 word, float32 [1]; None where the record has none."""
    if name not in record.inputs:
        return None
    return parse_words(record.inputs[name], 1, f"{record.id}: {name}").view(np.float32)


def record_tensor(record: Record) -> NDArray[Any]:
    """Return the input tensor of a quantize or hadamard record, in the type that it names (default float32).

    A record without `shape` holds one block (or one group of n) per row.
    """
    i = record.inputs
    count = int(np.prod(i["shape"])) if "shape" in i else None
    if "x" in i:
        bits = parse_words(i["x"], count, f"{record.id}: x")
    else:
        if count is None:
            raise FileFormatError(f"{record.id}: a generated input needs a shape")
        rule = InputRule(i["x_rule"])
        bits = generated_bits(rule, i.get("x_base", 0), int(i["x_seed"], 16), count)
    row = i.get("n", record_format(record).k)
    if count is None and bits.size % row:
        raise FileFormatError(f"{record.id}: x has {bits.size} words, not a multiple of {row}")
    x = bits.view(np.float32).reshape(i.get("shape", (-1, row)))
    if "dtype" not in i:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(_DTYPES[i["dtype"]])
        if not np.array_equal(narrow.astype(np.float32), x, equal_nan=True):
            raise FileFormatError(f"{record.id}: x holds values that {i['dtype']} cannot")
    return narrow


def record_operand(record: Record, name: str) -> MXArray:
    """Return operand `a` [M, K] or `b` [N, K] of a scaled_gemm record, NumPy codes."""
    i = record.inputs
    rows, length = i["m" if name == "a" else "n"], i["k"]
    made = record_format(record, f"{name}_format")
    if "operand_seed" in i:
        if made.name != DEFAULT:
            raise FileFormatError(f"{record.id}: only operands in {DEFAULT} can be made from a seed")
        codes, scales = generated_operand(int(i["operand_seed"], 16), 0 if name == "a" else 2, rows, length)
    else:
        where = f"{record.id}: {name}"
        elements = parse_digits(i[f"{name}_codes"], code_digits(made), rows * length, f"{where}_codes")
        codes = pack(elements.reshape(rows, length), made.element)
        scales = parse_digits(i[f"{name}_scales"], 2, rows * length // made.k, f"{where}_scales")
        scales = scales.reshape(rows, length // made.k)
    prescale = bool(i.get(f"{name}_prescale", False))
    tensor_scale = record_number(record, f"{name}_tensor_scale")
    return MXArray(
        codes, scales, (rows, length), 1, prescale=prescale, format=made, tensor_scale=tensor_scale
    )
