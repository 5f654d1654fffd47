"""Corpora, tokenizers, token arrays and loaders: what comes out, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mxref.errors import MxrefError
from mxref_training.data import (
    Documents,
    Loader,
    Tokenizer,
    builtin_corpus,
    cache,
    iter_documents,
    load_tokenizer,
    open_corpus,
    prose,
    sequential_batches,
    tokenize,
    train_tokenizer,
)
from mxref_training.data import builtin as builtin_module
from mxref_training.data.dedup import Deduplicator, normalised_words, shingles
from mxref_training.data.documents import survey
from mxref_training.data.installed import Installed
from mxref_training.data.tokens import token_dtype
from mxref_training.errors import DataError

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


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize("suffix", PACKINGS)
def test_every_packing_reads_the_same(tmp_path: Path, suffix: str) -> None:
    texts = [*make_texts(300), "line one\nline two\ttab", "é ü 漢字 🙂"]
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(PACKINGS[suffix](jsonl(texts)))
    assert list(iter_documents(path)) == texts


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_several_frames_in_one_file(tmp_path: Path, suffix: str) -> None:
    texts = make_texts(40)
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(PACKINGS[suffix](jsonl(texts[:15])) + PACKINGS[suffix](jsonl(texts[15:])))
    assert list(iter_documents(str(path))) == texts


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_lines_do_not_depend_on_the_chunks_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("mxref_training.data.documents._CHUNK", chunk)
    texts = make_texts(12)
    path = tmp_path / "data.jsonl.zst"
    path.write_bytes(PACKINGS[".zst"](jsonl(texts)))
    assert list(iter_documents(path)) == texts


def test_folder_pattern_and_list(tmp_path: Path) -> None:
    a, b, c = make_texts(3, 1), make_texts(3, 2), make_texts(3, 3)
    write(tmp_path / "a.jsonl", a)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json.gz").write_bytes(gzip.compress(jsonl(b)))
    write(tmp_path / "c.jsonl", c)
    (tmp_path / "README.txt").write_text("not data")
    assert list(iter_documents(tmp_path)) == [*a, *c, *b]
    assert list(iter_documents(str(tmp_path / "*.jsonl"))) == [*a, *c]
    assert list(iter_documents([tmp_path / "c.jsonl", tmp_path / "a.jsonl"])) == [*c, *a]


def test_blank_lines_byte_order_mark_and_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "  "}\n{"text": "two", "id": 3}')
    assert list(iter_documents(path)) == ["one", "two"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "cut at the end", "flipped", "not packed", "empty"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    noise = np.random.default_rng(0).integers(97, 123, size=(400, 100), dtype=np.uint8)
    plain = jsonl([row.tobytes().decode() for row in noise])
    # A zstd frame has no checksum unless asked for; without one a flipped literal is another text.
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if suffix == ".zst" else PACKINGS[suffix]
    packed = bytearray(pack(plain))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 0x55
    whole = bytes(packed)
    cuts = {
        "cut": whole[: len(whole) * 2 // 3],
        "cut at the end": whole[:-2],
        "not packed": plain,
        "empty": b"",
    }
    path = tmp_path / f"bad.jsonl{suffix}"
    path.write_bytes(cuts.get(damage, whole))
    with pytest.raises(DataError, match=r"cannot read .*bad\.jsonl") as caught:
        list(iter_documents(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"line 3: not valid JSON"),
        (b'{"text": "\xff"}', r"line 3: not valid JSON in UTF-8"),
        (b'["text"]', r"line 3: no field 'text'"),
        (b'{"content": "x"}', r"line 3: no field 'text'"),
        (b'{"text": 5}', r"line 3: 'text' is of type int"),
        (b'{"text": null}', r"line 3: 'text' is of type NoneType"),
        (b'{"text": "\\ud800"}', r"line 3: .*surrogate"),
        (b"[" * 100_000, r"line 3: not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(jsonl(["one", "two"]) + line + b"\n")
    with pytest.raises(DataError, match=r"bad\.jsonl, " + message):
        list(iter_documents(path))


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    for source, message in (
        (tmp_path / "gone.jsonl", "no such data file"),
        (str(tmp_path / "*.jsonl.xz"), "no file matches"),
        (tmp_path / "nothing", "no JSONL file in the folder"),
        (tmp_path / "empty.jsonl", "the corpus is empty"),
        ([], "no data files given"),
    ):
        with pytest.raises(DataError, match=message):
            list(iter_documents(source))


def test_survey_counts_and_hashes() -> None:
    docs = documents(["ab", "é"])
    assert (len(docs), docs.characters, docs.utf8_bytes) == (2, 3, 4)
    assert docs.sha256 == hashlib.sha256("ab\0é\0".encode()).hexdigest()
    assert list(docs) == list(docs) == ["ab", "é"]


# ---------------------------------------------------------------- prose and duplicates


def test_prose_keeps_sentences_and_drops_the_rest() -> None:
    doc = """Summarise the values of an array along the axis that the caller has chosen.

    The ``mean`` is computed by :func:`~numpy.add.reduce` in the order of *memory*, which
    is the one that the cache likes best; see `the guide <https://example.org>`_ for more on this.
    For example::

        total = sum(x)   # The code of the example is not a sentence that is kept.

    Parameters
    ----------
    a : array_like, optional
        The values that are to be summarised, in any shape that the function can take.
    axis : int
        Short one.

    .. math:: x = \\sum_i y_i that is not for the text of the corpus to keep.

    .. note::
        The result is a view whenever that is possible, and a copy in all of the other cases.

    >>> The doctest is not a sentence that is kept in the text.
    This output is not a sentence that is kept in the text either.

    ======  ===========================================
    name    the meaning of the name in this small table
    ======  ===========================================

    - An item of a list is a paragraph of its own when it is long enough to be one.
    - short item
    """
    assert prose.paragraphs(doc) == [
        "Summarise the values of an array along the axis that the caller has chosen.",
        "The mean is computed by reduce in the order of memory, which is the one that the cache likes best; "
        "see the guide for more on this.",
        "The values that are to be summarised, in any shape that the function can take.",
        "The result is a view whenever that is possible, and a copy in all of the other cases.",
        "An item of a list is a paragraph of its own when it is long enough to be one.",
    ]


def test_prose_reads_google_and_field_lists() -> None:
    doc = """Do the thing.

    Args:
        name (str, optional): The name under which the result is stored in the table.
            It must not be empty, and it must not be one that is used.
    :param other: The object that is compared with this one, or none of them at all.
    :type other: object
    """
    assert prose.paragraphs(doc) == [
        "The name under which the result is stored in the table. It must not be empty, and it must not be one "
        "that is used.",
        "The object that is compared with this one, or none of them at all.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Too short to be kept.",
        "This is a paragraph of the text that has no end to its last sentence",
        "Die Ausgabe der Funktion wird in einer Datei gespeichert und danach sofort wieder gelesen.",
        "This is the {name} of the template that is not filled in, and it is dropped for that.",
        "Copyright by the people who have written it, and all of the rights are with them.",
        "It is the case that np.add_x foo_bar.b a_1 b_2 c_3 d_4 e_5 are in the list.",
        "and this is the rest of a sentence that has lost its start to some other rule.",
        "The bracket (which is never closed is a sign that a part of the text is gone.",
    ],
)
def test_what_is_not_prose(text: str) -> None:
    assert prose.paragraphs(text) == []


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("aT .:`*-=>\n\t([)|"), max_size=300))
def test_any_docstring_can_be_read(text: str) -> None:
    for paragraph in prose.paragraphs(text):
        assert prose.is_prose(paragraph)
        assert "\n" not in paragraph


def test_duplicates_exact_and_near() -> None:
    seen = Deduplicator()
    first = "The quick brown fox jumps over the lazy dog and runs into the deep dark forest at night."
    assert seen.admit(first)
    assert not seen.admit(first.upper().replace(" ", "  ").replace(".", "!"))
    assert not seen.admit(first.replace("deep dark", "green"))
    assert seen.admit("An unrelated sentence about the weather in the north of the country in late spring.")
    assert (seen.exact, seen.near) == (1, 1)


# ---------------------------------------------------------------- built-in corpus

FEW = ("click", "jinja2", "no-such-distribution")


@pytest.fixture
def small_builtin() -> builtin_module.Builtin:
    return builtin_corpus(FEW, "[a-f]*.py")


def test_builtin_is_prose_and_its_split_is_clean(small_builtin: builtin_module.Builtin) -> None:
    report = small_builtin.report
    train, val = list(iter_documents(small_builtin.train)), list(iter_documents(small_builtin.val))
    assert report.absent == ("no-such-distribution",)
    assert "no-such-distribution" in str(report)
    assert set(report.sources) == {"python", "click", "jinja2"}
    assert all(report.sources.values())
    assert (len(train), len(val)) == (report.train.documents, report.val.documents)
    assert sum(map(len, train)) + sum(map(len, val)) == sum(report.sources.values()) > 200_000
    assert survey("train", lambda: train).sha256 == report.train.sha256
    assert survey("val", lambda: val).sha256 == report.val.sha256

    known = set()
    for text in train:
        for paragraph in text.split("\n"):
            known.update(shingles(normalised_words(paragraph)))
    for text in val:
        for paragraph in text.split("\n"):
            codes = shingles(normalised_words(paragraph))
            assert sum(code in known for code in codes) <= 0.5 * len(codes)
    everything = "\n".join(train + val)
    for leftover in (">>>", ".. ", "::\n", "``", "-----", "=====", ":param", ":class:", "https://"):
        assert leftover not in everything, leftover
    words = everything.lower().split()
    assert sum(word in prose.STOP_WORDS for word in words) > 0.35 * len(words)


def test_builtin_is_the_same_every_time_and_cached(
    small_builtin: builtin_module.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(builtin_module, "_build", lambda *_: pytest.fail("the cache was not used"))
        assert builtin_corpus(FEW, "[a-f]*.py") == small_builtin
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    again = builtin_corpus(FEW, "[a-f]*.py")
    assert again.train != small_builtin.train
    assert again.report == small_builtin.report


def test_validation_that_training_quotes_is_dropped(tmp_path: Path) -> None:
    # Every short file is quoted by the last one among enough other words for each of its paragraphs to be new.
    rng = np.random.default_rng(0)
    letters = [chr(97 + i) for i in range(26)]

    def sentence(words: int) -> str:
        made = ["".join(rng.choice(letters, size=6)) for _ in range(words)]
        return "The " + " and the ".join(made) + "."

    short = [[sentence(30), *(sentence(10) for _ in range(3))] for _ in range(20)]
    quoting = [f"{text} {sentence(20)}" for paragraphs in short for text in paragraphs[1:]]
    for index, paragraphs in enumerate([*short, quoting]):
        (tmp_path / f"f{index:02}.py").write_text('"""' + "\n\n".join(paragraphs) + '"""\n')
    files = tuple(f"f{index:02}.py" for index in range(21))
    builtin_module._build(tmp_path, [Installed("made", "1", tmp_path, files)], ())
    report = json.loads((tmp_path / "report.json").read_text())
    (val,) = iter_documents(tmp_path / "val.jsonl")
    assert (report["exact"], report["near"]) == (0, 3)
    assert val in [paragraphs[0] for paragraphs in short]


def test_builtin_does_not_import_what_it_reads() -> None:
    code = (
        "import sys; from mxref_training.data import builtin_corpus; builtin_corpus(('jinja2',), '[a-f]*.py');"
        "print([name for name in ('torch', 'jinja2', 'cProfile', 'numba') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    assert out.stderr == ""


def test_builtin_needs_something_installed(own_cache: Path) -> None:
    with pytest.raises(DataError, match="too few for a corpus"):
        builtin_corpus((), "no-such-file.py")
    assert not list((own_cache / "builtin").iterdir())


def test_builtin_reports_a_damaged_cache(small_builtin: builtin_module.Builtin) -> None:
    (small_builtin.train.parent / "report.json").write_text("{")
    with pytest.raises(DataError, match="delete this folder"):
        builtin_corpus(FEW, "[a-f]*.py")


# ---------------------------------------------------------------- cache


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
    assert [p.name for p in folder.iterdir()] == ["whole"]
    assert cache.cached("kind", "key", fail) == folder


def test_cache_when_another_process_wins(own_cache: Path) -> None:
    def race(folder: Path) -> None:
        (own_cache / "kind" / "key").mkdir()
        (own_cache / "kind" / "key" / "theirs").write_text("x")
        (folder / "ours").write_text("x")

    folder = cache.cached("kind", "key", race)
    assert [p.name for p in folder.iterdir()] == ["theirs"]
    assert [p.name for p in (own_cache / "kind").iterdir()] == ["key"]


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        cache.cached("kind", "key", lambda path: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root() == Path.home() / ".cache" / "mxref"


def test_cache_keys_do_not_run_together() -> None:
    assert cache.cache_key("ab", "c") != cache.cache_key("a", "bc")


# ---------------------------------------------------------------- tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(documents(make_texts(60)), 320)


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


# ---------------------------------------------------------------- tokens


def test_tokens_are_the_documents_each_with_an_end(tokenizer: Tokenizer) -> None:
    texts = make_texts(600, 3)
    tokens = tokenize(documents(texts), tokenizer)
    ends = np.flatnonzero(tokens.ids == tokenizer.eot)
    starts = np.concatenate([[0], ends[:-1] + 1])
    assert [tokenizer.decode(tokens.ids[a:b]) for a, b in zip(starts, ends, strict=True)] == texts
    assert ends[-1] == len(tokens) - 1
    assert tokens.ids.dtype == np.uint16
    assert tokens.documents == 600
    assert tokens.utf8_bytes == sum(len(text.encode()) for text in texts)
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


@pytest.mark.parametrize("damage", ["flip", "cut", "facts"])
def test_damaged_token_cache(tokenizer: Tokenizer, own_cache: Path, damage: str) -> None:
    docs = documents(make_texts(30))
    tokenize(docs, tokenizer)
    (folder,) = (own_cache / "tokens").iterdir()
    if damage == "facts":
        (folder / "tokens.json").write_text("{}")
    else:
        data = bytearray((folder / "tokens.npy").read_bytes())
        data[-9] ^= 1
        (folder / "tokens.npy").write_bytes(data if damage == "flip" else data[:-100])
    with pytest.raises(DataError, match=r"are damaged .*delete this folder"):
        tokenize(docs, tokenizer)


def test_text_that_changes_while_it_is_read(tokenizer: Tokenizer, own_cache: Path) -> None:
    readings = iter([["one text"], ["another text"]])
    docs = survey("moving", lambda: next(readings))
    with pytest.raises(DataError, match="moving changed while it was read"):
        tokenize(docs, tokenizer)
    assert not list((own_cache / "tokens").iterdir())


def test_a_large_corpus_shows_no_bar_without_a_terminal(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mxref_training.data.tokens._QUIET_BELOW", 0)
    tokenize(documents(make_texts(30)), tokenizer)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- loader


@pytest.mark.parametrize("seq_len", [1, 4, 10])
def test_every_token_is_predicted_once_per_epoch(seq_len: int) -> None:
    tokens = np.arange(41, dtype=np.uint16)
    loader = Loader(tokens, seq_len, seed=3)
    for epoch in range(3):
        inputs, targets = zip(*(loader.next_batch(1) for _ in range(loader.windows)), strict=True)
        assert sorted(np.concatenate(targets, axis=None)) == list(range(1, 41))
        assert sorted(np.concatenate(inputs, axis=None)) == list(range(40))
        assert loader.epoch == epoch + 1
        assert loader.position == 0


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
    ranks = [Loader(tokens, 8, seed=5) for _ in range(4)]
    shared = [
        int(first)
        for _ in range(20)
        for rank, loader in enumerate(ranks)
        for first in loader.next_batch(3, rank, 4)[0][:, 0]
    ]
    assert shared == whole


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
        ({"fingerprint": "0" * 64}, "was trained on data 0000000000000000"),
        ({"seq_len": 16}, "sequence length 16, this run 8"),
        ({"seed": 2}, "data seed 2, this run 1"),
        ({"version": 9}, "version 9"),
        ({"position": 100}, "window 100 of 100"),
        ({"epoch": -1}, "damaged"),
        ({"position": "x"}, "damaged"),
        ({"seed": None}, "damaged"),
    ],
)
def test_states_that_do_not_fit(change: dict[str, object], message: str) -> None:
    loader = Loader(np.arange(8 * 100 + 1), 8, seed=1)
    loader.next_batch(7)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert loader.sample == 7
    with pytest.raises(DataError, match="damaged"):
        loader.load_state_dict({"version": 1})


def test_resuming_on_other_data_is_refused() -> None:
    tokens = np.arange(801)
    state = Loader(tokens, 8).state_dict()
    other = tokens.copy()
    other[400] += 1
    with pytest.raises(DataError, match="give the same data"):
        Loader(other, 8).load_state_dict(state)


def test_loader_refuses_what_it_cannot_do() -> None:
    tokens = np.arange(100)
    with pytest.raises(DataError, match=r"100 tokens, fewer than one window of 100 \+ 1"):
        Loader(tokens, 100)
    assert Loader(tokens, 99).windows == 1
    with pytest.raises(DataError, match="at least 1"):
        Loader(tokens, 0)
    for seed in (-1, 1 << 64):
        with pytest.raises(DataError, match="out of range"):
            Loader(tokens, 8, seed=seed)
    for batch, rank, world in ((0, 0, 1), (1, 1, 1), (1, -1, 2)):
        with pytest.raises(DataError, match="no batch of"):
            Loader(tokens, 8).next_batch(batch, rank, world)


def test_sequential_batches_keep_order_and_the_last_part() -> None:
    tokens = np.arange(8 * 7 + 4, dtype=np.uint16)
    batches = list(sequential_batches(tokens, 8, 3))
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 1]
    assert np.concatenate([targets for _, targets in batches], axis=None).tolist() == list(range(1, 57))
    assert all(np.array_equal(targets, inputs + 1) for inputs, targets in batches)
    limited = list(sequential_batches(tokens, 8, 3, limit_tokens=39))
    assert sum(targets.size for _, targets in limited) == 32


def test_sequential_batches_refuse() -> None:
    tokens = np.arange(50)
    for arguments, message in (
        ((50, 1, None), "fewer than one window"),
        ((8, 0, None), "evaluation batch of 0"),
        ((8, 1, 7), "limit of 7 tokens is below one window of 8"),
    ):
        with pytest.raises(DataError, match=message):
            list(sequential_batches(tokens, *arguments))


# ---------------------------------------------------------------- corpora


def test_paths_with_validation(tmp_path: Path) -> None:
    train, val = make_texts(300, 1), make_texts(120, 2)
    corpus = open_corpus(write(tmp_path / "t.jsonl", train), str(write(tmp_path / "v.jsonl", val)))
    assert list(corpus.train_docs) == train
    assert list(corpus.val_docs) == val
    assert corpus.report.train.sha256 == documents(train).sha256
    text = str(corpus.report)
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
    assert f"held out {len(val)} documents" in str(corpus.report)
    again = open_corpus(write(tmp_path / "other.jsonl", [texts[7], *texts[::-1]]))
    assert set(again.val_docs) == set(val)


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to validate on"):
        open_corpus(write(tmp_path / "t.jsonl", ["same", "same"]))
    assert len(open_corpus(write(tmp_path / "t.jsonl", ["same", "other"])).val_docs) == 1


def test_equal_training_and_validation_data_are_refused(tmp_path: Path) -> None:
    texts = make_texts(100)
    train, val = write(tmp_path / "t.jsonl", texts), write(tmp_path / "v.jsonl", texts)
    for other in (train, val):
        with pytest.raises(DataError, match="100 of 100 validation documents are in the training data"):
            open_corpus(train, other)


def test_overlap_at_the_limit(tmp_path: Path) -> None:
    train, val = make_texts(500, 1), make_texts(300, 2)
    path = write(tmp_path / "v.jsonl", val)
    few = open_corpus(write(tmp_path / "few.jsonl", [*val[:2], *train, val[1]]), path)
    assert list(few.train_docs) == train
    assert few.report.dropped == 2
    assert few.report.train.documents == 500
    assert few.report.train.sha256 == documents(train).sha256
    assert "dropped 2 documents" in str(few.report)
    with pytest.raises(DataError, match="3 of 300 validation documents"):
        open_corpus(write(tmp_path / "many.jsonl", [*train, *val[:3]]), path)


def test_the_builtin_corpus_as_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = builtin_corpus(("click",), "[a-d]*.py")
    monkeypatch.setattr("mxref_training.data.sources.builtin_corpus", lambda: small)
    corpus = open_corpus("builtin")
    assert corpus.train_docs.sha256 == small.report.train.sha256
    assert corpus.val_docs.sha256 == small.report.val.sha256
    assert str(small.report) in str(corpus.report)
    mixed = open_corpus(write(tmp_path / "t.jsonl", make_texts(50)), "builtin")
    assert mixed.val_docs.sha256 == small.report.val.sha256


class FakeDatasets(types.ModuleType):
    """Stands in for the package `datasets`, which the project does not depend on."""

    calls = 0

    def __init__(self, texts: dict[str, list[str]], error: Exception | None = None) -> None:
        super().__init__("datasets")
        self.__spec__ = types.SimpleNamespace(name="datasets")  # type: ignore[assignment]
        self.texts, self.error = texts, error

    def load_dataset(self, path: str, name: str, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        assert (path, name, streaming) == ("allenai/c4", "en", True)
        self.calls += 1
        if self.error:
            raise self.error
        return ({"text": text, "url": "u"} for text in self.texts[split])


def test_c4_is_fetched_once_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDatasets({"train": make_texts(90, 1), "validation": make_texts(90, 2)})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for _ in range(2):
        corpus = open_corpus("c4", c4_documents=50, c4_val_documents=20)
        assert list(corpus.train_docs) == make_texts(90, 1)[:50]
        assert list(corpus.val_docs) == make_texts(90, 2)[:20]
    assert fake.calls == 2
    with pytest.raises(DataError, match="ended after 90 of 91"):
        open_corpus("c4", c4_documents=91)
    with pytest.raises(DataError, match="budget of 0"):
        open_corpus("c4", c4_documents=0)


def test_c4_out_of_reach(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets({}, ConnectionError("no route to host")))
    with pytest.raises(DataError, match=r"cannot fetch C4 .*no route to host.*`builtin`"):
        open_corpus("c4")
    assert not list((own_cache / "c4").iterdir())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        open_corpus("c4")


def test_the_data_side_does_not_need_torch() -> None:
    code = "import sys, mxref_training.data; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_data_errors_are_errors_of_the_project() -> None:
    assert issubclass(DataError, MxrefError)
    assert issubclass(DataError, ValueError)
