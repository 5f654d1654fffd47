"""Byte-level BPE tokenizers: one from a `tokenizer.json`, or one trained here on the training documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mxref_training.data.cache import Facts, cached
from mxref_training.data.documents import Documents
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
MIN_VOCAB = 258  # the two special tokens and the 256 bytes
VOCAB_MULTIPLE = 128  # embeddings are commonly padded to a multiple of 64 or 128 rows

# Names of the token that ends a document, in the order of the search: GPT-2 and ours, Llama 3,
# Llama 2 and T5.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>")

# GPT-4's split of text into words, with at most three digits to a token.
_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer with a token that ends a document.

    Special tokens are never recognised in text: a document that contains `<|endoftext|>` gets ordinary tokens. Raises
    DataError if no token ends a document.

    Attributes:
        sha256: of the tokenizer's JSON; it identifies the tokenizer in caches and logs.
        vocab_size: largest token id plus one.
        eot: id of the token that ends a document.
    """

    def __init__(self, inner: HuggingFaceTokenizer, name: str) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        vocab = inner.get_vocab(with_added_tokens=True)
        ends = [vocab[token] for token in _END_NAMES if token in vocab]
        if not ends:
            raise DataError(
                f"{name}: the tokenizer has none of {', '.join(_END_NAMES)} to end a document with"
            )
        self._inner = inner
        self.name = name
        self.eot: int = ends[0]
        self.vocab_size: int = max(vocab.values()) + 1
        self.sha256: str = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def to_table(self) -> dict[str, str]:
        """Return the tokenizer as JSON values, for another process."""
        return {"name": self.name, "json": self._inner.to_str()}

    @classmethod
    def from_table(cls, table: Mapping[str, str]) -> Tokenizer:
        """Return the tokenizer that `to_table` wrote."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        return cls(HuggingFaceTokenizer.from_str(table["json"]), table["name"])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of every text, without any special token, on all cores."""
        return [
            encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; special tokens are spelled out."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def check_vocab(self, model_vocab: int) -> None:
        """Check that a model's vocabulary holds every token, and little more.

        Args:
            model_vocab: rows of the model's embedding.

        Raises:
            DataError: there are fewer rows than tokens, or more than the tokens padded to a multiple of 128.
        """
        padded = -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if not self.vocab_size <= model_vocab <= padded:
            relation = "smaller" if model_vocab < self.vocab_size else "larger"
            padding = f", or to {padded} with padding" if padded > self.vocab_size else ""
            raise DataError(
                f"the model's vocabulary of {model_vocab} is {relation} than that of the tokenizer, "
                f"{self.vocab_size}: set model.vocab to {self.vocab_size}{padding}"
            )


@dataclass(frozen=True)
class TokenIds:
    """Stands for the tokenizer of token files, of which only the largest id is known.

    Attributes:
        vocab_size: largest token id plus one.
    """

    vocab_size: int
    sha256: ClassVar[str] = ""
    """Nothing identifies the tokenizer."""

    def check_vocab(self, model_vocab: int) -> None:
        """Raise DataError unless a model's vocabulary holds every token."""
        if self.vocab_size > model_vocab:
            raise DataError(
                f"the model's vocabulary of {model_vocab} is smaller than the data's largest token id, "
                f"{self.vocab_size - 1}: set model.vocab to at least {self.vocab_size}"
            )

    def to_table(self) -> dict[str, int]:
        """Return the vocabulary as JSON values, for another process."""
        return {"vocab_size": self.vocab_size}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json` file.

    Raises:
        DataError: the file is missing or damaged, or no token ends a document.
    """
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the tokenizer {path}: {error}") from error
    try:
        inner = HuggingFaceTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error
    return Tokenizer(inner, str(path))


def _train(documents: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    inner = HuggingFaceTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer)
    return inner


def require_vocab_to_train(vocab_size: int) -> None:
    """Raise DataError unless a tokenizer of this size can be trained: it needs a token for every byte."""
    if vocab_size < MIN_VOCAB:
        raise DataError(f"a vocabulary of {vocab_size} cannot hold all bytes: choose at least {MIN_VOCAB}")


def train_tokenizer(documents: Documents, vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on documents (Sennrich et al. 2016), from the cache if it is there.

    `<|endoftext|>` is token 0 and `<|pad|>` token 1; every text survives the round trip. The same documents and
    size give the same tokenizer.

    Args:
        documents: the training side of a corpus.
        vocab_size: number of tokens, at least 258.

    Raises:
        DataError: `vocab_size` is below 258, or the documents hold too little text for that many tokens.
    """
    import tokenizers

    require_vocab_to_train(vocab_size)

    def build(folder: Path) -> Facts:
        inner = _train(documents, vocab_size)
        if inner.get_vocab_size() != vocab_size:
            raise DataError(
                f"{documents.name} yields only {inner.get_vocab_size()} tokens, not {vocab_size}: "
                "choose a smaller vocabulary or give more text"
            )
        # The library's own `save` raises a bare Exception where the disk is full.
        (folder / "tokenizer.json").write_text(inner.to_str(pretty=True), encoding="utf-8")
        return {}

    inputs = {
        "documents": documents.sha256,
        "vocab_size": vocab_size,
        "split": _SPLIT,
        "special": [END_OF_TEXT, PAD],
        "tokenizers": tokenizers.__version__,
    }
    folder, _ = cached("tokenizers", inputs, build)
    return load_tokenizer(folder / "tokenizer.json")
