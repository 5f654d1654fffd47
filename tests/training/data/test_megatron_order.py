"""The order of samples from token files, against a second writing of Megatron's description."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import data_files
import megatron_oracle as oracle
from megatron_oracle import write_indexed
from mxref_training.data.megatron import IndexedLoader, open_tokens
from mxref_training.data.megatron import order as product
from mxref_training.errors import DataError

own_cache = data_files.own_cache


def texts(lengths: list[int], first: int = 0) -> list[list[int]]:
    """Return sequences whose tokens are all different."""
    ends = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in pairwise(ends)]


def loader(folder: Path, lengths: list[int], seq_len: int, seed: int, samples: int) -> IndexedLoader:
    if not (folder / "data.idx").exists():
        write_indexed(folder / "data", texts(lengths), "int32")
    made = IndexedLoader(open_tokens([(1.0, folder / "data")]), seq_len, seed, samples)
    return made


MIXED = [7, 1, 0, 12, 3, 3, 0, 25, 2, 9]  # 62 tokens; empty sequences, and some longer than a sample
CORPORA = {
    "mixed": MIXED,
    "one": [40],
    "ones": [1] * 30,
    "empty first": [0, 0, 5, 0, 11, 0],
    "short": [3],
}


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize("seq_len", [1, 4, 8, 13])
@pytest.mark.parametrize("corpus", CORPORA)
def test_indices(corpus: str, seq_len: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_SLOTS", 4)  # so that these corpora take several steps
    lengths = CORPORA[corpus]
    for wanted in (1, 2, 5, 6, 7, 12, 23):
        what = product.plan(sum(lengths), seq_len, wanted)
        made = product.make_order(np.array(lengths, np.int32), what, seq_len, seed)
        documents, samples, shuffle = oracle.indices(lengths, seq_len, seed, wanted)
        assert made.documents.tolist() == documents
        assert made.samples.tolist() == [list(pair) for pair in samples]
        assert made.shuffle.tolist() == shuffle


def test_the_last_epoch_is_apart_below_four_fifths() -> None:
    apart = set()
    for tokens in range(1, 60):
        for seq_len in (1, 2, 5, 9):
            for wanted in range(1, 40):
                found = product.plan(tokens, seq_len, wanted)
                assert found.epochs == oracle.epochs_for(tokens, seq_len, wanted)
                assert found.apart == oracle.last_apart(tokens, seq_len, wanted)
                assert found.samples >= wanted
                apart.add((found.epochs > 1, found.apart))
    assert apart == {(False, False), (True, False), (True, True)}
    # 100 samples to an epoch of 101 tokens: 79 of the second are apart, 80 are not.
    assert [product.plan(101, 1, 100 + n).apart for n in (79, 80)] == [True, False]


@pytest.mark.parametrize("wanted", [1, 9, 15, 22, 30])
@pytest.mark.parametrize("corpus", CORPORA)
def test_samples(corpus: str, wanted: int, tmp_path: Path) -> None:
    lengths = CORPORA[corpus]
    made = loader(tmp_path, lengths, 4, 7, wanted)
    expected = oracle.windows(texts(lengths), 4, 7, wanted)
    inputs, targets = made.next_batch(wanted)
    assert np.concatenate([inputs, targets[:, -1:]], axis=1).tolist() == expected[:wanted]
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous
    assert targets.flags.c_contiguous


def test_the_order_is_fixed_for_good(tmp_path: Path) -> None:
    # A pin: RandomState's stream is frozen, and published runs depend on it.
    made = loader(tmp_path, [3] * 8, 4, 1234, 8)
    assert made.next_batch(8)[0][:, 0].tolist() == [4, 6, 12, 20, 16, 1, 11, 15]
    assert made.order == "2 epochs, the last one apart"


def test_ranks_and_resumption(tmp_path: Path) -> None:
    def fresh() -> IndexedLoader:
        return loader(tmp_path, MIXED, 4, 3, 24)

    whole = fresh().next_batch(24)[0]
    for ranks in (1, 2, 4):
        parts = [fresh() for _ in range(ranks)]
        rows = [part.next_batch(8, micro_batch=4, part=(rank, ranks))[0] for rank, part in enumerate(parts)]
        share = 4 // ranks
        for row in range(8):
            taken = rows[row % 4 // share][row // 4 * share + row % 4 % share]
            assert np.array_equal(taken, whole[row])
        again = fresh()
        again.load_state_dict(json.loads(json.dumps(parts[-1].state_dict())))
        assert np.array_equal(again.next_batch(16)[0], whole[8:])
        assert again.state_dict()["epoch"] == 1


def test_a_state_of_another_order_is_refused(tmp_path: Path) -> None:
    made = loader(tmp_path, MIXED, 4, 3, 20)
    made.next_batch(5)
    state = made.state_dict()
    assert state["order"] == "2 epochs, the last one apart"
    other = loader(tmp_path, MIXED, 4, 3, 28)
    with pytest.raises(
        DataError,
        match="order '2 epochs, the last one apart', this run with '2 epochs': set data and run.steps",
    ):
        other.load_state_dict(state)
    longer = loader(tmp_path, MIXED, 4, 3, 21)  # more samples in the same order
    longer.load_state_dict(state)
    assert np.array_equal(longer.next_batch(2)[0], made.next_batch(2)[0])


def test_no_sample_beyond_the_order(tmp_path: Path) -> None:
    made = loader(tmp_path, MIXED, 4, 3, 10)
    made.next_batch(8)
    with pytest.raises(DataError, match=r"sample 12 is beyond the 10 .*data\.order_samples"):
        made.next_batch(4)
    assert made.sample == 8


@pytest.mark.parametrize("harm", ["cut", "rewritten", "gone"])
def test_a_file_that_changes_during_the_run(tmp_path: Path, harm: str) -> None:
    made, other = (loader(tmp_path, MIXED, 4, 3, 20) for _ in range(2))
    made.next_batch(8)
    path = tmp_path / "data.bin"
    if harm == "gone":  # it stays mapped
        path.unlink()
        other.next_batch(8)
        assert np.array_equal(made.next_batch(4)[0], other.next_batch(4)[0])
        return
    os.truncate(path, 100) if harm == "cut" else os.utime(path, ns=(1, 1))
    found = 100 if harm == "cut" else 248
    with pytest.raises(
        DataError, match=rf"data\.bin was changed .* it had 248 bytes, and has {found}: put it back"
    ):
        made.next_batch(4)
    assert made.sample == 8


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range(tmp_path: Path, seed: int) -> None:
    with pytest.raises(DataError, match=rf"the data seed {seed} is out of range.*run\.data_seed"):
        loader(tmp_path, MIXED, 4, seed, 10)


# ---------------------------------------------------------------- blends

# Of the second, a single division by the sum takes sample 12 from another file.
WEIGHTS = [[0.3, 0.7], [0.5, 0.8, 0.1, 0.4], [1.0, 1.0, 1.0], [12.5] * 8, [1e-3, 5.0, 2.0], [3.0]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_blend_order(weights: list[float]) -> None:
    for count in (1, 7, 200):
        file, number = product.blend_order(weights, count)
        assert list(zip(file.tolist(), number.tolist(), strict=True)) == oracle.blend(weights, count)
        assert product.prepared(weights, count) == oracle.prepared(weights, count)


def test_samples_of_a_blend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxref_training.data.megatron.token_files._AHEAD", 5)
    corpora = [texts(MIXED), texts([11, 30], 1000), texts([4] * 9, 2000)]
    weights = [0.2, 0.5, 0.4]
    parts = []
    for which, corpus in enumerate(corpora):
        write_indexed(tmp_path / f"p{which}", corpus, "uint16")
        parts.append((weights[which], tmp_path / f"p{which}"))
    made = IndexedLoader(open_tokens(parts), 4, 5, 40)
    prepared = oracle.prepared(weights, 40)
    windows = [oracle.windows(corpus, 4, 5, n) for corpus, n in zip(corpora, prepared, strict=True)]
    expected = [windows[file][number][:-1] for file, number in oracle.blend(weights, 40)]
    assert made.next_batch(12)[0].tolist() == expected[:12]
    again = IndexedLoader(open_tokens(parts), 4, 5, 40)
    again.load_state_dict(made.state_dict())
    assert again.next_batch(28)[0].tolist() == expected[12:]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("a/b", []),
        ("my own file", []),
        ("10 a/b", [(10.0, "a/b")]),
        ("0.3 a 0.7 b", [(0.3, "a"), (0.7, "b")]),
        ("0.3 a 0.7", []),
        ("7", []),
    ],
)
def test_parsing_blends(source: str, parts: list[tuple[float, str]]) -> None:
    assert product.parse_blend(source) == parts


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
def test_weights_that_are_none(weight: str) -> None:
    with pytest.raises(DataError, match="is not a positive number"):
        product.parse_blend(f"1 a {weight} b")
