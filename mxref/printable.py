"""Escapes control codes in text from outside, so that it is safe to print.

Labels, paths, file contents and messages of backends can contain control codes. A terminal executes them: they
move the cursor, hide text, set the title or write to the clipboard.
"""

from __future__ import annotations

import re

# C0 except tab and line feed; DEL; C1; line separators; marks that change the direction of writing; and surrogates,
# which cannot be printed (Python creates them from bytes of a path that are not UTF-8). The last two are
# noncharacters, which XML cannot represent.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""Return a text with every control code escaped, as in `\x1b`; tabs and line feeds stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
