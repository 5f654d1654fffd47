"""The inputs of a golden vector as arrays: format, random stream, tensor and operands of its record."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS, BlockFormat, ElementFormat
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.steps.random import Stream
from mxref.tomlio import nearest
from mxref.vectors import DEFAULT, Record
from mxref.vectors.data import InputRule, generated_bits, generated_operand, parse_digits, parse_words

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
    """Return the code of a value that the element has; -0 has its own."""
    code = element.magnitudes.index(abs(value))
    return code | element.sign if math.copysign(1.0, value) < 0 else code


def record_stream(record: Record) -> Stream | None:
    """Return the random stream of a record, None where it names none."""
    i = record.inputs
    if "seed" not in i:
        return None
    return Stream(int(i["seed"], 16), i.get("step", 0), i.get("layer", 0), i.get("operand", 0))


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
    return MXArray(codes, scales, (rows, length), 1, prescale=prescale, format=made)
