"""What the operations in kernels of others mean, beside those of `ttir`; `floats` has those on bits of floats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from prove import floats
from prove.terms import Term, apply, extract, widen_signed
from prove.ttir import POINTWISE, WITH_MORE, Kind, Line, UnknownOperation


def _shift_right_signed(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    a, by = args[0], args[1].constant
    if by is None or by >= kind.bits:
        raise UnknownOperation(f"not a shift by a constant below {kind.bits}: {line.text}")
    return widen_signed(extract(a, kind.bits - 1, by), kind.bits)


def _zeros_below(a: Term) -> int:
    """Return a number of zeros that the lowest bits of a term have, for all values of its variables."""
    match a.op:
        case "const":
            return (a.value & -a.value).bit_length() - 1 if a.value else a.width
        case "concat" if a.args[-1].constant == 0:
            return a.args[-1].width
        case "add" | "sub":
            return min(map(_zeros_below, a.args))
    return 0


def _divide(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    """Return a signed quotient by a power of two, toward zero."""
    a, by = args[0], args[1].constant
    if not (by and by & (by - 1) == 0 and by < 1 << (kind.bits - 1)):
        raise UnknownOperation(f"not a quotient by a power of two: {line.text}")
    places = by.bit_length() - 1
    if _zeros_below(a) >= places:  # no remainder
        return widen_signed(extract(a, kind.bits - 1, places), kind.bits)
    above = widen_signed(extract(a, kind.bits - 1, kind.bits - 1), kind.bits) & (by - 1)
    return widen_signed(extract(a + above, kind.bits - 1, places), kind.bits)


def signed_whole(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    """Return fptoui as AMD's machine code makes it, of the signed conversion."""
    return extract(Term("ftoi", 32, (args[0],)), kind.bits - 1, 0)


def _log2(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    """Return log2 of a power of two, of 0 or of infinity, the only numbers for which it has a meaning here."""
    a = args[0]
    if extract(a, 22, 0).constant != 0:
        raise UnknownOperation(f"log2 is not of a power of two: {line.text}")
    return floats.log2_of_power(a)


def _floor(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    if not floats.is_whole(args[0]):
        raise UnknownOperation(f"floor is not of a whole number: {line.text}")
    return args[0]


def _to_float8(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    if "rounding = rtne" not in line.text or line.kinds[0].element != "f32":
        raise UnknownOperation(line.text)
    return floats.to_float8(args[0], kind.element)


def _widened(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    match line.kinds[0].element, kind.element:
        case "bf16", "f32":
            return floats.widened(args[0])
        case "f16", "f32":
            return Term("half", 32, (args[0],))
    raise UnknownOperation(line.text)


def _narrowed(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    if [k.element for k in line.kinds] != ["f32", "bf16"]:
        raise UnknownOperation(line.text)
    return floats.narrowed(args[0])


def _compared(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    found = re.search(r"arith\.cmpf ([ou](?:eq|lt|le|gt|ge|ne)), %\w+, %\w+ :", line.text)
    if found is None or line.kinds[0].element == "f16":
        raise UnknownOperation(line.text)
    return floats.compared(found[1], *args)


def _from_whole(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    if kind.element not in ("f32", "bf16"):  # 16 bits of a term are those of bfloat16
        raise UnknownOperation(line.text)
    return Term("itof", kind.bits, (args[0],))


def _clamped(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    if ", propagateNan = none :" not in line.text:
        raise UnknownOperation(line.text)
    return floats.clamped(*args)


_ADDED: dict[str, Callable[[Line, Sequence[Term], Kind], Term]] = {
    "arith.shrsi": _shift_right_signed,
    "arith.divsi": _divide,
    "arith.extf": _widened,
    "arith.truncf": _narrowed,
    "arith.cmpf": _compared,
    "arith.divf": lambda line, args, kind: apply("fdiv", *args),
    "arith.sitofp": _from_whole,
    "arith.fptoui": lambda line, args, kind: Term("ftou", kind.bits, (args[0],)),
    "math.log2": _log2,
    "math.floor": _floor,
    "math.exp2": lambda line, args, kind: floats.exp2_of_whole(args[0]),
    "tt.clampf": _clamped,
    "tt.fp_to_fp": _to_float8,
}
ON_FLOAT32 = {
    "arith.addf", "arith.subf", "arith.mulf", "arith.divf", "math.fma", "arith.maximumf", "arith.fptosi",
    "arith.fptoui", "tt.clampf", "math.log2", "math.floor", "math.exp2",
}  # fmt: skip
MEANINGS = {**POINTWISE, **_ADDED}
SAYING_MORE = {*WITH_MORE, "tt.reduce", "arith.cmpf", "tt.clampf", "tt.fp_to_fp"}
