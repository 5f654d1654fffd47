"""English prose from docstrings: whole paragraphs are kept or dropped, so that the model learns no code and no markup.

In doubt a paragraph is dropped: a lost paragraph costs nothing. The rules follow C4's (Raffel et al. 2020, section 2.2)
where these make sense for documentation: sentences that end, enough words, no braces, no boilerplate.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

MIN_WORDS = 10
MIN_PLAIN_SHARE = 0.82  # words that are ordinary letters, against identifiers, numbers and operators
MIN_STOP_SHARE = 0.22  # English running text has 0.35 to 0.5, lists of names have next to none

_STOP = (
    "a about after all also an and any are as at be because been before but by can case could do "
    "does each either even for from had has have how if in instead into is it its may more most "
    "must no not of on one only or other same should so some such than that the their them then "
    "there these they this those to up use used using was we were what when where whether which "
    "while who will with without would you your"
)
STOP_WORDS = frozenset(_STOP.split())

_BULLET = re.compile(r"\s*(?:[-*+•]|\(?(?:\d{1,2}|[a-z])[.)]|:param [^:]+:|\.\. note::)\s+(?=\S)")
_ROLE = re.compile(r":[a-z][\w:+-]*:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`")
_TICKS = re.compile(r"`{1,2}([^`<]+?)(?:\s*<[^`>]*>)?`{1,2}_{0,2}")
_STRONG = re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*\n]+?)(?<=\S)\*{1,2}(?![\w*])")
_COLUMNS = re.compile(r"[^\s.!?:;)\"'] {2,}\S|\S {4,}\S")
_PLAIN = re.compile(r"[(\"'“‘]*[A-Za-z]+(?:[-'’/][A-Za-z]+)*[)\"'”’.,;:!?]*")
_NOISE = re.compile(
    r"^\[|[{}\\$|<>=^~@#`]|\.\. |::|:\w+:|https?:|www\.|"
    r"\b(?:copyright|licen[cs]ed?|all rights reserved|TODO|FIXME|XXX)\b",
    re.I,
)
_END = re.compile(r"[.!?][)\"'”’]*$")


def paragraphs(docstring: str) -> list[str]:
    """Return the paragraphs of English prose in a docstring, each one line, without markup.

    Args:
        docstring: text as written in the source, in reStructuredText, numpydoc, Google or Markdown style.
    """
    return [text for text in _blocks(inspect.cleandoc(docstring)) if is_prose(text)]


def _blocks(text: str) -> Iterator[str]:
    """Split a text at blank lines, list items and changes of indentation, and join the lines of each part."""
    block: list[str] = []
    depth = -1
    for line in [*text.split("\n"), ""]:
        item = _BULLET.match(line)
        if item:  # its next lines are indented as its text
            line = " " * item.end() + line[item.end() :]
        indent = len(line) - len(line.lstrip())
        if item or not line.strip() or indent != depth:
            if block and not any(map(_COLUMNS.search, block)):
                joined = _TICKS.sub(r"\1", _ROLE.sub(r"\1", " ".join(" ".join(block).split())))
                yield _STRONG.sub(r"\1", joined)
            block, depth = [], indent
        if line.strip():
            block.append(line.strip())


def is_prose(text: str) -> bool:
    """Return whether a paragraph reads as English: whole sentences, and few identifiers among the words."""
    words = text.split()
    if len(words) < MIN_WORDS or not text[0].isupper() or not text.isascii():
        return False
    if not _END.search(text) or _NOISE.search(text) or text.count("(") != text.count(")"):
        return False
    plain = sum(_PLAIN.fullmatch(word) is not None for word in words)
    stops = sum(word.lower().strip(".,;:!?()\"'") in STOP_WORDS for word in words)
    return plain >= MIN_PLAIN_SHARE * len(words) and stops >= MIN_STOP_SHARE * len(words)
