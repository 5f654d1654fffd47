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
from mxref_training.data import (
    Tokenizer,
    builtin_corpus,
    cache,
    load_tokenizer,
    seal,
    tokenize,
    train_tokenizer,
)
from mxref_training.durable import locked
from mxref_training.errors import DataError

own_cache = data_files.own_cache
tokenizer = data_files.tokenizer


def test_cache_is_complete_or_absent(own_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        cache.cached("kind", "key", fail)
    assert not list((own_cache / "kind").iterdir())

    def succeed(folder: Path) -> None:
        (folder / "whole").write_text("x")

    folder = cache.cached("kind", "key", succeed)
    assert {p.name for p in folder.iterdir()} == {"whole", seal.SEAL}
    assert cache.cached("kind", "key", fail) == folder


def test_of_two_that_want_an_entry_one_builds_it_and_the_other_waits(own_cache: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        (folder / "whole").write_text("x")
        began.set()
        assert go_on.wait(60)

    def never(folder: Path) -> None:
        raise AssertionError("built twice")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.cached, "kind", "key", slow)
        assert began.wait(60)
        second = pool.submit(cache.cached, "kind", "key", never)
        go_on.set()
        assert first.result(60) == second.result(60)
    assert [p.name for p in (own_cache / "kind").iterdir()] == ["key"]


def test_what_a_killed_builder_left_goes_with_the_next_build(own_cache: Path) -> None:
    left = own_cache / "kind" / ".other.tmp"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    alive = own_cache / "kind" / ".alive.tmp"
    alive.mkdir()
    with locked(alive.with_name(".alive.lock")):
        cache.cached("kind", "key", lambda folder: None)
        assert not left.exists()
        assert alive.exists()


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        cache.cached("kind", "key", lambda path: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root() == Path.home() / ".cache" / "mxref"


def test_cache_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: str) -> str:
        return path  # as for a user id that no file knows

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", homeless)
    with pytest.raises(DataError, match="no home folder for the cache: set XDG_CACHE_HOME"):
        cache.cache_root()


def test_cache_keys_do_not_run_together() -> None:
    assert cache.cache_key("ab", "c") != cache.cache_key("a", "bc")


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(bytes(range(40)))
    (folder / "b.json").write_text('{"documents": 3}')


def test_a_flipped_bit_of_an_entry_is_noticed() -> None:
    folder = cache.cached("kind", "key", fill)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 3):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            if (
                path.name == seal.SEAL
                and bytes(damaged).decode(errors="replace").split() == whole.decode().split()
            ):
                continue  # another kind of white space, which says nothing
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"is damaged .*: delete this folder"):
                cache.cached("kind", "key", fill)
        path.write_bytes(whole)
    assert cache.cached("kind", "key", fill) == folder


@pytest.mark.parametrize("name", ["a.bin", "b.json", seal.SEAL])
@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: os.truncate(path, 10)])
def test_a_missing_or_cut_file_of_an_entry_is_noticed(name: str, harm: Callable[[Path], None]) -> None:
    folder = cache.cached("kind", "key", fill)
    harm(folder / name)
    with pytest.raises(DataError, match=rf"{folder} is damaged .*{name}"):
        cache.cached("kind", "key", fill)


def test_a_damaged_tokenizer_is_noticed_even_if_it_can_be_read(own_cache: Path) -> None:
    train_tokenizer(documents(make_texts(60)), 320)
    (path,) = (own_cache / "tokenizers").glob("*/tokenizer.json")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"<|pad|>", b"<|pae|>"))
    assert load_tokenizer(path).vocab_size == 320, "nothing but the hash tells"
    with pytest.raises(DataError, match=r"is damaged \(tokenizer.json is not as it was written\)"):
        train_tokenizer(documents(make_texts(60)), 320)


def test_what_older_versions_cached_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache.cache_key("part")
    monkeypatch.setattr(cache, "_LAYOUT", "1")
    assert cache.cache_key("part") != key


# ---------------------------------------------------------------- other users


def test_a_cache_that_others_can_write_is_refused(own_cache: Path) -> None:
    cache.cached("kind", "key", fill)
    for part in (own_cache / "kind" / "key", own_cache / "kind", own_cache, own_cache.parent):
        part.chmod(0o777)
        message = rf"cannot be trusted \({part} can be written by every user\): set XDG_CACHE_HOME"
        with pytest.raises(DataError, match=message):
            cache.cached("kind", "key", fill)
        if part.name != "key":
            with pytest.raises(DataError, match=message):
                cache.cached("kind", "other", lambda path: pytest.fail("nothing is written there either"))
        part.chmod(0o755)
    assert cache.cached("kind", "key", fill)


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


@pytest.mark.parametrize("name", ["tokenizer.json", seal.SEAL])
def test_a_full_disk_while_a_tokenizer_is_kept(
    full: Callable[[str], None], own_cache: Path, name: str
) -> None:
    full(name)
    with pytest.raises(DataError, match=r"cannot fill .*No space left on device.*XDG_CACHE_HOME"):
        train_tokenizer(documents(make_texts(60)), 320)
    assert not list((own_cache / "tokenizers").iterdir())


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.json", seal.SEAL])
def test_a_full_disk_while_tokens_are_kept(
    full: Callable[[str], None], own_cache: Path, tokenizer: Tokenizer, name: str
) -> None:
    full(name)
    with pytest.raises(DataError, match=r"cannot fill .*No space left on device.*XDG_CACHE_HOME"):
        tokenize(documents(make_texts(60)), tokenizer)
    assert not list((own_cache / "tokens").iterdir())


@pytest.mark.parametrize("name", ["train.jsonl", "val.jsonl", "report.json"])
def test_a_full_disk_while_the_builtin_corpus_is_kept(
    full: Callable[[str], None], own_cache: Path, name: str
) -> None:
    full(name)
    with pytest.raises(DataError, match=r"cannot fill .*No space left on device.*XDG_CACHE_HOME"):
        builtin_corpus(("click",), "[a-d]*.py")
    assert not list((own_cache / "builtin").iterdir())
