"""The results of golden vectors, from the scalar oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import oracle
import oracle.plan
import oracle.random
from differential import oracle_quantize_tensor
from mxref.formats import BlockFormat
from mxref.vectors import Record, RecordOp
from mxref.vectors.data import (
    code_digits,
    digest,
    digits_text,
    float_words,
    parse_digits,
    parse_words,
    record_format,
    record_operand,
    record_stream,
    record_tensor,
    words_text,
)


def answer(record: Record) -> dict[str, str]:
    """Return the results of a record under the keys that it must have."""
    result = _ANSWERS[record.op](record)
    if record.op in (RecordOp.HADAMARD, RecordOp.SCALED_GEMM) and {"x_seed", "operand_seed"} & set(
        record.inputs
    ):
        return {f"{k}_sha256": digest(parse_words(v, None, record.id)) for k, v in result.items()}
    return result


def _scale(record: Record) -> dict[str, str]:
    amax = parse_words(record.inputs["amax"], None, record.id).tolist()
    rule, made = record.inputs["rule"], record_format(record)
    element, scale = _element(made), _scale_format(made)
    if made.scale.powers:
        return {"scales": digits_text([oracle.shared_scale(a, rule, element) for a in amax], 2)}
    if not made.tensor_scale:
        return {"scales": digits_text([oracle.nearest_scale(a, element, scale) for a in amax], 2)}
    given = _word(record, "tensor_amax")
    tensor = oracle.tensor_scale(oracle.tensor_amax(amax) if given is None else given, element, scale)
    scales = [oracle.nearest_scale(a, element, scale, tensor) for a in amax]
    return {"scales": digits_text(scales, 2), "tensor_scale": words_text([tensor])}


def _quantize(record: Record) -> dict[str, str]:
    i, spec, stream = record.inputs, record.spec, record_stream(record)
    where = {name: tuple(i[name]) for name in ("origin", "global_shape") if name in i}
    codes, scales, tensor = oracle_quantize_tensor(
        record_tensor(record), spec, stream, axis=i.get("axis", -1), pad=i.get("pad", False),
        amax=_word(record, "tensor_amax"), **where,
    )  # fmt: skip
    made = record_format(record)
    if spec.nonfinite.value == "raise" and (scales == _scale_format(made).nan).any():
        return {"error": "nonfinite"}
    above = {} if tensor is None else {"tensor_scale": words_text([tensor])}
    if "x_seed" in i:
        packed = np.frombuffer(_packed(codes.reshape(-1).tolist(), made.element.bits), np.uint8)
        return {"scales_sha256": digest(scales), "codes_sha256": digest(packed), **above}
    return {"scales": digits_text(scales, 2), "codes": digits_text(codes, code_digits(made)), **above}


def _dequantize(record: Record) -> dict[str, str]:
    i, made = record.inputs, record_format(record)
    how = {
        "element": _element(made),
        "scale": _scale_format(made),
        "tensor": _word(record, "tensor_scale"),
    }
    scales = parse_digits(i["scales"], 2, None, record.id).tolist()
    codes = parse_digits(i["codes"], code_digits(made), None, record.id).tolist()
    value = oracle.dequantize_f32 if i["out"] == "float32" else oracle.dequantize_bf16
    left = 0 if i["out"] == "float32" else 16
    bits = [value(scales[at // made.k], code, **how) << left for at, code in enumerate(codes)]
    shape = i.get("shape", [len(scales), made.k])
    axis = i.get("axis", len(shape) - 1)
    rows = [*shape[:axis], *shape[axis + 1 :]]
    stored = np.array(bits, np.uint32).reshape(*rows, -1)[..., : shape[axis]]
    return {"y": words_text(np.moveaxis(stored, -1, axis))}


def _hadamard(record: Record) -> dict[str, str]:
    i, x = record.inputs, record_tensor(record).astype(np.float32)
    n, axis = i["n"], i.get("axis", -1)
    signs = [-1 if int(i["signs"], 16) >> at & 1 else 1 for at in range(n)]
    moved = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    bits = moved.view(np.uint32).reshape(-1).tolist()
    groups = (oracle.random.hadamard(bits[at : at + n], signs) for at in range(0, len(bits), n))
    y = np.array([b for group in groups for b in group], np.uint32).reshape(moved.shape)
    return {"y": words_text(float_words(np.moveaxis(y.view(np.float32), -1, axis)))}


def _scaled_gemm(record: Record) -> dict[str, str]:
    i = record.inputs
    operands = [record_operand(record, name) for name in "ab"]
    a, b = map(_rows, operands)
    given = [_word(record, f"{name}_tensor_scale") for name in "ab"]
    how = {
        "prescaled": tuple(bool(q.prescale) for q in operands),
        "elements": tuple(_element(q.format) for q in operands),
        "scales": tuple(_scale_format(q.format) for q in operands),
        "tensor_scales": tuple(oracle.ONE if t is None else t for t in given),
    }
    bits = [_sum(i["profile"], i["out"], row, column, how) for row in a for column in b]
    return {"c": words_text(bits)}


def _sum(profile: str, out: str, row: Any, column: Any, how: dict[str, Any]) -> int:
    left = 16 if out == "bfloat16" else 0
    if profile == "ordered":
        bits: int = oracle.gemm_ordered(row, column, **how)
        return oracle.f32_bits_to_bf16_bits(bits) << left if left else bits
    exact: int = oracle.gemm_exact(row, column, out, **how)
    return exact << left


def _element(made: BlockFormat) -> Any:
    """Return the oracle's own description of a format's element."""
    return oracle.ELEMENTS[made.element.name]


def _scale_format(made: BlockFormat) -> Any:
    """Return the oracle's own description of a format's scales."""
    return oracle.SCALES[made.scale.name]


def _word(record: Record, name: str) -> int | None:
    """Return an input that is one word, None where the record has none."""
    return int(record.inputs[name], 16) if name in record.inputs else None


def _rows(operand: Any) -> list[list[tuple[int, list[int]]]]:
    """Return the rows of an operand as blocks: a scale byte and its element codes."""
    rows, k = [], operand.format.k
    for packed, scales in zip(operand.codes.tolist(), operand.scales.tolist(), strict=True):
        codes = _unpacked(bytes(packed), operand.format.element.bits)
        rows.append([(byte, codes[k * at : k * at + k]) for at, byte in enumerate(scales)])
    return rows


def _philox(record: Record) -> dict[str, str]:
    counter, key = (parse_words(record.inputs[name], None, record.id).tolist() for name in ("counter", "key"))
    return {"words": words_text(oracle.random.philox4x32_10(counter, key))}


def _integers(record: Record) -> dict[str, str]:
    i = record.inputs
    first = i["row"] * i["length"] + i["first"]
    where = (int(i["seed"], 16), i["step"], i["layer"], i["operand"])
    r = [oracle.random.sr_integer(*where, first + at, i["sr_bits"]) for at in range(i["count"])]
    return {"r": words_text(r)}


def _signs(record: Record) -> dict[str, str]:
    i = record.inputs
    sign_id = oracle.plan.sign_id(i["operand"])
    signs = oracle.random.sign_vector(i["n"], int(i["seed"], 16), i["step"], i["layer"], sign_id, i["policy"])
    bits = sum(1 << at for at, d in enumerate(signs) if d < 0)
    return {"signs": f"{bits:0{max(1, i['n'] // 4)}x}"}


def _pack(record: Record) -> dict[str, str]:
    made = record_format(record)
    codes = parse_digits(record.inputs["codes"], code_digits(made), None, record.id).tolist()
    return {"packed": _packed(codes, made.element.bits).hex()}


def _unpack(record: Record) -> dict[str, str]:
    made = record_format(record)
    codes = _unpacked(bytes.fromhex(record.inputs["packed"]), made.element.bits)
    return {"codes": digits_text(codes, code_digits(made))}


def _packed(codes: list[int], bits: int) -> bytes:
    """Return codes as little-endian numbers of eight codes, the first code in the lowest bits."""
    groups = [codes[at : at + 8] for at in range(0, len(codes), 8)]
    numbers = [sum(code << bits * at for at, code in enumerate(group)) for group in groups]
    return b"".join(
        number.to_bytes(len(group) * bits // 8, "little")
        for number, group in zip(numbers, groups, strict=True)
    )


def _unpacked(packed: bytes, bits: int) -> list[int]:
    """Return the codes of such bytes; eight codes take `bits` bytes."""
    codes = []
    for at in range(0, len(packed), bits):
        group = packed[at : at + bits]
        number = int.from_bytes(group, "little")
        codes += [number >> bits * i & (1 << bits) - 1 for i in range(len(group) * 8 // bits)]
    return codes


def _exchange(record: Record) -> dict[str, str]:
    codes = [int(digit, 16) for digit in _unpack(record)["codes"]]
    elements = [oracle.dequantize_f32(127, code) for code in codes]  # byte 127 is a scale of 1
    values = map(oracle.scale_value, parse_digits(record.inputs["scales"], 2, None, record.id).tolist())
    factors = [oracle.NAN32 if v is None else oracle.round_f32(v) for v in values]
    return {"elements": words_text(elements), "factors": words_text(factors)}


_ANSWERS: dict[RecordOp, Callable[[Record], dict[str, str]]] = {
    RecordOp.SCALE: _scale,
    RecordOp.QUANTIZE: _quantize,
    RecordOp.DEQUANTIZE: _dequantize,
    RecordOp.HADAMARD: _hadamard,
    RecordOp.SCALED_GEMM: _scaled_gemm,
    RecordOp.PHILOX: _philox,
    RecordOp.INTEGERS: _integers,
    RecordOp.SIGNS: _signs,
    RecordOp.PACK: _pack,
    RecordOp.UNPACK: _unpack,
    RecordOp.EXCHANGE: _exchange,
}
