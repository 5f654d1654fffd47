"""The built-in corpus: English documentation of the installed Python and its packages.

It lets every command run on a machine without data and without a network. The text is read from source files,
which are parsed and never imported; none of it is part of this project. The corpus depends on the installed versions,
so the report names them and the SHA-256 of both sides. Compare runs on this corpus only on one machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from mxref_training.data import dedup, installed, prose
from mxref_training.data.cache import cache_key, cached
from mxref_training.data.documents import TextHash, digest
from mxref_training.data.installed import Installed, find_sources, texts_of
from mxref_training.data.progress import progress
from mxref_training.errors import DataError
from mxref_training.wording import counted

# The packages that the project pins, then their dependencies. Order matters: of two copies of a paragraph, the first
# is kept.
DISTRIBUTIONS = (
    *(
        "numpy",
        "ml_dtypes",
        "safetensors",
        "tomli-w",
        "click",
        "rich",
        "numba",
        "llvmlite",
        "triton",
        "torch",
    ),
    *("tokenizers", "zstandard", "matplotlib", "jinja2", "sphinx", "furo", "pytest", "hypothesis", "mypy"),
    *(
        "sympy",
        "mpmath",
        "networkx",
        "docutils",
        "pygments",
        "babel",
        "beautifulsoup4",
        "pillow",
        "fonttools",
    ),
    *(
        "pyparsing",
        "python-dateutil",
        "contourpy",
        "huggingface_hub",
        "fsspec",
        "filelock",
        "anyio",
        "urllib3",
    ),
    *("requests", "packaging", "pathspec", "pluggy", "sortedcontainers", "setuptools", "scipy", "pandas"),
)

MAX_DOCUMENT = 6_000  # characters; the text of a longer file becomes several documents
MIN_DOCUMENT = 240  # characters
VALIDATION_SHARE = 0.05  # of source files


@dataclass(frozen=True)
class SideReport:
    """Counts of one side of the split; `sha256` is computed by `documents.TextHash`."""

    documents: int
    characters: int
    sha256: str


@dataclass(frozen=True)
class BuiltinReport:
    """The sources of the built-in corpus, and counts of what was kept and removed.

    Attributes:
        train: training side.
        val: validation side.
        sources: characters kept, by source.
        versions: version of every source.
        absent: distributions that are not installed here and therefore missing.
        unreadable: source files that were skipped because they could not be read or parsed.
        exact: repeated paragraphs removed.
        near: nearly repeated paragraphs removed, including paragraphs of validation that training quotes.
    """

    train: SideReport
    val: SideReport
    sources: dict[str, int]
    versions: dict[str, str]
    absent: tuple[str, ...]
    unreadable: int
    exact: int
    near: int

    def __str__(self) -> str:
        text = (
            f"built-in corpus: {self.train.documents:,} + {self.val.documents:,} documents, "
            f"{self.train.characters / 1e6:.2f} + {self.val.characters / 1e6:.2f} M characters from "
            f"{counted(len(self.versions), 'source')}, {counted(self.exact + self.near, 'repeated paragraph')} removed"
        )
        return text + (f", not installed: {', '.join(self.absent)}" if self.absent else "")


@dataclass(frozen=True)
class Builtin:
    """The built-in corpus on disk: two JSONL files and the report."""

    train: Path
    val: Path
    report: BuiltinReport


def _documents(paragraphs: list[str]) -> Iterator[str]:
    """Join paragraphs into documents of at most `MAX_DOCUMENT` characters; a longer paragraph is a document."""
    text = ""
    for paragraph in paragraphs:
        if text and len(text) + 1 + len(paragraph) > MAX_DOCUMENT:
            yield text
            text = ""
        text = f"{text}\n{paragraph}" if text else paragraph
    if len(text) >= MIN_DOCUMENT:
        yield text


def _jsonl(path: Path) -> IO[str]:
    return path.open("w", encoding="utf-8", newline="\n")


class _Writer:
    """One side of the split, written to a JSONL file and counted."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._hash = TextHash()
        self._documents = self._characters = 0

    def add(self, text: str, source: str) -> None:
        self._file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
        self._hash.add(text)
        self._documents += 1
        self._characters += len(text)

    def side(self) -> SideReport:
        """Return the counts so far."""
        return SideReport(self._documents, self._characters, self._hash.hexdigest())


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the cycle collector: syntax trees hold no cycles, and walking them costs a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _File:
    """The prose of one source file. A file goes to one side as a whole."""

    source: str
    paragraphs: list[str]
    code: int


def _collect(sources: list[Installed], seen: dedup.Deduplicator) -> tuple[list[_File], int]:
    """Return the source files that hold prose, and the number of those that could not be read."""
    collected, unreadable = [], 0
    files = [(source, name) for source in sources for name in source.files]
    for source, name in progress(files, "reading installed documentation"):
        texts = texts_of(source.root / name)
        if texts is None:
            unreadable += 1
            continue
        paragraphs = [p for text in texts for p in prose.paragraphs(text) if seen.admit(p)]
        if sum(map(len, paragraphs)) >= MIN_DOCUMENT:
            collected.append(_File(source.name, paragraphs, digest("\n".join(paragraphs))))
    return collected, unreadable


def _is_known(paragraph: str, known: set[int]) -> bool:
    return dedup.overlap(dedup.shingles(dedup.normalised_words(paragraph)), known) > dedup.MAX_SEEN


def _build(folder: Path, sources: list[Installed], absent: tuple[str, ...]) -> None:
    seen = dedup.Deduplicator()
    with _no_garbage_collection():
        files, unreadable = _collect(sources, seen)
    # The smallest hashes are a random choice of an exact size.
    held_out = set(sorted(file.code for file in files)[: max(1, round(VALIDATION_SHARE * len(files)))])
    known = {
        code
        for file in files
        if file.code not in held_out
        for paragraph in file.paragraphs
        for code in dedup.shingles(dedup.normalised_words(paragraph))
    }
    kept = {source.name: 0 for source in sources}
    leaked = 0
    with _jsonl(folder / "train.jsonl") as train_file, _jsonl(folder / "val.jsonl") as val_file:
        train, val = _Writer(train_file), _Writer(val_file)
        for file in files:
            side, paragraphs = train, file.paragraphs
            if file.code in held_out:
                # A validation paragraph that a longer training paragraph quotes is new to the test, but training reads
                # its text.
                side, paragraphs = val, [p for p in file.paragraphs if not _is_known(p, known)]
                leaked += len(file.paragraphs) - len(paragraphs)
            for document in _documents(paragraphs):
                side.add(document, file.source)
                kept[file.source] += len(document)
    report = BuiltinReport(
        train=train.side(),
        val=val.side(),
        sources=kept,
        versions={source.name: source.version for source in sources},
        absent=absent,
        unreadable=unreadable,
        exact=seen.exact,
        near=seen.near + leaked,
    )
    if not report.train.documents or not report.val.documents:
        raise DataError(
            f"{counted(len(files), 'installed source file')} with documentation gave too few documents for a corpus, "
            f"{report.train.documents} for training and {report.val.documents} for validation: "
            "pass a JSONL file with a text field instead"
        )
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def builtin_corpus(distributions: Sequence[str] = DISTRIBUTIONS, pattern: str = "**/*.py") -> Builtin:
    """Return the built-in corpus, made on the first call and kept in the cache.

    Args:
        distributions: names of installed distributions to read; absent ones are named in the report.
        pattern: glob of the files of the standard library to read.

    Returns:
        Paths of two JSONL files with `text` and `source` fields, and the report. No paragraph of validation has
        more than half of its word 5-grams in training.

    Raises:
        DataError: the sources hold too little text, or the cache is damaged or cannot be written.
    """
    sources, absent = find_sources(distributions, pattern)
    code = [
        Path(module).read_text(encoding="utf-8")
        for module in (__file__, installed.__file__, prose.__file__, dedup.__file__)
    ]
    versions = [f"{source.name} {source.version} {source.root}" for source in sources]
    key = cache_key(pattern, *versions, "", *absent, "", *code)
    folder = cached("builtin", key, lambda partial: _build(partial, sources, absent))
    try:
        fields = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        train, val = SideReport(**fields.pop("train")), SideReport(**fields.pop("val"))
        report = BuiltinReport(train, val, absent=tuple(fields.pop("absent")), **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cached corpus in {folder} is damaged: delete this folder") from error
    return Builtin(folder / "train.jsonl", folder / "val.jsonl", report)
