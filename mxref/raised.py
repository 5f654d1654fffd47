"""How messages quote an exception that is not one of mxref's."""

from __future__ import annotations

import textwrap
import traceback

_LONGEST = 300
"""Characters of an exception's text that a message quotes."""


def raised_text(err: BaseException) -> str:
    """Return an exception in one line: its type, the beginning of its text, and the file and line that raised it."""
    said = textwrap.shorten(" ".join(str(err).split()), _LONGEST, placeholder=" ...")
    frames = traceback.extract_tb(err.__traceback__)
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(err).__name__}{f': {said}' if said else ''}{at}"
