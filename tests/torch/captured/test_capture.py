"""What a capture leaves behind that fails, with the calls of `torch.cuda` recorded: a CPU has none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxref_torch.captured.operations import capturing

POOL = (0, 7)
STREAM = SimpleNamespace(device=torch.device("cpu"), device_index=3)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls in their order. A capture whose block raises does not end."""
    made: list[Any] = []

    class Graph:
        ended = False

        def pool(self) -> Any:
            if not self.ended:
                raise RuntimeError("without a preceding successful capture")
            return POOL

        def reset(self) -> None:
            made.append("reset")

    @contextmanager
    def graph(graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        assert stream is STREAM
        made.append(("begin", pool))
        try:
            yield
        except KeyError:
            graph.ended = True
            raise
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 - as torch
        graph.ended = True
        made.append("end")

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        assert stream is STREAM
        made.append("stream")
        try:
            yield
        finally:
            made.append("stream before")

    for name, value in (
        ("CUDAGraph", Graph), ("graph", graph), ("stream", current), ("graph_pool_handle", lambda: POOL),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        note = lambda *given, name=name: made.append((name, *given))  # noqa: E731
        monkeypatch.setattr(torch._C, name, note, raising=False)
    return made


def test_a_capture_that_ends_is_all_there_is(calls: list[Any]) -> None:
    with capturing(torch.cuda.CUDAGraph(), STREAM):
        pass
    assert calls == ["stream", ("begin", POOL), "end", "stream before"]


def test_one_whose_end_fails_too_is_ended_for_allocator_and_generator(calls: list[Any]) -> None:
    with (
        pytest.raises(RuntimeError, match="previous error") as found,
        capturing(torch.cuda.CUDAGraph(), STREAM),
    ):
        raise ValueError("waits for the GPU")
    assert isinstance(found.value.__context__, ValueError)
    assert calls == [
        "stream", ("begin", POOL), "stream before", "reset",
        ("_cuda_endAllocateToPool", 3, POOL), ("_cuda_releasePool", 3, POOL),
        "stream", ("begin", None), "end", "stream before", "reset",
    ]  # fmt: skip


def test_one_that_ends_after_an_exception_frees_its_graph_alone(calls: list[Any]) -> None:
    with pytest.raises(KeyError), capturing(torch.cuda.CUDAGraph(), STREAM):
        raise KeyError("a mistake in Python")
    assert calls == ["stream", ("begin", POOL), "stream before", "reset"]
