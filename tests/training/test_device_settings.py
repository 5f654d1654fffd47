"""Device settings of a run hold only during the run; an error about too little memory names the setting to change."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from mxref.errors import MxrefError
from mxref_training.device import deterministic
from mxref_triton.memory import DeviceMemoryError, asking, empty

CPU = torch.device("cpu")


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_runs_are_deterministic_and_do_not_fill_memory(filled, fails, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", filled)
    threads = torch.get_num_threads()
    try:
        with deterministic(CPU, threads=1):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
            assert torch.get_num_threads() == 1
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is filled
    assert torch.get_num_threads() == threads


@pytest.fixture
def full(monkeypatch):
    """A GPU of which nothing is left."""

    def refuse(*_args, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5_000, 90_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4_000)
    return refuse


def test_memory_that_is_not_there_is_asked_for_by_size(full):
    message = "cpu: 6,144 bytes asked for, 5,000 of 90,000 free and 3,000 cached in pieces; take a smaller"
    with pytest.raises(DeviceMemoryError, match=message) as caught:
        empty((3, 1024), torch.int16, CPU)
    assert isinstance(caught.value, MxrefError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(DeviceMemoryError, match="cpu: 123 bytes asked for") as caught, asking(123, CPU):
        full()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_of_an_allocation_stay_what_they_are():
    with pytest.raises(KeyError), asking(123, CPU):
        raise KeyError("x")
    with asking(123, CPU):
        pass
    assert empty((2, 3), torch.int32, CPU).shape == (2, 3)
