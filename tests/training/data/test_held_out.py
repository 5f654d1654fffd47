"""Corpora: where training and validation text comes from, and how the two are kept apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import data_files
from data_files import documents, make_texts, write
from mxref_training.data import builtin_corpus, iter_documents, open_corpus
from mxref_training.data.progress import progress
from mxref_training.errors import DataError

own_cache = data_files.own_cache


def test_paths_with_validation(tmp_path: Path) -> None:
    train, val = make_texts(300, 1), make_texts(120, 2)
    corpus = open_corpus(write(tmp_path / "t.jsonl", train), str(write(tmp_path / "v.jsonl", val)))
    assert list(corpus.train_docs) == train
    assert list(corpus.val_docs) == val
    assert corpus.train_docs.sha256 == documents(train).sha256
    text = str(corpus)
    assert "\n" not in text
    for part in ("t.jsonl: 300 documents", "v.jsonl: 120 documents", documents(val).sha256[:16]):
        assert part in text


def test_a_path_alone_holds_some_documents_out(tmp_path: Path) -> None:
    texts = make_texts(400)
    corpus = open_corpus(write(tmp_path / "t.jsonl", [*texts, texts[7]]))
    train, val = list(corpus.train_docs), list(corpus.val_docs)
    assert len(set(val)) == 8
    assert sorted(train + val) == sorted([*texts, texts[7]])
    assert set(train).isdisjoint(val)
    assert f"held out of t.jsonl: {len(val)} documents" in str(corpus)
    again = open_corpus(write(tmp_path / "other.jsonl", [texts[7], *texts[::-1]]))
    assert set(again.val_docs) == set(val)


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to validate on"):
        open_corpus(write(tmp_path / "t.jsonl", ["same", "same"]))
    corpus = open_corpus(write(tmp_path / "t.jsonl", ["same", "other"]))
    assert len(corpus.val_docs) == 1
    assert "held out of t.jsonl: 1 document," in str(corpus)
    assert "t.jsonl: 1 document, " in str(corpus)


def test_equal_training_and_validation_data_are_refused(tmp_path: Path) -> None:
    texts = make_texts(100)
    train, val = write(tmp_path / "t.jsonl", texts), write(tmp_path / "v.jsonl", texts[::-1])
    link = tmp_path / "link.jsonl"
    link.symlink_to(train)
    for other in (train, val, link):
        with pytest.raises(DataError, match="100 of 100 validation documents are in the training data"):
            open_corpus(train, other)


def test_overlap_at_the_limit(tmp_path: Path) -> None:
    train, val = make_texts(500, 1), make_texts(300, 2)
    path = write(tmp_path / "v.jsonl", val)
    few = open_corpus(write(tmp_path / "few.jsonl", [*val[:2], *train, val[1]]), path)
    assert list(few.train_docs) == train
    assert few.train_docs.documents == 500
    assert few.train_docs.sha256 == documents(train).sha256
    assert "dropped 2 documents" in str(few)
    with pytest.raises(DataError, match="3 of 300 validation documents"):
        open_corpus(write(tmp_path / "many.jsonl", [*train, *val[:3]]), path)


def test_the_builtin_text_as_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = builtin_corpus(("click",), "[a-d]*.py")
    monkeypatch.setattr("mxref_training.data.split.builtin_corpus", lambda: small)
    corpus = open_corpus("builtin")
    assert list(corpus.train_docs) == list(iter_documents(small.train))
    assert list(corpus.val_docs) == list(iter_documents(small.val))
    assert str(corpus).count(small.note) == 1
    mixed = open_corpus(write(tmp_path / "t.jsonl", make_texts(50)), "builtin")
    assert mixed.val_docs.sha256 == corpus.val_docs.sha256


def test_the_data_side_does_not_need_torch() -> None:
    code = "import sys, mxref_training.data; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_title_of_a_bar_is_no_markup(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich knows
    assert list(progress([1, 2], "[/odd] \x1b[2J", 2)) == [1, 2]
    shown = capfd.readouterr().err
    assert r"[/odd] \x1b[2J" in shown
