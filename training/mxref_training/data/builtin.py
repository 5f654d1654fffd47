"""The built-in text: English documentation of the installed Python, NumPy, PyTorch, and what comes with them.

It lets every command run on a machine without data and without a network. The text is read from source files,
which are parsed and never imported; none of it is part of this project. It depends on the installed versions, which
its note names. Compare runs on this text only on one machine.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxref_training.data import prose
from mxref_training.data.cache import Facts, cached
from mxref_training.data.progress import progress
from mxref_training.errors import DataError
from mxref_training.wording import counted

# What an installation with training brings. Of two copies of a paragraph, the first is kept.
DISTRIBUTIONS = (
    *("numpy", "torch", "sympy", "networkx", "mpmath", "jinja2"),
    *("matplotlib", "fonttools", "pillow", "huggingface_hub", "numba", "scipy", "click", "rich"),
)

MAX_DOCUMENT = 6_000  # characters; the text of a longer file becomes several documents
MIN_DOCUMENT = 240  # characters
VALIDATION_SHARE = 0.05  # of source files
SHINGLE = 5  # words
MAX_SEEN = 0.5  # share of known shingles above which a paragraph counts as a copy

_SKIPPED = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|idlelib|lib2to3|turtledemo|(site|dist)-packages)/|test_"
)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Builtin:
    """The built-in text: a JSONL file with the fields `text` and `source` for each side, and a note on both."""

    train: Path
    val: Path
    note: str


def builtin_corpus(distributions: Sequence[str] = DISTRIBUTIONS, pattern: str = "**/*.py") -> Builtin:
    """Return the built-in text, made on the first call and kept in the cache.

    Args:
        distributions: names of distributions to read, as far as they are installed.
        pattern: glob of the files of the standard library to read.

    Returns:
        Paths and note. No paragraph of validation has more than half of its word 5-grams in training.

    Raises:
        DataError: the sources hold too little text, or the cache is damaged or cannot be written.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = [(f"Python {platform.python_version()}", library, sorted(library.glob(pattern)))]
    for name in distributions:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        files = sorted(Path(str(found.locate_file(file))) for file in found.files or ())
        sources.append((f"{name} {found.version}", Path(str(found.locate_file(""))), files))
    inputs = {
        "pattern": pattern,
        "sources": [[name, str(root)] for name, root, _ in sources],
        "code": [Path(module).read_text(encoding="utf-8") for module in (__file__, prose.__file__)],
    }
    folder, facts = cached("builtin", inputs, lambda partial: _build(partial, sources))
    return Builtin(folder / "train.jsonl", folder / "val.jsonl", facts["note"])


def _build(folder: Path, sources: Sequence[tuple[str, Path, list[Path]]]) -> Facts:
    files = [
        (name, path)
        for name, root, paths in sources
        for path in paths
        if path.suffix == ".py" and not _SKIPPED.search(path.relative_to(root).as_posix())
    ]
    # Validation comes last, and so none of its paragraphs is a copy of one of training.
    files.sort(key=_is_held_out)
    known: set[int] = set()
    sides: dict[str, list[str]] = {"train": [], "val": []}
    for name, path in progress(files, "reading installed documentation"):
        found = [p for text in _docstrings(path) for p in prose.paragraphs(text) if _is_new(p, known)]
        sides["val" if _is_held_out((name, path)) else "train"] += [
            json.dumps({"text": text, "source": name.split()[0]}) + "\n" for text in _documents(found)
        ]
    if not all(sides.values()):
        raise DataError(
            f"{counted(len(files), 'installed source file')} gave too few documents for a corpus: pass a JSONL file "
            "with a text field instead"
        )
    for side, lines in sides.items():
        (folder / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"note": f"built-in text: documentation from {', '.join(name for name, _, _ in sources)}"}


def _is_held_out(file: tuple[str, Path]) -> bool:
    """Return whether a file is for validation: a random choice by its name, the same for every folder and version."""
    name = f"{file[0].split()[0]} {'/'.join(file[1].parts[-3:])}"
    return hashlib.sha256(name.encode()).digest()[0] < VALIDATION_SHARE * 256


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a source file that can be parsed, in their order.

    Strings that a call or an assignment gives to a name with "doc" are docstrings too: this is how NumPy and PyTorch
    document compiled functions. The topics of `help()` are those of pydoc_data/topics.py.
    """
    source = path.read_bytes()
    if len(source) > 2_000_000:  # a generated table
        return
    gc.disable()  # a syntax tree has no cycles, and looking for some takes half of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in these sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # for another version of Python
        return
    finally:
        gc.enable()
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node, clean=False):
                yield text
        elif isinstance(node, ast.Expr | ast.Assign) and isinstance(
            node.value, ast.Call | ast.Dict | ast.Constant
        ):
            value = node.value
            target = value.func if isinstance(value, ast.Call) else getattr(node, "targets", [value])[0]
            if "doc" in ast.unparse(target).lower() or path.name == "topics.py":
                strings = (part.value for part in ast.walk(value) if isinstance(part, ast.Constant))
                yield from (text for text in strings if isinstance(text, str) and " " in text)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for part in getattr(node, "body", ()) if not isinstance(node, ast.Expr) else ():
        yield from _statements(part)


def _is_new(paragraph: str, known: set[int]) -> bool:
    """Return whether at most half of a paragraph's word 5-grams are known, and remember them if so.

    The test is containment in all earlier text. It is stricter than MinHash's resemblance of pairs (Broder 1997): a
    text composed of parts of several earlier ones is a copy too.
    """
    words = _WORD.findall(paragraph.lower())
    runs = [words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1))]
    codes = [zlib.crc32(" ".join(run).encode()) for run in runs]
    if sum(code in known for code in codes) > MAX_SEEN * len(codes):
        return False
    known.update(codes)
    return True


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
