"""Batches of token windows in a seeded order that does not depend on how they are split over steps or ranks.

The stream of tokens is cut into windows of `seq_len + 1` tokens that share one token with the next, so every
token but the first is predicted exactly once. The tokens that do not fill a last window are skipped at the two ends of
the stream. A random shift per epoch divides them between the ends, so no token is skipped in every epoch.

Sample `i` of the whole run is window `order(i // n)[i % n]` of epoch `i // n`: a function of the seed and of `i`
alone. Section "The order of the data" in docs/reference/training.rst defines how the
shift and the order of an epoch are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.tokens import token_hash
from mxref_training.errors import DataError
from mxref_training.wording import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATE_VERSION = 1


def _check(tokens: NDArray[Any], seq_len: int) -> None:
    if seq_len < 1:
        raise DataError(f"a sequence length of {seq_len} is too short: it must be at least 1")
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"the data has {counted(len(tokens), 'token')}, fewer than one window of {seq_len} + 1: "
            "give more text or a shorter sequence length"
        )


class Loader:
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
        DataError: there are fewer tokens than one window, or the length or seed is out of range.
    """

    def __init__(
        self, tokens: NDArray[Any], seq_len: int, seed: int = 0, fingerprint: str | None = None
    ) -> None:
        _check(tokens, seq_len)
        if not 0 <= seed < 1 << 64:
            raise DataError(f"the data seed {seed} is out of range: choose one from 0 to 2^64 - 1")
        self._tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.fingerprint = fingerprint or token_hash(tokens)
        self.windows = (len(tokens) - 1) // seq_len
        self.sample = 0
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """Number of full passes over the data so far."""
        return self.sample // self.windows

    @property
    def position(self) -> int:
        """Number of windows of the current epoch given out so far."""
        return self.sample % self.windows

    def _starts(self, epoch: int) -> NDArray[np.int64]:
        """Return the first token of every window of an epoch, `[windows]`, in the order of use."""
        if self._cached is None or self._cached[0] != epoch:
            # Sorting raw Philox words keeps the order across NumPy releases; `Generator` promises no such thing.
            words = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.windows + 1)
            spare = (len(self._tokens) - 1) % self.seq_len
            order = np.argsort(words[1:], kind="stable")
            self._cached = epoch, order * self.seq_len + int(words[0] % np.uint64(spare + 1))
        return self._cached[1]

    def next_batch(
        self, batch: int, rank: int = 0, world_size: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return this rank's share of the next `batch * world_size` samples, and move past all of them.

        Args:
            batch: sequences for this rank.
            rank: index of this rank; the ranks get consecutive shares of the samples.
            world_size: ranks that each call this with the same `batch`.

        Returns:
            Inputs and targets, each `[batch, seq_len]` int64; the targets are the inputs moved by one token.

        Raises:
            DataError: `batch` is below 1 or `rank` is not below `world_size`.
        """
        if batch < 1 or not 0 <= rank < world_size:
            raise DataError(f"no batch of {batch} for rank {rank} of {world_size}")
        first = self.sample + rank * batch
        starts = [int(self._starts(i // self.windows)[i % self.windows]) for i in range(first, first + batch)]
        self.sample += batch * world_size
        return _gather(self._tokens, starts, self.seq_len)

    def state_dict(self) -> dict[str, int | str]:
        """Return the state with which a later run continues at the next sample, on any number of ranks."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader on the same data stopped; an error leaves this loader unchanged.

        Raises:
            DataError: the state is incomplete or out of range, or was taken with other data, another sequence
                length or another seed.
        """
        try:
            version, epoch, position = (int(state[key]) for key in ("version", "epoch", "position"))
            seed, seq_len, fingerprint = int(state["seed"]), int(state["seq_len"]), str(state["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the loader state is damaged ({error!r}): resume from another checkpoint"
            ) from error
        if version != STATE_VERSION:
            raise DataError(f"the loader state has version {version}: this program reads {STATE_VERSION}")
        if fingerprint != self.fingerprint:
            raise DataError(
                f"the checkpoint was trained on data {fingerprint[:16]}, this run has {self.fingerprint[:16]}: "
                "give the same data and tokenizer, or start a new run"
            )
        for name, theirs, ours in (
            ("sequence length", seq_len, self.seq_len),
            ("data seed", seed, self.seed),
        ):
            if theirs != ours:
                raise DataError(f"the checkpoint has {name} {theirs}, this run {ours}: set it to {theirs}")
        if epoch < 0 or not 0 <= position < self.windows:
            raise DataError(
                f"the loader state is damaged (window {position} of {self.windows} in epoch {epoch}): "
                "resume from another checkpoint"
            )
        self.sample = epoch * self.windows + position


def _gather(
    tokens: NDArray[Any], starts: list[int], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def sequential_batches(
    tokens: NDArray[Any], seq_len: int, batch: int, limit_tokens: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the windows of a token array in order, for evaluation; the last batch may be smaller.

    Args:
        tokens: token ids, `[N]`, any integer dtype.
        seq_len: tokens that are predicted per window.
        batch: windows per batch.
        limit_tokens: largest number of predicted tokens; None means all.

    Yields:
        Inputs and targets, each `[at most batch, seq_len]` int64.

    Raises:
        DataError: there are fewer tokens than one window, or the limit is below one window.
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
    for first in range(0, windows, batch):
        starts = [index * seq_len for index in range(first, min(first + batch, windows))]
        yield _gather(tokens, starts, seq_len)
