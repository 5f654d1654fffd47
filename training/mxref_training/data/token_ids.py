"""The vocabulary of data that comes as token ids, without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from mxref_training.errors import DataError


@dataclass(frozen=True)
class TokenIds:
    """Stands for the tokenizer of token files, of which only the largest id is known.

    Attributes:
        vocab_size: largest token id plus one.
    """

    vocab_size: int

    @property
    def sha256(self) -> str:
        """Nothing identifies the tokenizer: empty."""
        return ""

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
