"""The PTX instructions of inline assembly, each with the meaning that NVIDIA's documentation of PTX gives it.

PTX ISA, sections "fma" and "mul" of half precision, "min", "max", "prmt" and "cvt". That the hardware follows this text
is an assumption of every theorem on a kernel with inline assembly. Of bfloat16 arithmetic the text says: subnormal
numbers are supported, and .rn rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable

from prove.terms import Term, apply, choose, concat, const, extract


def _halves(word: Term) -> tuple[Term, Term]:
    return extract(word, 31, 16), extract(word, 15, 0)


def _by_halves(op: str) -> Callable[..., Term]:
    def done(*words: Term) -> Term:
        high, low = zip(*map(_halves, words), strict=True)
        return concat(apply(op, *high), apply(op, *low))

    return done


def _permuted(selector: int) -> Callable[[Term, Term], Term]:
    """Return prmt.b32: nibble i of the selector names the byte of eight for byte i; 8 and more, its sign."""

    def done(a: Term, b: Term) -> Term:
        both = concat(b, a)
        out = []
        for place in range(4):
            choice = selector >> 4 * place & 0xF
            byte = extract(both, 8 * (choice & 7) + 7, 8 * (choice & 7))
            out.append(concat(*[extract(byte, 7, 7)] * 8) if choice & 8 else byte)
        return concat(*reversed(out))

    return done


def _power_above(x: Term) -> Term:
    """Return cvt.rp.satfinite.ue8m0x2.f32 of a number: the power of two at or above its magnitude, below it a zero."""
    e, m = extract(x, 30, 23), extract(x, 22, 0)
    below_normal = choose(const(1 << 22, 23).below(m), const(1, 8), const(0, 8))  # 2^22 is 2^-127
    up = choose(e.equal(0), below_normal, choose(m.equal(0), e, e + 1))
    finite = choose(up.equal(255), const(254, 8), up)
    return concat(const(0, 8), choose(const(0x7F800000, 31).below(extract(x, 30, 0)), const(255, 8), finite))


MEANING: dict[str, Callable[..., Term]] = {
    "add.rz.f32 $0, $1, $2;": lambda a, b: apply("fadd.rz", a, b),
    "cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;": _power_above,
    "max.u16x2 $0, $1, $2;": _by_halves("umax"),
    "min.u16x2 $0, $1, $2;": _by_halves("umin"),
    "fma.rn.bf16x2 $0, $1, $2, $3;": _by_halves("fma"),
    "mul.rn.bf16x2 $0, $1, $2;": _by_halves("fmul"),
    "prmt.b32 $0, $1, $2, 0x5410;": _permuted(0x5410),
    "prmt.b32 $0, $1, $2, 0x7632;": _permuted(0x7632),
    "prmt.b32 $0, $1, $2, 0xFBD9;": _permuted(0xFBD9),
}
