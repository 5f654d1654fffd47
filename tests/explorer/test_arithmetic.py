"""The explorer page's arithmetic gives the bits of the specification: golden vectors, conformance, planted faults."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from explorer.page_backend import PageBackend, script
from mxref import DIALECTS, OperandSpec, UnsupportedError
from mxref.conformance import CLAUSES, check
from mxref.formats import BLOCK_FORMATS, BlockShape
from mxref.steps.hadamard import SIZES, SignPolicy
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import ScaleRule, bump_above
from mxref.tomlio import to_table
from mxref.vectors import BACKEND_OPS, Record, RecordOp, load_vectors
from mxref.vectors.data import code_digits, digits_text, parse_digits, parse_words, record_format, words_text
from mxref.vectors.run import run_record

PLANTED = [
    # the fault, the text in which it is planted, its place, the clause that it breaks
    ("M's mantissa is a turn", ".M) & 0x7fffff) + 1", ".M) & 0x7fffff)", "scale.rule.rceil"),
    ("ties go away from zero", 'rounding === "rna" || code % 2 === 1', "true", "rounding.rne"),
    ("a Weyl constant has a wrong bit", "0xbb67ae85", "0xbb67ae84", "random.philox"),
    ("the stages run backwards", "h = 1; h < n; h *= 2", "h = n / 2; h >= 1; h /= 2", "hadamard.order"),
    ("the high half comes first", "16 * (j & 1)", "16 * (1 - (j & 1))", "random.elements"),
]


@cache
def page() -> PageBackend:
    return PageBackend()


def stream_of(record: Record) -> dict[str, object]:
    fields = {key: record.inputs.get(key, 0) for key in ("step", "layer", "operand")}
    return {"seed": str(int(record.inputs["seed"], 16)), **fields}


def philox(record: Record) -> dict[str, str]:
    counter, key = (
        parse_words(record.inputs[name], count, name).tolist() for name, count in (("counter", 4), ("key", 2))
    )
    return {"words": words_text(np.array(page().engine.call("mx.philox", counter, key), np.uint32))}


def integers(record: Record) -> dict[str, str]:
    i = record.inputs
    start = i["row"] * i["length"] + i["first"]
    drawn = page().engine.call("integersOf", stream_of(record), str(start), i["count"], i["sr_bits"])
    return {"r": words_text(np.array(drawn, np.uint32))}


def signs(record: Record) -> dict[str, str]:
    n = record.inputs["n"]
    negative = page().engine.call("mx.signVector", n, record.inputs["policy"], stream_of(record))
    return {"signs": f"{sum(1 << i for i, each in enumerate(negative) if each):0{max(1, n // 4)}x}"}


def pack(record: Record) -> dict[str, str]:
    made = record_format(record)
    codes = parse_digits(record.inputs["codes"], code_digits(made), None, record.id)
    packed = page().engine.call("packed", codes.tolist(), made.element.bits)
    return {"packed": digits_text(packed, 2)}


def unpack(record: Record) -> dict[str, str]:
    made = record_format(record)
    packed = parse_digits(record.inputs["packed"], 2, None, record.id)
    codes = page().engine.call("unpacked", packed.tolist(), made.element.bits)
    return {"codes": digits_text(codes, code_digits(made))}


OWN = {
    RecordOp.PHILOX: philox, RecordOp.INTEGERS: integers, RecordOp.SIGNS: signs,
    RecordOp.PACK: pack, RecordOp.UNPACK: unpack,
}  # fmt: skip
"""The operations of the vectors that are none of a backend's, asked of the page's own functions."""
NOT_ON_THE_PAGE = {RecordOp.SCALED_GEMM, RecordOp.EXCHANGE}
"""The page multiplies nothing, and has no types of ml_dtypes."""


@pytest.mark.clause("random.philox", "random.elements", "random.counter")
@pytest.mark.clause("hadamard.signs", "hadamard.policy", "packing.nibbles", "packing.sixes")
def test_golden_vectors():
    ran = dict.fromkeys(RecordOp, 0)
    for record in load_vectors():
        if record.op in OWN:
            assert OWN[record.op](record) == record.expected, record.id
        elif record.op in BACKEND_OPS and record.inputs.get("dtype", "float32") == "float32":
            try:
                assert run_record(record, page()) is None, record.id
            except UnsupportedError:
                assert record.op in NOT_ON_THE_PAGE
                continue
        else:
            continue
        ran[record.op] += 1
    assert {op for op, count in ran.items() if not count} == NOT_ON_THE_PAGE
    assert sum(ran.values()) > 1_300


@pytest.mark.study
@pytest.mark.clause("conformance.protocol", "conformance.unsupported")
def test_the_page_conforms():
    report = check(page(), level="quick", shrink=False)
    assert report.ok, report.failures
    skipped = {result.clause for result in report.clauses if not result.passed}
    assert all(clause.startswith(("gemm.", "rounding.native_sr")) for clause in skipped)


@pytest.mark.parametrize(("fault", "text", "planted", "clause"), PLANTED, ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_caught(fault, text, planted, clause):
    source = script("mx.js")
    assert source.count(text) == 1
    asked = {each for each in CLAUSES if each.startswith(clause.rpartition(".")[0])}
    report = check(
        PageBackend(source.replace(text, planted)),
        level="quick",
        shrink=False,
        clauses=asked,
        formats=["mxfp4"],
    )
    assert report.failing[0] == clause


def constant(expression: str) -> object:
    return page().engine.call(f"(() => {expression})")


def test_the_page_offers_every_choice():
    assert constant("Object.keys(mx.FORMATS)") == list(BLOCK_FORMATS)
    for name, choices in (
        ("RULES", ScaleRule), ("ROUNDINGS", Rounding), ("POLICIES", SignPolicy), ("BLOCKS", BlockShape)
    ):  # fmt: skip
        assert constant(f"mx.{name}") == [choice.value for choice in choices]
    assert constant("mx.SIZES") == list(SIZES)
    assert constant("mx.MAX_SR_BITS") == MAX_SR_BITS


def treatment(spec: OperandSpec) -> dict[str, object]:
    """Return a treatment as the page has it: no error is raised for NaN, because the page shows NaN blocks."""
    table = to_table(spec) | {"sign_vector": spec.sign_vector or ""}
    return {key: value for key, value in table.items() if key != "nonfinite"}


@pytest.mark.clause("dialect.ocp", "dialect.amd", "dialect.nvidia", "dialect.tseng", "recipe.overlay")
def test_the_page_has_the_defaults_and_the_dialects():
    assert constant("mx.DEFAULTS") == treatment(OperandSpec())
    assert constant("mx.DIALECTS").keys() == DIALECTS.keys()
    for name, dialect in DIALECTS.items():
        assert constant(f"({{...mx.DEFAULTS, ...mx.DIALECTS.{name}}})") == treatment(dialect.spec)


def test_the_turns_are_those_of_the_rules():
    for name, made in BLOCK_FORMATS.items():
        for rule in (
            *ScaleRule,
            *map(ScaleRule, (">1.3", ">=1.75", ">=1", ">2", ">1.00000011920928955078125")),
        ):
            turn = page().engine.call(
                "((name, rule) => mx.turn(rule, mx.FORMATS[name].element))", name, rule.value
            )
            assert turn == bump_above(rule, made.element) + 1
