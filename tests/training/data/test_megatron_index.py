"""Megatron's token files: read as they were written, and refused if a byte does not fit."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

import data_files
from megatron_oracle import CODES, index_bytes, write_indexed
from mxref_training.data.megatron import open_indexed, open_tokens
from mxref_training.errors import DataError

own_cache = data_files.own_cache

TEXTS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def write(folder: Path, dtype: str = "int32", texts: list[list[int]] = TEXTS) -> Path:
    write_indexed(folder / "some.data", texts, dtype)
    return folder / "some.data"


@pytest.mark.parametrize("dtype", CODES)
def test_files_are_read_as_written(tmp_path: Path, dtype: str) -> None:
    file = open_indexed(write(tmp_path, dtype))
    assert file.ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert file.ids.dtype == dtype
    assert file.lengths.tolist() == [3, 0, 1, 4]
    assert file.starts.tolist() == [0, 3, 3, 4, 8]
    assert file.documents == 4
    assert not file.ids.flags.writeable


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    prefix.with_name("some.data.idx").write_bytes(index_bytes([3, 0, 1, 4], 4, 4, [0, 2, 4]))
    file = open_indexed(prefix)
    assert file.documents == 2
    assert len(file.lengths) == 4


_APART = "its lengths, places and document boundaries do not fit together: fetch or make both files again"


def change_index(place: int, form: str, value: object) -> object:
    def change(data: bytearray) -> None:
        struct.pack_into(form, data, place, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_index(0, "<3s", b"XYZ"), r"no index of Megatron of version 1: it begins with b'XYZDIDX"),
        (change_index(9, "<Q", 2), r"no index of Megatron of version 1: it begins with .*, 2"),
        (change_index(17, "<B", 7), "dtype code 7, which is none of integers"),
        (
            change_index(18, "<Q", 5),
            r"is cut short: expected 134 bytes, found 122 \(its header counts 5 sequences",
        ),
        (change_index(26, "<Q", 2**60), r"is cut short: expected 9,223,372,036,854,775,890 bytes, found 122"),
        (change_index(34, "<i", -3), _APART),
        (change_index(34, "<i", 4), _APART),
        (change_index(50 + 16, "<q", 4), _APART),
        (
            change_index(34 + 12, "<i", 5),
            r"data.bin is cut short: expected 36 bytes, found 32 \(.* 9 tokens of 4",
        ),
        (change_index(82, "<q", 1), _APART),
        (change_index(114, "<q", 3), _APART),
        (change_index(98, "<q", 0), _APART),
        (lambda data: data.__delitem__(slice(33, None)), "is cut short: it has 33 of at least 34 bytes"),
        (lambda data: data.__delitem__(slice(-1, None)), "is cut short: expected 122 bytes, found 121"),
        (lambda data: data.clear(), "data.idx is cut short: it has 0 of at least 34 bytes"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, change, message: str) -> None:
    prefix = write(tmp_path)
    path = prefix.with_name("some.data.idx")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_indexed(prefix)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (31, "data.bin is cut short: expected 32 bytes, found 31"),
        (36, "data.bin is too long: expected 32 bytes, found 36"),
        (0, "data.bin is cut short: expected 32 bytes, found 0"),
    ],
)
def test_a_token_file_of_another_size_is_refused(tmp_path: Path, size: int, message: str) -> None:
    prefix = write(tmp_path)
    prefix.with_name("some.data.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=message):
        open_indexed(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    prefix = write(tmp_path)
    prefix.with_name(f"some.data{suffix}").unlink()
    with pytest.raises(
        DataError, match=rf"cannot read .*some.data{suffix} .*both some.data.bin and some.data.idx"
    ):
        open_indexed(prefix)


def test_files_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the index lists no tokens"):
        open_indexed(write(tmp_path, texts=[[], []]))


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path, texts=[[1, 2], [3, -4]])
    with pytest.raises(DataError, match="token 3 is -4: ids must not be negative"):
        open_tokens([(1.0, prefix)])


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    first = open_tokens([(1.0, prefix)])
    assert (first.largest, len(first)) == (12, 8)
    write(tmp_path, texts=[[5, 6, 7], [], [8], [9, 10, 11, 99]])
    os.utime(tmp_path / "some.data.bin", ns=(1, 1))  # a clock may be too coarse for two writes in a row
    second = open_tokens([(1.0, prefix)])
    assert second.largest == 99
    assert second.sha256 != first.sha256
    assert second.fingerprint != first.fingerprint


def test_the_cuts_between_sequences_are_in_the_fingerprint(tmp_path: Path) -> None:
    first = open_tokens([(1.0, write(tmp_path))])
    second = open_tokens([(1.0, write(tmp_path, texts=[[5, 6], [], [7, 8], [9, 10, 11, 12]]))])
    assert second.sha256 == first.sha256
    assert second.fingerprint != first.fingerprint
