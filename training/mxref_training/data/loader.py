"""Batches of token windows in a seeded order that does not depend on how they are split over steps or ranks.

The stream of tokens is cut into windows of `seq_len + 1` tokens that share one token with the next, so every
token but the first is predicted exactly once. The tokens that do not fill a last window are skipped at the two ends of
the stream. A random shift per epoch divides them between the ends, so no token is skipped in every epoch.

Sample `i` of the whole run is window `order(i // n)[i % n]` of epoch `i // n`: a function of the seed and of `i`
alone. Section "The order of the data" in docs/reference/training.rst defines how the
shift and the order of an epoch are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.mapped import MappedFile
from mxref_training.data.samples import SampleLoader
from mxref_training.data.tokens import token_hash
from mxref_training.errors import DataError
from mxref_training.wording import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxref_training.data.samples import Pair


def _check(tokens: NDArray[Any], seq_len: int) -> None:
    if seq_len < 1:
        raise DataError(f"a sequence length of {seq_len} is too short: it must be at least 1")
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"the data has {counted(len(tokens), 'token')}, fewer than one window of {seq_len} + 1: "
            "give more text or a shorter sequence length"
        )


class Loader(SampleLoader):
    """Endless shuffled training batches from a flat token array.

    Args:
        tokens: token ids, `[N]`, any integer dtype; a memory map is read only where it is needed.
        seq_len: tokens that are predicted per window.
        seed: seed of the order, at least 0 and below 2^64.
        fingerprint: SHA-256 of the data, as in `Tokens.sha256`; computed if it is not given.

    Attributes:
        windows: windows per epoch.
        sample: number of samples given out so far, over all ranks and epochs.

    Raises:
        DataError: there are fewer tokens than one window, the length or seed is out of range, or the file of the tokens
            is cut short.
    """

    def __init__(
        self, tokens: NDArray[Any], seq_len: int, seed: int = 0, fingerprint: str | None = None
    ) -> None:
        _check(tokens, seq_len)
        if not 0 <= seed < 1 << 64:
            raise DataError(f"the data seed {seed} is out of range: choose one from 0 to 2^64 - 1")
        self._tokens, self._file = tokens, MappedFile.of(tokens)
        self.seq_len = seq_len
        self.seed = seed
        self.fingerprint = fingerprint or token_hash(tokens)
        self.windows = (len(tokens) - 1) // seq_len
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def _starts(self, epoch: int) -> NDArray[np.int64]:
        """Return the first token of every window of an epoch, `[windows]`, in the order of use."""
        if self._cached is None or self._cached[0] != epoch:
            # Sorting raw Philox words keeps the order across NumPy releases; `Generator` promises no such thing.
            words = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.windows + 1)
            spare = (len(self._tokens) - 1) % self.seq_len
            order = np.argsort(words[1:], kind="stable")
            self._cached = epoch, order * self.seq_len + int(words[0] % np.uint64(spare + 1))
        return self._cached[1]

    def take(self, samples: list[int]) -> Pair:
        """Return inputs and targets of samples that are numbered from the start of the run.

        Raises:
            DataError: the file of the tokens was changed since the loader was made.
        """
        if self._file is not None:
            self._file.require_unchanged()
        starts = [int(self._starts(i // self.windows)[i % self.windows]) for i in samples]
        return _gather(self._tokens, starts, self.seq_len)


def _gather(tokens: NDArray[Any], starts: list[int], seq_len: int) -> Pair:
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def sequential_batches(
    tokens: NDArray[Any], seq_len: int, batch: int, limit_tokens: int | None = None
) -> Iterator[Pair]:
    """Yield the windows of a token array in order, for evaluation; the last batch may be smaller.

    Args:
        tokens: token ids, `[N]`, any integer dtype.
        seq_len: tokens that are predicted per window.
        batch: windows per batch.
        limit_tokens: largest number of predicted tokens; None means all.

    Yields:
        Inputs and targets, each `[at most batch, seq_len]` int64.

    Raises:
        DataError: there are fewer tokens than one window, the limit is below one window, or the file of the tokens was
            changed meanwhile.
    """
    _check(tokens, seq_len)
    if batch < 1:
        raise DataError(f"an evaluation batch of {batch} is too small: it must be at least 1")
    windows = (len(tokens) - 1) // seq_len
    if limit_tokens is not None:
        windows = min(windows, limit_tokens // seq_len)
        if windows < 1:
            raise DataError(
                f"a limit of {counted(limit_tokens, 'token')} is below one window of {seq_len}: raise the limit"
            )
    file = MappedFile.of(tokens)
    for first in range(0, windows, batch):
        if file is not None:
            file.require_unchanged()
        starts = [index * seq_len for index in range(first, min(first + batch, windows))]
        yield _gather(tokens, starts, seq_len)
