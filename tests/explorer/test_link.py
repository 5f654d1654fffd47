"""A link of `mxref explain` shows in the explorer page the block that Python explains, to the last bit."""

from __future__ import annotations

import json
import math
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner

from explorer.page_backend import Engine, script
from mxref import DIALECTS, OperandSpec, Stream
from mxref.cli import main
from mxref.errors import RecipeError
from mxref.explain import explain_block, explorer_link
from mxref.explain.link import EXPLORER, treatment_text

STREAM = Stream(0xFEDCBA9876543210, 0x80000001, 0xABCDEF, 4)
TREATMENTS = [
    *(dialect.spec for dialect in DIALECTS.values()),
    OperandSpec(format="mxfp8_e4m3", scale_rule="rceil", rounding="rna", hadamard=32, signs="per_step"),
    OperandSpec(format="mxfp8_e5m2", scale_rule="ceil", rounding="sr", sr_bits=22, prescale=True),
    OperandSpec(rounding="rtz", hadamard=16, sign_vector="+-" * 8, zero_scale=127),
    OperandSpec(scale_rule=">=1.3", format="mxfp8_e4m3"),
    OperandSpec(rounding="sr", sr_bits=3, hadamard=256, signs="fixed"),
    OperandSpec(scale_rule="even", block="32x32", hadamard=16, rounding="sr"),
    OperandSpec(format="mxint8", scale_rule="rceil"),
    OperandSpec(format="mxint8", rounding="sr", prescale=True, block="4x32", scale_rule=">1.3"),
    OperandSpec(format="nvfp4"),
    OperandSpec(
        format="nvfp4", rounding="sr", sr_bits=22, hadamard=64, signs="per_step_layer", zero_scale=56
    ),
    OperandSpec(format="nvfp4", rounding="rna", block="16x16"),
    OperandSpec(format="nvfp4", rounding="rtz", block="2x16", hadamard=8),
    OperandSpec(format="nvfp4", rounding="sr", block="16x16", hadamard=16, arithmetic="te_2_13"),
    *(OperandSpec(format="nvfp4", four_over_six=by) for by in ("absolute", "squared", "largest")),
]


@cache
def page() -> Engine:
    return Engine(*map(script, ("orders.js", "mx.js", "link.js", "numbers.js", "explain.js")))


def drawn(seed: int) -> np.ndarray:
    """Return [64, 512] whose rows have scales from tiny to huge, with zeros, NaN and Inf here and there."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(64, 512)) * np.exp2(draw.integers(-140, 120, (64, 1)))
    x[draw.random(x.shape) < 0.02] = 0
    x[5, 40], x[9, 300], x[3, 32:64] = np.nan, -np.inf, -0.0
    return x.astype(np.float32)


def number(text: str | None) -> float | None:
    return None if text is None else float(text.replace("Infinity", "inf"))


def same(shown: str | None, value: float | None) -> bool:
    got = number(shown)
    if value is None or math.isnan(value):
        return got is None or math.isnan(got)
    return got == value and math.copysign(1, got) == math.copysign(1, value)


def check_block(shown: dict, block) -> None:
    assert shown["byte"] == block.scale.byte
    assert bytes(shown["packed"]) == block.packed
    assert shown["e"] == block.scale.unclamped
    scale = block.scale
    assert (number(shown["amax"]), number(shown["t"])) == (scale.tensor_amax, scale.tensor_scale)
    assert number(shown["quotient"]) == scale.quotient
    assert shown["neighbours"] == (None if scale.lower is None else shown["neighbours"])
    if scale.lower is not None:
        assert list(map(float, shown["neighbours"])) == [scale.lower, scale.upper]
    assert (None if shown["amaxAt"] < 0 else shown["amaxAt"]) == block.scale.amax_at
    spoiled = block.is_nan
    for got, e in zip(shown["elements"], block.elements, strict=True):
        assert (got["xBits"], got["sign"], got["code"]) == (e.x_bits, e.d, e.code)
        assert got["yBits"] == e.y_bits or (math.isnan(e.y) and got["yBits"] & 0x7FFFFFFF > 0x7F800000)
        assert got["kind"] == e.case.value
        if spoiled:
            continue
        if e.v is None:  # under a scale of 0
            assert (math.isnan(number(got["v"])), e.element, scale.value) == (True, 0, 0)
            continue
        # The page keeps a scaled magnitude below the smallest normal float32, which the reference may replace by 0.
        assert same(got["v"], e.v) or abs(number(got["v"])) < 2**-126
        assert same(got["lower"], e.lower)
        assert same(got["upper"], e.upper)
        assert (got["T"], got["r"]) == (e.threshold, e.random if block.spec.rounding == "sr" else None)
        assert math.isclose(number(got["value"]), e.value, rel_tol=1e-15)
        assert math.isclose(number(got["error"]), e.error, rel_tol=1e-12, abs_tol=1e-15 * abs(e.value))
    if block.sqnr_db is None or spoiled:
        assert shown["snr"] is None
    else:
        assert math.isclose(number(shown["snr"]), block.sqnr_db, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("spec", TREATMENTS, ids=treatment_text)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_link_shows_the_block_that_python_explains(spec, axis):
    x = drawn(7)
    for index in (0, 1, 17, 83, 84, 145, 1023):
        link = explorer_link(x, spec, STREAM, axis=axis, index=index % 1024, pad=True)
        shown = page().call("shownAt", link.partition("#")[2])
        check_block(shown, explain_block(x, spec, STREAM, axis=axis, index=index, pad=True))
        assert page().call("shownAt", shown["again"]) == shown


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 260.0, 2688.0, 3e38])
def test_a_link_holds_the_amax_of_the_tensor(amax):
    x = drawn(8)[:, :48]
    for spec in (OperandSpec(format="nvfp4"), OperandSpec(format="nvfp4", rounding="sr", hadamard=32)):
        for index in range(0, 192, 7):
            link = explorer_link(x, spec, STREAM, index=index, pad=True, amax=amax)
            assert f"&amax={np.float32(amax).view(np.uint32):08x}" in link
            shown = page().call("shownAt", link.partition("#")[2])
            check_block(shown, explain_block(x, spec, STREAM, index=index, pad=True, amax=amax))
            assert page().call("shownAt", shown["again"]) == shown


def test_without_an_amax_the_numbers_are_the_tensor():
    x = drawn(9)[30, :64]
    spec = OperandSpec(format="nvfp4", hadamard=64)  # all four blocks are one group, and so in each link
    for index in range(4):
        address, key, _ = explorer_link(x, spec, index=index).partition("#")[2].partition("&amax=")
        assert key
        check_block(page().call("shownAt", address), explain_block(x, spec, index=index))


def test_a_treatment_names_only_what_differs_from_the_dialect_in_its_format():
    assert treatment_text(OperandSpec(format="nvfp4")) == "ocp,format=nvfp4"
    assert treatment_text(OperandSpec(format="nvfp4", block="16x16")) == "ocp,format=nvfp4,block=16x16"
    assert treatment_text(OperandSpec(format="mxint8", scale_rule="rceil")) == "nvidia,format=mxint8"


CHANGES = [
    ("tseng,scale_rule=%3E%3D1.3,block=32x32,zero_scale=127", "nvfp4",
     "tseng,format=nvfp4,scale_rule=nearest,block=16x16,zero_scale=56,prescale=false"),
    ("ocp,format=nvfp4,rounding=sr,block=2x16,zero_scale=56", "mxint8",
     "ocp,format=mxint8,rounding=sr,block=2x32,zero_scale=127"),
    ("amd,format=mxfp8_e4m3", "mxint8", "amd,format=mxint8"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "format", "after"), CHANGES)
def test_another_format_keeps_the_choices_that_it_has(before, format, after):
    made = page().call("inFormat", before, format)
    assert made == page().call("inFormat", after, format)
    assert link_text(made["text"]) == link_text(after)


def link_text(treatment: str) -> dict:
    return page().call("link.readTreatment", treatment)


def test_rows_that_are_padded_keep_their_place_in_the_tensor():
    x = drawn(3)[:5, :70]
    for spec in ("tseng", OperandSpec(rounding="sr")):
        for index in range(10):
            link = explorer_link(x, spec, STREAM, index=index, pad=True)
            check_block(
                page().call("shownAt", link.partition("#")[2]),
                explain_block(x, spec, STREAM, index=index, pad=True),
            )


def run(*args: str):
    return CliRunner().invoke(main, ["explain", *args])


def test_the_command_prints_links_of_the_blocks_that_it_explains():
    words = [
        "1",
        "-2",
        "0.3",
        "nan",
        "0x7f7fffff",
        "--dialect",
        "tseng",
        "--operand",
        "wgrad.x",
        "--step",
        "7",
        "--seed",
        "3",
    ]
    links = run(*words, "--link").stdout.split()
    blocks = json.loads(run(*words, "--json").stdout)["blocks"]
    assert len(links) == len(blocks) == 2
    for link, block in zip(links, blocks, strict=True):
        address, _, state = link.partition("#")
        assert address == (EXPLORER / "index.html").as_uri()
        assert bytes(page().call("shownAt", state)["packed"]).hex() == block["packed"]
    elsewhere = run("1", "--link", "--explorer", "https://host/explorer/").stdout
    assert elsewhere == "https://host/explorer/#x=3f800000&a=ocp\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1", "--link", "--json"), "give one of them"),
        (("1", "--explorer", "https://host"), "give --link too"),
    ],
)
def test_options_that_do_not_go_together(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_signs_of_no_operand_are_refused():
    with pytest.raises(RecipeError, match="operand"):
        explorer_link(np.ones(64, np.float32), "tseng", Stream(1, operand=7))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("x=3f80000", "words of eight"),
        ("x=" + "00000001" * 257, "257 words, more than 256"),
        ("a=opc", "no dialect opc"),
        ("a=ocp,rounding=up", "rounding = up is not one of rne, rna, rtz, sr"),
        ("a=ocp,toString=1", "no key toString"),
        ("a=ocp,sr_bits=23", "sr_bits = 23 is above 22"),
        ("a=ocp,signs=fixed", "without a Hadamard transform"),
        ("a=ocp,hadamard=4,sign_vector=++", "2 signs, hadamard = 4"),
        ("y=1", "no key y"),
        ("seed=18446744073709551616", "above 18446744073709551615"),
        ("step=-1", "not a whole number"),
        ("operand=7", "operand = 7 is not one of fprop.x"),
        ("block=1", "block 1 does not exist"),
        ("others=1", "others is not a word"),
        ("block=2&a=ocp,format=nvfp4", "block 2 does not exist"),
        ("e=16&a=ocp,format=nvfp4", "e = 16 is above 15"),
        ("amax=43820000", "no format here has one"),
        ("amax=7f800000&a=ocp,format=nvfp4", "amax = inf is no finite magnitude"),
        ("amax=c3820000&a=ocp,format=nvfp4", "amax = -260 is no finite magnitude"),
        ("amax=1&a=ocp,format=nvfp4", "amax is not a word"),
        ("a=amd,format=nvfp4", "nvfp4 has scales of UE4M3: scale_rule = even is not one of nearest"),
        ("a=ocp,format=nvfp4,scale_rule=%3E1.5", "scale_rule = >1.5 is not one of nearest"),
        ("a=ocp,scale_rule=nearest", "mxfp4 has scales of E8M0: scale_rule = nearest is not one of floor"),
        ("a=ocp,format=nvfp4,prescale=true", "prescale is for powers of two"),
        ("a=ocp,format=nvfp4,zero_scale=127", "zero_scale = 127 is not one of 0, 56"),
        ("a=ocp,format=nvfp4,block=1x32", "block = 1x32 is not 1x16 or 16x16, for nvfp4"),
        ("a=ocp,block=3x32", "block = 3x32 is not 1x32 or 32x32, for mxfp4"),
    ],
)
def test_the_page_refuses_addresses_that_mean_nothing(address, message):
    refused = page().call("refusal", address)
    assert refused["name"] == "LinkError"
    assert message in refused["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1, -2;0.3", "3f800000 c0000000 3e99999a"),
        ("tensor([[1., -0.], [inf, -nan]], dtype=torch.bfloat16)", "3f800000 80000000 7f800000 ffc00000"),
        ("0x3f800000 1e-45\n3.4028235e38", "3f800000 00000001 7f7fffff"),
    ],
)
def test_pasted_numbers_are_read(text, words):
    assert page().call("wordsOf", text) == words


@pytest.mark.parametrize("text", ["", "1 two", "1e39", "0x1ffffffff", "1 " * 257])
def test_pasted_text_that_holds_no_float32_is_refused(text):
    with pytest.raises(Exception, match="no number|no float32|beyond float32|more than 256"):
        page().call("wordsOf", text)


def test_numbers_are_shown_as_python_shows_them():
    draw = np.random.default_rng(1)
    x = draw.integers(0, 2**32, 400, np.uint32).view(np.float32)
    for value in x[np.isfinite(x)]:
        assert np.float32(page().call("shownNumber", int(value.view(np.uint32)))) == value


def test_presets_are_blocks():
    for name, words in page().call("presets").items():
        assert len(words) == 32, name
        values = np.array(words, np.uint32).view(np.float32)
        assert np.isnan(values).any() == (name == "nan")
        assert (np.abs(values) < 2**-125).all() == (name == "tiny")
