"""The built-in corpus: which text is prose, which is a duplicate, and what the corpus holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_files
from mxref_training.data import builtin as builtin_module
from mxref_training.data import builtin_corpus, iter_documents, prose
from mxref_training.data.dedup import Deduplicator, normalised_words, shingles
from mxref_training.data.documents import survey
from mxref_training.data.installed import Installed
from mxref_training.errors import DataError

own_cache = data_files.own_cache


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
    with pytest.raises(DataError, match="too few documents for a corpus"):
        builtin_corpus((), "no-such-file.py")
    assert not list((own_cache / "builtin").iterdir())


def test_builtin_reports_a_damaged_cache(small_builtin: builtin_module.Builtin) -> None:
    (small_builtin.train.parent / "report.json").write_text("{")
    with pytest.raises(DataError, match="delete this folder"):
        builtin_corpus(FEW, "[a-f]*.py")
