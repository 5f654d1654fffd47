"""Ranks with other versions, other code or other processors than the first."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mxref_training import identity
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import ConfigError
from mxref_training.identity import require_same_draws, require_same_software
from rank_threads import on_ranks


def named(require: Any) -> Any:
    """Give the thread of a rank its number as its name, by which what is replaced tells ranks apart."""

    def work(ranks: Ranks) -> None:
        threading.current_thread().name = str(ranks.rank)
        require(ranks)

    return work


def on_second() -> bool:
    return threading.current_thread().name == "1"


@pytest.mark.parametrize(
    ("name", "replaced", "said"),
    [
        (
            "versions",
            lambda: {"torch": "2.12" if on_second() else "2.13"},
            "torch is '2.13' on rank 0 and '2.12'",
        ),
        (
            "versions",
            lambda: {} if on_second() else {"numba": "1"},
            "numba is '1' on rank 0 and None on rank 1",
        ),
        (
            "code_digest",
            lambda: "b" if on_second() else "a",
            "code of mxref is 'a' on rank 0 and 'b' on rank 1",
        ),
    ],
)
def test_other_software_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, replaced: Any, said: str
) -> None:
    monkeypatch.setattr(identity, name, replaced)
    for err in on_ranks(2, named(require_same_software)):
        with pytest.raises(ConfigError, match=f"the software: {said}.*: start every rank with the same"):
            raise err


def test_the_same_software_and_processor_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another bug-fix release of Python moves no bit."""
    monkeypatch.setattr(identity, "versions", lambda: {"python": threading.current_thread().name})
    assert on_ranks(2, named(require_same_software)) == [None, None]
    assert on_ranks(2, named(require_same_draws)) == [None, None]
    require_same_software(SOLE)
    require_same_draws(SOLE)


def test_a_processor_that_draws_other_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = torch.Tensor.normal_

    def other(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return normal(tensor, *arguments, **options).mul_(1 + 2**-20 * on_second())

    monkeypatch.setattr(torch.Tensor, "normal_", other)
    for err in on_ranks(2, named(require_same_draws)):
        with pytest.raises(
            ConfigError, match=r"other weights on rank 1 \(.*\) than on rank 0 .*ATEN_CPU_CAPABILITY"
        ):
            raise err
