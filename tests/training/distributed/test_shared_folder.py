"""Ranks on hosts that share the folder of a run, late or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import CheckpointError
from mxref_training.run import shared_folder
from mxref_training.run.shared_folder import require_shared
from rank_threads import on_ranks


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
    monkeypatch.setattr(shared_folder, "PATIENCE", 0.0)
    monkeypatch.setattr(
        shared_folder.socket, "gethostname", lambda: f"host-{threading.current_thread().name}"
    )
    records = [of_host(tmp_path / "0", "the run"), of_host(tmp_path / "1", text)]

    def look(ranks: Ranks) -> None:
        threading.current_thread().name = str(ranks.rank)
        require_shared(records[ranks.rank], ranks)

    for err in on_ranks(2, look):
        with pytest.raises(
            CheckpointError, match=r"rank 1 on host-1 does not find .*run\.json as rank 0 on host-0 "
        ):
            raise err


def test_one_process_shares_with_nobody(tmp_path: Path) -> None:
    require_shared(tmp_path / "no such file", SOLE)
