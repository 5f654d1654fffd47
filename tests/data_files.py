"""Made-up texts, the files that hold them, and the fixtures of the tests of the data side.

A test module takes a fixture by assignment (`tokenizer = data_files.tokenizer`): as an import, it would look
unused, and every argument of its name would look like a redefinition.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mxref_training.data import Documents, Tokenizer, train_tokenizer
from mxref_training.data.documents import survey

PANGRAM = "the quick brown fox jumps over a lazy dog while seven wizards box and vex mighty queens of quartz"
WORDS = PANGRAM.split()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "mxref"


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=rng.integers(20, 60))) + f" №{seed}-{k}."
        for k in range(count)
    ]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write(path: Path, texts: list[str]) -> Path:
    path.write_bytes(jsonl(texts))
    return path


def documents(texts: list[str], name: str = "texts") -> Documents:
    return survey(name, lambda: texts)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(documents(make_texts(60)), 320)
