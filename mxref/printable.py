"""Text from elsewhere, made safe to print.

Labels, paths, file contents and messages of backends may hold control codes, which a terminal would obey: they
move the cursor, hide text, set the title or write to the clipboard.
"""

from __future__ import annotations

import re

# C0 but tab and line feed, DEL, C1, separators that break lines, marks that turn the direction of writing, and halves
# of surrogate pairs, which cannot be printed: Python makes them from the bytes of a path that are not UTF-8. The last
# two are no characters: XML cannot hold them.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""Return a text with every control code spelled out, as in `\x1b`; tabs and line feeds stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
