"""The tokens that a run trains and validates on, made once and shared by every arm of an ablation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from mxref_training.config import RunConfig, TrainConfig
from mxref_training.data import (
    Documents,
    Loader,
    Tokenizer,
    Tokens,
    load_tokenizer,
    open_corpus,
    tokenize,
    train_tokenizer,
)
from mxref_training.data.documents import survey
from mxref_training.data.samples import SampleLoader
from mxref_training.errors import ConfigError
from mxref_training.wording import counted


@dataclass(frozen=True)
class TokenCorpus:
    """Training and validation tokens of one tokenizer.

    Raises ConfigError when both sides hold the same tokens: a validation loss on training data means nothing.
    """

    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    report: str
    """One line about the documents and the decisions made about them."""

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
        """Return the loader of a run's training batches, at the first sample."""
        return Loader(self.train.ids, run.seq_len, run.order_seed, self.train.sha256)


def prepare_corpus(config: TrainConfig) -> TokenCorpus:
    """Return the tokens that a configuration names, from the cache if it has them.

    Raises:
        DataError: data or tokenizer are missing, damaged or too small, or training data holds validation data.
        ConfigError: both sides hold the same tokens, or too few for one sequence or one evaluation.
    """
    data = config.data
    options = {"c4_documents": data.max_documents} if data.max_documents else {}
    corpus = open_corpus(data.train, data.val, max_line=data.max_line_mib << 20, **options)
    train = _first(corpus.train_docs, data.max_documents)
    tokenizer = (
        load_tokenizer(data.tokenizer) if data.tokenizer else train_tokenizer(train, config.model.vocab)
    )
    tokenizer.check_vocab(config.model.vocab)
    tokens = TokenCorpus(
        tokenize(train, tokenizer), tokenize(corpus.val_docs, tokenizer), tokenizer, str(corpus.report)
    )
    check_lengths(config, tokens)
    return tokens


def check_lengths(config: TrainConfig, corpus: TokenCorpus) -> None:
    """Raise ConfigError unless each side has the tokens that one batch or one evaluation needs."""
    for side, tokens, needed in (
        ("training", corpus.train, config.run.seq_len + 1),
        ("validation", corpus.val, config.run.eval_tokens + 1),
    ):
        if len(tokens) < needed:
            raise ConfigError(
                f"the {side} data has {counted(len(tokens), 'token')}, this run needs {needed:,}: "
                "give more text, or lower run.seq_len or run.eval_tokens"
            )


def _first(documents: Documents, limit: int) -> Documents:
    if not limit or limit >= len(documents):
        return documents

    def read() -> Iterable[str]:
        return islice(documents, limit)

    return survey(f"{documents.name}, first {limit:,}", read)
