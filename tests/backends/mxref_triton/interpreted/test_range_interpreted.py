"""Scales beyond the range of `bounded` in Triton's interpreter: found wherever they are, and nothing else is."""

import numpy as np
import pytest
import torch

from interpreted.gemm_operands import drawn, on
from mxref_triton import TritonBackend
from mxref_triton.products import scale_range
from mxref_triton.products.scale_range import PART, flag_scales

LIMIT = 252


def flagged(a, b=None, limit=LIMIT, before=0):
    word = torch.full((1,), before, dtype=torch.int32)
    flag_scales(limit, word, a, b)
    return int(word)


def codes(*shape):
    """Scale codes of every value that is no range to leave."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.choice([0, 1, 127, LIMIT - 1, LIMIT, 255], shape).astype(np.uint8))


@pytest.mark.clause("gemm.bounded")
def test_every_code_under_every_limit_in_either_operand():
    inside = codes(3, 5)
    for limit in (0, 252, 254):
        quiet = inside.clamp(max=limit)
        for code in range(256):
            planted = quiet.clone()
            planted[2, 4] = code
            want = limit < code < 255
            assert flagged(planted, quiet, limit) == flagged(quiet, planted, limit) == want
            assert flagged(planted, None, limit) == want


@pytest.mark.parametrize("size", [1, 2, 31, PART - 1, PART, PART + 1, 2 * PART + 17])
def test_wherever_it_lies_in_operands_of_any_size(size):
    a, b = codes(size), codes(PART + 3)
    assert flagged(a, b) == flagged(b, a) == 0
    for place in {0, size // 2, max(size - 2, 0), size - 1}:
        planted = a.clone()
        planted[place] = LIMIT + 1
        assert flagged(planted, b) == flagged(b, planted) == flagged(planted) == 1
        # Beyond the end there is nothing to see.
        if place:
            assert flagged(planted[:place], b) == flagged(b, planted[:place]) == 0


def test_operands_without_elements():
    none, wrong = codes(0, 4), torch.full((1, 1), LIMIT + 1, dtype=torch.uint8)
    assert flagged(none) == flagged(none, none) == flagged(none, codes(2, 2)) == 0
    assert flagged(none, wrong) == flagged(wrong, none) == 1


def test_strided_scales():
    base = codes(6, 8)
    base[1::2] = 254
    assert flagged(base[::2], base[::2].t()) == 0
    base[4, 6] = 253
    for view in (base[::2, ::2], base[::2].t(), base[::2, 6:]):
        assert not view.is_contiguous()
        assert flagged(view, codes(2)) == flagged(codes(2), view) == 1
    assert flagged(base[::2, 1::2]) == 0


def test_a_word_that_is_set_stays_set():
    assert flagged(codes(8), codes(8), before=1) == 1


@pytest.mark.parametrize("way", ["mfma", "bf16"])
@pytest.mark.parametrize("where", ["a", "b", "neither"])
def test_a_product_looks_at_both_operands_in_one_launch(way, where, monkeypatch):
    launches = []

    def counting(kernel, *arguments, **constants):
        launches.append(kernel.__name__)
        return launch(kernel, *arguments, **constants)

    launch = scale_range.launch
    monkeypatch.setattr(scale_range, "launch", counting)
    backend = TritonBackend(bounded=way)
    rng = np.random.default_rng(0)
    a, b = (on("cpu", drawn(rng, rows, 96, 100, 110)) for rows in (5, 7))
    if where != "neither":
        {"a": a, "b": b}[where].scales[3, 2] = LIMIT + 1
    for right in (b, backend.prepare(b, profile="bounded")):
        launches.clear()
        backend.scaled_gemm(a, right, profile="bounded")
        assert launches == ["_flag_scales"]
        assert backend.range_exceeded() == (where != "neither")
        assert not backend.range_exceeded()
