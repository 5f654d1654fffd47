"""The golden vectors as a C table, for programs in C and testbenches of hardware: `mxref vectors c`."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mxref._version import SPECIFICATION
from mxref.formats import BlockFormat
from mxref.layouts.packed import unpack
from mxref.recipe import GemmProfile
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.scale import bump_above
from mxref.vectors import Record, RecordOp, load_vectors
from mxref.vectors.data import (
    code_digits,
    float_words,
    parse_digits,
    parse_words,
    record_format,
    record_number,
    record_operand,
    record_stream,
    record_tensor,
)

SOURCES = Path(__file__).resolve().parents[1] / "c"
"""The folder of `mxref.h` and of the files that belong to it."""
TABLE = "mxref_vectors.h"
_LINE = 110
_ONE = 0x3F800000

_Arrays = list[str]


def write_c(folder: Path, directory: Path | None = None) -> tuple[int, int]:
    """Write `mxref.h`, the golden vectors as a C table, and a program that holds one to the other.

    Left out are records that give digests of large results, and what `mxref.h` does not have: the profiles `exact` and
    `bounded`, the orders of float32 operations, and four over six.

    Args:
        folder: to write into; made where it is missing.
        directory: that of the golden vectors; default as of `load_vectors`.

    Returns:
        How many records are in the table, and how many are left out.

    Raises:
        FileFormatError: as of `load_vectors`.
    """
    arrays: _Arrays = []
    tables: dict[RecordOp, list[str]] = {op: [] for op in _TABLES}
    left_out = 0
    for record in load_vectors(directory=directory):
        op = RecordOp.PACK if record.op is RecordOp.UNPACK else record.op
        if op not in _TABLES or _not_in_c(record):
            left_out += 1
            continue
        tables[op].append("    {" + ", ".join(_TABLES[op][1](record, arrays)) + "},")
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES.iterdir():
        if source.suffix in (".h", ".c"):
            shutil.copyfile(source, folder / source.name)
    text = [
        f"/* The golden vectors of specification {SPECIFICATION}; written by `mxref vectors c`. */",
        "#ifndef MXREF_VECTORS_H",
        "#define MXREF_VECTORS_H",
        "",
        '#include "mxref_vector_types.h"',
        "",
        *arrays,
    ]
    for kind, rows in tables.items():
        name = _TABLES[kind][0]
        text += ["", f"static const mxref_{name}_vector mxref_{name}_vectors[] = {{", *rows, "};"]
    (folder / TABLE).write_text("\n".join([*text, "", "#endif", ""]), encoding="utf-8")
    return sum(map(len, tables.values())), left_out


def _not_in_c(record: Record) -> bool:
    digests = any(name.endswith("sha256") for name in record.expected)
    drawn = record.op is not RecordOp.SIGNS or record.inputs["policy"] != SignPolicy.NONE
    chosen = {"arithmetic", "four_over_six"} & record.inputs.keys()
    return (
        digests
        or bool(chosen)
        or not drawn
        or record.inputs.get("profile", GemmProfile.ORDERED) != GemmProfile.ORDERED
    )


def _array(arrays: _Arrays, kind: str, values: Any) -> str:
    """Add an array of integers to the file, and return its name; 0 for an empty one."""
    flat = np.asarray(values).reshape(-1).tolist()
    if not flat:
        return "0"
    name = f"mxref__{len(arrays)}"
    width = 2 if kind == "uint8_t" else 8
    texts = [f"0x{value:0{width}x}{'ull' if kind == 'uint64_t' else ''}" for value in flat]
    each = _LINE // (len(texts[0]) + 1)
    lines = [",".join(texts[i : i + each]) for i in range(0, len(texts), each)]
    arrays.append(f"static const {kind} {name}[] = {{" + ",\n    ".join(lines) + "};")
    return name


def _text(record: Record) -> str:
    return f'"{record.id}"'


def _format(made: BlockFormat) -> str:
    return f"&MXREF_{made.name.upper()}"


def _stream(stream: Stream | None) -> str:
    s = stream or Stream(0)
    return f"{{0x{s.seed:x}ull, 0x{s.step << 32 | s.layer << 8 | s.operand:x}ull}}"


def _treatment(record: Record) -> str:
    spec = record.spec
    rule = "TURN" if spec.scale_rule.is_threshold else spec.scale_rule.name
    turn = bump_above(spec.scale_rule, record_format(record).element) if spec.scale_rule.is_threshold else 0
    ones = int(spec.zero_scale != 0)
    return (
        f"{{MXREF_{rule}, {turn}, MXREF_{spec.rounding.name}, {spec.sr_bits}, {int(spec.prescale)}, {ones}}}"
    )


def _word(record: Record, results: str = "tensor_scale") -> str:
    """Return one word of a record's results; 1 for a format without a scale of the tensor."""
    text = record.expected.get(results) or record.inputs.get(results)
    return f"0x{text}u" if text else "MXREF_ONE"


def _scale(record: Record, arrays: _Arrays) -> Sequence[str]:
    amax = parse_words(record.inputs["amax"], None, record.id)
    scales = parse_digits(record.expected["scales"], 2, amax.size, record.id)
    made = record_format(record)
    return (
        _text(record), _format(made), _treatment(record), _word(record), str(amax.size),
        _array(arrays, "uint32_t", amax), _array(arrays, "uint8_t", scales),
    )  # fmt: skip


def _quantize(record: Record, arrays: _Arrays) -> Sequence[str]:
    i, spec, made = record.inputs, record.spec, record_format(record)
    x = record_tensor(record)
    axis = i.get("axis", -1) % x.ndim
    origin = i.get("origin") or [0] * x.ndim
    whole = list(i.get("global_shape") or x.shape)
    rows = np.moveaxis(x, axis, -1)
    unit = math.lcm(made.k, spec.hadamard or 1)
    padded = rows.shape[-1] + (-rows.shape[-1] % unit if i.get("pad") else 0)
    length = whole[axis] + -whole[axis] % unit
    stored = np.zeros((*rows.shape[:-1], padded), np.float32)
    stored[..., : rows.shape[-1]] = rows
    first = _first_indices(rows.shape[:-1], origin, whole, axis, length)
    stream = record_stream(record)
    expected = record.expected
    amax = record_number(record, "tensor_amax")
    codes = scales = "0"
    if "codes" in expected:
        codes = _array(
            arrays, "uint8_t", parse_digits(expected["codes"], code_digits(made), stored.size, record.id)
        )
        scales = _array(
            arrays, "uint8_t", parse_digits(expected["scales"], 2, stored.size // made.k, record.id)
        )
    return (
        _text(record), _format(made), _treatment(record), "0" if amax is None else f"0x{float_words(amax)[0]:08x}",
        str(int("error" in expected)), str(first.size), str(padded), str(spec.block.rows), str(spec.hadamard or 0),
        str(int(spec.signs is not SignPolicy.NONE)), _stream(_sign_stream(stream, spec.signs)), _stream(stream),
        _array(arrays, "uint64_t", first), _array(arrays, "uint32_t", stored.view(np.uint32)), _word(record),
        scales, codes,
    )  # fmt: skip


def _first_indices(
    rows: tuple[int, ...], origin: Sequence[int], whole: Sequence[int], axis: int, length: int
) -> Any:
    """Return the index of each row's first element in the random stream."""
    others = [n for n in range(len(whole)) if n != axis]
    places = np.indices(rows, dtype=np.int64).reshape(len(rows), math.prod(rows))
    row = np.zeros(math.prod(rows), np.int64)
    for at, n in enumerate(others):
        row = row * whole[n] + places[at] + origin[n]
    return row * length + origin[axis]


def _sign_stream(stream: Stream | None, policy: SignPolicy) -> Stream | None:
    """Return the stream from which signs are drawn."""
    if stream is None or policy is SignPolicy.NONE:
        return None
    step = 0 if policy is SignPolicy.FIXED else stream.step
    layer = stream.layer if policy is SignPolicy.PER_STEP_LAYER else 0
    return Stream(stream.seed, step, layer, 6 + stream.operand // 2)


def _dequantize(record: Record, arrays: _Arrays) -> Sequence[str]:
    i, made = record.inputs, record_format(record)
    scales = parse_digits(i["scales"], 2, None, record.id)
    codes = parse_digits(i["codes"], code_digits(made), scales.size * made.k, record.id)
    shape = tuple(i.get("shape", (scales.size, made.k)))
    axis = i.get("axis", len(shape) - 1)
    rows = shape[:axis] + shape[axis + 1 :]
    stored = codes.reshape(*rows, -1)
    y = np.moveaxis(parse_words(record.expected["y"], math.prod(shape), record.id).reshape(shape), axis, -1)
    return (
        _text(record), _format(made), str(int(i["out"] == "bfloat16")), _word(record), str(math.prod(rows)),
        str(stored.shape[-1]), str(shape[axis]),
        _array(arrays, "uint8_t", scales), _array(arrays, "uint8_t", codes), _array(arrays, "uint32_t", y),
    )  # fmt: skip


def _hadamard(record: Record, arrays: _Arrays) -> Sequence[str]:
    i = record.inputs
    x = record_tensor(record)
    axis = i.get("axis", -1)
    y = parse_words(record.expected["y"], x.size, record.id).reshape(x.shape)
    x, y = np.ascontiguousarray(np.moveaxis(x.astype(np.float32), axis, -1)), np.moveaxis(y, axis, -1)
    signs = int(i["signs"], 16)
    words = [signs >> at & 0xFFFFFFFF for at in range(0, max(i["n"], 32), 32)]
    return (
        _text(record), str(i["n"]), str(x.size), _array(arrays, "uint32_t", words),
        _array(arrays, "uint32_t", x.view(np.uint32)), _array(arrays, "uint32_t", y),
    )  # fmt: skip


def _gemm(record: Record, arrays: _Arrays) -> Sequence[str]:
    i = record.inputs
    operands = []
    for name in ("a", "b"):
        q = record_operand(record, name)
        t = _ONE if q.tensor_scale is None else int(q.tensor_scale.view(np.uint32)[0])
        codes = _array(arrays, "uint8_t", unpack(q.codes, q.format.element))
        scales = _array(arrays, "uint8_t", q.scales)
        operands.append(f"{{{_format(q.format)}, {codes}, {scales}, 0x{t:08x}u, {int(q.prescale)}}}")
    blocks = i["k"] // record_format(record, "a_format").k
    c = parse_words(record.expected["c"], i["m"] * i["n"], record.id)
    return (
        _text(record), str(int(i["out"] == "bfloat16")), str(i["m"]), str(i["n"]), str(blocks), *operands,
        _array(arrays, "uint32_t", c),
    )  # fmt: skip


def _words(text: str) -> str:
    return "{" + ", ".join(f"0x{word}u" for word in text.split()) + "}"


def _philox(record: Record, arrays: _Arrays) -> Sequence[str]:
    return (
        _text(record), _words(record.inputs["counter"]), _words(record.inputs["key"]), _words(record.expected["words"]),
    )  # fmt: skip


def _integers(record: Record, arrays: _Arrays) -> Sequence[str]:
    i = record.inputs
    r = [int(word, 16) for word in record.expected["r"].split()]
    return (
        _text(record), _stream(record_stream(record)), str(i["sr_bits"]), str(i["count"]),
        f"{i['row'] * i['length'] + i['first']}ull", _array(arrays, "uint32_t", r),
    )  # fmt: skip


def _signs(record: Record, arrays: _Arrays) -> Sequence[str]:
    i = record.inputs
    signs = int(record.expected["signs"], 16)
    words = [signs >> at & 0xFFFFFFFF for at in range(0, max(i["n"], 32), 32)]
    stream = _sign_stream(record_stream(record), SignPolicy(i["policy"]))
    return _text(record), _stream(stream), str(i["n"]), _array(arrays, "uint32_t", words)


def _pack(record: Record, arrays: _Arrays) -> Sequence[str]:
    made, both = record_format(record), {**record.inputs, **record.expected}
    codes = parse_digits(both["codes"], code_digits(made), None, record.id)
    packed = parse_digits(both["packed"], 2, None, record.id)
    return (
        _text(record), _format(made), str(codes.size), _array(arrays, "uint8_t", codes),
        _array(arrays, "uint8_t", packed),
    )  # fmt: skip


_TABLES: dict[RecordOp, tuple[str, Callable[[Record, _Arrays], Iterable[str]]]] = {
    RecordOp.SCALE: ("scale", _scale),
    RecordOp.QUANTIZE: ("quantize", _quantize),
    RecordOp.DEQUANTIZE: ("dequantize", _dequantize),
    RecordOp.HADAMARD: ("hadamard", _hadamard),
    RecordOp.SCALED_GEMM: ("gemm", _gemm),
    RecordOp.PHILOX: ("philox", _philox),
    RecordOp.INTEGERS: ("random", _integers),
    RecordOp.SIGNS: ("signs", _signs),
    RecordOp.PACK: ("pack", _pack),
}
"""The name of each operation's table, and what makes a row of it."""
