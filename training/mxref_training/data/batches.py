"""Batches of token windows in an order that does not depend on how they are split over steps or ranks.

`Loader` cuts the stream of tokens into windows of `seq_len + 1` tokens that share one token with the next, so every
token but the first is predicted exactly once. The tokens that do not fill a last window are skipped at the two ends of
the stream. A random shift per epoch divides them between the ends, so no token is skipped in every epoch.

Sample `i` of the whole run is window `order(i // n)[i % n]` of epoch `i // n`: a function of the seed and of `i`
alone. Section "The order of the data" in docs/reference/training.rst defines how the
shift and the order of an epoch are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.tokens import MappedFile
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pair = tuple[NDArray[np.int64], NDArray[np.int64]]
    """Inputs and targets, each `[rows, seq_len]`; the targets are the inputs moved by one token."""

STATE_VERSION = 1


class SampleLoader(ABC):
    """Batches of samples whose order does not depend on how they are split over steps or ranks.

    Attributes:
        seq_len: tokens that are predicted per sample.
        seed: seed of the order.
        fingerprint: SHA-256 of the data.
        order: what decides the order besides data, seed and length; empty if nothing does.
        windows: samples per epoch.
        sample: number of samples given out so far, over all ranks and epochs.
    """

    seq_len: int
    seed: int
    fingerprint: str
    order: str = ""
    windows: int
    sample: int = 0

    @abstractmethod
    def take(self, samples: list[int]) -> Pair:
        """Return inputs and targets of samples that are numbered from the start of the run."""

    def next_batch(self, batch: int, *, micro_batch: int = 0, part: tuple[int, int] = (0, 1)) -> Pair:
        """Return one rank's rows of the next `batch` samples, and move past all of them.

        Row `i` of every micro-batch belongs to rank `i * ranks // micro_batch`, so each rank takes the same number of
        consecutive rows of every micro-batch.

        Args:
            batch: sequences of the global batch over all ranks, a multiple of the micro-batch.
            micro_batch: sequences of a micro-batch over all ranks, a multiple of their number; 0 is the whole batch.
            part: the rank, and the number of ranks that share the batch.

        Returns:
            Inputs and targets, each `[batch / ranks, seq_len]` int64: the rank's rows of the first micro-batch, then
            those of the second, and so on. The targets are the inputs moved by one token.
        """
        rank, ranks = part
        micro_batch = micro_batch or batch
        share = micro_batch // ranks
        firsts = range(self.sample + rank * share, self.sample + batch, micro_batch)
        pair = self.take([first + row for first in firsts for row in range(share)])
        self.sample += batch
        return pair

    def state_dict(self) -> dict[str, int | str]:
        """Return the state with which a later run continues at the next sample, on any number of ranks."""
        return {
            "version": STATE_VERSION,
            "epoch": self.sample // self.windows,
            "position": self.sample % self.windows,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "fingerprint": self.fingerprint,
            **({"order": self.order} if self.order else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader on the same data stopped; an error leaves this loader unchanged.

        Raises:
            DataError: the state was taken with other data, another sequence length, another seed or another order.
        """
        for key, way_out in (
            ("version", "use the version of mxref that wrote it"),
            ("fingerprint", "give the same data and tokenizer, or start a new run"),
            ("seq_len", "set run.seq_len as it was"),
            ("seed", "set run.data_seed as it was"),
            ("order", "set data and run.steps as they were, or start a new run"),
        ):
            theirs, ours = state.get(key, ""), self.state_dict().get(key, "")
            if theirs != ours:
                raise DataError(
                    f"the checkpoint took its samples with {key} {theirs!r}, this run with {ours!r}: {way_out}"
                )
        self.sample = state["epoch"] * self.windows + state["position"]


class Loader(SampleLoader):
    """Endless shuffled training batches from a flat token array.

    Args:
        tokens: token ids, `[N]`, at least one window, any integer dtype; a memory map is read only where it is needed.
        seq_len: tokens that are predicted per window.
        seed: seed of the order, at least 0 and below 2^64.
        fingerprint: SHA-256 of the data, as in `Tokens.sha256`.
    """

    def __init__(self, tokens: NDArray[Any], seq_len: int, seed: int = 0, fingerprint: str = "") -> None:
        self._tokens, self._file = tokens, MappedFile(tokens)
        self.seq_len = seq_len
        self.seed = seed
        self.fingerprint = fingerprint
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
        self._file.require_unchanged()
        starts = [int(self._starts(i // self.windows)[i % self.windows]) for i in samples]
        return _gather(self._tokens, starts, self.seq_len)


def _gather(tokens: NDArray[Any], starts: list[int], seq_len: int) -> Pair:
    return pair_of(np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64))


def pair_of(windows: NDArray[np.int64]) -> Pair:
    """Return inputs and targets of windows, `[rows, seq_len + 1]`."""
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
        DataError: there are too few tokens for one window, or the file of the tokens was changed meanwhile.
    """
    predicted = min(len(tokens) - 1, len(tokens) if limit_tokens is None else limit_tokens)
    windows = predicted // seq_len
    if windows < 1:
        raise DataError(
            f"an evaluation on {predicted:,} predicted tokens has no window of {seq_len}: give more text, raise "
            "run.eval_tokens, or lower run.seq_len"
        )
    file = MappedFile(tokens)
    for first in range(0, windows, batch):
        file.require_unchanged()
        starts = [index * seq_len for index in range(first, min(first + batch, windows))]
        yield _gather(tokens, starts, seq_len)
