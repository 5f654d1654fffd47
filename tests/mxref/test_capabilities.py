"""Capabilities: an undeclared request is refused with the field's name, and the defaults are the specification's."""

import re
from dataclasses import fields, replace

import numpy as np
import pytest
from protocol_cases import SPEC, X, narrow

from mxref import (
    Arithmetic,
    Capabilities,
    FourOverSix,
    GemmProfile,
    OperandSpec,
    Rounding,
    Stream,
    UnsupportedError,
    formats,
    quantize,
)
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref.steps.scale import EXPONENT_RULES


@pytest.mark.clause("conformance.unsupported", evidence="known answer")
@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: narrow.quantize(X, OperandSpec(scale_rule="even")), "scale_rules"),
        (lambda: narrow.quantize(X, OperandSpec(rounding="rna")), "roundings"),
        (
            lambda: narrow.quantize(
                X, OperandSpec(rounding="sr", sr_bits=17), placement=Placement(Stream(0))
            ),
            "max_sr_bits",
        ),
        (lambda: narrow.quantize(X, OperandSpec(block="32x32")), "blocks"),
        (lambda: narrow.quantize(X, OperandSpec(hadamard=32)), "hadamard_sizes"),
        (lambda: narrow.quantize(X, OperandSpec(prescale=True)), "prescale"),
        (lambda: narrow.scaled_gemm(quantize(X), quantize(X, OperandSpec(prescale=True))), "prescale"),
        (lambda: narrow.quantize(X.astype(np.float16), OperandSpec()), "in_dtypes"),
        (lambda: narrow.hadamard(X.astype(np.float16), 16), "in_dtypes"),
        (lambda: narrow.hadamard(X, 32), "hadamard_sizes"),
        (lambda: narrow.dequantize(quantize(X), "bfloat16"), "dequantize_dtypes"),
        (lambda: narrow.scaled_gemm(quantize(X), quantize(X), profile="exact"), "gemms"),
        (lambda: narrow.scaled_gemm(quantize(X), quantize(X), out_dtype="bfloat16"), "gemm_dtypes"),
    ],
)
def test_what_is_not_declared_is_refused_by_field(call, field):
    with pytest.raises(UnsupportedError, match=rf"backend 'narrow' .*{field}"):
        call()


@pytest.mark.clause("conformance.unsupported", "scale.arithmetic")
def test_an_order_that_a_backend_does_not_declare_is_refused():
    class RealAlone(ReferenceBackend):
        name = "real_alone"
        capabilities = replace(ReferenceBackend.capabilities, arithmetics=frozenset({Arithmetic.REAL}))

    backend = RealAlone()
    assert backend.quantize(X, OperandSpec("nvfp4")) == quantize(X, OperandSpec("nvfp4"))
    with pytest.raises(
        UnsupportedError, match=r"'real_alone' does not declare te in arithmetics \(declared: real\)"
    ):
        backend.quantize(X, "te_nvfp4")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (("bounded", formats.MXFP4, formats.MXFP4), "ordered of mxfp4 x mxfp4"),
        (("ordered", formats.MXFP4, formats.MXFP6_E2M3), "ordered of mxfp4 x mxfp4"),
        (("ordered", formats.MXFP6_E2M3, formats.MXFP6_E3M2), "mxfp4, mxfp8_e4m3"),
    ],
)
def test_of_the_declared_products_those_near_the_undeclared_one_are_named(asked, named):
    ordered = {(GemmProfile.ORDERED, made, made) for made in (formats.MXFP4, formats.MXFP8_E4M3)}
    with pytest.raises(UnsupportedError, match=rf"{asked[1]} x {asked[2]} in gemms \(declared: {named}\);"):
        Capabilities(gemms=frozenset(ordered)).require("x", "gemms", asked)


@pytest.mark.clause("conformance.capabilities", evidence="known answer")
def test_capabilities_have_the_defaults_of_the_specification():
    everything = {
        "scale_rules": set(EXPONENT_RULES), "roundings": set(Rounding),
        "hadamard_sizes": {2, 4, 8, 16, 32, 64, 128, 256},
        "in_dtypes": {"float32", "bfloat16", "float16"}, "gemm_dtypes": {"float32", "bfloat16"},
    }  # fmt: skip
    counts = {"both": 2, "all but `NEAREST`": 4, "all three": 3, "all four": 4, "all eight": 8}
    names = {
        "ORDERED": GemmProfile.ORDERED,
        "MXFP4": formats.MXFP4,
        "REAL": Arithmetic.REAL,
        "OFF": FourOverSix.OFF,
    }
    rows = re.findall(r"^`(\w+)` .* {2,}(\S.*)$", SPEC["conformance.capabilities"].text, re.MULTILINE)
    assert [name for name, _ in rows] == [f.name for f in fields(Capabilities)]
    for name, default in rows:
        if default in counts:
            assert len(everything[name]) == counts[default]
            assert getattr(Capabilities(), name) == everything[name]
        else:
            assert getattr(Capabilities(), name) == eval(default.strip("`"), names), name
