"""Triton's interpreter without work that decides nothing, which is half of its time.

It changes some hundred functions of `triton.language` before every launch and every call of a device function, and
takes that back after the launch. In a process whose kernels are all interpreted, the change may stay.

It also computes whether each sum of integers overflows, for an assertion that only its debug mode makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """What a launch gives back at its end: nothing."""

    def restore(self) -> None:
        pass


def install() -> None:
    """Change the language once for this process, and compute no overflows."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    change: Callable[[Any], Any] = interpreter._patch_lang
    changed: set[str] = set()

    def once(fn: Any) -> _Kept:
        seen = {m.__name__ for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)}
        if not seen <= changed:
            change(fn)
            changed.update(seen)
        return _Kept()

    interpreter._patch_lang = once
