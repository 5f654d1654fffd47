"""Documents of a data set of the package `datasets`, streamed from the Hugging Face Hub or a folder, fetched once.

The first documents of a split are written to the cache. A run then reads them as a JSONL file, so a stream has the
same order, hash and separation of the two sides as any other text, and a resumed run does not stream again.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxref_training.data.cache import Facts, cached
from mxref_training.data.progress import progress
from mxref_training.errors import DataError

C4 = "c4"
PREFIX = "hf:"
TRAIN, VALIDATION = "train", "validation"

_WAY_OUT = "pass a JSONL file with a text field, or `builtin`"
_FILE = "documents.jsonl.gz"


@dataclass(frozen=True)
class DatasetStream:
    """A data set, as `datasets.load_dataset` finds it.

    Attributes:
        name: its name on the Hub, or a folder.
        config: its configuration, such as a language; None takes the only one.
        split: the split to read; None is `train` for training and `validation` for validation.
    """

    name: str
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.config}" if self.config else self.name


def parse_stream(source: str | Path) -> DatasetStream | None:
    """Return the data set that `c4` or `hf:NAME[:CONFIG[:SPLIT]]` names; None for any other source.

    Raises:
        DataError: the name is empty, or there are too many parts.
    """
    if source == C4:
        return DatasetStream("allenai/c4", "en")
    if not isinstance(source, str) or not source.startswith(PREFIX):
        return None
    name, *rest = source.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise DataError(
            f"{source!r} is not of the form hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, as in hf:allenai/c4:en"
        )
    return DatasetStream(name, *(part or None for part in rest))


def has_validation(stream: DatasetStream) -> bool:
    """Return whether a data set has a split named `validation`; DataError if it cannot be reached."""
    return VALIDATION in _asked(
        stream, lambda datasets: datasets.get_dataset_split_names(stream.name, stream.config)
    )


def fetched(stream: DatasetStream, split: str, documents: int) -> Path:
    """Return a JSONL file with the first documents of a split, or all that it has, from the cache if it has them.

    Raises:
        DataError: the package is missing, the data set cannot be reached, or a row has no string `text`.
    """

    def build(folder: Path) -> Facts:
        with gzip.open(folder / _FILE, "wt", encoding="utf-8", compresslevel=4) as file:
            for text in progress(_texts(stream, split, documents), f"fetching {stream} {split}", documents):
                file.write(json.dumps({"text": text}) + "\n")
        return {}

    inputs = {**asdict(stream), "split": split, "documents": documents, "folder": _local_state(stream.name)}
    return cached("streams", inputs, build)[0] / _FILE


def _local_state(name: str) -> list[tuple[str, int, int]]:
    """Return sizes and times of a folder's files, so that changed files are read again; none for a name on the Hub."""
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    states = [(str(path.resolve()), path.stat()) for path in files]
    return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


def _texts(stream: DatasetStream, split: str, documents: int) -> Iterator[str]:
    rows = _asked(
        stream,
        lambda datasets: iter(datasets.load_dataset(stream.name, stream.config, split=split, streaming=True)),
    )
    for number in range(documents):
        row = _asked(stream, lambda _: next(rows, None))
        if row is None:
            return
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(
                f"{stream} {split}, document {number + 1}: no string in the column `text`; its columns are "
                f"{', '.join(row)}"
            )
        yield text


def _asked(stream: DatasetStream, question: Any) -> Any:
    """Return what the package answers; DataError for whatever it raises."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{stream} needs the package datasets: pip install 'mxref[datasets]', or {_WAY_OUT}")
    import datasets

    try:
        return question(datasets)
    except Exception as error:  # the library passes on the errors of whatever HTTP client it uses
        raise DataError(f"cannot fetch {stream} ({type(error).__name__}: {error}): {_WAY_OUT}") from error
