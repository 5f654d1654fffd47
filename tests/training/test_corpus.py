"""The data that a configuration names, and the tokens made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

import data_files
from data_files import make_texts, write
from mxref_training.config import DataConfig
from mxref_training.config_files import load_config
from mxref_training.data import Tokenizer
from mxref_training.data.corpus import prepare_corpus
from mxref_training.errors import ConfigError

own_cache = data_files.own_cache


@pytest.mark.parametrize("key", ["train", "val", "tokenizer"])
def test_an_empty_path_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key} is empty: give a path"):
        DataConfig(**{key: ""})


def test_the_report_says_how_many_documents_are_trained_on(tmp_path: Path) -> None:
    data = [f"data.train={write(tmp_path / 'text.jsonl', make_texts(300))}", "model.vocab=260"]
    corpus = prepare_corpus(load_config("tiny", data))
    assert corpus.report.startswith("train text.jsonl: 294 documents, ")
    assert corpus.report.endswith("; trains on the first 200 documents of these, as data.max_documents says")
    assert isinstance(corpus.tokenizer, Tokenizer)
    assert (corpus.train.ids == corpus.tokenizer.eot).sum() == 200
    whole = prepare_corpus(load_config("tiny", [*data, "data.max_documents=294"]))
    assert "trains on" not in whole.report
