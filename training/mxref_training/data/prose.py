"""English prose from docstrings: markup, code, tables and parameter lists are removed, whole paragraphs are kept.

In doubt a paragraph is rejected: a lost paragraph costs nothing, but code or markup would be learned by the model.
The rules follow C4's line rules (Raffel et al. 2020, section 2.2) where these make sense for documentation: sentences
that end, enough words, no braces, no boilerplate.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

MIN_WORDS = 10
MIN_PLAIN_SHARE = 0.82  # words that are ordinary letters, against identifiers, numbers and operators
MIN_STOP_SHARE = 0.22  # English running text has 0.35 to 0.5, lists of names have next to none

_STOP = (
    "a about after all also an and any are as at be because been before but by can case could do "
    "does each either even for from had has have how if in instead into is it its may more most "
    "must no not of on one only or other same should so some such than that the their them then "
    "there these they this those to up use used using was we were what when where whether which "
    "while who will with without would you your "
)
STOP_WORDS = frozenset(_STOP.split())
# The rules may have removed the start of a sentence; a paragraph cannot begin with these words.
_CONTINUES = frozenset(
    ["and", "or", "but", "than", "is", "are", "was", "were", "be", "been", "so", "then", "of", "to"]
)

_FENCE = re.compile(r"\s*(?:```|~~~)")
_DOCTEST = re.compile(r"\s*(?:>>>|\.\.\. |In \[\d+\]:|Out\[\d+\]:|\$ )")
_ADMONITION = re.compile(
    r"\s*\.\. (?:note|warning|tip|hint|important|caution|attention|danger|admonition|rubric)::\s*(.*)", re.I
)
_DIRECTIVE = re.compile(r"\s*\.\.(?:\s|$)")
_RULE = re.compile(r"\s*([^\w\s])\1{2,}\s*$")
_TYPE_FIELD = re.compile(r"\s*:(?:type|rtype|vartype|raises?|cvar|ivar|var)\b[^:]*:\s*\S*$")
_FIELD = re.compile(r"\s*(?::[a-z]+(?: [^:]+)?:|@[a-z]+(?: \w+)?:)\s+(.*)")
_BULLET = re.compile(r"\s*(?:[-*+•]|\(?(?:\d{1,2}|[a-z])[.)])\s+(\S.*)")
_PARAMETER = re.compile(
    r"\s*[*`]{0,4}[A-Za-z_][\w.]*[*`]{0,4}(?:\s?\([^)]*\))?(?::| --?| —)\s+([A-Za-z`\"'].*)"
)
_NUMPYDOC = re.compile(r"\s*[*\w`][\w*, .`'\"()\[\]]* :(?: |$)")
_COLUMNS = re.compile(r"[^\s.!?:;)\"'] {2,}\S|\S {4,}\S")

_ROLE = re.compile(r":[a-z][\w:+-]*:`([^`]+)`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{0,2}")
_OLD_QUOTE = re.compile(r"`([^`'\n]+)'")
_TICKS = re.compile(r"`{1,2}([^`]+)`{1,2}_{0,2}")
_STRONG = re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*\n]+?)(?<=\S)\*{1,2}(?![\w*])")
_CITATION = re.compile(r"(\[[\w#*-]{1,12}\])_|\|[\w-]+\|")
_MARKDOWN = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
_PLAIN = re.compile(r"[(\"'“‘]*[A-Za-z]+(?:[-'’/][A-Za-z]+)*[)\"'”’.,;:!?]*")
_NOISE = re.compile(
    r"^\[|[{}\\$|<>=^~@#`]|\.\.\.\s*\w+\(|https?:|www\.|"
    r"\b(?:copyright|licen[cs]ed?|all rights reserved|TODO|FIXME|XXX)\b",
    re.I,
)
_HYPHEN = re.compile(r"(?<=\w)-\n\s*(?=[a-z])")
_LOWER = re.compile(r"[a-z]+(?![\w.(])|(?:i\.e|e\.g)\.")
_END = re.compile(r"[.!?][)\"'”’]*$|:$")


@dataclass
class _Block:
    """A paragraph that is being read; if it contains a table, the whole paragraph is dropped."""

    indent: int = 0
    item: bool = False
    lines: list[str] = field(default_factory=list)
    spoiled: bool = False

    def opens(self, indent: int) -> bool:
        """Return whether a line of this indentation starts a new paragraph."""
        if self.item or self.spoiled:
            return indent <= self.indent
        return not self.lines or indent != self.indent


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _blocks(text: str) -> Iterator[_Block]:
    """Split at blank lines, list items and changes of indentation; drop what is not running text."""
    block = _Block()
    literal: int | None = None  # while set, deeper lines belong to a literal block or a dropped directive
    fenced = doctest = False
    for line in text.expandtabs(8).split("\n"):
        blank = not line.strip()
        if _FENCE.match(line):
            fenced = not fenced
            doctest, blank = False, True
        elif fenced:
            continue
        if literal is not None and not blank:
            if _indent(line) > literal:
                continue
            literal = None
        if blank or doctest or _DOCTEST.match(line):
            doctest = not blank
            yield block
            block = _Block()
            continue
        if _RULE.match(line):
            # The line above an underline is a heading; a rule elsewhere only separates.
            if len(block.lines) != 1:
                yield block
            block = _Block()
            continue
        indent, start, item = _indent(line), None, False
        if admonition := _ADMONITION.match(line):
            start = admonition[1]
        elif _DIRECTIVE.match(line):
            start, literal = "", indent
        elif _TYPE_FIELD.match(line) or (block.opens(indent) and _NUMPYDOC.match(line)):
            start = ""
        elif match := _FIELD.match(line) or _BULLET.match(line):
            start, item = match[1], True
        elif block.opens(indent):
            # "name: text" is a parameter where a paragraph may open; elsewhere it is a sentence with a colon.
            match = _PARAMETER.match(line)
            start, item = (match[1], True) if match else (line, False)
        if start is None:
            block.lines.append(line)
        else:
            yield block
            block = _Block(indent, item, [start] if start else [])
        block.spoiled |= _COLUMNS.search(line.strip()) is not None
        if line.rstrip().endswith("::") and not admonition:
            literal = block.indent
    yield block


def _inline(text: str) -> str:
    """Replace inline markup by its text."""
    text = _ROLE.sub(lambda m: m[1].split("<")[0].strip().rpartition(".")[2] if m[1][0] == "~" else
                     m[1].split("<")[0].strip().lstrip("!"), text)  # fmt: skip
    text = _MARKDOWN.sub(r"\1", _LINK.sub(r"\1", text))
    text = _TICKS.sub(r"\1", _OLD_QUOTE.sub(r"'\1'", text)).replace("``", '"')
    return _CITATION.sub(r"\1", _STRONG.sub(r"\1", text))


def is_prose(text: str) -> bool:
    """Return whether a paragraph reads as English: words, few of them identifiers, and a proper end."""
    words = text.split()
    if len(words) < MIN_WORDS or not _END.search(text) or _NOISE.search(text) or _LOWER.match(text):
        return False
    if text.count("(") != text.count(")"):
        return False
    if not text.isascii() and sum(c > "\x7f" for c in text) > 0.03 * len(text):
        return False
    plain = sum(_PLAIN.fullmatch(word) is not None for word in words)
    stops = sum(word.lower().strip(".,;:!?()\"'") in STOP_WORDS for word in words)
    return plain >= MIN_PLAIN_SHARE * len(words) and stops >= MIN_STOP_SHARE * len(words)


def _close(text: str) -> str:
    """Drop a last sentence that ends in a colon: the example after it was removed."""
    starts = [match.end() for match in _SENTENCE.finditer(text)]
    return text[: starts[-1]].rstrip() if starts else ""


def paragraphs(docstring: str) -> list[str]:
    """Return the paragraphs of English prose in a docstring, each one line, without markup.

    Args:
        docstring: text as written in the source, in reStructuredText, numpydoc, Google or Markdown style.

    Returns:
        Paragraphs in order; empty when nothing in it reads as prose.
    """
    found: list[tuple[str, bool]] = []
    for block in _blocks(unicodedata.normalize("NFC", inspect.cleandoc(docstring))):
        if block.spoiled:
            continue
        text = " ".join(_inline(_HYPHEN.sub("-", "\n".join(block.lines))).split())
        if text.endswith("::"):
            text = text[:-1]
        if text:
            text = text[0].upper() + text[1:] if text.split()[0] in STOP_WORDS - _CONTINUES else text
            found.append((text, block.item))
    kept: list[str] = []
    for (text, _), (follower, is_item) in pairwise([*found, ("", False)]):
        # A sentence with a colon may stay only if the list after it stays.
        if text.endswith(":") and not (is_item and is_prose(follower)):
            text = _close(text)
        if is_prose(text):
            kept.append(text)
    return kept
