"""The tokens that a run trains and validates on, made once and shared by every arm of an ablation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mxref_training.config import DataConfig, RunConfig, TrainConfig
from mxref_training.data.batches import Loader, SampleLoader
from mxref_training.data.documents import Documents, survey
from mxref_training.data.megatron import IndexedTokens, indexed_parts, open_tokens, require_apart
from mxref_training.data.split import open_corpus
from mxref_training.data.tokenizer import TokenIds, Tokenizer, load_tokenizer, train_tokenizer
from mxref_training.data.tokens import Tokens, tokenize
from mxref_training.errors import ConfigError, DataError
from mxref_training.wording import counted

Parts = Sequence[tuple[float, Path]]
"""Weights and prefixes of token files."""


@dataclass(frozen=True)
class TokenCorpus:
    """Training and validation tokens of one tokenizer.

    Raises ConfigError when both sides hold the same tokens: a validation loss on training data means nothing.
    """

    train: Tokens | IndexedTokens
    val: Tokens | IndexedTokens
    tokenizer: Tokenizer | TokenIds
    report: str
    """One line about the documents and the decisions made about them."""
    order_samples: int = 0
    """Samples that the order of token files is made for; 0 is those of the run."""

    def __post_init__(self) -> None:
        if self.train.sha256 == self.val.sha256:
            raise ConfigError(
                f"training and validation data are the same {counted(len(self.val), 'token')} "
                f"(SHA-256 {self.val.sha256[:16]}): give other validation data, or none: then some documents are "
                "held out"
            )

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the training tokens, the validation tokens and the tokenizer."""
        return {"train": self.train.sha256, "val": self.val.sha256, "tokenizer": self.tokenizer.sha256}

    def loader(self, run: RunConfig) -> SampleLoader:
        """Return the loader of a run's training batches, at the first sample.

        Raises:
            ConfigError: the order of token files is made for fewer samples than the run takes.
            DataError: as of the loader.
        """
        if isinstance(self.train, IndexedTokens):
            needed = run.steps * run.batch
            if 0 < self.order_samples < needed:
                raise ConfigError(
                    f"data.order_samples = {self.order_samples:,} is below the run's {needed:,} samples: raise it, or "
                    "set it to 0"
                )
            return self.train.loader(run.seq_len, run.order_seed, self.order_samples or needed)
        return Loader(self.train.ids, run.seq_len, run.order_seed, self.train.sha256)


def prepare_corpus(config: TrainConfig) -> TokenCorpus:
    """Return the tokens that a configuration names, from the cache if it has them.

    Raises:
        DataError: data or tokenizer are missing, damaged or too small, or training data holds validation data.
        ConfigError: both sides hold the same tokens, or too few for one sequence or one evaluation.
    """
    data = config.data
    train, val = indexed_parts(data.train), indexed_parts(data.val) if data.val else None
    corpus = _from_text(config) if train is None and val is None else _indexed(config, train, val)
    check_lengths(config, corpus)
    return corpus


def _from_text(config: TrainConfig) -> TokenCorpus:
    data = config.data
    options = {"stream_documents": data.max_documents} if data.max_documents else {}
    corpus = open_corpus(data.train, data.val, max_line=data.max_line_mib << 20, **options)
    train = _first(corpus.train_docs, data.max_documents)
    report = str(corpus)
    if train is not corpus.train_docs:
        report += (
            f"; trains on the first {counted(len(train), 'document')} of these, as data.max_documents says"
        )
    tokenizer = (
        load_tokenizer(data.tokenizer) if data.tokenizer else train_tokenizer(train, config.model.vocab)
    )
    tokenizer.check_vocab(config.model.vocab)
    train_tokens = tokenize(train, tokenizer, data.workers)
    val_tokens = tokenize(corpus.val_docs, tokenizer, data.workers)
    return TokenCorpus(train_tokens, val_tokens, tokenizer, report)


def _indexed(config: TrainConfig, train: Parts | None, val: Parts | None) -> TokenCorpus:
    """Return a corpus of Megatron's token files."""
    data = config.data
    train, val = require_indexed_sides(data, train, val)
    train_tokens, val_tokens = open_tokens(train), open_tokens(val)
    note = require_apart(train_tokens, val_tokens)
    ids = TokenIds(1 + max(train_tokens.largest, val_tokens.largest))
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else ids
    if ids.vocab_size > tokenizer.vocab_size:
        raise DataError(
            f"the data has the token id {ids.vocab_size - 1}, the tokenizer {data.tokenizer} only "
            f"{counted(tokenizer.vocab_size, 'token')}: give the tokenizer that made the data"
        )
    tokenizer.check_vocab(config.model.vocab)
    report = "; ".join([f"train {train_tokens}; validation {val_tokens}", *([note] if note else [])])
    return TokenCorpus(train_tokens, val_tokens, tokenizer, report, data.order_samples)


def require_indexed_sides(data: DataConfig, train: Parts | None, val: Parts | None) -> tuple[Parts, Parts]:
    """Return the token files of both sides; ConfigError unless both have some, and validation a single one."""
    if train is None or val is None:
        side, other = ("val", "train") if val is None else ("train", "val")
        given = getattr(data, side)
        state = "is not set" if given is None else f"= {given!r} is text"
        raise ConfigError(
            f"data.{other} names token files, but data.{side} {state}: name the token files of the {side} side too"
        )
    if len(val) > 1:
        raise ConfigError(
            "data.val names several token files: validation data must be one file, because its order counts"
        )
    if data.max_documents:
        raise ConfigError(
            f"data.max_documents = {data.max_documents} limits text, but data.train names token files: set it to 0"
        )
    return train, val


def check_lengths(config: TrainConfig, corpus: TokenCorpus) -> None:
    """Raise ConfigError unless each side has the tokens that one batch or one evaluation needs."""
    ways = "give more text" if config.data.val else "give more text, name validation data by data.val"
    for side, tokens, needed, way_out in (
        ("training", corpus.train, config.run.seq_len + 1, "give more text, or lower run.seq_len"),
        ("validation", corpus.val, config.run.eval_tokens + 1, f"{ways}, or lower run.eval_tokens"),
    ):
        if len(tokens) < needed:
            raise ConfigError(
                f"the {side} data has {counted(len(tokens), 'token')}, this run needs {needed:,}: {way_out}"
            )


def _first(documents: Documents, limit: int) -> Documents:
    if not limit or limit >= len(documents):
        return documents

    def read() -> Iterable[str]:
        return islice(documents, limit)

    return survey(f"{documents.name}, first {limit:,}", read)
