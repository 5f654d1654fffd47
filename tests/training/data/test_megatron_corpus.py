"""Megatron's token files as the data of a run: what a configuration may name, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data_files
import megatron_oracle as oracle
from megatron_oracle import write_indexed
from mxref_training.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from mxref_training.data.corpus import TokenCorpus, prepare_corpus
from mxref_training.data.megatron import IndexedTokens, token_files
from mxref_training.errors import CheckpointError, ConfigError, DataError

own_cache = data_files.own_cache

MODEL = ModelConfig(layers=1, width=32, heads=2, kv_heads=2, ffn=32, vocab=96, max_seq=8)
RUN = RunConfig(steps=10, batch=4, micro_batch=2, seq_len=8, eval_every=5, eval_tokens=16, seed=5)


def texts(seed: int, count: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 90, rng.integers(4, 20)).tolist() for _ in range(count)]


TRAIN, VAL = texts(1), texts(2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_indexed(tmp_path / "train.en_6_text_document", TRAIN, "int32")
    write_indexed(tmp_path / "more", texts(3), "uint16")
    write_indexed(tmp_path / "val", VAL, "int32")
    return tmp_path


def config(train: str, val: str | None, **fields: object) -> TrainConfig:
    return TrainConfig(
        model=MODEL, optim=OptimConfig(lr=1e-3), run=RUN, data=DataConfig(train, val, **fields)
    )  # type: ignore[arg-type]


def prepare(folder: Path, train: str = "train.en_6_text_document", **fields: object) -> TokenCorpus:
    val = str(fields.pop("val", folder / "val"))
    return prepare_corpus(config(train if " " in train else str(folder / train), val, **fields))


@pytest.mark.parametrize(
    "name",
    ["train.en_6_text_document", "train.en_6_text_document.bin", "train.en_6_text_document.idx"],
)
def test_a_prefix_or_a_file(folder: Path, name: str) -> None:
    (folder / "train.en_6_text_document").mkdir()  # where Megatron keeps its own cache
    corpus = prepare(folder, name)
    assert isinstance(corpus.train, IndexedTokens)
    inputs, targets = corpus.loader(RUN).next_batch(40)
    expected = oracle.windows(TRAIN, 8, 5, 40)[:40]
    assert np.concatenate([inputs, targets[:, -1:]], axis=1).tolist() == expected
    assert corpus.val.ids.tolist() == [token for text in VAL for token in text]
    assert "train.en_6_text_document: 40 documents" in corpus.report
    assert corpus.hashes["tokenizer"] == ""


def test_the_order_of_more_samples_than_the_run_takes(folder: Path) -> None:
    corpus = prepare(folder, order_samples=1000)
    inputs, _ = corpus.loader(RUN).next_batch(40)
    assert inputs.tolist() == [window[:-1] for window in oracle.windows(TRAIN, 8, 5, 1000)[:40]]
    with pytest.raises(ConfigError, match=r"data\.order_samples = 39 is below the run's 40 samples"):
        prepare(folder, order_samples=39).loader(RUN)


def test_a_blend(folder: Path) -> None:
    source = f"2 {folder / 'train.en_6_text_document'} 1 {folder / 'more'}.bin"
    corpus = prepare(folder, source)
    assert ": 80 documents" in corpus.report
    prepared = oracle.prepared([2.0, 1.0], 40)
    windows = [oracle.windows(part, 8, 5, n) for part, n in zip((TRAIN, texts(3)), prepared, strict=True)]
    expected = [windows[file][number][:-1] for file, number in oracle.blend([2.0, 1.0], 40)]
    assert corpus.loader(RUN).next_batch(40)[0].tolist() == expected
    with pytest.raises(DataError, match="the tokens of several files have no common order"):
        _ = corpus.train.ids


def test_a_weight_does_not_change_a_single_file(folder: Path) -> None:
    path = folder / "train.en_6_text_document"
    alone, weighed = prepare(folder), prepare(folder, f"10 {path}")
    state = alone.loader(RUN).state_dict()
    assert weighed.loader(RUN).state_dict() == state


def test_another_process_gets_the_same_data(folder: Path) -> None:
    for train in ("train.en_6_text_document", f"2 {folder / 'train.en_6_text_document'} 1 {folder / 'more'}"):
        corpus = prepare(folder, train, order_samples=50)
        got = TokenCorpus.from_table(json.loads(json.dumps(corpus.to_table())))
        assert got.hashes == corpus.hashes
        assert got.loader(RUN).state_dict() == corpus.loader(RUN).state_dict()
        assert np.array_equal(got.loader(RUN).next_batch(7)[0], corpus.loader(RUN).next_batch(7)[0])


def test_a_file_is_read_in_full_once_for_all_hosts_that_mount_it(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the device is another one on each host, and after each boot."""
    read: list[Path] = []
    read_all, stat = token_files._read, Path.stat
    monkeypatch.setattr(token_files, "_read", lambda file: read.append(file.prefix) or read_all(file))
    prepare(folder)
    assert len(read) == 2

    def elsewhere(path: Path, **options: bool) -> os.stat_result:
        own = stat(path, **options)
        if path.suffix != ".bin":  # what is locked must be where it was opened
            return own
        rest = {name: getattr(own, name) for name in dir(own) if name.startswith("st_")}
        return os.stat_result([*own[:2], 4321, *own[3:10]], rest)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", elsewhere)
        prepare(folder)
    assert len(read) == 2


def test_the_vocabulary_must_hold_every_id(folder: Path) -> None:
    assert max(token for text in TRAIN + VAL for token in text) == 89
    small = replace(config(str(folder / "more"), str(folder / "val")), model=replace(MODEL, vocab=89))
    with pytest.raises(
        DataError, match="vocabulary of 89 is smaller than the data's largest token id, 89: set model"
    ):
        prepare_corpus(small)
    prepare_corpus(replace(small, model=replace(MODEL, vocab=90)))


def test_a_tokenizer_must_hold_every_id(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    def tokenizer(size: int) -> str:
        vocab = {f"t{i}": i for i in range(size - 1)} | {"<|endoftext|>": size - 1}
        path = tmp_path / f"{size}.json"
        path.write_text(Tokenizer(models.WordLevel(vocab, unk_token="t0")).to_str())
        return str(path)

    assert prepare(folder, tokenizer=tokenizer(96)).hashes["tokenizer"]
    with pytest.raises(DataError, match=r"token id 89, the tokenizer .*80\.json only 80 tokens"):
        prepare(folder, tokenizer=tokenizer(80))


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("train", "val", "fields", "error", "message"),
    [
        ("{f}/more", None, {}, ConfigError, r"data\.train names token files, but data\.val is not set"),
        (
            "{f}/more",
            "builtin",
            {},
            ConfigError,
            r"data\.train names token files, but data\.val = 'builtin' is text",
        ),
        (
            "builtin",
            "{f}/val",
            {},
            ConfigError,
            r"data\.val names token files, but data\.train = 'builtin' is text",
        ),
        ("{f}/more", "1 {f}/val 1 {f}/more", {}, ConfigError, r"data\.val names several token files"),
        ("{f}/more", "{f}/val", {"max_documents": 3}, ConfigError, r"data\.max_documents = 3 limits text"),
        (
            "1 {f}/more 2 {f}/nothing",
            "{f}/val",
            {},
            DataError,
            r"nothing: no .*nothing\.bin and .*nothing\.idx",
        ),
        ("{f}/gone.bin", "{f}/val", {}, DataError, r"cannot read .*gone\.idx"),
    ],
)
def test_what_does_not_fit(
    folder: Path, train: str, val: str | None, fields: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare_corpus(config(train.format(f=folder), val and val.format(f=folder), **fields))


def copied(folder: Path) -> str:
    for suffix in (".bin", ".idx"):
        (folder / f"copy{suffix}").write_bytes((folder / f"val{suffix}").read_bytes())
    return "copy"


def linked(folder: Path) -> str:
    for suffix in (".bin", ".idx"):
        (folder / f"link{suffix}").symlink_to(folder / f"val{suffix}")
    return "link"


def in_a_blend(folder: Path) -> str:
    return f"9 {folder / 'train.en_6_text_document'} 1 {folder / 'val'}"


@pytest.mark.parametrize("make", [lambda folder: "val", copied, linked, in_a_blend])
def test_training_on_the_validation_data_is_refused(folder: Path, make) -> None:
    with pytest.raises(DataError, match="give validation data that is not in the training data"):
        prepare(folder, make(folder))


def test_a_run_goes_on_with_the_next_sample(folder: Path, tmp_path: Path) -> None:
    from training_setup import run

    settings = replace(RUN, steps=4)
    whole = replace(config(str(folder / "more"), str(folder / "val")), run=settings)
    corpus = prepare_corpus(whole)
    run(tmp_path / "whole", config=whole, corpus=corpus)
    run(tmp_path / "parts", config=whole, corpus=corpus, stop_after=2)
    run(tmp_path / "parts", config=whole, corpus=prepare_corpus(whole))
    losses = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    damaged = bytearray((folder / "more.bin").read_bytes())
    damaged[100] ^= 1
    (folder / "more.bin").write_bytes(damaged)
    os.utime(folder / "more.bin", ns=(1, 1))  # a clock may be too coarse for two writes in a row
    with pytest.raises(CheckpointError, match="data"):
        run(tmp_path / "parts", config=whole, corpus=prepare_corpus(whole))
    damaged[100] ^= 1
    (folder / "more.bin").write_bytes(damaged)
    longer = replace(whole, run=replace(settings, steps=30))  # another order: of more epochs
    with pytest.raises(DataError, match=r"set data and run\.steps as they were"):
        run(tmp_path / "parts", config=longer, corpus=prepare_corpus(longer))
