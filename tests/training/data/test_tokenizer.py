"""The tokenizers: the same every time, exact both ways, and refused where they do not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_files
from data_files import documents, make_texts, write
from mxref_training.data import Tokenizer, load_tokenizer, train_tokenizer
from mxref_training.errors import DataError

own_cache = data_files.own_cache
tokenizer = data_files.tokenizer


def test_tokenizer_special_tokens_and_size(tokenizer: Tokenizer) -> None:
    assert (tokenizer.eot, tokenizer.vocab_size) == (0, 320)
    assert tokenizer.decode([0, 1]) == "<|endoftext|><|pad|>"


@settings(deadline=None)
@given(st.text(max_size=200))
def test_tokenizer_round_trip_is_exact(text: str) -> None:
    (ids,) = _session_tokenizer().encode_batch([text])
    assert _session_tokenizer().decode(ids) == text
    assert all(1 < i < 300 for i in ids)


_made: list[Tokenizer] = []


def _session_tokenizer() -> Tokenizer:
    if not _made:
        _made.append(train_tokenizer(documents(make_texts(20)), 300))
    return _made[0]


def test_special_tokens_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    text = "before <|endoftext|> and <|pad|> after"
    (ids,) = tokenizer.encode_batch([text])
    assert {tokenizer.eot, 1}.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_tokenizer_is_deterministic_across_processes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "data.jsonl", make_texts(60))
    code = (
        "import sys; from mxref_training.data import iter_documents, train_tokenizer\n"
        "from mxref_training.data.documents import survey\n"
        "print(train_tokenizer(survey('x', lambda: iter_documents(sys.argv[1])), 320).sha256)"
    )
    for threads in ("1", "2"):
        env = {"RAYON_NUM_THREADS": threads, "XDG_CACHE_HOME": str(tmp_path / threads), "PATH": ""}
        out = subprocess.run(
            [sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == tokenizer.sha256


def test_tokenizer_comes_from_the_cache(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxref_training.data.tokenizer._train", lambda *_: pytest.fail("trained again"))
    assert train_tokenizer(documents(make_texts(60)), 320).sha256 == tokenizer.sha256


def test_tokenizer_errors(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import models

    with pytest.raises(DataError, match="at least 258"):
        train_tokenizer(documents(["x"]), 257)
    with pytest.raises(DataError, match=r"yields only \d+ tokens, not 5000"):
        train_tokenizer(documents(make_texts(5)), 5000)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text('{"version": 3}')
    with pytest.raises(DataError, match=r"bad\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    HuggingFaceTokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "endless.json"))
    with pytest.raises(DataError, match="to end a document with"):
        load_tokenizer(tmp_path / "endless.json")


def test_end_token_of_other_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import models

    inner = HuggingFaceTokenizer(models.WordLevel({"a": 0, "</s>": 7, "<|end_of_text|>": 41}, "a"))
    inner.save(str(tmp_path / "other.json"))
    loaded = load_tokenizer(tmp_path / "other.json")
    assert (loaded.eot, loaded.vocab_size) == (41, 42)


@pytest.mark.parametrize("vocab", [320, 321, 384])
def test_vocabulary_that_fits(tokenizer: Tokenizer, vocab: int) -> None:
    tokenizer.check_vocab(vocab)


@pytest.mark.parametrize(("vocab", "relation"), [(319, "smaller"), (385, "larger"), (0, "smaller")])
def test_vocabulary_that_does_not_fit(tokenizer: Tokenizer, vocab: int, relation: str) -> None:
    with pytest.raises(DataError, match=rf"{vocab} is {relation} .* 320: set model.vocab to 320, or to 384"):
        tokenizer.check_vocab(vocab)
