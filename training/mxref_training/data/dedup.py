"""Removal of repeated paragraphs: exact repeats, and those most of whose word 5-grams have been seen before."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

SHINGLE = 5  # words
MAX_SEEN = 0.5  # share of known shingles above which a paragraph counts as a copy

_WORD = re.compile(r"\w+")


def normalised_words(text: str) -> list[str]:
    """Return the words of a text without case and punctuation, which is what duplicates are compared by."""
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
    """Remembers what it has let through; a paragraph passes when it is new.

    Containment in everything seen so far is stricter than MinHash's resemblance of pairs (Broder 1997): a text
    pieced together from several older ones is a copy too. The memory holds hashes only.

    Attributes:
        exact: paragraphs refused because they repeat an earlier one but for case and punctuation.
        near: paragraphs refused because more than `MAX_SEEN` of their shingles are known.
    """

    exact: int = 0
    near: int = 0
    _texts: set[str] = field(default_factory=set, repr=False)
    _shingles: set[int] = field(default_factory=set, repr=False)

    def admit(self, text: str) -> bool:
        """Tell whether a paragraph is new, and remember it if so."""
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
