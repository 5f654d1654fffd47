"""What all ranks of a run must have in common: the command, versions, code, processors and the folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mxref_training.distributed import agreement
from mxref_training.distributed.agreement import require_agreement, require_same_draws, require_shared
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import ConfigError
from rank_threads import on_ranks


def named(require: Any) -> Any:
    """Give the thread of a rank its number as its name, by which what is replaced tells ranks apart."""

    def work(ranks: Ranks) -> None:
        threading.current_thread().name = str(ranks.rank)
        require(ranks)

    return work


def agreed(ranks: Ranks) -> None:
    require_agreement(ranks, Path("run"), {"run": {"seed": 3}})


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
            "numba is '1' on rank 0 and 'not set' on rank 1",
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
    monkeypatch.setattr(agreement, name, replaced)
    for err in on_ranks(2, named(agreed)):
        with pytest.raises(ConfigError, match=f"the software: {said}.*: start every rank with the same"):
            raise err


def test_the_same_software_and_processor_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another bug-fix release of Python moves no bit."""
    monkeypatch.setattr(agreement, "versions", lambda: {"python": threading.current_thread().name})
    assert on_ranks(2, named(agreed)) == [None, None]
    assert on_ranks(2, named(require_same_draws)) == [None, None]
    agreed(SOLE)
    require_same_draws(SOLE)


def test_another_folder_or_seed_on_one_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder in other words is the same."""

    def other(ranks: Ranks) -> None:
        require_agreement(ranks, tmp_path / f"run-{ranks.rank}", {})

    def reseeded(ranks: Ranks) -> None:
        require_agreement(ranks, tmp_path, {"run": {"seed": ranks.rank}})

    for err in on_ranks(2, other):
        with pytest.raises(
            ConfigError, match="the command: --out is '.*run-0' on rank 0 and '.*run-1' on rank 1"
        ):
            raise err
    for err in on_ranks(2, reseeded):
        with pytest.raises(ConfigError, match="the run's numbers: run.seed is 0 on rank 0 and 1 on rank 1"):
            raise err
    monkeypatch.chdir(tmp_path)
    words = ["run", tmp_path / "." / "run"]
    assert on_ranks(2, lambda ranks: require_agreement(ranks, Path(words[ranks.rank]), {})) == [None, None]


def test_a_processor_that_draws_other_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = torch.Tensor.normal_

    def other(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return normal(tensor, *arguments, **options).mul_(1 + 2**-20 * on_second())

    monkeypatch.setattr(torch.Tensor, "normal_", other)
    for err in on_ranks(2, named(require_same_draws)):
        with pytest.raises(
            ConfigError,
            match=r"the weights that PyTorch draws \(set ATEN_CPU_CAPABILITY=.* on rank 0 and .* on rank 1",
        ):
            raise err


def of_host(folder: Path, text: str | None) -> Path:
    folder.mkdir()
    if text is not None:
        (folder / "run.json").write_text(text)
    return folder / "run.json"


def test_what_another_host_shows_late_is_waited_for(tmp_path: Path) -> None:
    records = [
        of_host(tmp_path / "0", "the run"),
        of_host(tmp_path / "1", None),
        of_host(tmp_path / "2", "old"),
    ]
    for late in records[1:]:
        threading.Timer(0.3, late.write_text, ("the run",)).start()
    assert on_ranks(3, lambda ranks: require_shared(records[ranks.rank], ranks)) == [None] * 3


@pytest.mark.parametrize("text", [None, "another run"])
def test_a_host_with_another_folder_is_named_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(agreement, "PATIENCE", 0.0)
    records = [of_host(tmp_path / "0", "the run"), of_host(tmp_path / "1", text)]
    for err in on_ranks(2, lambda ranks: require_shared(records[ranks.rank], ranks)):
        found = "[0-9a-f]+" if text else "No such file or directory"
        with pytest.raises(
            ConfigError,
            match=rf"all hosts share, .*run\.json is '[0-9a-f]+' on rank 0 and '{found}' on rank 1",
        ):
            raise err


def test_one_process_shares_with_nobody(tmp_path: Path) -> None:
    require_shared(tmp_path / "no such file", SOLE)
