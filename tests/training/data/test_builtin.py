"""The built-in text: which text is prose, which is a duplicate, and what the two sides hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import data_files
from mxref_training.data import builtin as builtin_module
from mxref_training.data import builtin_corpus, iter_documents, prose
from mxref_training.errors import DataError

own_cache = data_files.own_cache


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

    - An item of a list is a paragraph of its own when it is long enough to be one,
      and it may have another line.
    - short item
    """
    assert prose.paragraphs(doc) == [
        "Summarise the values of an array along the axis that the caller has chosen.",
        "The mean is computed by numpy.add.reduce in the order of memory, which is the one that the cache likes best; "
        "see the guide for more on this.",
        "The values that are to be summarised, in any shape that the function can take.",
        "The result is a view whenever that is possible, and a copy in all of the other cases.",
        "An item of a list is a paragraph of its own when it is long enough to be one, and it may have another line.",
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


def test_duplicates_exact_and_near() -> None:
    known: set[int] = set()
    first = "The quick brown fox jumps over the lazy dog and runs into the deep dark forest at night."
    assert builtin_module._is_new(first, known)
    assert not builtin_module._is_new(first.upper().replace(" ", "  ").replace(".", "!"), known)
    assert not builtin_module._is_new(first.replace("deep dark", "green"), known)
    assert builtin_module._is_new(
        "An unrelated sentence about the weather in the north of the country in late spring.", known
    )


FEW = ("click", "jinja2", "no-such-distribution")


@pytest.fixture
def small_builtin() -> builtin_module.Builtin:
    return builtin_corpus(FEW, "[a-f]*.py")


def test_builtin_is_prose_and_its_split_is_clean(small_builtin: builtin_module.Builtin) -> None:
    train, val = list(iter_documents(small_builtin.train)), list(iter_documents(small_builtin.val))
    assert sum(map(len, train + val)) > 150_000
    assert 0 < sum(map(len, val)) < 0.15 * sum(map(len, train))
    for source in ("Python 3", "click ", "jinja2 "):
        assert source in small_builtin.note
    known: set[int] = set()
    for text in "\n".join(train).split("\n"):
        builtin_module._is_new(text, known)
    for text in "\n".join(val).split("\n"):
        assert builtin_module._is_new(text, set(known))
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
    for side in ("train", "val"):
        assert getattr(again, side) != getattr(small_builtin, side)
        assert getattr(again, side).read_bytes() == getattr(small_builtin, side).read_bytes()


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
