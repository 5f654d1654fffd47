"""Token arrays and loaders: every token once per epoch, in an order that survives a restart."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data_files
from data_files import documents, make_texts
from mxref_training.data import Loader, Tokenizer, sequential_batches, tokenize
from mxref_training.data.documents import survey
from mxref_training.data.tokens import token_dtype
from mxref_training.errors import DataError

own_cache = data_files.own_cache
tokenizer = data_files.tokenizer


# ---------------------------------------------------------------- tokens


def test_tokens_are_the_documents_each_with_an_end(tokenizer: Tokenizer) -> None:
    texts = make_texts(600, 3)
    tokens = tokenize(documents(texts), tokenizer)
    ends = np.flatnonzero(tokens.ids == tokenizer.eot)
    starts = np.concatenate([[0], ends[:-1] + 1])
    assert [tokenizer.decode(tokens.ids[a:b]) for a, b in zip(starts, ends, strict=True)] == texts
    assert ends[-1] == len(tokens) - 1
    assert tokens.ids.dtype == np.uint16
    assert tokens.sha256 == hashlib.sha256(tokens.ids.tobytes()).hexdigest()
    assert not tokens.ids.flags.writeable


def test_token_dtype() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_tokens_come_from_the_cache(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_texts(30)
    first = tokenize(documents(texts), tokenizer)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: pytest.fail("tokenised again"))
    assert tokenize(documents(texts), tokenizer).sha256 == first.sha256


def test_text_that_changes_while_it_is_read(tokenizer: Tokenizer, own_cache: Path) -> None:
    readings = iter([["one text"], ["another text"]])
    docs = survey("moving", lambda: next(readings))
    with pytest.raises(DataError, match="moving changed while it was read"):
        tokenize(docs, tokenizer)
    assert not list((own_cache / "tokens").iterdir())


# ---------------------------------------------------------------- loader


@pytest.mark.parametrize("seq_len", [1, 4, 10])
def test_every_token_is_predicted_once_per_epoch(seq_len: int) -> None:
    tokens = np.arange(41, dtype=np.uint16)
    loader = Loader(tokens, seq_len, seed=3)
    for epoch in range(3):
        inputs, targets = zip(*(loader.next_batch(1) for _ in range(loader.windows)), strict=True)
        assert sorted(np.concatenate(targets, axis=None)) == list(range(1, 41))
        assert sorted(np.concatenate(inputs, axis=None)) == list(range(40))
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (epoch + 1, 0)


def test_leftover_tokens_move_from_epoch_to_epoch() -> None:
    loader = Loader(np.arange(10 * 7 + 6), 10, seed=0)
    seen: set[int] = set()
    for _ in range(60):
        for _ in range(loader.windows):
            inputs, targets = loader.next_batch(1)
            assert np.array_equal(targets, inputs + 1)
            seen.update(targets[0].tolist())
    assert seen == set(range(1, 76))


def test_batches_are_int64_and_shifted_by_one() -> None:
    inputs, targets = Loader(np.arange(1000, dtype=np.uint16), 16).next_batch(8)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.flags.c_contiguous
    assert targets.flags.c_contiguous


def samples(loader: Loader, sizes: list[int]) -> list[int]:
    return [int(first) for size in sizes for first in loader.next_batch(size)[0][:, 0]]


def test_order_does_not_depend_on_the_split() -> None:
    tokens = np.arange(100 * 8 + 3)
    whole = samples(Loader(tokens, 8, seed=5), [240])
    assert samples(Loader(tokens, 8, seed=5), [1] * 240) == whole
    assert samples(Loader(tokens, 8, seed=5), [7, 100, 3, 130]) == whole


@pytest.mark.parametrize(
    ("ranks", "micro_batch"), [(1, 4), (2, 4), (2, 12), (3, 6), (4, 4), (4, 12), (12, 12)]
)
def test_ranks_share_the_rows_of_every_micro_batch(ranks: int, micro_batch: int) -> None:
    tokens = np.arange(100 * 8 + 3)
    whole = Loader(tokens, 8, seed=5)
    parts = [Loader(tokens, 8, seed=5) for _ in range(ranks)]
    for _ in range(10):
        rows = whole.next_batch(12)[0]
        found = [
            loader.next_batch(12, micro_batch=micro_batch, part=(rank, ranks))[0]
            for rank, loader in enumerate(parts)
        ]
        taken = [0] * ranks
        for row in range(12):  # the assignment as its definition says it
            rank = row % micro_batch * ranks // micro_batch
            assert np.array_equal(found[rank][taken[rank]], rows[row])
            taken[rank] += 1
        assert taken == [len(part) for part in found] == [12 // ranks] * ranks
        assert all(loader.state_dict() == whole.state_dict() for loader in parts)


def test_a_state_of_two_ranks_resumes_on_any_number() -> None:
    tokens = np.arange(100 * 8 + 3)
    two = [Loader(tokens, 8, seed=5) for _ in range(2)]
    for rank, loader in enumerate(two):
        loader.next_batch(84, micro_batch=4, part=(rank, 2))
        loader.next_batch(84, micro_batch=4, part=(rank, 2))
    expected = samples(Loader(tokens, 8, seed=5), [168, 12])[168:]
    for ranks in (1, 3, 4):
        found = []
        for rank in range(ranks):
            loader = Loader(tokens, 8, seed=5)
            loader.load_state_dict(two[1].state_dict())
            found += loader.next_batch(12, part=(rank, ranks))[0][:, 0].tolist()
        assert found == expected


def test_order_is_shuffled_and_seeded() -> None:
    tokens = np.arange(8 * 100 + 1)
    loader = Loader(tokens, 8, seed=5)
    first, second = samples(loader, [100]), samples(loader, [100])
    assert sorted(first) == sorted(second)
    assert first != sorted(first)
    assert first != second
    assert samples(Loader(tokens, 8, seed=6), [100]) != first
    assert samples(Loader(tokens, 8, seed=2**64 - 1), [100]) != first


def test_order_is_fixed_for_good() -> None:
    # A pin: another order would break the resumption of runs, and every published one.
    assert samples(Loader(np.arange(81), 8, seed=7), [10]) == [
        8 * window for window in [7, 3, 0, 5, 2, 1, 6, 4, 8, 9]
    ]


@pytest.mark.parametrize("stop", [0, 1, 99, 100, 250])
def test_resuming_goes_on_with_the_next_sample(stop: int) -> None:
    tokens = np.arange(8 * 100 + 5)
    loader = Loader(tokens, 8, seed=1)
    if stop:
        loader.next_batch(stop)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = Loader(tokens.copy(), 8, seed=1)
    resumed.load_state_dict(state)
    assert samples(resumed, [60]) == samples(loader, [60])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 16}, "seq_len 16, this run with 8: set run.seq_len"),
        ({"seed": 2}, "seed 2, this run with 1: set run.data_seed"),
        ({"version": 9}, "version 9, this run with 1"),
        ({"order": "2 epochs"}, "order '2 epochs', this run with '': set data and run.steps"),
    ],
)
def test_states_that_do_not_fit(change: dict[str, object], message: str) -> None:
    loader = Loader(np.arange(8 * 100 + 1), 8, seed=1)
    loader.next_batch(7)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert loader.sample == 7


def test_resuming_on_other_data_is_refused() -> None:
    tokens = np.arange(801)
    state = Loader(tokens, 8, fingerprint="one").state_dict()
    with pytest.raises(DataError, match="give the same data"):
        Loader(tokens, 8, fingerprint="other").load_state_dict(state)


def test_sequential_batches_keep_order_and_the_last_part() -> None:
    tokens = np.arange(8 * 7 + 4, dtype=np.uint16)
    batches = list(sequential_batches(tokens, 8, 3))
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 1]
    assert np.concatenate([targets for _, targets in batches], axis=None).tolist() == list(range(1, 57))
    assert all(np.array_equal(targets, inputs + 1) for inputs, targets in batches)
    limited = list(sequential_batches(tokens, 8, 3, limit_tokens=39))
    assert sum(targets.size for _, targets in limited) == 32


@pytest.mark.parametrize(("seq_len", "limit"), [(50, None), (8, 7)])
def test_an_evaluation_without_a_window_is_refused(seq_len: int, limit: int | None) -> None:
    with pytest.raises(DataError, match=f"has no window of {seq_len}: .*raise run.eval_tokens"):
        list(sequential_batches(np.arange(50), seq_len, 1, limit))


@pytest.fixture
def mapped(tmp_path: Path) -> np.memmap[Any, Any]:
    """Twenty thousand tokens in a file."""
    np.save(tmp_path / "tokens.npy", np.arange(20_000, dtype=np.uint16))
    return np.load(tmp_path / "tokens.npy", mmap_mode="r")  # type: ignore[no-any-return]


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def rewrite(path: Path) -> None:
    """Change a byte in place; the time of the change differs from that of the first writing."""
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize("spoil", [cut, rewrite])
def test_a_mapped_file_that_is_changed_is_an_error_and_no_dead_process(
    spoil: Callable[[Path], None], mapped: np.memmap[Any, Any], tmp_path: Path
) -> None:
    """To read behind the end of a file that was cut is fatal: SIGBUS."""
    loader, evaluation = Loader(mapped, 100), sequential_batches(mapped, 100, 2)
    loader.next_batch(2)
    next(evaluation)
    spoil(tmp_path / "tokens.npy")
    found = "4,096" if spoil is cut else "40,128"
    said = f"tokens.npy was changed while a run read it: it had 40,128 bytes, and has {found}"
    with pytest.raises(DataError, match=said):
        loader.next_batch(2)
    with pytest.raises(DataError, match=said):
        next(evaluation)


def test_a_mapped_file_that_is_deleted_or_replaced_is_read_on(
    mapped: np.memmap[Any, Any], tmp_path: Path
) -> None:
    path, loader = tmp_path / "tokens.npy", Loader(mapped, 100)
    path.unlink()
    assert loader.next_batch(200)[0].max() > 10_000
    np.save(path, np.zeros(3, np.uint16))
    assert loader.next_batch(200)[0].max() > 10_000
