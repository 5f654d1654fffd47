"""A finding shows operands and blocks that reproduce it, and no more than needed."""

from dataclasses import replace

import numpy as np
import pytest

from mutants import BY_NAME
from mxref import GemmProfile, MXArray, OperandSpec
from mxref.conformance import check
from mxref.conformance.checking import Subject
from mxref.conformance.requests.multiplying import Product


def operands_of(failure):
    """The product that a failure shows, which must show all rows of both operands."""
    request = failure.request
    m, n, k = map(int, request["M, N, K"].split(", "))
    arrays = []
    for name, rows in (("A", m), ("B", n)):
        scales, codes = zip(*(block.split(":") for block in failure.inputs[name]), strict=True)
        packed = np.frombuffer(bytes.fromhex("".join(codes)), np.uint8).reshape(rows, k // 2)
        bytes_ = np.array([int(s, 16) for s in scales], np.uint8).reshape(rows, k // 32)
        prescale = name in request.get("prescaled", "").split(" and ")
        arrays.append(MXArray(packed, bytes_, (rows, k), 1, prescale=prescale))
    layout = request.get("layout", "")
    return Product(*arrays, GemmProfile(request["profile"]), request["out_dtype"], layout)


def with_one_element_less(product):
    """The product once for each element that is not zero, without it."""
    for side in ("a", "b"):
        q = getattr(product, side)
        for place in zip(*np.nonzero(q.codes), strict=True):
            for kept in (0x0F, 0xF0):
                codes = q.codes.copy()
                codes[place] &= kept
                if (codes != q.codes).any():
                    yield replace(product, **{side: replace(q, codes=codes)})


@pytest.mark.parametrize(
    ("name", "blocks", "elements"),
    [
        ("blocks descending", 3, 6),
        ("accumulator flushed", 1, 2),
        ("NaN rows dropped", 1, 0),
        ("bfloat16 output truncated", 2, 4),
        ("exact with ties away", 2, 4),
        ("exact's subnormals of float32 rounded twice", 2, 4),
        ("prescale undone twice", 1, 4),
        ("codes by a pointer", 1, 2),
        ("2^-127 multiplied off by one", 1, 2),
    ],
)
def test_a_product_is_shrunk_until_nothing_can_be_left_out(name, blocks, elements):
    mutant = BY_NAME[name]
    backend = mutant.make()
    report = check(backend, ops=["gemm"], clauses=[mutant.clause], level="quick", formats=mutant.formats)
    failure = next(f for f in report.failures if f.clause == mutant.clause)
    product, subject = operands_of(failure), Subject(backend)
    assert product.wrong(subject)[0].any()
    assert product.a.scales.shape[1] <= blocks
    codes = [q.codes & mask for q in (product.a, product.b) for mask in (0x0F, 0xF0)]
    assert sum(int(np.count_nonzero(part)) for part in codes) <= elements
    for candidate in with_one_element_less(product):
        assert not candidate.wrong(subject)[0].any()


@pytest.mark.clause("scale.block.tile")
def test_a_tile_s_finding_shows_its_elements():
    backend = BY_NAME["tile amax by row"].make()
    report = check(backend, ops=["quantize"], clauses=["scale.block.tile"], level="quick", formats=["mxfp4"])
    failure = next(f for f in report.failures if f.clause == "scale.block.tile")
    words = [int(word, 16) for word in failure.inputs["x"]]
    x = np.array(words, np.uint32).view(np.float32).reshape(32, 32)
    q = backend.quantize(x, OperandSpec(block="32x32"))
    shown = {
        f"scale {scale:02x}  codes {bytes(codes).hex(' ')}"
        for scale, codes in zip(q.scales[:, 0], q.codes, strict=True)
    }
    assert failure.got in shown
    assert failure.expected not in shown
