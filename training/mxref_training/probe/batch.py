"""The batch that all checkpoints and recipes of a probe read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref_training.config import TrainConfig
from mxref_training.data.batches import sequential_batches
from mxref_training.data.corpus import TokenCorpus, prepare_corpus
from mxref_training.errors import ConfigError
from mxref_training.probe.moments import Moment
from mxref_training.wording import counted


class Side(StrEnum):
    """Which tokens a batch is made of."""

    VAL = "val"
    TRAIN = "train"


@dataclass(frozen=True)
class Shape:
    """Which batch is asked for."""

    side: Side = Side.VAL
    sequences: int | None = None
    """None: those of a micro-batch of the run."""
    length: int | None = None
    """Tokens of a sequence; None: those of the run."""
    first: int = 0
    """Number of the first sequence."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a side of the corpus, in its own order."""

    side: Side
    first: int
    """Number of the first sequence."""
    inputs: NDArray[np.int64]
    """[sequences, length]."""
    targets: NDArray[np.int64]
    """The inputs moved by one token."""

    @property
    def name(self) -> str:
        """The batch in a few words."""
        sequences, length = self.inputs.shape
        last = self.first + sequences - 1
        return f"{self.side.value} sequences {self.first} to {last} of {length:,} tokens"

    def facts(self) -> dict[str, Any]:
        """Return the description of the batch for the results."""
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


def make_batch(corpus: TokenCorpus, config: TrainConfig, shape: Shape) -> Batch:
    """Return sequences of a side of the corpus.

    Raises:
        ConfigError: sequences longer than the model takes, or too few tokens.
    """
    sequences, length = shape.sequences or config.run.sequences, shape.length or config.run.seq_len
    if length > config.model.max_seq:
        raise ConfigError(f"--length {length:,} is above model.max_seq = {config.model.max_seq:,} of the run")
    tokens = corpus.val if shape.side is Side.VAL else corpus.train
    needed = (shape.first + sequences) * length + 1
    if len(tokens) < needed:
        raise ConfigError(
            f"the batch needs the first {needed:,} tokens of the {shape.side.value} side, which has "
            f"{counted(len(tokens), 'token')}: lower --batch, --length or --first"
        )
    part = tokens.ids[shape.first * length : needed]
    inputs, targets = next(sequential_batches(part, length, sequences))
    return Batch(shape.side, shape.first, inputs, targets)


def corpus_of(moment: Moment, config: TrainConfig) -> tuple[TokenCorpus, dict[str, Any]]:
    """Return the tokens that a configuration names, and their hashes with the sides that are not those of the run.

    Raises:
        ConfigError: another tokenizer than that of the run, whose tokens would mean something else.
        DataError: data or tokenizer are missing or damaged.
    """
    corpus = prepare_corpus(config)
    trained_on = moment.identity["data"]
    if corpus.tokenizer.sha256 != trained_on["tokenizer"]:
        raise ConfigError(
            f"the tokenizer of {config.data.tokenizer or config.data.train} is not that of the run {moment.run}: name "
            "the run's own by --tokenizer, or its text by --data"
        )
    other = [side for side in ("train", "val") if corpus.hashes[side] != trained_on.get(side)]
    return corpus, {"hashes": corpus.hashes, "other": other}
