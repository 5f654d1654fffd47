"""Waits for other ranks without a time limit; a collective would end with an error after its time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


PAUSE = 0.1
"""Seconds between two looks."""
FIRST_WORD = 60.0
"""Seconds until a wait is reported; the next reports come after twice, four times this long, and so on."""


def wait_for(
    store: Store, keys: Sequence[str], failed: Callable[[], None], say: Callable[[float], None]
) -> None:
    """Return when a store has all keys, however long that takes.

    Args:
        store: of the ranks.
        keys: what other ranks will put there.
        failed: raises if another rank has failed, which will then not come.
        say: is told now and then for how many seconds this rank has waited.

    Raises:
        DistNetworkError: the process that holds the store has ended.
    """
    began, next_word = time.monotonic(), FIRST_WORD
    while not store.check(list(keys)):
        failed()
        waited = time.monotonic() - began
        if waited >= next_word:
            next_word *= 2
            with suppress(OSError):
                say(waited)
        time.sleep(PAUSE)
