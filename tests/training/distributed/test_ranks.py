"""The ranks of a run: what the environment says of them, and one process, which has no other ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.failing import one_error
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import ConfigError
from rank_threads import on_ranks

STARTED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_the_environment_of_torchrun_is_read() -> None:
    assert started_ranks(STARTED) == Ranks(3, 4, 1, 2)
    assert started_ranks({"PATH": "/bin"}) is SOLE
    assert not started_ranks(STARTED).first
    assert started_ranks(dict.fromkeys(STARTED, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) == SOLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": "four"}, "there is WORLD_SIZE=four: "),
        ({"LOCAL_RANK": ""}, "there is LOCAL_RANK=: "),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        started_ranks(STARTED | change)


def test_one_process_talks_to_itself_and_needs_no_process_group() -> None:
    with connected(SOLE) as ranks:
        assert ranks is SOLE
        assert not torch.distributed.is_initialized()
        assert (ranks.first, ranks.several) == (True, False)
        assert ranks.broadcast({"a": 1}) == {"a": 1}
        assert ranks.gather("x") == ["x"]
        assert ranks.gather_numbers([1, 2.5]) == [[1, 2.5]]
        assert (ranks.any(False), ranks.any(True)) == (False, True)
        ranks.agree("the run", {"seed": 1})
        entered = []
        with ranks.first_alone():
            entered.append(1)
        assert entered == [1]


def test_one_process_raises_its_own_error_unchanged() -> None:
    error = ValueError("as it is")
    with pytest.raises(ValueError, match="^as it is$") as caught, one_error(SOLE):
        raise error
    assert caught.value is error


def test_what_differs_between_ranks_is_named_by_its_key() -> None:
    def agree(ranks: Ranks) -> None:
        ranks.agree(
            "the run", {"run": {"seed": 3, "batch": 4}, "data": {"train": "ab"[ranks.rank], "val": "c"}}
        )

    for found in on_ranks(2, agree):
        assert isinstance(found, ConfigError)
        assert str(found).startswith(
            "the run: data.train is 'a' on rank 0 and 'b' on rank 1: start every rank"
        )
