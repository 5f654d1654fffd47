"""The explorer page's arithmetic gives the bits of the specification: golden vectors, conformance, planted faults."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from explorer.page_backend import PageBackend, script
from mxref import (
    DIALECTS,
    Arithmetic,
    FourOverSix,
    OperandSpec,
    Placement,
    Stream,
    UnsupportedError,
    quantize,
)
from mxref.conformance import CLAUSES, check
from mxref.errors import RecipeError
from mxref.formats import BLOCK_FORMATS, NVFP4
from mxref.steps.hadamard import SIZES, SignPolicy
from mxref.steps.quotient import tensor_scale
from mxref.steps.rounding import Rounding
from mxref.steps.scale import EXPONENT_RULES, ScaleRule, bump_above, rules_of
from mxref.tomlio import to_table
from mxref.vectors import BACKEND_OPS, Record, RecordOp, load_vectors
from mxref.vectors.data import code_digits, digits_text, parse_digits, parse_words, record_format, words_text
from mxref.vectors.run import run_record

PLANTED = [
    # the fault, its script, the text in which it is planted, what is planted, the clause that it breaks
    ("M's mantissa is a turn", "mx", ".M) & 0x7fffff) + 1", ".M) & 0x7fffff)", "scale.rule.rceil"),
    ("ties go away from zero", "mx", "away || code % 2 === 1", "true", "rounding.rne"),
    ("a Weyl constant has a wrong bit", "mx", "0xbb67ae85", "0xbb67ae84", "random.philox"),
    ("the stages run backwards", "mx", "h = 1; h < n; h *= 2", "h = n / 2; h >= 1; h /= 2", "hadamard.order"),
    ("the high half comes first", "mx", "16 * (j & 1)", "16 * (1 - (j & 1))", "random.elements"),
    (
        "the largest power of two is not the top",
        "mx",
        "chooses(treatment) ? exp2(exponentOf(scale.S)) : scale.S",
        "scale.S",
        "scale.four_over_six",
    ),
    ("ggml casts halves to even", "orders", "nearest(q, true)", "nearest(q)", "scale.arithmetic"),
    (
        "an inverse is rounded once",
        "orders",
        "f(f(1 / Math.max(A, SMALLEST_NORMAL)) * (M * S))",
        "f((M * S) / Math.max(A, SMALLEST_NORMAL))",
        "scale.arithmetic",
    ),
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
                # The page's backend quantizes to no format with a scale of the tensor.
                assert record.op in NOT_ON_THE_PAGE or record_format(record).tensor_scale
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


@pytest.mark.parametrize(("fault", "name", "text", "planted", "clause"), PLANTED, ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_caught(fault, name, text, planted, clause):
    source = script(f"{name}.js")
    assert source.count(text) == 1
    asked = {each for each in CLAUSES if each.startswith(clause.rpartition(".")[0])}
    report = check(
        PageBackend(**{name: source.replace(text, planted)}),
        level="quick",
        shrink=False,
        clauses=asked,
        formats=["mxfp4" if clause.startswith(("hadamard", "random", "rounding", "scale.rule")) else "nvfp4"],
    )
    assert report.failing[0] == clause


def constant(expression: str) -> object:
    return page().engine.call(f"(() => {expression})")


def test_the_page_offers_every_choice():
    assert constant("Object.keys(mx.FORMATS)") == list(BLOCK_FORMATS)
    for name, choices in (("ROUNDINGS", Rounding), ("POLICIES", SignPolicy)):
        assert constant(f"mx.{name}") == list(map(str, choices))
    assert constant("mx.SIZES") == list(SIZES)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_page_offers_what_a_format_has(name):
    made = BLOCK_FORMATS[name]
    assert constant(f"mx.rulesOf('{name}')") == list(rules_of(made.scale))
    assert constant(f"mx.blocksOf('{name}')") == [made.row, made.tile]
    assert constant(f"mx.zeroScalesOf('{name}')") == [0, made.scale.one_code]
    assert constant(f"mx.arithmeticsOf('{name}')") == list(Arithmetic)[: 1 if made.scale.powers else None]
    assert constant(f"mx.choicesOf('{name}')") == list(FourOverSix)[: 1 if made.scale.powers else None]
    most = constant(f"mx.maxBitsOf('{name}')")
    assert OperandSpec(format=made, sr_bits=most)
    with pytest.raises(RecipeError, match="sr_bits"):
        OperandSpec(format=made, sr_bits=most + 1)


@pytest.mark.clause("formats.element", "formats.int8", "formats.scale", "formats.e8m0")
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_page_has_the_numbers_of_each_format(name):
    made, shown = BLOCK_FORMATS[name], f"mx.FORMATS.{name}"
    for values, key in ((made.element.values, "element.values"), (made.scale.values, "scale.values")):
        got = constant(f"{shown}.{key}.map((value) => Object.is(value, -0) ? '-0' : String(value))")
        np.testing.assert_array_equal([float(each.replace("Infinity", "inf")) for each in got], values)
        assert [each.startswith("-") for each in got] == [
            math.copysign(1, each) < 0 and each == each for each in values
        ]
    element = made.element
    numbers = ("p", "emax", "M", "prescale", "maxCode", "sign")
    assert [constant(f"{shown}.element.{key}") for key in numbers] == [
        element.precision, element.max_exponent, element.max_value, element.prescale, element.max_code, element.sign
    ]  # fmt: skip
    assert constant(f"[{shown}.k, {shown}.scale.nan, {shown}.scale.powers, Boolean({shown}.tensorScale)]") == [
        made.k, made.scale.nan_code, made.scale.powers, made.tensor_scale
    ]  # fmt: skip


def treatment(spec: OperandSpec) -> dict[str, object]:
    """Return a treatment as the page has it: no error is raised for NaN, because the page shows NaN blocks."""
    table = to_table(spec) | {"sign_vector": spec.sign_vector or "", "arithmetic": spec.arithmetic.value}
    table["four_over_six"] = spec.four_over_six.value
    return {key: value for key, value in table.items() if key != "nonfinite"}


@pytest.mark.clause(
    "recipe.overlay", "dialect.ocp", "dialect.amd", "dialect.nvidia", "dialect.tseng", "dialect.te_mxfp8",
    "dialect.te_nvfp4", "dialect.torchao_nvfp4", "dialect.modelopt_nvfp4", "dialect.compressed_tensors_nvfp4",
    "dialect.ggml_nvfp4",
)  # fmt: skip
def test_the_page_has_the_defaults_and_the_dialects():
    for name in BLOCK_FORMATS:
        assert constant(f"mx.defaultsOf('{name}')") == treatment(OperandSpec(format=name))
    assert constant("mx.DIALECTS").keys() == DIALECTS.keys()
    for name, dialect in DIALECTS.items():
        shown = f"({{...mx.defaultsOf('{dialect.spec.format}'), ...mx.DIALECTS.{name}}})"
        assert constant(shown) == treatment(dialect.spec)


def test_the_turns_are_those_of_the_rules():
    for name, made in BLOCK_FORMATS.items():
        if not made.scale.powers:
            continue
        for rule in (
            *EXPONENT_RULES,
            *map(ScaleRule, (">1.3", ">=1.75", ">=1", ">2", ">1.00000011920928955078125")),
        ):
            turn = page().engine.call(
                "((name, rule) => mx.turn(rule, mx.FORMATS[name].element))", name, rule.value
            )
            assert turn == bump_above(rule, made.element) + 1


LARGEST = float(np.finfo(np.float32).max)


def neighbours(value: Fraction) -> list[np.float32]:
    """Return the float32 nearest to a real number, and the two beside it."""
    near = np.float32(min(float(value), LARGEST))
    return [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(LARGEST))]


def amaxes(seed: int, count: int) -> np.ndarray:
    """Return amaxes of tensors: under some t is a power of two, under the others it has 24 bits; from tiny to huge."""
    draw = np.random.default_rng(seed)
    some = draw.uniform(1, 2, count) * np.exp2(draw.integers(-140, 120, count))
    return np.float32([2688, 260, 2688 * 2.0**-140, 2.0**-149, LARGEST, *some])


@pytest.mark.clause("scale.tensor")
def test_the_scale_of_a_tensor_is_the_references():
    draw = np.random.default_rng(11)
    some = draw.integers(0, 0x7F800000, 2000, np.uint32).view(np.float32)
    for amax in (*amaxes(1, 20), *some, np.float32(0)):
        t = page().engine.call("mx.tensorScale", int(amax.view(np.uint32)), {"format": "nvfp4"})
        assert np.float32(t) == tensor_scale(amax, NVFP4).scale


def same_bytes(x: np.ndarray, spec: OperandSpec, placement: Placement) -> None:
    expected, got = (f(x, spec, placement=placement) for f in (quantize, page().quantize))
    np.testing.assert_array_equal(got.scales, expected.scales)
    np.testing.assert_array_equal(got.codes, expected.codes)
    assert got.tensor_scale == expected.tensor_scale


@pytest.mark.clause("scale.rule.nearest", "scale.underflow")
@pytest.mark.parametrize("amax", amaxes(2, 8))
def test_scales_at_ties_and_beside_them(amax):
    """The amax of each block is a middle between two scales, as near as float32 holds it, or a neighbour of that."""
    t, scales = (
        Fraction(float(tensor_scale(amax, NVFP4).scale)),
        NVFP4.scale.values[: NVFP4.scale.max_code + 1],
    )
    middles = [(Fraction(a) + Fraction(b)) / 2 for a, b in pairwise(scales)]
    near = [
        each for middle in [*middles, Fraction(448), Fraction(464)] for each in neighbours(middle * 6 * t)
    ]
    x = np.zeros((len(near), 16), np.float32)
    x[:, 5] = near
    x[:, 6] = -x[:, 5] / 3
    same_bytes(x, OperandSpec(format="nvfp4"), Placement(amax=np.array([amax])))


@pytest.mark.clause("rounding.quotient")
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("amax", amaxes(3, 8))
def test_elements_at_ties_and_beside_them(amax, rounding):
    """Elements are points of the grid, middles between them and steps of SR, times X and t, and their neighbours."""
    t, grid = (
        Fraction(float(tensor_scale(amax, NVFP4).scale)),
        [Fraction(each) for each in NVFP4.element.magnitudes],
    )
    points = [*grid[1:], *((a + b) / 2 for a, b in pairwise(grid))]
    steps = [
        (g + h * Fraction(f, 2**22))
        for g, h in ((Fraction(4), 2), (Fraction(1, 2), Fraction(1, 2)))
        for f in (1, 2**21 + 1)
    ]
    rows = []
    for scale in NVFP4.scale.values[1 : NVFP4.scale.max_code + 1 : 3]:
        unit = Fraction(scale) * t
        near = [each for point in (*points, *steps) for each in neighbours(point * unit)]
        for start in range(0, len(near), 15):
            part = np.float32(near[start : start + 15])
            rows.append(
                [float(6 * unit), *(part * np.float32([1, -1] * 8)[: len(part)]), *[0] * (15 - len(part))]
            )
    x = np.clip(rows, -LARGEST, LARGEST).astype(np.float32)
    for sr_bits in (22, 7) if rounding is Rounding.SR else (16,):
        spec = OperandSpec(format="nvfp4", rounding=rounding, sr_bits=sr_bits)
        same_bytes(x, spec, Placement(Stream(5, 1, 2, 3), amax=np.array([amax])))


@pytest.mark.clause("formats.int8", "rounding.sign")
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_integers_at_ties_and_beside_them(rounding, rule):
    halves = np.arange(1, 257, dtype=np.float32) / np.float32(
        128
    )  # points of the grid and middles between them
    near = np.concatenate([np.nextafter(halves, np.float32(0)), halves, np.nextafter(halves, np.float32(9))])
    x = np.zeros((len(near) // 16, 32), np.float32)
    x[:, ::2], x[:, 1::2] = near.reshape(-1, 16), -near.reshape(-1, 16)
    x[::2, 0] = 1.5
    for prescale in (False, True):
        spec = OperandSpec(format="mxint8", scale_rule=rule, rounding=rounding, prescale=prescale)
        same_bytes(x, spec, Placement(Stream(5, 1, 2, 3)))


@pytest.mark.clause("scale.block.tile", "scale.tensor.amax")
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_whole_arrays_of_each_format(name):
    made = BLOCK_FORMATS[name]
    draw = np.random.default_rng(4)
    x = (draw.normal(size=(64, 128)) * np.exp2(draw.integers(-30, 30, (64, 1)))).astype(np.float32)
    x[3, 40], x[50, 7], x[8, :32] = np.nan, np.inf, -0.0
    for options in (
        {}, {"block": made.tile, "zero_scale": made.scale.one_code},
        {"hadamard": 64, "signs": "per_step", "rounding": "sr"},
    ):  # fmt: skip
        same_bytes(x, OperandSpec(format=name, **options), Placement(Stream(5, 1, 2, 3)))
