"""The batch that all checkpoints and recipes of a probe read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref_training.data.corpus import TokenCorpus
from mxref_training.data.loader import sequential_batches
from mxref_training.errors import ConfigError
from mxref_training.wording import counted


class Side(StrEnum):
    """Which tokens a batch is made of."""

    VAL = "val"
    TRAIN = "train"


@dataclass(frozen=True)
class Batch:
    """Windows of a side of the corpus, in its own order."""

    side: Side
    first: int
    """Number of the first window."""
    inputs: NDArray[np.int64]
    """[sequences, length]."""
    targets: NDArray[np.int64]
    """The inputs moved by one token."""

    @property
    def name(self) -> str:
        """The batch in a few words."""
        sequences, length = self.inputs.shape
        last = self.first + sequences - 1
        return f"{self.side.value} windows {self.first} to {last} of {length:,} tokens"

    def facts(self) -> dict[str, Any]:
        """Return what the results say of the batch."""
        sequences, length = self.inputs.shape
        tokens = np.concatenate([self.inputs, self.targets[:, -1:]], axis=1).astype("<i8")
        return {
            "name": self.name,
            "side": self.side.value,
            "first": self.first,
            "sequences": sequences,
            "length": length,
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        }


def make_batch(corpus: TokenCorpus, side: Side, sequences: int, length: int, first: int = 0) -> Batch:
    """Return `sequences` windows of `length` tokens from the window `first` on.

    Raises:
        ConfigError: the side has too few tokens.
    """
    tokens = corpus.val if side is Side.VAL else corpus.train
    needed = (first + sequences) * length + 1
    if len(tokens) < needed:
        raise ConfigError(
            f"the batch needs {needed:,} tokens from the beginning of the {side.value} side, which has "
            f"{counted(len(tokens), 'token')}: lower --batch, --length or --first"
        )
    part = tokens.ids[first * length : needed]
    inputs, targets = next(sequential_batches(part, length, sequences))
    return Batch(side, first, inputs, targets)
