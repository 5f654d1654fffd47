"""A capture that fails leaves the GPU as it was: stream, generator, allocator, and graphs that were captured before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref_torch.captured.operations import capturing

FAILURES = 3


def waits(x: torch.Tensor) -> None:
    (x + torch.rand(len(x), device="cuda")).sum().item()


def errs(x: torch.Tensor) -> None:
    x + torch.rand(len(x), device="cuda")
    raise KeyError("a mistake in Python")


def held() -> int:
    """Bytes that were freed and that the allocator does not give out again yet."""
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # looks at what other streams have finished
    found = torch.cuda.memory_stats()
    return int(found["active_bytes.all.current"] - found["allocated_bytes.all.current"])


def used_by(stream: Any) -> None:
    """Free memory that another stream has used."""
    t = torch.empty(1 << 22, device="cuda")
    t.record_stream(stream)


@pytest.mark.parametrize("fails", [waits, errs])
def test_the_gpu_goes_on_as_before(
    fails: Callable[[torch.Tensor], None], cases: Callable[[int], None]
) -> None:
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(64, device="cuda")
    y = torch.zeros(64, device="cuda")
    earlier = torch.cuda.CUDAGraph()
    with capturing(earlier, stream):
        y.copy_(x + torch.rand(64, device="cuda"))
    torch.cuda.manual_seed(5)
    want = [torch.randn(64, device="cuda") for _ in range(2)]
    before = held()
    torch.cuda.manual_seed(5)
    drawn = [torch.randn(64, device="cuda")]
    for _ in range(FAILURES):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(Exception), capturing(graph, stream):  # noqa: B017, PT011 - as CUDA's version names it
            fails(x)
        del graph
    drawn.append(torch.randn(64, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(drawn, want, strict=True))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    used_by(other)
    assert held() == before
    earlier.replay()
    first = y.clone()
    earlier.replay()
    assert not torch.equal(first, y)
    later = torch.cuda.CUDAGraph()
    with capturing(later, stream):
        y.copy_(x * 2)
    later.replay()
    assert torch.equal(y, x * 2)
    cases(FAILURES)
