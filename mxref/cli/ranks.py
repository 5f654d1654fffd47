"""Commands under `torchrun`, which starts every command once for each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import click

from mxref.errors import MxrefError

_LET_IT_SPEAK = 5
"""Seconds that other ranks stay: `torchrun` ends all ranks when the first one has ended."""


class RanksError(MxrefError, RuntimeError):
    """A command for one process that several ranks run."""


class ForRanks(click.Command):
    """A command that the ranks of a job run together."""


class OneProcess(click.Command):
    """A command for one process that can say what to give instead of ranks."""

    def __init__(self, *args: Any, instead: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.instead = instead


def refuse_ranks(name: str, command: click.Command, environment: Mapping[str, str] = os.environ) -> None:
    """Raise RanksError on the first of several ranks, and end the others, unless the command is `ForRanks`.

    Each rank would do all of the work, and they would write the same files.
    """
    world, rank = environment.get("WORLD_SIZE", ""), environment.get("RANK", "")
    if isinstance(command, ForRanks) or not (world.isdecimal() and rank.isdecimal() and int(world) > 1):
        return
    if int(rank):
        time.sleep(_LET_IT_SPEAK)
        raise click.exceptions.Exit(2)
    instead = f"; {command.instead}" if isinstance(command, OneProcess) and command.instead else ""
    raise RanksError(
        f"mxref {name} is for one process, but WORLD_SIZE = {world} says that torchrun has started {world} ranks: give "
        f"the command without torchrun, or unset RANK and WORLD_SIZE{instead}"
    )
