"""What a proof asks: steps that a solver decides."""

from __future__ import annotations

from dataclasses import dataclass

from prove.terms import Term, digest_of


class NotProved(Exception):
    """A step of the proof has no form here, or does not hold; the message names it."""


@dataclass(frozen=True)
class Step:
    """A question for the solver: whether a goal follows from assumptions for all values of the variables."""

    name: str
    goal: Term
    assumptions: tuple[Term, ...] = ()

    @property
    def digest(self) -> str:
        """What identifies the question: the SHA-256 of its terms."""
        return digest_of(self.goal, *self.assumptions)
