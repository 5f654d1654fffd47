"""The cache of derived data: entries are complete or absent, unchanged, and safe from other users."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import data_files
from data_files import documents, make_texts
from mxref_training.data import Tokenizer, builtin_corpus, cache, load_tokenizer, tokenize, train_tokenizer
from mxref_training.data.cache import Facts
from mxref_training.errors import DataError

own_cache = data_files.own_cache
tokenizer = data_files.tokenizer

INPUTS = {"part": "a", "number": 3, "list": [1, 2]}


def fill(folder: Path) -> Facts:
    (folder / "a.bin").write_bytes(bytes(range(40)))
    return {"documents": 3}


def test_cache_is_complete_or_absent(own_cache: Path) -> None:
    def fail(folder: Path) -> Facts:
        (folder / "half").write_text("x")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        cache.cached("kind", INPUTS, fail)
    assert not list((own_cache / "kind").iterdir())
    folder, facts = cache.cached("kind", INPUTS, fill)
    assert {p.name for p in folder.iterdir()} == {"a.bin", cache.RECORD}
    assert facts == {"documents": 3}
    assert cache.cached("kind", INPUTS, fail) == (folder, facts)


def test_every_input_is_in_the_name() -> None:
    changes: list[dict[str, Any]] = [{}, {"part": "b"}, {"number": 4}, {"list": [12]}, {"more": None}]
    names = [cache.cached("kind", {**INPUTS, **change}, fill)[0].name for change in changes]
    assert len(set(names)) == len(names)


def test_of_two_that_want_an_entry_one_builds_it_and_the_other_waits(own_cache: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> Facts:
        began.set()
        assert go_on.wait(60)
        return fill(folder)

    def never(folder: Path) -> Facts:
        raise AssertionError("built twice")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.cached, "kind", INPUTS, slow)
        assert began.wait(60)
        second = pool.submit(cache.cached, "kind", INPUTS, never)
        go_on.set()
        assert first.result(60) == second.result(60)
    assert [p.name for p in (own_cache / "kind").iterdir()] == [first.result()[0].name]


def test_what_a_killed_builder_left_is_not_used_and_goes_with_the_next_build() -> None:
    folder, facts = cache.cached("kind", INPUTS, fill)
    left = folder.with_name(f".{folder.name}.tmp")
    folder.rename(left)
    (left / "half").write_text("x")
    (left / "a.bin").write_bytes(b"")
    assert cache.cached("kind", INPUTS, fill) == (folder, facts)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} == {"a.bin", cache.RECORD}


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        cache.cached("kind", INPUTS, fill)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root() == Path.home() / ".cache" / "mxref"


def test_cache_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id that no file knows
    with pytest.raises(DataError, match="no home folder for the cache: set XDG_CACHE_HOME"):
        cache.cache_root()


def test_a_flipped_bit_of_an_entry_is_noticed() -> None:
    folder, facts = cache.cached("kind", INPUTS, fill)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 3):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            if path.name == cache.RECORD and damaged.split() == whole.split():
                continue  # another kind of white space, which says nothing
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"is damaged .*: delete this folder"):
                cache.cached("kind", INPUTS, fill)
        path.write_bytes(whole)
    assert cache.cached("kind", INPUTS, fill) == (folder, facts)


@pytest.mark.parametrize("name", ["a.bin", cache.RECORD])
@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: os.truncate(path, 10)])
def test_a_missing_or_cut_file_of_an_entry_is_noticed(name: str, harm: Callable[[Path], None]) -> None:
    folder, _ = cache.cached("kind", INPUTS, fill)
    harm(folder / name)
    with pytest.raises(DataError, match=rf"{folder} is damaged"):
        cache.cached("kind", INPUTS, fill)


def test_a_damaged_tokenizer_is_noticed_even_if_it_can_be_read(own_cache: Path) -> None:
    train_tokenizer(documents(make_texts(60)), 320)
    (path,) = (own_cache / "tokenizers").glob("*/tokenizer.json")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"<|pad|>", b"<|pae|>"))
    assert load_tokenizer(path).vocab_size == 320, "nothing but the hash tells"
    with pytest.raises(DataError, match=r"is damaged \(tokenizer.json is not as it was written\)"):
        train_tokenizer(documents(make_texts(60)), 320)


def test_tokens_are_named_by_text_tokenizer_end_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one input at a time: each has tokens of its own."""
    docs, more = documents(make_texts(60)), documents(make_texts(60, 2))
    plain, other = train_tokenizer(docs, 320), train_tokenizer(more, 320)
    ended = Tokenizer.from_table(plain.to_table())
    ended.eot = 1
    made = [tokenize(*pair) for pair in ((docs, plain), (more, plain), (docs, other), (docs, ended))]
    monkeypatch.setattr("tokenizers.__version__", "0.0.1")
    made.append(tokenize(docs, plain))
    paths = [str(tokens.ids.filename) for tokens in made]  # type: ignore[attr-defined]
    assert len(set(paths)) == len(paths)
    assert len({tokens.sha256 for tokens in made}) == len(made) - 1  # the version alone changes no token
    sizes = [train_tokenizer(docs, size).sha256 for size in (320, 321)]
    assert len({*sizes, other.sha256}) == 3


# ---------------------------------------------------------------- other users


def test_a_cache_that_others_can_write_is_refused(own_cache: Path) -> None:
    entry, _ = cache.cached("kind", INPUTS, fill)
    for part in (entry, own_cache / "kind", own_cache, own_cache.parent):
        part.chmod(0o777)
        message = rf"cannot be trusted \({part} can be written by every user\): set XDG_CACHE_HOME"
        with pytest.raises(DataError, match=message):
            cache.cached("kind", INPUTS, fill)
        if part != entry:
            with pytest.raises(DataError, match=message):
                cache.cached("kind", {}, lambda path: pytest.fail("nothing is written there either"))
        part.chmod(0o755)
    assert cache.cached("kind", INPUTS, fill)


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the disk be full for files of a name: what is written to them goes to /dev/full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    mkdir = Path.mkdir

    def fill_up(name: str) -> None:
        def folder(self: Path, *args: Any, **options: Any) -> None:
            mkdir(self, *args, **options)
            if self.suffix == ".tmp":
                (self / name).symlink_to("/dev/full")

        monkeypatch.setattr(Path, "mkdir", folder)

    return fill_up


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tokenizers", "tokenizer.json"),
        ("tokens", "tokens.bin"),
        ("builtin", "train.jsonl"),
        ("builtin", "val.jsonl"),
    ],
)
def test_a_full_disk(
    full: Callable[[str], None], own_cache: Path, tokenizer: Tokenizer, kind: str, name: str
) -> None:
    make: dict[str, Callable[[], object]] = {
        "tokenizers": lambda: train_tokenizer(documents(make_texts(60)), 330),
        "tokens": lambda: tokenize(documents(make_texts(60)), tokenizer),
        "builtin": lambda: builtin_corpus(("click",), "[a-d]*.py"),
    }
    before = set(own_cache.glob("*/*"))
    full(name)
    with pytest.raises(DataError, match=r"cannot fill .*No space left on device.*XDG_CACHE_HOME"):
        make[kind]()
    assert set(own_cache.glob("*/*")) == before
