"""Writes the clauses as SMT-LIB 2 text, one file for each format, so that any solver can read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mxref.formats import BLOCK_FORMATS, BlockFormat
from places import ROOT
from prove import clauses
from prove.terms import Term, in_order, var

FOLDER = ROOT / "spec" / "smt"
SR_BITS = 16
_OPERATIONS = {
    "add": "bvadd", "sub": "bvsub", "mul": "bvmul", "and": "bvand", "or": "bvor", "xor": "bvxor",
    "shl": "bvshl", "lshr": "bvlshr",
}  # fmt: skip
_TRUTHS = {"eq": "=", "ult": "bvult", "ule": "bvule", "slt": "bvslt", "sle": "bvsle"}
_WIDTH = 96


def _expression(term: Term, args: Sequence[str]) -> str:
    match term.op:
        case "const":
            return f"(_ bv{term.value} {term.width})"
        case "var":
            return str(term.value)
        case "concat":
            out = args[-1]
            for arg in reversed(args[:-1]):
                out = f"(concat {arg} {out})"
            return out
        case "extract":
            return f"((_ extract {term.value[0]} {term.value[1]}) {args[0]})"
        case "ite":
            return f"(ite {_truth(args[0])} {args[1]} {args[2]})"
    if term.op in _TRUTHS:
        return _BIT.format(f"({_TRUTHS[term.op]} {' '.join(args)})")
    return f"({_OPERATIONS[term.op]} {' '.join(args)})"


_BIT = "(ite {} #b1 #b0)"


def _truth(bit: str) -> str:
    """Return the truth of a bit's text, without a detour."""
    head, tail = _BIT.split("{}")
    return (
        bit.removeprefix(head).removesuffix(tail)
        if bit.startswith(head) and bit.endswith(tail)
        else f"(= {bit} #b1)"
    )


def define(name: str, parameters: Sequence[Term], body: Term) -> str:
    """Return a function as SMT-LIB text; what occurs more than once gets a name."""
    terms = list(in_order([body]))
    uses: dict[Term, int] = {}
    for term in terms:
        for arg in term.args:
            uses[arg] = uses.get(arg, 0) + 1
    texts: dict[Term, str] = {}
    lines, closing = [], ""
    for term in terms:
        text = _expression(term, [texts[arg] for arg in term.args])
        if term is not body and term.args and (uses[term] > 1 or len(text) > _WIDTH):
            short = f"t{len(lines)}"
            lines.append(f"  (let (({short} {text}))")
            closing += ")"
            text = short
        texts[term] = text
    given = " ".join(f"({p.value} (_ BitVec {p.width}))" for p in parameters)
    head = f"(define-fun {name} ({given}) (_ BitVec {body.width})"
    return "\n".join([head, *lines, f"  {texts[body]}{closing})"]) + "\n"


def functions(made: BlockFormat) -> dict[str, tuple[str, list[Term], Term]]:
    """Return the functions of a format by name: the clauses, the parameters and the body of each."""
    element, u, y, byte = made.element, var("u", 32), var("y", 32), var("byte", 8)
    out: dict[str, tuple[str, list[Term], Term]] = {}
    for rule in ("floor", "ceil", "rceil", "even"):
        body = clauses.scale_byte(u, rule, element)
        out[f"byte.{rule}"] = (f"scale.rule.{rule}, scale.clamp, scale.zero, scale.nonfinite", [u], body)
    for rounding in ("rne", "rna", "rtz"):
        body = clauses.element_code(y, byte, element, rounding)
        told = f"rounding.scaled, rounding.{rounding}, rounding.saturate, rounding.sign, scale.nonfinite"
        out[f"code.{rounding}"] = (told, [y, byte], body)
    v = clauses.scaled(y, byte, element, SR_BITS)
    r = var("r", SR_BITS)
    code = clauses.stochastic(v, clauses.widen(r, v.width), SR_BITS, element)
    told = f"rounding.sr with R = {SR_BITS}, rounding.saturate, rounding.sign"
    out["code.sr"] = (told, [y, byte, r], clauses.signed(code, y, element))
    code = var("code", element.bits)
    out["value"] = (
        "dequantize.value, dequantize.overflow, dequantize.nan", [code, byte], clauses.decoded(code, byte, element)
    )  # fmt: skip
    return out


def text_of(made: BlockFormat) -> str:
    """Return the file of a format."""
    lines = [
        f"; {made.name}: the clauses of the specification as SMT-LIB 2.6, logic QF_BV. Written by `make clauses`.",
        "; u: the bits of a block's amax. y: those of an element, a float32. byte: the shared scale.",
        "; r: the random integer of SR.",
        "",
    ]
    for name, (told, parameters, body) in functions(made).items():
        lines += [f"; {told}", define(f"{made.name}.{name}", parameters, body)]
    return "\n".join(lines)


def e8m0_text() -> str:
    """Return the file of the casts to E8M0."""
    x = var("x", 32)
    lines = ["; formats.e8m0.cast, as SMT-LIB 2.6, logic QF_BV. Written by `make clauses`.", ""]
    for name, nearest in (("down", False), ("nearest", True)):
        lines.append(define(f"e8m0.{name}", [x], clauses.e8m0_cast(x, nearest)))
    return "\n".join(lines)


def files() -> dict[str, str]:
    """Return every file's text by its name: formats whose scale is a power of two, and the casts."""
    out = {f"{name}.smt2": text_of(made) for name, made in BLOCK_FORMATS.items() if made.scale.powers}
    return out | {"e8m0.smt2": e8m0_text()}


def write_clauses(folder: Path = FOLDER) -> None:
    """Write the files."""
    folder.mkdir(exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
