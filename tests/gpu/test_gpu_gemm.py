"""Scaled GEMM on the GPU: `ordered` bit for bit at sizes of training, and `bounded` against its tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.operands_torch import drawn, exact, ordered, same_bits, tolerance
from mxref import GemmProfile, MXArray
from mxref_triton import TritonBackend
from mxref_triton.products import bounded
from mxref_triton.products.fold import fold

FP8_EPS = 2.0**-6
"""127 products of a 128-element run, each cut off 13 binades below the largest, against that largest alone."""


needs_hopper = pytest.mark.skipif(
    not (torch.version.cuda and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
    reason="no Hopper",
)


# ---- ordered ----


@pytest.fixture(params=["packed", "folded"])
def kernel(request, monkeypatch):
    """The kernel that computes `ordered` at every size; folded ones exist on Hopper and on gfx950."""
    if request.param == "folded" and not bounded._multiplies_folded(torch.device("cuda")):
        pytest.skip("neither Hopper nor gfx950")
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 0 if request.param == "folded" else 1 << 62)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot", "gemm.nan")
@pytest.mark.parametrize("spread", [0, 1, 3, 8], ids=lambda s: f"spread {s}")
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 32), (300, 260, 4096), (1000, 70, 96), (129, 513, 8192), (512, 512, 2048)]
)
@pytest.mark.usefixtures("kernel")
def test_ordered_is_the_definition(m, n, k, spread, cases):
    backend = TritonBackend()
    a, b = drawn(m, k, spread, seed=1), drawn(n, k, spread, seed=2)
    a.scales[m // 2, k // 64] = 255
    assert same_bits(backend.scaled_gemm(a, b), ordered(a, b))
    cases(m * n)


@pytest.mark.clause("gemm.ordered")
@pytest.mark.parametrize("centre", [0, 20, 64, 79, 175, 190, 235, 254])
@pytest.mark.usefixtures("kernel")
def test_ordered_at_every_end_of_the_range(centre, cases):
    backend = TritonBackend()
    a, b = drawn(520, 1024, 4, centre, seed=1), drawn(512, 1024, 4, 254 - centre, seed=2)
    for right in (b, drawn(512, 1024, 4, centre, seed=3)):
        assert same_bits(backend.scaled_gemm(a, right), ordered(a, right))
        cases(520 * 512)


@pytest.mark.clause("gemm.ordered")
@pytest.mark.usefixtures("kernel")
def test_ordered_where_the_tensor_core_drops_most(cases):
    """Sums of 1152 beside elements of a half: what FP8 accumulation over more than a block loses."""
    backend = TritonBackend()
    a, b = drawn(512, 4096, 0), drawn(512, 4096, 0)
    for q in (a, b):
        blocks = q.codes.view(512, -1, 16)
        blocks[:, ::4] = 0x77
        blocks[:, 1::4] = 0x11
    assert same_bits(backend.scaled_gemm(a, b), ordered(a, b))
    cases(512 * 512)


@pytest.mark.clause("gemm.ordered", "gemm.output", "gemm.prescale")
@pytest.mark.parametrize("prescaled", [0, 1, 2])
def test_folded_and_packed_kernels_agree(prescaled, cases):
    """The same product in one call, and by strips too small to be folded."""
    backend = TritonBackend()
    a = replace(drawn(768, 4096, 2, seed=1), prescale=prescaled > 0)
    b = replace(drawn(640, 4096, 2, seed=2), prescale=prescaled > 1)
    for out in ("float32", "bfloat16"):
        whole = backend.scaled_gemm(a, b, out_dtype=out)
        for first in range(0, 768, 32):
            part = replace(
                a, codes=a.codes[first : first + 32], scales=a.scales[first : first + 32], shape=(32, 4096)
            )
            got = backend.scaled_gemm(part, b, out_dtype=out)
            assert torch.equal(got, whole[first : first + 32])
        cases(768 * 640)


# ---- bounded ----


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("k", [32, 512, 4096, 16384])
def test_bf16_is_of_class_fp32(k, cases):
    backend = TritonBackend(bounded="bf16")
    a, b = drawn(256, k, 4, seed=1), drawn(272, k, 4, seed=2)
    want, magnitude = exact(a, b)
    got = backend.scaled_gemm(a, b, profile="bounded").double()
    assert ((got - want).abs() <= tolerance(k, magnitude, "fp32")).all()
    assert not backend.range_exceeded()
    cases(256 * 272)


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize(("scale", "other"), [(0, 234), (3, 127), (252, 2), (57, 57)])
def test_bf16_at_the_ends_of_its_range(scale, other):
    """Elements of 2^-128 and of 6 * 2^125, products among the subnormal numbers: nothing is flushed."""
    backend = TritonBackend(bounded="bf16")
    a, b = drawn(64, 512, 0, scale, seed=1), drawn(64, 512, 0, other, seed=2)
    want, magnitude = exact(a, b)
    got = backend.scaled_gemm(a, b, profile="bounded").double()
    assert ((got - want).abs() <= tolerance(512, magnitude, "fp32")).all()
    assert not backend.range_exceeded()


@needs_hopper
@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("k", [512, 1024, 4096, 16384])
@pytest.mark.parametrize("positive", [False, True])
def test_fp8_is_within_its_bound(k, positive, cases):
    backend = TritonBackend(bounded="fp8")
    a, b = drawn(256, k, 1.5, seed=1), drawn(272, k, 1.5, seed=2)
    if positive:
        a.codes.bitwise_and_(0x77)
        b.codes.bitwise_and_(0x77)
    want, magnitude = exact(a, b)
    got = backend.scaled_gemm(a, b, profile="bounded").double()
    assert not backend.range_exceeded()
    assert ((got - want).abs() <= tolerance(k, magnitude, "fp8-hopper")).all()
    cases(256 * 272)


@needs_hopper
@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("small", range(6, 14))
def test_fp8_is_within_its_bound_where_it_loses_most(small, cases):
    """A one, and after it as many elements as possible that each fall just below the last bit kept."""
    backend = TritonBackend(bounded="fp8")
    a, b = drawn(32, 1024, 0, 127 - small // 2), drawn(32, 1024, 0, 127 - small + small // 2)
    a.codes.fill_(0x33)
    b.codes.fill_(0x22)
    for q in (a, b):
        q.codes.view(32, -1, 16)[:, ::4] = 0
        q.codes.view(32, -1, 16)[:, ::4, 0] = 2
        q.scales[:, ::4] = 127
    want, magnitude = exact(a, b)
    error = (backend.scaled_gemm(a, b, profile="bounded").double() - want).abs() / magnitude
    assert not backend.range_exceeded()
    assert error.max() <= FP8_EPS
    cases(32 * 32)


@needs_hopper
@pytest.mark.clause("gemm.bounded", "gemm.nan")
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_fp8_computes_rows_that_it_cannot_hold_from_their_codes(prepared, out, cases):
    backend = TritonBackend(bounded="fp8")
    a, b = drawn(70, 1024, 1, seed=1), drawn(64, 1024, 1, seed=2)

    def multiply() -> torch.Tensor:
        right = backend.prepare(b, profile=GemmProfile.BOUNDED) if prepared else b
        return backend.scaled_gemm(a, right, profile="bounded", out_dtype=out)

    plain = multiply()
    b.scales[5, 7] = 255
    spoiled = multiply()
    assert spoiled.isnan().sum(dim=0).tolist() == [70 if column == 5 else 0 for column in range(64)]
    b.codes.view(64, -1, 16)[9, 3] = 0
    b.scales[9, 3] = 1  # zeros under any scale fit
    assert int(fold(b).misfits[0]) == 0
    b.codes.view(64, -1, 16)[9, 3, 2] = 1  # below the smallest step of E4M3
    b.scales[20, 5], b.scales[21, 5] = 254, 200
    a.scales[33, 0], a.scales[34, 1] = 250, 0
    got, want = multiply(), backend.scaled_gemm(a, b, profile="ordered", out_dtype=out)
    rows, columns = [33, 34], [9, 20, 21]
    assert sorted(fold(a, wide=True).misfits[1:3].tolist()) == rows
    assert sorted(fold(b).misfits[1:4].tolist()) == columns
    as_integers = torch.int32 if out == "float32" else torch.int16
    for part, other in ((got[rows], want[rows]), (got[:, columns], want[:, columns])):
        assert torch.equal(part.contiguous().view(as_integers), other.contiguous().view(as_integers))
    others = torch.ones_like(got, dtype=torch.bool)
    others[rows] = False
    others[:, [5, *columns]] = False
    assert torch.equal(got[others], plain[others])
    assert not backend.range_exceeded()
    cases(70 * 64)


@needs_hopper
@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_a_left_operand_folded_wide_is_within_the_class(out, cases):
    """Scales 15 to 26 below the largest fit E5M2: nothing is computed again."""
    backend = TritonBackend(bounded="fp8")
    a, b = drawn(512, 4096, 4, seed=1), drawn(768, 4096, 1, seed=2)
    a.scales.clamp_(min=(a.scales.amax(dim=1, keepdim=True).int() - 26).clamp(min=0).to(torch.uint8))
    assert int(fold(a, wide=True).misfits[0]) == int(fold(b).misfits[0]) == 0
    assert int(fold(a).misfits[0]) > 100
    got = backend.scaled_gemm(a, b, profile="bounded", out_dtype=out)
    want, magnitude = exact(a, b)
    error = (got.double() - want).abs() / magnitude
    assert error.max() <= FP8_EPS
    assert torch.equal(backend.scaled_gemm(a, b, profile="bounded", out_dtype=out), got)
    cases(512 * 768)


@needs_hopper
@pytest.mark.clause("gemm.bounded")
def test_fp8_prepared_and_not_are_the_same_bits():
    backend = TritonBackend(bounded="fp8")
    a, b = drawn(512, 2048, 1, seed=1), drawn(768, 2048, 1, seed=2)
    for out in ("float32", "bfloat16"):
        plain = backend.scaled_gemm(a, b, profile="bounded", out_dtype=out)
        made = backend.prepare(b, profile=GemmProfile.BOUNDED)
        assert torch.equal(backend.scaled_gemm(a, made, profile="bounded", out_dtype=out), plain)


@needs_hopper
@pytest.mark.clause("gemm.operands")
@pytest.mark.parametrize(("m", "n", "k"), [(5, 40, 1024), (600, 600, 1024), (64, 64, 480)])
def test_what_fp8_does_not_take_is_answered_with_ordered(m, n, k):
    backend = TritonBackend(bounded="fp8")
    a, b = drawn(m, k, 6, seed=1), drawn(n, k, 6, seed=2)
    got = backend.scaled_gemm(a, b, profile="bounded")
    assert same_bits(got, ordered(a, b))
    assert not backend.range_exceeded()


def test_fold_of_every_code_at_every_gap(cases):
    """The bytes, against torch's own conversion to E4M3, which rounds to nearest as folding does."""
    rows = [[(140, [2] + [0] * 31), (140 - gap, [*range(16), *range(16)])] for gap in range(141)]
    codes = torch.tensor([[c for _, block in row for c in block] for row in rows], device="cuda")
    scales = torch.tensor([[s for s, _ in row] for row in rows], dtype=torch.uint8, device="cuda")
    q = MXArray((codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales, (141, 64), 1)
    f = fold(q)
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cuda")[codes & 7]
    value = torch.where(codes > 7, -value, value)
    value = value * torch.exp2(scales.double().repeat_interleave(32, 1) - 134)
    order = torch.tensor([*range(0, 32, 2), *range(1, 32, 2)], device="cuda")
    want = value.view(141, 2, 32)[..., order].reshape(141, 64).float().to(torch.float8_e4m3fn)
    assert torch.equal(f.values.view(torch.uint8), want.view(torch.uint8))
    wide = fold(q, wide=True)
    value = value[:27] * 2.0**7
    fitting = value.view(27, 2, 32)[..., order].reshape(27, 64).float().to(torch.float8_e5m2)
    assert torch.equal(wide.values.view(torch.uint8)[:27], fitting.view(torch.uint8))
    assert sorted(wide.misfits[1 : 1 + int(wide.misfits[0])].tolist()) == [*range(27, 141)]
    by_block = fold(q, by_block=True).values.view(torch.uint8)
    assert torch.equal(by_block.transpose(0, 1).reshape(141, 64), want.view(torch.uint8))
    cases(141 * 64)
