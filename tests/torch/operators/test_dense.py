"""BF16 products on a CPU for which torch has no vector code of its own."""

import pytest

torch = pytest.importorskip("torch")

from mxref_torch.operators import dense


@pytest.fixture
def capability(monkeypatch):
    def set_to(name):
        dense._widens.cache_clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)

    yield set_to
    dense._widens.cache_clear()


def test_bf16_products_on_avx2_are_those_of_float32_rounded_once(capability):
    # 1 + 2^-8 + 2^-18 lies just above the tie between 1 and 1 + 2^-7; BF16 sums would lose the last term.
    a, b = torch.tensor([[1.0, 2.0**-9, 2.0**-9]]), torch.tensor([[1.0, 2.0, 2.0**-9]])
    given = a.bfloat16(), b.bfloat16()
    capability("AVX2")
    out = dense.dense_gemm(*given, "fprop")
    assert out.dtype == torch.bfloat16
    assert out.item() == 1 + 2.0**-7


@pytest.mark.parametrize(("name", "float32_products"), [("AVX2", 1), ("AVX512", 0), ("DEFAULT", 0)])
def test_only_avx2_takes_float32(capability, monkeypatch, name, float32_products):
    taken = []
    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: taken.append(a.dtype) or plain(a, b))
    capability(name)
    dense.dense_gemm(torch.ones(2, 4).bfloat16(), torch.ones(3, 4).bfloat16(), "fprop")
    assert taken.count(torch.float32) == float32_products
    assert len(taken) == 1
