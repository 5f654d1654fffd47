"""Terms of bits, of which kernels and clauses are made: folded when they are built, evaluated by NumPy.

A truth is one bit, and a float is its bits. Equal terms are one object, so `is` compares what they say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, np.dtype[np.uint64]]

FLOATS = {32: (8, 24), 16: (8, 8)}
"""Exponent and significand bits of the floats on which kernels compute, by width: float32 and bfloat16."""


class Term:
    """An operation on terms; `value` is its constant, name, or first and last bit."""

    __slots__ = ("args", "op", "value", "width")
    _known: ClassVar[dict[Any, Term]] = {}

    op: str
    width: int
    args: tuple[Term, ...]
    value: Any

    def __new__(cls, op: str, width: int, args: tuple[Term, ...] = (), value: Any = None) -> Term:
        key = (op, width, tuple(map(id, args)), value)
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = super().__new__(cls)
            found.op, found.width, found.args, found.value = op, width, args, value
        return found

    @property
    def constant(self) -> int | None:
        """The value of a constant, else None."""
        return self.value if self.op == "const" else None

    def _other(self, other: Term | int) -> Term:
        return const(other, self.width) if isinstance(other, int) else other

    def __add__(self, other: Term | int) -> Term:
        return apply("add", self, self._other(other))

    def __sub__(self, other: Term | int) -> Term:
        return apply("sub", self, self._other(other))

    def __mul__(self, other: Term | int) -> Term:
        return apply("mul", self, self._other(other))

    def __and__(self, other: Term | int) -> Term:
        return apply("and", self, self._other(other))

    def __or__(self, other: Term | int) -> Term:
        return apply("or", self, self._other(other))

    def __xor__(self, other: Term | int) -> Term:
        return apply("xor", self, self._other(other))

    def __lshift__(self, other: Term | int) -> Term:
        return apply("shl", self, self._other(other))

    def __rshift__(self, other: Term | int) -> Term:
        return apply("lshr", self, self._other(other))

    def __invert__(self) -> Term:
        return self ^ ((1 << self.width) - 1)

    def equal(self, other: Term | int) -> Term:
        return apply("eq", self, self._other(other))

    def below(self, other: Term | int) -> Term:
        return apply("ult", self, self._other(other))

    def upto(self, other: Term | int) -> Term:
        return apply("ule", self, self._other(other))

    def signed_below(self, other: Term | int) -> Term:
        return apply("slt", self, self._other(other))


def const(value: int, width: int) -> Term:
    """Return a constant, its value taken modulo 2^width."""
    return Term("const", width, (), value & ((1 << width) - 1))


def var(name: str, width: int) -> Term:
    """Return a free variable."""
    return Term("var", width, (), name)


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value


_FOLDED = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul": lambda a, b, w: a * b,
    "and": lambda a, b, w: a & b,
    "or": lambda a, b, w: a | b,
    "xor": lambda a, b, w: a ^ b,
    "shl": lambda a, b, w: a << b if b < w else 0,
    "lshr": lambda a, b, w: a >> b if b < w else 0,
    "eq": lambda a, b, w: int(a == b),
    "ult": lambda a, b, w: int(a < b),
    "ule": lambda a, b, w: int(a <= b),
    "slt": lambda a, b, w: int(_signed(a, w) < _signed(b, w)),
    "sle": lambda a, b, w: int(_signed(a, w) <= _signed(b, w)),
    "umin": lambda a, b, w: min(a, b),
    "umax": lambda a, b, w: max(a, b),
    "smin": lambda a, b, w: min(_signed(a, w), _signed(b, w)),
    "smax": lambda a, b, w: max(_signed(a, w), _signed(b, w)),
}
_TRUTHS = {"eq", "ult", "ule", "slt", "sle"}
_RUNS = 4
"""A mask of at most so many runs of equal bits becomes pieces of the other term."""


def apply(op: str, *args: Term) -> Term:
    """Return an operation of two terms of one width; float operations too, of two or three."""
    width = args[0].width
    if any(arg.width != width for arg in args):
        raise ValueError(f"{op} of terms of {', '.join(str(arg.width) for arg in args)} bits")
    if op in _FOLDED:
        a, b = (arg.constant for arg in args)
        out = 1 if op in _TRUTHS else width
        if a is not None and b is not None:
            return const(_FOLDED[op](a, b, width), out)
        if op in ("and", "or", "xor", "add", "mul") and b is None and a is not None:
            args, a, b = (args[1], args[0]), b, a
        if b is not None:
            simpler = _with_constant(op, args[0], b)
            if simpler is not None:
                return simpler
        return Term(op, out, args)
    return Term(op, width, args)


def _with_constant(op: str, a: Term, b: int) -> Term | None:
    width = a.width
    if b == 0 and op in ("add", "sub", "or", "xor", "shl", "lshr"):
        return a
    if b == 0 and op in ("and", "mul"):
        return const(0, width)
    if b == 1 and op == "mul":
        return a
    if op == "shl" and b < width:
        return concat(extract(a, width - 1 - b, 0), const(0, b))
    if op == "lshr" and b < width:
        return concat(const(0, b), extract(a, width - 1, b))
    if op == "and":
        pieces = []
        top = width - 1
        for bit in range(width - 1, -1, -1):
            if bit == 0 or (b >> bit & 1) != (b >> (bit - 1) & 1):
                pieces.append((top, bit))
                top = bit - 1
        if len(pieces) <= _RUNS:
            kept = (extract(a, hi, lo) if b >> lo & 1 else const(0, hi - lo + 1) for hi, lo in pieces)
            return concat(*kept)
    return None


def concat(*parts: Term) -> Term:
    """Return terms one after the other, the highest bits first."""
    out: list[Term] = []
    for part in (inner for p in parts for inner in (p.args if p.op == "concat" else (p,))):
        last = out[-1] if out else None
        if last is not None and last.op == part.op == "const":
            out[-1] = const(last.value << part.width | part.value, last.width + part.width)
        elif (
            last is not None
            and last.op == part.op == "extract"
            and last.args == part.args
            and last.value[1] == part.value[0] + 1
        ):
            out[-1] = extract(part.args[0], last.value[0], part.value[1])
        elif part.width:
            out.append(part)
    return out[0] if len(out) == 1 else Term("concat", sum(p.width for p in out), tuple(out))


def extract(a: Term, hi: int, lo: int) -> Term:
    """Return bits hi to lo of a term."""
    if hi < lo:
        return const(0, 0)
    if (hi, lo) == (a.width - 1, 0):
        return a
    if a.op == "const":
        return const(a.value >> lo, hi - lo + 1)
    if a.op == "extract":
        return extract(a.args[0], hi + a.value[1], lo + a.value[1])
    if a.op == "concat":
        parts, top = [], a.width
        for part in a.args:
            top -= part.width
            if lo < top + part.width and hi >= top:
                parts.append(extract(part, min(hi - top, part.width - 1), max(lo - top, 0)))
        return concat(*parts)
    if a.op in ("and", "or", "xor") and all(arg.op == "concat" for arg in a.args):
        return apply(a.op, *(extract(arg, hi, lo) for arg in a.args))
    return Term("extract", hi - lo + 1, (a,), (hi, lo))


def widen(a: Term, width: int) -> Term:
    """Return a term with zeros above."""
    return concat(const(0, width - a.width), a)


def widen_signed(a: Term, width: int) -> Term:
    """Return a term with copies of its sign above."""
    if a.width == width:
        return a
    if a.constant is not None or (a.op == "concat" and a.args[0].constant == 0):
        return const(_signed(a.value, a.width), width) if a.constant is not None else widen(a, width)
    return Term("sext", width, (a,))


def choose(condition: Term, a: Term, b: Term) -> Term:
    """Return `a` where a truth holds, else `b`."""
    if condition.constant is not None:
        return a if condition.constant else b
    return a if a is b else Term("ite", a.width, (condition, a, b))


def every(truths: Sequence[Term]) -> Term:
    """Return whether all truths hold."""
    out = const(1, 1)
    for truth in truths:
        out = truth if out.constant == 1 else out & truth
    return out


def in_order(roots: Sequence[Term]) -> Iterator[Term]:
    """Yield every term that occurs, each once, after its arguments."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        term, ready = stack.pop()
        if ready:
            yield term
        elif id(term) not in seen:
            seen.add(id(term))
            stack.append((term, True))
            stack.extend((arg, False) for arg in reversed(term.args))


def variables(*roots: Term) -> list[Term]:
    """Return the variables in terms, in the order in which they occur."""
    return [term for term in in_order(roots) if term.op == "var"]


def digest_of(*roots: Term) -> str:
    """Return the SHA-256 of the structure of terms."""
    numbers: dict[int, int] = {}
    hashed = hashlib.sha256()
    for number, term in enumerate(in_order(roots)):
        numbers[id(term)] = number
        args = [numbers[id(arg)] for arg in term.args]
        hashed.update(f"{term.op} {term.width} {args} {term.value}\n".encode())
    hashed.update(str([numbers[id(root)] for root in roots]).encode())
    return hashed.hexdigest()


def substitute(roots: Sequence[Term], by: Mapping[Term, Term]) -> list[Term]:
    """Return terms in which others stand for some terms."""
    made: dict[int, Term] = {id(old): new for old, new in by.items()}
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        term, ready = stack.pop()
        if id(term) in made:
            continue
        if not ready:
            stack.append((term, True))
            stack.extend((arg, False) for arg in term.args)
        else:
            made[id(term)] = _rebuilt(term, tuple(made[id(arg)] for arg in term.args))
    return [made[id(root)] for root in roots]


def _rebuilt(term: Term, args: tuple[Term, ...]) -> Term:
    if all(a is b for a, b in zip(args, term.args, strict=True)):
        return term
    match term.op:
        case "concat":
            return concat(*args)
        case "extract":
            return extract(args[0], *term.value)
        case "ite":
            return choose(*args)
        case "sext":
            return widen_signed(args[0], term.width)
        case "half" | "ftoi" | "ftou" | "itof":
            return Term(term.op, term.width, args)
        case _:
            return apply(term.op, *args)


def evaluate(roots: Sequence[Term], values: Mapping[str, Any]) -> list[Array]:
    """Return the values of terms, uint64, from those of their variables, by name."""
    done: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for term in in_order(roots):
            args = [done[id(arg)] for arg in term.args]
            if max(term.width, *(arg.width for arg in term.args), 0) > 64:
                done[id(term)] = _wide_value(term, args)
            else:
                done[id(term)] = _value(term, args, values) & np.uint64((1 << term.width) - 1)
    return [done[id(root)] for root in roots]


def _wide_value(term: Term, args: list[Any]) -> Any:
    """Return a value of more than 64 bits, or of such, as Python's integers."""

    def one(*numbers: int) -> int:
        match term.op:
            case "const":
                return int(term.value)
            case "concat":
                out = 0
                for number, arg in zip(numbers, term.args, strict=True):
                    out = out << arg.width | number
                return out
            case "extract":
                return numbers[0] >> term.value[1] & ((1 << term.width) - 1)
            case "ite":
                return numbers[1] if numbers[0] else numbers[2]
        return _FOLDED[term.op](*numbers, term.args[0].width) & ((1 << term.width) - 1)

    if not args:
        return np.array(one(), dtype=object)
    made = np.frompyfunc(one, len(args), 1)(*(np.asarray(arg).astype(object) for arg in args))
    return np.asarray(made, dtype=object if term.width > 64 else np.uint64)


def _value(term: Term, args: list[Any], values: Mapping[str, Any]) -> Any:
    widths = [arg.width for arg in term.args]
    match term.op, args:
        case "const", _:
            return np.uint64(term.value)
        case "var", _:
            return np.asarray(values[term.value]).astype(np.uint64)
        case "concat", _:
            out = np.uint64(0)
            for part, width in zip(args, widths, strict=True):
                out = (out << np.uint64(width) if width < 64 else 0) | part
            return out
        case "extract", [a]:
            return a >> np.uint64(term.value[1])
        case "sext", [a]:
            return _as_signed(a, widths[0]).astype(np.uint64)
        case "ite", [condition, a, b]:
            return np.where(condition != 0, a, b)
        case (("add" | "sub" | "mul" | "and" | "or" | "xor"), [a, b]):
            return _NUMPY[term.op](a, b)
        case (("shl" | "lshr"), [a, b]):
            shifted = (np.left_shift if term.op == "shl" else np.right_shift)(a, np.minimum(b, np.uint64(63)))
            return np.where(b < widths[0], shifted, np.uint64(0))
        case (("eq" | "ult" | "ule" | "umin" | "umax"), [a, b]):
            return _NUMPY[term.op](a, b).astype(np.uint64)
        case (("slt" | "sle" | "smin" | "smax"), [a, b]):
            a, b = _as_signed(a, widths[0]), _as_signed(b, widths[0])
            return np.asarray(_NUMPY[term.op](a, b)).astype(np.int64).astype(np.uint64)
        case (("ftoi" | "ftou"), [a]):
            number = np.nan_to_num(np.asarray(a).astype(np.uint32).view(np.float32))
            low, high = (-(2.0**31), 2.0**31 - 128) if term.op == "ftoi" else (0, (1 << term.width) - 1)
            return np.trunc(np.clip(number, low, high)).astype(np.int64).astype(np.uint64)
        case "itof", [a]:
            return _float_bits(_as_signed(a, widths[0]).astype(np.float64), term.width)
        case (("fadd" | "fadd.rz" | "fsub" | "fmul" | "fdiv" | "fma" | "fmaximum"), _):
            return _float_value(term.op, args, widths[0])
        case "half", [a]:
            single = a.astype(np.uint16).view(np.float16).astype(np.float32)
            return single.view(np.uint32).astype(np.uint64)
    raise ValueError(f"no value of {term.op}")


_NUMPY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "eq": np.equal, "ult": np.less, "ule": np.less_equal, "umin": np.minimum, "umax": np.maximum,
    "slt": np.less, "sle": np.less_equal, "smin": np.minimum, "smax": np.maximum,
}  # fmt: skip


def _as_signed(a: Any, width: int) -> Any:
    up = np.uint64(64 - width)
    return (np.asarray(a) << up).view(np.int64) >> np.int64(up)


def _float_value(op: str, args: list[Any], width: int) -> Any:
    bits = [(np.asarray(a) << np.uint64(32 - width)).astype(np.uint32) for a in args]
    numbers = [each.view(np.float32) for each in bits]
    if op == "fmaximum":  # -0 is below +0, which NumPy's own maximum does not know
        first, second = (np.where(each >> 31 != 0, ~each, each | np.uint32(1 << 31)) for each in bits)
        larger = np.where(first < second, bits[1], bits[0]).astype(np.uint64)
        is_nan = np.isnan(numbers[0]) | np.isnan(numbers[1])
        return np.where(is_nan, np.uint64(0x7FC00000), larger) >> np.uint64(32 - width)
    wide = [number.astype(np.float64) for number in numbers]
    if op == "fdiv":  # 53 bits are enough for a second rounding to 24 to change nothing
        return (wide[0] / wide[1]).astype(np.float32).view(np.uint32).astype(np.uint64)
    if op in ("fmul", "fma"):
        exact, rest = wide[0] * wide[1], np.zeros_like(wide[0])  # 48 bits at most
        if op == "fma":
            exact, rest = _sum(exact, wide[2])
    else:
        exact, rest = _sum(wide[0], wide[1] if op.startswith("fadd") else -wide[1])
    # A value that keeps a sticky last bit is rounded once more without error.
    odd = _odd(exact, rest, np.uint64)
    if op == "fadd.rz":
        single = odd.astype(np.float32)
        beyond = np.abs(single) > np.abs(odd)
        single = np.where(beyond, np.nextafter(single, np.float32(0)), single)
        return single.view(np.uint32).astype(np.uint64)
    return _float_bits(odd, width)


def _float_bits(odd: Any, width: int) -> Any:
    """Return float64 numbers, whose last bit is sticky, as the bits of float32 or bfloat16; NaN as GPUs make it."""
    single = np.where(np.isnan(odd), np.uint32(0x7FC00000).view(np.float32), odd.astype(np.float32))
    if width == 32:
        return single.view(np.uint32).astype(np.uint64)
    kept = _odd(single, odd - single, np.uint32).view(np.uint32).astype(np.uint64)
    return (kept + np.uint64(0x7FFF) + ((kept >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)


def _sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the float64 sum, and exactly what it lacks."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _odd(value: Any, rest: Any, word: Any) -> Any:
    """Return a value, its last bit set if `rest` was lost."""
    even = (np.asarray(value).view(word) & word(1)) == 0
    return np.where((rest != 0) & even & np.isfinite(rest), _toward(value, rest), value)


def _toward(value: Any, rest: Any) -> Any:
    return np.nextafter(value, (np.sign(rest) * np.inf).astype(value.dtype))
