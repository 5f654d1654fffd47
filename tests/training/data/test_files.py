"""Compressed files: every byte is checked, and memory holds at most one line and one window."""

from __future__ import annotations

import gzip
import lzma
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from data_files import jsonl
from mxref_training.data import iter_documents
from mxref_training.data.files import without_checksum
from mxref_training.errors import DataError

TEXTS = ["ab", "c d", "abab", "é"]  # few bytes, for each of which the file is read a dozen times
PARTS = jsonl(TEXTS[:2]), jsonl(TEXTS[2:])
SKIPPABLE = (0x184D2A57).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"\x28\xb5\x2f\xfd!"

zstd = zstandard.ZstdCompressor(write_checksum=True).compress
zstd_unchecked = zstandard.ZstdCompressor().compress


def streamed_zstd(data: bytes) -> bytes:
    """A frame with a window and without its size, as a pipe writes it."""
    packer = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return packer.compress(data) + packer.flush()


FILES = {
    "gzip members": (".gz", b"".join(map(gzip.compress, PARTS))),
    "xz streams": (".xz", b"".join(map(lzma.compress, PARTS))),
    "padded xz streams": (".xz", b"".join(lzma.compress(part) + bytes(8) for part in PARTS)),
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
    assert not without_checksum(path)
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


def test_padding_of_xz_is_a_multiple_of_four(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.xz"
    for zeros in range(9):
        padded = b"".join(lzma.compress(part) + bytes(zeros) for part in PARTS)
        assert read(path, padded) == (None if zeros % 4 else TEXTS)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".zst", zstd_unchecked), (".xz", lambda data: lzma.compress(data, check=lzma.CHECK_NONE))],
)
def test_a_file_without_a_checksum_is_told(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"data.jsonl{suffix}"
    assert read(path, pack(PARTS[0]) + pack(PARTS[1])) == TEXTS
    assert without_checksum(path)


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


# ---------------------------------------------------------------- memory

LIMIT = 1 << 28  # bytes of address space beyond what the imports took, on a line limit of 64 MiB
BOMB = 3 << 30  # bytes, decompressed
READER = """
import resource, sys
from pathlib import Path
import zstandard
from mxref_training.data import iter_documents
from mxref_training.errors import DataError
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    for text in iter_documents(sys.argv[1]):
        pass
except DataError as error:
    print(error)
"""


def gzip_bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = b"a" * (1 << 24)
    return b"".join(packer.compress(block) for _ in range(16)) + packer.flush()


def zstd_bomb() -> bytes:
    """A frame of one byte repeated for 3 GiB, in blocks of 4 bytes each (RFC 8878, section 3.1.1.2)."""
    size = 1 << 17
    blocks = BOMB // size
    header = b"\x28\xb5\x2f\xfd\x00\x58"  # a window of 2 MiB, no checksum
    rle = [(size << 3 | 1 << 1 | (i == blocks - 1)).to_bytes(3, "little") + b"a" for i in range(blocks)]
    return header + b"".join(rle)


def xz_bomb() -> bytes:
    return lzma.compress(b"a" * (1 << 28), preset=0)


def long_line() -> bytes:
    return b'{"text": "' + b"a" * 200_000_000 + b'"}\n'


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
@pytest.mark.parametrize(
    ("suffix", "make", "message"),
    [
        ("", long_line, "line 1: longer than 67,108,864 bytes, decompressed"),
        (".gz", gzip_bomb, "line 1: longer than 67,108,864 bytes, decompressed"),
        (".zst", zstd_bomb, "line 1: longer than 67,108,864 bytes, decompressed"),
        (".xz", xz_bomb, "line 1: longer than 67,108,864 bytes, decompressed"),
    ],
)
def test_bombs_end_in_an_error_before_the_memory_does(
    tmp_path: Path, suffix: str, make: Callable[[], bytes], message: str
) -> None:
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(make())
    command = [sys.executable, "-c", READER, str(path), str(LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert message in done.stdout


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_limit_of_a_line_is_exact_and_counts_each_line_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.jsonl{suffix}"
    data = jsonl(["a", "b" * 50, "c"])
    path.write_bytes(gzip.compress(data) if suffix else data)
    longest = max(map(len, data.split(b"\n")))
    assert len(list(iter_documents(path, max_line=longest))) == 3
    with pytest.raises(DataError, match=rf"data\.jsonl{suffix}, line 2: longer than {longest - 1} bytes"):
        list(iter_documents(path, max_line=longest - 1))
