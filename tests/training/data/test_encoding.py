"""Tokens made by spawned processes: the same as by one, and no process is left whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import data_files
from data_files import documents, make_texts
from mxref_training.data import Tokenizer, tokenize
from mxref_training.data.documents import survey
from mxref_training.data.encoding import encoded
from mxref_training.errors import DataError

own_cache = data_files.own_cache
tokenizer = data_files.tokenizer


def test_workers_make_the_same_tokens(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_texts(1100, 3)
    alone = tokenize(documents(texts), tokenizer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    shared = tokenize(documents(texts), tokenizer, workers=2)
    assert str(shared.ids.filename).startswith(str(tmp_path / "other"))  # type: ignore[attr-defined]
    assert shared.sha256 == alone.sha256
    assert shared.ids.tobytes() == alone.ids.tobytes()
    assert not multiprocessing.active_children()


def test_batches_are_taken_as_they_are_needed(tokenizer: Tokenizer) -> None:
    taken = 0

    def batches() -> Iterator[list[str]]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield [f"text {number}"]

    found = encoded(batches(), tokenizer, "<u2", 2)
    for number in range(3):
        ids = [*tokenizer.encode_batch([f"text {number}"])[0], tokenizer.eot]
        assert next(found) == b"".join(i.to_bytes(2, "little") for i in ids)
        assert taken == 4 + number
    found.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def failing_tokenizer() -> Tokenizer:
    """Return a tokenizer that knows one word and raises at any other."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import models

    vocab = {"known": 0, "<|endoftext|>": 1}
    return Tokenizer(HuggingFaceTokenizer(models.WordLevel(vocab, unk_token="[missing]")), "failing")


def test_a_worker_that_raises(own_cache: Path) -> None:
    texts = ["known"] * 600 + ["unknown"]
    with pytest.raises(
        DataError, match=r"a worker process .* failed \(Exception: WordLevel error: .*data\.workers"
    ):
        tokenize(documents(texts), failing_tokenizer(), workers=2)
    assert not multiprocessing.active_children()
    assert not list((own_cache / "tokens").iterdir())


def test_a_worker_that_dies_stops_the_rest(tokenizer: Tokenizer, own_cache: Path) -> None:
    texts = make_texts(2000, 1)
    readings = iter([False, True])

    def read() -> Iterator[str]:
        kill = next(readings)
        for number, text in enumerate(texts):
            if kill and number == 1500:
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)
            yield text

    with pytest.raises(DataError, match=r"died; the kernel may have killed it .* lower data\.workers"):
        tokenize(survey("texts", read), tokenizer, workers=2)
    assert not multiprocessing.active_children()
    assert not list((own_cache / "tokens").iterdir())


_SCRIPT = """
import itertools, multiprocessing, signal, sys
from mxref_training.data import load_tokenizer
from mxref_training.data.encoding import encoded
told = False
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    texts = (["some text"] * 50 for _ in itertools.count())
    for _ in encoded(texts, load_tokenizer(sys.argv[1]), "<u2", 2):
        pids = [child.pid for child in multiprocessing.active_children()]
        if len(pids) == 2 and not told:
            told = not print(*pids, flush=True)
"""


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_is_left(tokenizer: Tokenizer, tmp_path: Path, kill: signal.Signals) -> None:
    """The parent ends by a signal, SIGINT to the whole group as a terminal sends it: no worker stays."""
    table = tokenizer.to_table()
    (tmp_path / "tokenizer.json").write_text(table["json"])
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "tokenizer.json")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if kill == signal.SIGINT:
            os.killpg(parent.pid, kill)
        else:
            parent.send_signal(kill)
        try:
            parent.communicate(timeout=30)
        finally:
            parent.kill()
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{alive} still run"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
