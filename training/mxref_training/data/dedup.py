"""Removal of repeated paragraphs: exact repeats, and paragraphs whose word 5-grams are mostly known."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

SHINGLE = 5  # words
MAX_SEEN = 0.5  # share of known shingles above which a paragraph counts as a copy

_WORD = re.compile(r"\w+")


def normalised_words(text: str) -> list[str]:
    """Return the words of a text without case and punctuation; duplicates are compared by them."""
    return _WORD.findall(text.lower())


def shingles(words: list[str]) -> list[int]:
    """Return the CRC-32 of every run of `SHINGLE` words (of all words where there are fewer)."""
    last = max(1, len(words) - SHINGLE + 1)
    return [zlib.crc32(" ".join(words[i : i + SHINGLE]).encode()) for i in range(last)]


def overlap(codes: list[int], known: set[int]) -> float:
    """Return the share of shingles that are known, from 0 to 1."""
    return sum(code in known for code in codes) / len(codes)


@dataclass
class Deduplicator:
    """Admits a paragraph only if it is new, and remembers the admitted ones.

    The test is containment in all earlier text. It is stricter than MinHash's resemblance of pairs (Broder 1997): a
    text composed of parts of several earlier ones is a copy too. Only hashes are stored.

    Attributes:
        exact: paragraphs refused because they repeat an earlier one except for case and punctuation.
        near: paragraphs refused because more than `MAX_SEEN` of their shingles are known.
    """

    exact: int = 0
    near: int = 0
    _texts: set[str] = field(default_factory=set, repr=False)
    _shingles: set[int] = field(default_factory=set, repr=False)

    def admit(self, text: str) -> bool:
        """Return whether a paragraph is new, and remember it if it is."""
        words = normalised_words(text)
        normal = " ".join(words)
        if normal in self._texts:
            self.exact += 1
            return False
        found = shingles(words)
        if overlap(found, self._shingles) > MAX_SEEN:
            self.near += 1
            return False
        self._texts.add(normal)
        self._shingles.update(found)
        return True
