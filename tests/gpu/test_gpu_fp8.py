"""Tensor-scaled FP8 by the GPU's own FP8 units: the products of a layer within the error class, whatever its shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import library

from mxref_torch.operators import dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = (
    (256, 128, 512),
    (2048, 2048, 2048),
    (48, 16, 32),
    (33, 48, 64),
    (64, 40, 96),
    (1, 16, 16),
    (0, 16, 32),
)
EPS = 2.0**-6
"""Of the class `fp8-hopper`, which holds that of every other way too."""


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)], ids=["fprop", "backward"])
def test_products_are_within_the_error_class(types, cases):
    generator = torch.Generator("cuda").manual_seed(0)
    a_inverse, b_inverse = torch.tensor(0.37, device="cuda"), torch.tensor(0.0021, device="cuda")
    for m, n, k in SHAPES:
        a, b = (
            (40 * torch.randn(rows, k, device="cuda", generator=generator)).to(dtype)
            for rows, dtype in zip((m, n), types, strict=True)
        )
        exact, sizes = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        plain = dense.dense_gemm(a, b, "dgrad")
        assert plain.dtype is torch.float32
        assert ((plain.double() - exact).abs() <= EPS * sizes).all()
        scaled = dense.dense_gemm(a, b, "dgrad", None, a_inverse, b_inverse)
        assert scaled.dtype is torch.bfloat16
        factor = a_inverse.double() * b_inverse.double()
        error = (scaled.double() - exact * factor).abs()
        assert (error <= EPS * sizes * factor + 2.0**-8 * exact.abs() * factor).all()
    cases(len(SHAPES))


def test_a_transposed_operand_gives_the_same_product():
    a, b = (torch.randn(64, 64, device="cuda").to(E4M3) for _ in range(2))
    want = dense.dense_gemm(a, b, "fprop")
    assert torch.equal(dense.dense_gemm(a.t().contiguous().t(), b.t().contiguous().t(), "fprop"), want)


def test_the_operator_passes_torchs_own_checks():
    a, b = (torch.randn(64, 64, device="cuda").to(E4M3) for _ in range(2))
    scales = [torch.ones((), device="cuda")] * 2
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    for arguments in ((a, b, "fprop"), (a, b, "fprop", None, *scales)):
        library.opcheck(dense.dense_gemm, arguments, test_utils=checks)
