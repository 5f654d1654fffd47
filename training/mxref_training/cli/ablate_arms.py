"""The arms of a ladder in the options of `mxref ablate`, and on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxref_training.lab.ladder import Ladder


def words(text: str | None) -> list[str]:
    """Return the words of a comma-separated list; none of None."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def kept_arms(text: str) -> list[str]:
    """Return the arms that `--keep-checkpoints` names; `none` names none."""
    return [] if text.strip() == "none" else words(text)


def show_arms(ladder: Ladder, names: Sequence[str]) -> None:
    """Print the arms that are named, with the treatment of each."""
    from rich.table import Table

    from mxref.terminal import BOX, HEAD, QUIET, console

    table = Table(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0))
    for name in ("arm", "stage", "paper", "treatment"):
        table.add_column(name, style=QUIET if name == "stage" else "", no_wrap=name != "treatment")
    for arm in [arm for arm in ladder.arm if arm.name in names]:
        table.add_row(
            arm.name,
            arm.stage,
            arm.paper.overhead if arm.paper else "",
            _in_words(ladder.treatment(arm)),
        )
    console().print(table)


def _in_words(treatment: list[tuple[str, str]]) -> str:
    """Return the treatment of the three GEMMs, those treated alike named together."""
    roles: dict[str, list[str]] = {}
    for role, text in treatment:
        roles.setdefault(text, []).append(role)
    if len(roles) == 1:
        return next(iter(roles))
    return "; ".join(f"{' + '.join(names)}: {text}" for text, names in roles.items())
