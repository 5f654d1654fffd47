"""The clauses as terms give what the scalar oracle gives, on the golden vectors, at every turn, and at random."""

from __future__ import annotations

import numpy as np
import pytest

import oracle
from mxref.formats import BLOCK_FORMATS
from mxref.vectors import load_vectors
from prove import clauses, smtlib
from prove.kernels import RULES
from prove.terms import const, evaluate, var

MADE = [made for made in BLOCK_FORMATS.values() if made.scale.powers]
FORMATS = pytest.mark.parametrize("made", MADE, ids=lambda made: made.name)
U, Y, BYTE, R = var("u", 32), var("y", 32), var("byte", 8), var("r", 16)


def element_of(made):
    return oracle.ELEMENTS[made.element.name]


def turns():
    """Bits of magnitudes around every exponent and every threshold of a rule."""
    fields = np.arange(256)[:, None] << 23
    mantissas = np.array([0, 1 << 22, 3 << 21, 7 << 20, 15 << 19, 0x7E0000, 0x7F0000, 0x7FFFFF])[None, :]
    around = (fields + mantissas).ravel()[:, None] + np.arange(-1, 2)
    return np.unique(around[(around >= 0) & (around < 1 << 31)])


def rule_faults(made, rule, byte):
    """How many bytes of a term differ from the oracle's."""
    u = turns()
    (found,) = evaluate([byte], {"u": u})
    element = element_of(made)
    right = [
        255 if x >= oracle.INF32 else 0 if not x else oracle.shared_scale(x, rule, element)
        for x in map(int, u)
    ]
    return int((found != np.array(right)).sum())


@pytest.mark.clause(
    "scale.rule.floor", "scale.rule.ceil", "scale.rule.rceil", "scale.rule.even", "scale.clamp"
)
@FORMATS
@pytest.mark.parametrize("rule", RULES)
def test_bytes_are_the_oracles(made, rule):
    assert rule_faults(made, rule, clauses.scale_byte(U, rule, made.element)) == 0


def test_a_wrong_threshold_is_seen(monkeypatch):
    made = BLOCK_FORMATS["mxfp4"]
    right = clauses.goes_up
    monkeypatch.setattr(clauses, "goes_up", lambda u, rule, element: right(u + 1, rule, element))
    for rule in ("ceil", "rceil", "even"):
        assert rule_faults(made, rule, clauses.scale_byte(U, rule, made.element))


def pairs(made, seed=1):
    """Elements and bytes: ties, points and their neighbours under some scales, and any bits."""
    random = np.random.default_rng(seed)
    element = element_of(made)
    points = np.array([float(x) for x in element.grid])
    near = np.concatenate([points, (points[1:] + points[:-1]) / 2, [2 * points[-1]]])
    bytes_ = np.array([0, 1, 2, 3, 60, 126, 127, 128, 200, 238, 245, 252, 253, 254])
    with np.errstate(over="ignore", under="ignore"):
        values = (near[:, None] * 2.0 ** (bytes_[None, :] - 127.0)).astype(np.float32)
    bits = values.view(np.uint32).astype(np.int64)[:, :, None] + np.arange(-1, 2)
    byte = np.broadcast_to(bytes_[None, :, None], bits.shape).ravel()
    bits = np.clip(bits.ravel(), 0, 0x7F7FFFFF) | random.integers(0, 2, byte.size) << 31
    any_bits = random.integers(0, 1 << 32, 500) & ~(1 << 30)
    any_bytes = np.clip((any_bits >> 23 & 255) - random.integers(-4, 20, 500), 0, 254)
    return np.concatenate([bits, any_bits]), np.concatenate([byte, any_bytes])


def element_faults(made, rounding, code, R=16):
    bits, byte = pairs(made)
    if rounding == "sr":  # terms of more than 64 bits are slow to evaluate
        bits, byte = bits[::7], byte[::7]
    drawn = np.random.default_rng(2).integers(0, 1 << R, bits.size)
    (found,) = evaluate([code], {"y": bits, "byte": byte, "r": drawn})
    element = element_of(made)
    right = []
    for x, b, one in zip(map(int, bits), map(int, byte), map(int, drawn), strict=True):
        v = oracle.f32_value(x & 0x7FFFFFFF) / oracle.scale_value(b)
        magnitude = oracle.round_element(v, rounding, one if rounding == "sr" else None, R, element)
        right.append(element.code(magnitude, x >= 1 << 31))
    return int((found != np.array(right)).sum())


@pytest.mark.clause(
    "rounding.scaled", "rounding.rne", "rounding.rna", "rounding.rtz", "rounding.saturate", "rounding.sign"
)
@FORMATS
@pytest.mark.parametrize("rounding", ["rne", "rna", "rtz"])
def test_codes_are_the_oracles(made, rounding):
    assert element_faults(made, rounding, clauses.element_code(Y, BYTE, made.element, rounding)) == 0


@pytest.mark.clause("rounding.sr")
@FORMATS
def test_stochastic_codes_are_the_oracles(made):
    assert element_faults(made, "sr", smtlib.functions(made)["code.sr"][2]) == 0


def test_a_wrong_tie_and_a_lost_bit_are_seen(monkeypatch):
    made = BLOCK_FORMATS["mxfp8_e4m3"]
    assert element_faults(made, "rne", clauses.element_code(Y, BYTE, made.element, "rna"))
    scaled = clauses.scaled
    monkeypatch.setattr(clauses, "scaled", lambda *args: scaled(*args) & ~1)  # without the sticky bit
    assert element_faults(made, "rne", clauses.element_code(Y, BYTE, made.element))


@pytest.mark.clause("dequantize.value", "dequantize.overflow", "dequantize.nan", "formats.element")
@FORMATS
def test_values_are_the_oracles(made):
    element, code = element_of(made), var("code", made.element.bits)
    codes = np.arange(1 << made.element.bits)
    bytes_ = np.array([0, 1, 2, 17, 127, 200, 238, 239, 246, 251, 252, 253, 254, 255])
    all_codes, all_bytes = (x.ravel() for x in np.meshgrid(codes, bytes_))
    (found,) = evaluate([clauses.decoded(code, BYTE, made.element)], {"code": all_codes, "byte": all_bytes})
    right = [
        oracle.dequantize_f32(int(b), int(c), element) for c, b in zip(all_codes, all_bytes, strict=True)
    ]
    assert (found == np.array(right)).all()


@pytest.mark.clause("formats.e8m0.cast")
def test_casts_to_e8m0():
    bits = np.array(
        [0, 1, 1 << 22, (1 << 22) + 1, 1 << 23, 0x3F800000, 0x3FBFFFFF, 0x3FC00000, 0x7F3FFFFF, 0x7F400000]
    )
    down, nearest = evaluate([clauses.e8m0_cast(U, False), clauses.e8m0_cast(U, True)], {"u": bits})
    assert list(down) == [0, 0, 0, 0, 1, 127, 127, 127, 254, 254]
    assert list(nearest) == [0, 0, 0, 1, 1, 127, 127, 128, 254, 255]
    special = np.array([0x7F800000, 0x7FC00000, 0xFFFFFFFF])
    for cast in (False, True):
        assert list(evaluate([clauses.e8m0_cast(U, cast)], {"u": special})[0]) == [255] * 3


_PLAIN = {"rule", "rounding", "format", "x", "scales", "codes", "zero_scale"}


def golden():
    """Records of whole blocks whose results the terms give: no transform, no prescale, a plain input."""
    for record in load_vectors():
        data = {**record.inputs, **record.expected}
        if (
            record.op == "quantize"
            and set(data) <= _PLAIN
            and data["rounding"] != "sr"
            and data["rule"] in RULES
        ):
            yield record, BLOCK_FORMATS[data.get("format", "mxfp4")], data


def test_golden_blocks():
    seen = set()
    for record, made, data in golden():
        words = np.array([int(word, 16) for word in data["x"].split()]).reshape(-1, made.k)
        u = clauses.largest([var(f"y{j}", 32) & clauses.MAGNITUDE for j in range(made.k)])
        byte = clauses.scale_byte(u, data["rule"], made.element, data.get("zero_scale", 0))
        (scales,) = evaluate([byte], {f"y{j}": words[:, j] for j in range(made.k)})
        code = clauses.element_code(Y, BYTE, made.element, data["rounding"])
        (codes,) = evaluate([code], {"y": words.ravel(), "byte": np.repeat(scales, made.k)})
        digits = 1 if made.element.bits == 4 else 2
        assert "".join(f"{int(s):02x}" for s in scales) == data["scales"], record.id
        text = "".join(f"{int(c):0{digits}x}" for c in codes)
        assert text == data["codes"], record.id
        seen.add((made.name, data["rule"], data["rounding"]))
    assert len(seen) > 20


@pytest.mark.clause("packing.nibbles", "packing.sixes", "packing.bytes")
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_codes_follow_each_other_from_the_lowest_bit_on(bits):
    codes = np.arange(8) * 5 % (1 << bits)
    (word,) = evaluate([clauses.packed([const(int(c), bits) for c in codes])], {})
    right = sum(int(c) << bits * j for j, c in enumerate(codes))
    assert int(word) == right
    if bits == 6:  # the number of packing.sixes, twice
        w = [c[0] + 64 * c[1] + 4096 * c[2] + 262144 * c[3] for c in (codes[:4], codes[4:])]
        assert int(word) == int(w[0]) + (int(w[1]) << 24)


def test_the_files_are_those_of_the_clauses():
    written = {path.name: path.read_text(encoding="utf-8") for path in smtlib.FOLDER.glob("*.smt2")}
    assert written == smtlib.files(), "write them: make clauses"


def test_the_files_are_smt_lib(tmp_path):
    """A solver reads each file, and finds no value for which a function differs from the term it was written from."""
    bitwuzla = pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
    for name, text in smtlib.files().items():
        made = BLOCK_FORMATS.get(name.removesuffix(".smt2"))
        if made is None:
            checks = ["(assert (not (= (e8m0.nearest #x3fc00000) #x80)))"]
        else:
            bits, byte = pairs(made)
            codes = evaluate([clauses.element_code(Y, BYTE, made.element)], {"y": bits, "byte": byte})[0]
            checks = [
                f"(assert (not (= ({made.name}.code.rne (_ bv{bits[i]} 32) (_ bv{byte[i]} 8)) "
                f"(_ bv{int(codes[i])} {made.element.bits}))))"
                for i in range(0, len(bits), len(bits) // 4)
            ]
        for check in checks:
            parser = bitwuzla.Parser(bitwuzla.TermManager(), bitwuzla.Options())
            parser.parse(f"(set-logic QF_BV)\n{text}\n{check}", True, False)
            assert parser.bitwuzla().check_sat() == bitwuzla.Result.UNSAT, (name, check)
