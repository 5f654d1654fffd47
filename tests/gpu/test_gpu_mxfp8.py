"""Formats other than MXFP4 on the GPU: products of every pair against their error class, at every scale; flags."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from gpu.operands_torch import DEVICE, tolerance
from mxref import GemmProfile, MXArray
from mxref.backend import within_range
from mxref.formats import (
    BLOCK_FORMATS,
    CANONICAL_NAN,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
)
from mxref.layouts.packed import pack, unpack
from mxref_triton import TritonBackend
from mxref_triton.products import by_value

GEMMS = TritonBackend.capabilities.gemms
PAIRS = [
    pair for pair in product(BLOCK_FORMATS.values(), repeat=2)
    if (GemmProfile.BOUNDED, *pair) in GEMMS and pair != (MXFP4, MXFP4)
]  # fmt: skip
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))


def drawn(made: BlockFormat, rows: int, k: int, low: int, high: int, seed: int) -> MXArray:
    """Return drawn finite codes under scale codes from `low` to `high`; of scales with a mantissa, under all."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=DEVICE, generator=generator)

    element = made.element
    codes = integers(0, element.max_code + 1, rows, k) | integers(0, 2, rows, k) * element.sign
    codes = torch.from_numpy(pack(codes.cpu().numpy(), element)).to(DEVICE)
    if not made.scale.powers:
        low, high = 0, made.scale.max_code
    tensor = torch.tensor([0.7 + seed / 999], device=DEVICE) if made.tensor_scale else None
    scales = integers(low, high + 1, rows, k // made.k)
    return MXArray(codes, scales, (rows, k), 1, format=made, tensor_scale=tensor)


def values(q: MXArray) -> torch.Tensor:
    """Return the values of an operand in float64 [rows, K]."""
    grid = torch.tensor(q.format.element.values, dtype=torch.float64, device=DEVICE)
    codes = torch.from_numpy(unpack(q.codes.cpu().numpy(), q.format.element)).to(DEVICE)
    scales = torch.tensor(q.format.scale.values, dtype=torch.float64, device=DEVICE)[q.scales.long()]
    values = grid[codes.long()] * scales.repeat_interleave(q.format.k, 1)
    return values if q.tensor_scale is None else values * q.tensor_scale.double()


def check(
    backend: TritonBackend, a: MXArray, b: MXArray, out: str = "float32", prepared: bool = False
) -> int:
    """Hold a product to its class, done over where it left its range; return how often it was computed."""
    runs = []
    right = backend.prepare(b, profile="bounded") if prepared else b

    def work() -> torch.Tensor:
        runs.append(None)
        return backend.scaled_gemm(a, right, profile="bounded", out_dtype=out)

    got = within_range(backend, work).double()
    va, vb = values(a), values(b)
    want, magnitude = va @ vb.T, va.abs() @ vb.abs().T
    scaled = sum(q.tensor_scale is not None for q in (a, b))
    bound = tolerance(a.length + scaled, magnitude, backend.capabilities.bounded_class, out)
    right_or_nan = ((got - want).abs() <= bound) | (got.isnan() & want.isnan())
    assert (right_or_nan | (magnitude >= 2.0**127)).all()
    return len(runs)


@pytest.mark.clause("gemm.bounded", "gemm.output", "conformance.dual")
@pytest.mark.parametrize("k", [32, 512, 4096, 16384])
@every_pair
def test_products_are_of_their_class(pair, k, cases):
    a, b = (drawn(made, rows, k, 116, 126, rows) for made, rows in zip(pair, (256, 272), strict=True))
    for bounded in ("auto", "bf16", "ordered"):
        backend = TritonBackend(bounded=bounded)
        for out, prepared in (("float32", False), ("bfloat16", True)):
            assert check(backend, a, b, out, prepared) == 1
            cases(256 * 272)


@pytest.mark.clause("gemm.bounded", "gemm.tensor_scale", "gemm.prescale", "gemm.nan", "conformance.dual")
@pytest.mark.parametrize("out", ["float32", "bfloat16", "onto"])
@pytest.mark.parametrize(("made", "prescale"), [(NVFP4, False), (MXFP8_E4M3, True), (MXINT8, False)], ids=str)
def test_hopper_finishes_sums_where_it_multiplies(made, prescale, out, monkeypatch):
    """Tiles that reach over every edge, several to a program, over memory that held something else."""
    backend = TritonBackend()
    if not by_value.is_hopper(torch.device("cuda", 0)) or (GemmProfile.BOUNDED, made, made) not in GEMMS:
        pytest.skip("no Hopper, or not declared")

    def poisoned(shape, dtype, device):
        return torch.full(shape, -7.75e33, dtype=dtype, device=device)

    launched = []
    monkeypatch.setattr(by_value, "empty", poisoned)
    monkeypatch.setattr(by_value, "_programs", lambda device: 3)
    kept = by_value._multiply
    monkeypatch.setattr(by_value, "_multiply", lambda *given: (launched.append(1), kept(*given)))
    a, b = drawn(made, 300, 480, 116, 126, 1), drawn(made, 777, 480, 116, 126, 2)
    a.scales[7, 3] = made.scale.nan_code
    a = replace(a, prescale=prescale)
    onto = torch.linspace(-9, 9, 300 * 777, device=DEVICE).reshape(300, 777)
    want = values(a) @ values(b).T / (made.element.prescale if prescale else 1)
    magnitude = values(a).abs() @ values(b).abs().T / (made.element.prescale if prescale else 1)
    if out == "onto":
        got, want = onto.clone(), want + onto
        backend.add_product(a, b, got, profile="bounded")
        bound = tolerance(483, magnitude, "fp32") + 2.0**-23 * (want.abs() + magnitude)
    else:
        got = backend.scaled_gemm(a, b, profile="bounded", out_dtype=out)
        bound = tolerance(483, magnitude, "fp32", out)
    # Without anything to finish, BLAS rounds to bfloat16 itself.
    assert bool(launched) == (out != "bfloat16" or made is not MXINT8)
    assert not backend.range_exceeded()
    rows = torch.arange(300, device=DEVICE) != 7
    assert got[7].isnan().all()
    assert ((got.double() - want).abs() <= bound)[rows].all()


@pytest.mark.clause("gemm.operands", "gemm.tensor_scale")
@pytest.mark.parametrize("made", [NVFP4, MXFP8_E4M3, MXINT8], ids=str)
def test_large_products_along_no_elements_are_zeros(made):
    """Enough tiles for the kernel of Hopper, which cannot read such operands."""
    backend = TritonBackend()
    a, b = drawn(made, 2304, 0, 116, 126, 1), drawn(made, 4352, 0, 116, 126, 2)
    for out in ("float32", "bfloat16"):
        assert not backend.scaled_gemm(a, b, profile="bounded", out_dtype=out).count_nonzero()
    onto = torch.ones(2304, 4352, device=DEVICE)
    backend.add_product(a, b, onto, profile="bounded")
    assert bool((onto == 1).all())


@pytest.mark.clause("gemm.bounded", "gemm.nan")
@every_pair
def test_products_at_every_scale(pair, cases):
    """Scale codes of 0 to 254 side by side, some NaN: out of the range of BF16, and computed block by block."""
    backend = TritonBackend()
    a, b = (drawn(made, rows, 1024, 0, 254, rows) for made, rows in zip(pair, (96, 112), strict=True))
    a.scales[3, 1], b.scales[5, 2] = 255, 255
    # Folded operands have no range, and BF16 holds nearly all of MXINT8 and all of NVFP4.
    narrow = all(made.element.bits < 8 or made is MXINT8 for made in pair)
    assert check(backend, a, b) in ((1, 2) if narrow else (2,))
    cases(96 * 112)


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize(("made", "lowest", "highest"), [(MXFP8_E4M3, 3, 246), (MXFP8_E5M2, 10, 239)])
def test_bf16_at_the_ends_of_its_range(made, lowest, highest):
    """Elements of bfloat16's smallest step, and of its largest binade: exact, and neither flushed nor flagged."""
    backend = TritonBackend(bounded="bf16")
    for scale, other in ((lowest, 230), (highest, 2 + lowest), (lowest, 127)):
        a, b = drawn(made, 64, 512, scale, scale, 1), drawn(made, 64, 512, other, other, 2)
        assert check(backend, a, b) == 1
    for scale in (lowest - 1, highest + 1):
        a, b = drawn(made, 64, 512, scale, scale, 1), drawn(made, 64, 512, 20, 20, 2)
        assert check(backend, a, b) == 2


@pytest.mark.clause("gemm.nan")
@pytest.mark.parametrize("bounded", ["auto", "ordered"])
def test_nan_and_inf_codes_give_what_their_values_give(bounded):
    a, b = (drawn(MXFP8_E5M2, rows, 64, 120, 130, rows) for rows in (40, 48))
    beyond = torch.tensor([0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF], dtype=torch.uint8, device=DEVICE)
    a.codes[:8, 3], b.codes[:8, 3] = beyond, beyond
    got = TritonBackend(bounded=bounded).scaled_gemm(a, b, profile="bounded")
    # A sum of products with one Inf or NaN among the terms does not depend on their order.
    want = (values(a)[:, None] * values(b)[None]).sum(-1)
    finite = want.isfinite()
    assert bool(want.isinf().any())
    assert bool(want.isnan().any())
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
    assert (got[want.isnan()].view(torch.int32) == CANONICAL_NAN).all()
