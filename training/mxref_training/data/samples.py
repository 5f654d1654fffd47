"""The place of a run in an endless list of samples, and the rows of a batch that each rank takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mxref_training.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Pair = tuple[NDArray[np.int64], NDArray[np.int64]]
    """Inputs and targets, each `[rows, seq_len]`; the targets are the inputs moved by one token."""

STATE_VERSION = 1


def rows_of(part: tuple[int, int], batch: int, micro_batch: int = 0) -> list[int]:
    """Return the rows of a global batch that one rank takes, ascending.

    Row `i` of every micro-batch belongs to rank `i * ranks // micro_batch`, so each rank takes the same number of
    consecutive rows of every micro-batch.

    Args:
        part: the rank, and the number of ranks that share the batch.
        batch: sequences of the global batch.
        micro_batch: sequences of a micro-batch over all ranks; 0 is the whole batch.

    Raises:
        DataError: there is no such rank, the batch is below 1, or a number is not a multiple of the next.
    """
    rank, ranks = part
    micro_batch = micro_batch or batch
    if batch < 1 or not 0 <= rank < ranks:
        raise DataError(f"no batch of {batch} for rank {rank} of {ranks}")
    if micro_batch < 1 or batch % micro_batch or micro_batch % ranks:
        raise DataError(
            f"a batch of {batch} in micro-batches of {micro_batch} cannot be shared by {ranks} ranks: the batch must "
            "be a multiple of the micro-batch, and the micro-batch a multiple of the number of ranks"
        )
    share = micro_batch // ranks
    return [first + rank * share + row for first in range(0, batch, micro_batch) for row in range(share)]


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

    @property
    def epoch(self) -> int:
        """Number of full passes over the data so far."""
        return self.sample // self.windows

    @property
    def position(self) -> int:
        """Number of samples of the current epoch given out so far."""
        return self.sample % self.windows

    def next_batch(self, batch: int, *, micro_batch: int = 0, part: tuple[int, int] = (0, 1)) -> Pair:
        """Return one rank's rows of the next `batch` samples, and move past all of them.

        Args:
            batch: sequences of the global batch, over all ranks.
            micro_batch: sequences of a micro-batch over all ranks; 0 is the whole batch.
            part: the rank, and the number of ranks that share the batch.

        Returns:
            Inputs and targets, each `[batch / ranks, seq_len]` int64: the rank's rows of the first micro-batch, then
            those of the second, and so on. The targets are the inputs moved by one token.

        Raises:
            DataError: as of `rows_of`; the position is then unchanged.
        """
        pair = self.take([self.sample + row for row in rows_of(part, batch, micro_batch)])
        self.sample += batch
        return pair

    def state_dict(self) -> dict[str, int | str]:
        """Return the state with which a later run continues at the next sample, on any number of ranks."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "fingerprint": self.fingerprint,
            **({"order": self.order} if self.order else {}),
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
        if (theirs_order := str(state.get("order", ""))) != self.order:
            raise DataError(
                f"the checkpoint took its samples in the order {theirs_order!r}, this run in the order {self.order!r}: "
                "set data and run.steps as they were, or start a new run"
            )
        if epoch < 0 or not 0 <= position < self.windows:
            raise DataError(
                f"the loader state is damaged (window {position} of {self.windows} in epoch {epoch}): "
                "resume from another checkpoint"
            )
        self.sample = epoch * self.windows + position
