"""Read a data file in pieces of bounded size, and check every byte of a compressed file.

A compressed file may hold several gzip members (RFC 1952), Zstandard frames (RFC 8878) or xz streams (The .xz
File Format 1.1.0), one after the other. Each must be complete, and nothing may follow the last one. A reader that
ignores trailing bytes loses documents if one bit of a later header flips.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PACKINGS = (".gz", ".zst", ".xz")
PIECE = 1 << 20  # bytes that are decompressed at once, at most twice that for .zst
_READ = 1 << 17  # bytes that are read at once
_MAX_WINDOW = 1 << 31  # bytes; the largest that `zstd --long=31` writes

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE = 0x184D2A50  # the last 4 bits are free
_ZSTD_RLE, _ZSTD_RESERVED = 1, 3  # types of blocks


class Damaged(Exception):
    """A compressed file is incomplete or damaged; the message is a reason in a few words."""


class _Input:
    """A file that is read once; bytes that were read too far can be put back."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._held = file, b""

    def next(self) -> bytes:
        """Return some bytes; none at the end."""
        data, self._held = self._held or self._file.read(_READ), b""
        return data

    def give_back(self, data: bytes) -> None:
        self._held = data + self._held

    def exactly(self, count: int) -> bytes:
        """Return `count` bytes; Damaged if the file ends first."""
        parts = []
        while count:
            data = self.next()
            if not data:
                raise Damaged("the last frame is cut short")
            parts.append(data[:count])
            self.give_back(data[count:])
            count -= len(parts[-1])
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Skip `count` bytes; Damaged if the file ends first."""
        for start in range(0, count, _READ):
            self.exactly(min(_READ, count - start))

    def skip_zeros(self) -> int:
        """Skip zero bytes and return their number."""
        count = 0
        while data := self.next():
            rest = data.lstrip(b"\0")
            count += len(data) - len(rest)
            if rest:
                self.give_back(rest)
                break
        return count


def _gzip(source: _Input) -> Iterator[bytes]:
    while data := source.next():
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if not data:
                raise Damaged("the last member is cut short")
            try:
                yield member.decompress(data, PIECE)
            except zlib.error as error:
                raise Damaged(str(error)) from error
            data = member.unconsumed_tail or (b"" if member.eof else source.next())
        source.give_back(member.unused_data)


def _xz(source: _Input, unchecked: Callable[[], None]) -> Iterator[bytes]:
    while data := source.next():
        # FORMAT_AUTO would mistake a damaged header for the older format, which has no checksum.
        stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
        while not stream.eof:
            if stream.needs_input:
                data = data or source.next()
                if not data:
                    raise Damaged("the last stream is cut short")
            try:
                piece = stream.decompress(data, PIECE)
            except lzma.LZMAError as error:
                raise Damaged(str(error)) from error
            data = b""
            yield piece
        if stream.check == lzma.CHECK_NONE:
            unchecked()
        source.give_back(stream.unused_data)
        if source.skip_zeros() % 4:
            raise Damaged("the padding after a stream is not a multiple of 4 bytes")


def _zstd(source: _Input, unchecked: Callable[[], None]) -> Iterator[bytes]:
    """Decompress block by block, 128 KiB each: the library's own readers accept a truncated frame as a short one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    while data := source.next():
        source.give_back(data)
        magic = source.exactly(4)
        number = int.from_bytes(magic, "little")
        if number & ~0xF == _ZSTD_SKIPPABLE:
            source.skip(int.from_bytes(source.exactly(4), "little"))
            continue
        if number != _ZSTD_MAGIC:
            raise Damaged("no frame begins where one is expected")
        try:
            yield from _zstd_frame(source, magic, decompressor.decompressobj(), unchecked)
        except zstandard.ZstdError as error:
            if "not enough memory" in str(error):
                raise MemoryError("the window of a Zstandard frame") from error
            raise Damaged(str(error)) from error


def _zstd_frame(source: _Input, magic: bytes, frame: Any, unchecked: Callable[[], None]) -> Iterator[bytes]:
    """Decompress one frame after its magic number (RFC 8878, section 3.1.1)."""
    descriptor = source.exactly(1)
    flags = descriptor[0]
    single_segment, has_checksum = flags >> 5 & 1, flags >> 2 & 1
    content_size = (single_segment, 2, 4, 8)[flags >> 6]
    dictionary_id = (0, 1, 2, 4)[flags & 3]
    header = source.exactly(1 - single_segment + dictionary_id + content_size)
    yield frame.decompress(magic + descriptor + header)
    last = False
    while not last:
        block = source.exactly(3)
        fields = int.from_bytes(block, "little")
        last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        if kind == _ZSTD_RESERVED:
            raise Damaged("a block is of the reserved type")
        yield frame.decompress(block + source.exactly(1 if kind == _ZSTD_RLE else size))
    if has_checksum:
        yield frame.decompress(source.exactly(4))
    else:
        unchecked()
    if not frame.eof:
        raise Damaged("a frame does not end with its last block")


def pieces(path: Path, unchecked: Callable[[], None]) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in pieces of at most 2 MiB, some of them empty.

    The file name gives the compression: `.gz`, `.zst` or `.xz`; any other file is plain.

    Args:
        path: a regular file.
        unchecked: called for every frame or stream without a checksum of its content; damage there may go unnoticed.

    Raises:
        Damaged: the compressed file is empty, cut short or altered, or bytes follow its last part.
        OSError: the file cannot be read.
        MemoryError: a window does not fit in memory.
    """
    with path.open("rb") as file:
        source = _Input(file)
        if path.suffix in PACKINGS:
            first = source.next()
            if not first:
                raise Damaged("the file is empty")
            source.give_back(first)
        match path.suffix:
            case ".gz":
                yield from _gzip(source)
            case ".xz":
                yield from _xz(source, unchecked)
            case ".zst":
                yield from _zstd(source, unchecked)
            case _:
                while data := source.next():
                    yield data
