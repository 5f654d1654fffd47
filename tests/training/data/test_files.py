"""Compressed files: every byte is checked."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from data_files import jsonl
from mxref_training.data import iter_documents
from mxref_training.errors import DataError

TEXTS = ["ab", "c d", "abab", "é"]  # few bytes, for each of which the file is read a dozen times
PARTS = jsonl(TEXTS[:2]), jsonl(TEXTS[2:])
SKIPPABLE = (0x184D2A57).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"\x28\xb5\x2f\xfd!"

zstd = zstandard.ZstdCompressor(write_checksum=True).compress


def streamed_zstd(data: bytes) -> bytes:
    """A frame with a window and without its size, as a pipe writes it."""
    packer = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return packer.compress(data) + packer.flush()


FILES = {
    "gzip members": (".gz", b"".join(map(gzip.compress, PARTS))),
    "xz streams": (".xz", b"".join(map(lzma.compress, PARTS))),
    "zstd frames": (".zst", zstd(PARTS[0]) + SKIPPABLE + streamed_zstd(PARTS[1])),
}


def read(path: Path, data: bytes) -> list[str] | None:
    """Return the documents; None where the file is refused."""
    path.write_bytes(data)
    try:
        return list(iter_documents(path))
    except DataError:
        return None


def altered(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the data with a bit of each byte flipped, each byte cleared, doubled or left out."""
    for i, byte in enumerate(data):
        for value in {byte ^ 1 << i % 8, 0} - {byte}:
            yield f"byte {i} set to {value:#04x}", data[:i] + bytes([value]) + data[i + 1 :]
        yield f"byte {i} doubled", data[:i] + bytes([byte]) + data[i:]
        yield f"byte {i} left out", data[:i] + data[i + 1 :]


@pytest.mark.parametrize("name", FILES)
def test_an_altered_file_is_refused_or_reads_the_same(tmp_path: Path, name: str) -> None:
    suffix, data = FILES[name]
    path = tmp_path / f"data.jsonl{suffix}"
    assert read(path, data) == TEXTS
    outcomes = {"refused": 0, "same": 0}
    for change, damaged in altered(data):
        found = read(path, damaged)
        assert found in (None, TEXTS), f"{change}: {len(found or [])} documents"
        outcomes["refused" if found is None else "same"] += 1
    assert outcomes["refused"] > 3 * outcomes["same"], "dates and what is skipped take few bytes"


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_refused_unless_whole_parts_are_left(tmp_path: Path, name: str) -> None:
    suffix, data = FILES[name]
    path = tmp_path / f"data.jsonl{suffix}"
    found = {length: read(path, data[:length]) for length in range(len(data))}
    assert all(texts in (None, TEXTS[:2], TEXTS) for texts in found.values())
    # A cut between two parts, or in what stands for nothing, leaves a sound file: nothing tells that there was more.
    assert sum(texts is not None for texts in found.values()) <= 6


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("garbage", [b"\n", b"garbage", bytes(3), bytes(5)])
def test_what_stands_behind_the_last_part_is_refused(tmp_path: Path, name: str, garbage: bytes) -> None:
    suffix, data = FILES[name]
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(data + garbage)
    with pytest.raises(DataError, match=r"cannot read .*data\.jsonl"):
        list(iter_documents(path))


def test_the_older_format_of_xz_is_not_taken(tmp_path: Path) -> None:
    assert read(tmp_path / "data.jsonl.xz", lzma.compress(PARTS[0], format=lzma.FORMAT_ALONE)) is None


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("name", FILES)
def test_documents_do_not_depend_on_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, name: str
) -> None:
    monkeypatch.setattr("mxref_training.data.files.READ", piece)
    suffix, data = FILES[name]
    assert read(tmp_path / f"data.jsonl{suffix}", data) == TEXTS
