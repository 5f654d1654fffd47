"""Kernels of columns and of both orientations are read backward, and planted faults have no proof."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")

from prove.certificates import decide, proofs_of
from prove.counterexamples import first_difference, some_blocks
from prove.kernels import Compiled, cases
from prove.questions import NotProved
from prove.terms import const
from prove.ttir import UnknownOperation, without_locations
from prove.turned import read_turned
from usual import usual

EVEN, FLOAT32 = "mxfp4.even.bfloat16.columns", "mxfp4.even.float32.columns"
SIXES = "mxfp6_e2m3.even.bfloat16.columns"
DUAL = "mxfp4.even.bfloat16.dual"
COLUMNS = [name for name in cases() if name.endswith(("columns", "dual"))]
FAULTS = {
    "a tie goes the other way": (EVEN, ("0x4B000000", "0x4B000001"), "mxref explain"),
    "an element is left out of amax": (
        EVEN, (r"re:arith\.maximumf (%\w+), %\w+", r"arith.maximumf \1, \1"), "mxref explain",
    ),
    "two words change places": (EVEN, (r"re:tt\.join (%\w+), (%\w+)", r"tt.join \2, \1"), "explain|places"),
    "an element of another unit": (EVEN, ("dense<32> : tensor<256xi32>", "dense<33> : tensor<256xi32>"), "places"),
    "the tile of another program": (EVEN, ("dense<8192>", "dense<8193>"), "places"),
    "the lower of two lines for both": (
        EVEN, (r"re:dense<16> : tensor<256xi32>", "dense<15> : tensor<256xi32>"), "explain|places|mixed|depends",
    ),
    "the tile of another program for rows": (DUAL, ("arith.constant 32 : i32", "arith.constant 16 : i32"), "places"),
    "a code of rows alone": (DUAL, ("0x4B000000", "0x4B000001"), "mxref explain"),
}  # fmt: skip


@pytest.mark.parametrize("name", usual(COLUMNS, EVEN, FLOAT32, SIXES, DUAL))
def test_the_terms_give_the_references_bytes(compiled, name):
    for proof in proofs_of(compiled("gfx950", name)):
        assert first_difference(proof, some_blocks(proof, 2000), np.zeros(2000, dtype=np.int64)) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_no_proof(compiled, fault):
    name, change, told = FAULTS[fault]
    now = compiled("gfx950", name)
    if change[0].startswith("re:"):
        text = re.sub(change[0].removeprefix("re:"), change[1], now.ttir, count=1)
    else:
        text = now.ttir.replace(change[0], change[1], 1)
    assert text != now.ttir
    with pytest.raises(NotProved, match=told) as caught:
        list(decide(Compiled(name, "gfx950", now.kernel, text, []), {}))
    print(f"{fault}: {caught.value}")


def test_an_operation_that_is_unknown_is_named(compiled):
    text = compiled("gfx950", EVEN).ttir
    given = {"argument6": const(8192, 32)}
    for old, new, told in (
        (r"math\.absf", "math.exp2", "exp2"),
        (r"dense<23>", "dense<32>", "below 32"),
        (r"(tt\.reshape \S+)", r"\1 allow_reorder", "allow_reorder"),
        (r"(    tt\.return)", r"    %9000 = tt.atomic_rmw max, %1 : i32\n\1", "atomic_rmw"),
    ):
        other = re.sub(old, new, text)
        assert other != text
        with pytest.raises(UnknownOperation, match=told):
            read_turned(other, given)


def test_what_the_source_promises_of_addresses_is_asked(compiled):
    now = compiled("gfx950", FLOAT32)
    text = without_locations(now.ttir)
    assert "tt.contiguity = dense<[1, 1, 2]>" in text
    other = text.replace("tt.contiguity = dense<[1, 1, 2]>", "tt.contiguity = dense<[1, 2, 1]>")
    with pytest.raises(NotProved, match="places"):
        list(decide(Compiled(FLOAT32, "gfx950", now.kernel, other, []), {}))
