"""The tokens that a run trains and validates on, made once and shared by every arm of an ablation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mxref_training.config import DataConfig, RunConfig, TrainConfig
from mxref_training.data.batches import Loader, SampleLoader
from mxref_training.data.documents import Documents, iter_documents, survey
from mxref_training.data.megatron import (
    IndexedLoader,
    IndexedTokens,
    indexed_parts,
    open_indexed,
    open_tokens,
)
from mxref_training.data.split import BUILTIN, open_corpus
from mxref_training.data.streamed import parse_stream
from mxref_training.data.tokenizer import (
    TokenIds,
    Tokenizer,
    load_tokenizer,
    require_vocab_to_train,
    train_tokenizer,
)
from mxref_training.data.tokens import Tokens, tokenize
from mxref_training.errors import ConfigError, DataError
from mxref_training.wording import counted

Parts = list[tuple[float, Path]]
"""Weights and prefixes of token files."""


@dataclass(frozen=True)
class TokenCorpus:
    """Training and validation tokens of one tokenizer."""

    train: Tokens | IndexedTokens
    val: Tokens | IndexedTokens
    tokenizer: Tokenizer | TokenIds
    report: str
    """One line about the documents and the decisions made about them."""
    order_samples: int = 0
    """Samples that the order of token files is made for; 0 is those of the run."""

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
            return IndexedLoader(self.train, run.seq_len, run.order_seed, self.order_samples or needed)
        return Loader(self.train.ids, run.seq_len, run.order_seed, self.train.sha256)

    def to_table(self) -> dict[str, Any]:
        """Return the corpus as JSON values with the paths of its arrays, for another process."""
        return {
            "train": self.train.to_table(),
            "val": self.val.to_table(),
            "tokenizer": self.tokenizer.to_table(),
            "report": self.report,
            "order_samples": self.order_samples,
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> TokenCorpus:
        """Return the corpus that `to_table` described; no text is read again."""
        told: dict[str, Any] = table["tokenizer"]
        tokenizer = TokenIds(**told) if "vocab_size" in told else Tokenizer.from_table(told)
        train, val = (
            open_tokens(side["indexed"]) if "indexed" in side else Tokens.from_table(side)
            for side in (table["train"], table["val"])
        )
        return cls(train, val, tokenizer, table["report"], table["order_samples"])


def prepare_corpus(config: TrainConfig) -> TokenCorpus:
    """Return the tokens that a configuration names, from the cache if it has them.

    Raises:
        DataError: data or tokenizer are missing, damaged or too small, or training data holds validation data.
        ConfigError: a side has too few tokens for one sequence or one evaluation, or only one names token files.
    """
    sides = token_files(config.data)
    corpus = _indexed(config, *sides) if sides else _from_text(config)
    check_lengths(config, corpus)
    return corpus


def require_readable(data: DataConfig, vocab: int) -> None:
    """Raise the error with which a run would refuse its data or its tokenizer, as far as a short look can find it.

    Of each side the first document is read, or the index of token files. The tokenizer is loaded. Nothing is fetched or
    written, and the built-in corpus is not made.

    Args:
        data: the configuration of the data.
        vocab: vocabulary of the model.

    Raises:
        DataError, ConfigError: as of `prepare_corpus`.
    """
    sides = token_files(data)
    if sides:
        for _, prefix in (*sides[0], *sides[1]):
            open_indexed(prefix)
    else:
        for source in filter(None, (data.train, data.val)):
            if source != BUILTIN and not parse_stream(source):
                next(iter_documents(source))
    if data.tokenizer:
        load_tokenizer(data.tokenizer).check_vocab(vocab)
    elif not sides:
        require_vocab_to_train(vocab)


def _from_text(config: TrainConfig) -> TokenCorpus:
    data = config.data
    options = {"stream_documents": data.max_documents} if data.max_documents else {}
    corpus = open_corpus(data.train, data.val, **options)
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
    return TokenCorpus(tokenize(train, tokenizer), tokenize(corpus.val_docs, tokenizer), tokenizer, report)


def _first(documents: Documents, limit: int) -> Documents:
    if not limit or limit >= len(documents):
        return documents

    def read() -> Iterable[str]:
        return islice(documents, limit)

    return survey(f"{documents.name}, first {limit:,}", read)


def _indexed(config: TrainConfig, train: Parts, val: Parts) -> TokenCorpus:
    """Return a corpus of Megatron's token files."""
    data = config.data
    train_tokens, val_tokens = open_tokens(train), open_tokens(val)
    for file, facts in zip(train_tokens.files, train_tokens.facts, strict=True):
        if facts.sha256 == val_tokens.sha256:
            raise DataError(
                f"{file.prefix} holds the tokens of the validation data {val[0][1]}: give validation data that is not "
                "in the training data"
            )
    ids = TokenIds(1 + max(train_tokens.largest, val_tokens.largest))
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else ids
    if ids.vocab_size > tokenizer.vocab_size:
        raise DataError(
            f"the data has the token id {ids.vocab_size - 1}, the tokenizer {data.tokenizer} only "
            f"{counted(tokenizer.vocab_size, 'token')}: give the tokenizer that made the data"
        )
    tokenizer.check_vocab(config.model.vocab)
    report = f"train {train_tokens}; validation {val_tokens}"
    return TokenCorpus(train_tokens, val_tokens, tokenizer, report, data.order_samples)


def token_files(data: DataConfig) -> tuple[Parts, Parts] | None:
    """Return the token files of both sides; None if the data is text.

    Raises:
        ConfigError: one side names token files and the other does not, or validation several.
        DataError: as of `indexed_parts`.
    """
    train, val = indexed_parts(data.train), indexed_parts(data.val or "")
    if not train and not val:
        return None
    if not train or not val:
        side, other = ("val", "train") if train else ("train", "val")
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
