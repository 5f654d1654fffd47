"""Documents: texts from plain and compressed files, and the files and lines that are refused."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_files import documents, jsonl, make_texts, write
from mxref_training.data import iter_documents
from mxref_training.errors import DataError

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("suffix", PACKINGS)
def test_every_packing_reads_the_same(tmp_path: Path, suffix: str) -> None:
    texts = [*make_texts(300), "line one\nline two\ttab", "é ü 漢字 🙂"]
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(PACKINGS[suffix](jsonl(texts)))
    assert list(iter_documents(path)) == texts


def test_folder_and_pattern(tmp_path: Path) -> None:
    a, b, c = make_texts(3, 1), make_texts(3, 2), make_texts(3, 3)
    write(tmp_path / "a.jsonl", a)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json.gz").write_bytes(gzip.compress(jsonl(b)))
    write(tmp_path / "c.jsonl", c)
    (tmp_path / "README.txt").write_text("not data")
    assert list(iter_documents(tmp_path)) == [*a, *c, *b]
    assert list(iter_documents(str(tmp_path / "*.jsonl"))) == [*a, *c]


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
    # The text may be wrong before the checksum at the end tells.
    with pytest.raises(
        DataError, match=r"cannot read .*bad\.jsonl|bad\.jsonl.*, line \d+: not valid"
    ) as caught:
        list(iter_documents(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"line 3: not valid JSON"),
        (b'{"text": "\xff"}', r"line 3: not valid JSON in UTF-8"),
        (b'["text"]', r"line 3: every line must be an object"),
        (b'{"content": "x"}', r"line 3: every line must be an object"),
        (b'{"text": 5}', r"line 3: every line must be an object with a string 'text'"),
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
        ("x" * 5000, "cannot look for data in x+ .File name too long"),
    ):
        with pytest.raises(DataError, match=message):
            list(iter_documents(source))


def test_survey_counts_and_hashes() -> None:
    docs = documents(["ab", "é"])
    assert (len(docs), docs.characters) == (2, 3)
    lengths = [(2).to_bytes(8, "little")] * 2
    assert docs.sha256 == hashlib.sha256(lengths[0] + b"ab" + lengths[1] + "é".encode()).hexdigest()
    assert list(docs) == list(docs) == ["ab", "é"]


def test_corpora_with_null_characters_do_not_share_a_hash() -> None:
    split = [["a\0b"], ["a", "b"], ["a\0", "b"], ["a", "\0b"], ["a\0b", ""], ["", "a\0b"], ["ab"]]
    assert len({documents(texts).sha256 for texts in split}) == len(split)


def test_a_folder_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def closed(path: str | Path) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)  # root, as whom tests may run, can read every folder
    with pytest.raises(DataError, match=r"cannot look for data in .*closed \(Permission denied\)"):
        list(iter_documents(tmp_path))
