"""Data sets of the package `datasets`: the real package reads folders; only the Hub is a stand-in."""

from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import data_files
from data_files import make_texts, write
from mxref_training.data import open_corpus
from mxref_training.data.streamed import DatasetStream, parse_stream
from mxref_training.errors import DataError

own_cache = data_files.own_cache

TRAIN, VAL = make_texts(90, 1), make_texts(80, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data set in a folder, with splits named as on the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", TRAIN)
    write(tmp_path / "set" / "validation.jsonl", VAL)
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("source", "stream"),
    [
        ("c4", DatasetStream("allenai/c4", "en")),
        ("hf:allenai/c4:en", DatasetStream("allenai/c4", "en")),
        ("hf:allenai/c4:en:validation", DatasetStream("allenai/c4", "en", "validation")),
        ("hf:me/own", DatasetStream("me/own")),
        ("hf:me/own::test", DatasetStream("me/own", None, "test")),
        ("a/file.jsonl", None),
        (Path("c4"), None),
    ],
)
def test_sources(source: object, stream: DatasetStream | None) -> None:
    assert parse_stream(source) == stream


@pytest.mark.parametrize("source", ["hf:", "hf::en", "hf:a:b:c:d"])
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(DataError, match="is not of the form hf:NAME"):
        parse_stream(source)


def test_both_splits_of_a_data_set(folder: Path) -> None:
    corpus = open_corpus(f"hf:{folder}", stream_documents=50, stream_val_documents=20)
    assert list(corpus.train_docs) == TRAIN[:50]
    assert list(corpus.val_docs) == VAL[:20]
    assert f"{folder} train: 50 documents" in str(corpus)
    assert f"{folder} validation: 20 documents" in str(corpus)


def test_named_splits(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(f"hf:{folder}:default:validation", write(tmp_path / "v.jsonl", make_texts(60, 3)))
    assert list(corpus.train_docs) == VAL
    held_out = open_corpus(f"hf:{folder}::train")
    assert sorted([*held_out.train_docs, *held_out.val_docs]) == sorted(TRAIN)
    assert ": 2 documents" in str(held_out)
    with pytest.raises(DataError, match="80 of 80 validation documents are in the training data"):
        open_corpus(f"hf:{folder}::validation", f"hf:{folder}")


def test_a_data_set_without_validation(folder: Path) -> None:
    (folder / "validation.jsonl").unlink()
    corpus = open_corpus(f"hf:{folder}")
    assert len(corpus.train_docs) + len(corpus.val_docs) == 90
    assert "held out" in str(corpus)


def test_a_stream_is_read_once_and_again_when_its_folder_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    first = open_corpus(f"hf:{folder}::train", f"hf:{folder}::validation")
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("streamed again"))
        again = open_corpus(f"hf:{folder}::train", f"hf:{folder}::validation")
    assert again.train_docs.sha256 == first.train_docs.sha256
    write(folder / "train.jsonl", [*TRAIN, "one more"])
    assert list(open_corpus(f"hf:{folder}::train", f"hf:{folder}::validation").train_docs) == [
        *TRAIN,
        "one more",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:{f}:other", r"cannot fetch .*:other \(ValueError: BuilderConfig 'other' not found"),
        ("hf:{f}::nothing", r"cannot fetch .* \(ValueError: Bad split: nothing\. Available splits"),
    ],
)
def test_what_the_package_refuses(folder: Path, own_cache: Path, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_corpus(source.format(f=folder))
    assert not list(own_cache.glob("streams/*"))


def test_rows_without_text_in_a_folder(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"content": "x", "id": 3}\n' * 3)
    with pytest.raises(
        DataError, match=r"document 1: no string in the column `text`; its columns are content, id"
    ):
        open_corpus(f"hf:{folder}::train")


# ---------------------------------------------------------------- the Hub, played


def on_the_hub(monkeypatch: pytest.MonkeyPatch, rows: Callable[[], list[dict[str, Any]]]) -> list[tuple]:
    """Let the package find rows for any name; return the questions that it will be asked."""
    asked: list[tuple] = []
    fake: Any = types.ModuleType("datasets")
    fake.__spec__ = types.SimpleNamespace(name="datasets")

    def load_dataset(name: str, config: str, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        assert streaming
        asked.append((name, config, split))
        return iter(rows())

    fake.load_dataset = load_dataset
    fake.get_dataset_split_names = lambda name, config: ["train", "validation"]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_c4_and_its_long_name_are_the_same(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    numbers = iter(range(10))
    asked = on_the_hub(monkeypatch, lambda: [{"text": text} for text in make_texts(30, next(numbers))])
    corpus = open_corpus("c4", stream_documents=20, stream_val_documents=10)
    assert asked == [("allenai/c4", "en", "train"), ("allenai/c4", "en", "validation")]
    again = open_corpus("hf:allenai/c4:en", stream_documents=20, stream_val_documents=10)
    assert len(asked) == 2
    assert str(again) == str(corpus)
    (file, _) = own_cache.glob("streams/*/documents.jsonl.gz")
    with gzip.open(file, "rt") as lines:
        assert set(json.loads(next(lines))) == {"text"}


def test_a_full_disk_is_not_taken_for_a_network_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    on_the_hub(monkeypatch, lambda: [{"text": "x"}])
    monkeypatch.setattr("mxref_training.data.streamed.gzip.open", full)
    with pytest.raises(DataError, match=r"cannot fill .*No space left on device"):
        open_corpus("c4")


def test_a_stream_that_breaks_leaves_nothing(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def breaks() -> Any:
        yield {"text": "x"}
        raise ConnectionError("no route to host")

    on_the_hub(monkeypatch, breaks)
    with pytest.raises(DataError, match=r"cannot fetch allenai/c4:en .*no route to host.*`builtin`"):
        open_corpus("c4")
    assert not list(own_cache.glob("streams/*"))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets: pip install 'mxref\[datasets\]'"):
        open_corpus("c4")
