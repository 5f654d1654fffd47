"""Batches from Megatron's token files in Megatron's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mxref_training.data.megatron.blend import blend_order, prepared
from mxref_training.data.megatron.index import IndexedFile
from mxref_training.data.megatron.order import cached_order
from mxref_training.data.samples import SampleLoader
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxref_training.data.samples import Pair

_AHEAD = 1 << 16  # samples for which the file is chosen at once


class IndexedLoader(SampleLoader):
    """The samples that Megatron's GPTDataset gives, or its BlendedDataset for several files, one after the other.

    Args:
        files: the token files.
        weights: their weights; the weight of a single file means nothing.
        seq_len: tokens that are predicted per sample.
        seed: Megatron's `random_seed`, from 0 to 2^32 - 1.
        samples: samples that the order is made for, as of Megatron: its training steps times its global batch.
        fingerprint: SHA-256 of the files and their weights.

    Raises:
        DataError: length or number of samples below 1, or as of `cached_order`.
    """

    def __init__(
        self,
        files: Sequence[IndexedFile],
        weights: Sequence[float],
        seq_len: int,
        seed: int,
        samples: int,
        fingerprint: str,
    ) -> None:
        if seq_len < 1 or samples < 1:
            raise DataError(f"no order of {samples} samples of length {seq_len}: both must be at least 1")
        self.seq_len, self.seed, self.fingerprint = seq_len, seed, fingerprint
        self._files, self._weights = tuple(files), tuple(weights)
        wanted = [samples] if len(files) == 1 else prepared(weights, samples)
        made = [cached_order(file.lengths, seq_len, seed, n) for file, n in zip(files, wanted, strict=True)]
        self._orders = [order for _, order in made]
        self.order = "; ".join(str(what) for what, _ in made)
        self.windows = samples
        self._blend: tuple[NDArray[np.int16], NDArray[np.int64]] | None = None

    def take(self, samples: list[int]) -> Pair:
        """Return inputs and targets of samples that are numbered from the start of the run."""
        if samples[-1] >= self.windows:
            raise DataError(
                f"sample {samples[-1] + 1:,} is beyond the {self.windows:,} that Megatron's order was made for: set "
                "data.order_samples to the samples of the whole run"
            )
        for file in self._files:
            file.require_unchanged()
        windows = np.stack([self._window(*self._place(sample)) for sample in samples])
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def _place(self, sample: int) -> tuple[int, int]:
        """Return the file of a sample, and its number among the samples of that file."""
        if len(self._files) == 1:
            return 0, sample
        if self._blend is None or sample >= len(self._blend[0]):
            self._blend = blend_order(self._weights, min(self.windows, 2 * sample + _AHEAD))
        return int(self._blend[0][sample]), int(self._blend[1][sample])

    def _window(self, which: int, number: int) -> NDArray[np.int64]:
        """Return the `seq_len + 1` tokens of a sample."""
        file, order = self._files[which], self._orders[which]
        slot, offset = order.samples[order.shuffle[number]]
        window = np.empty(self.seq_len + 1, np.int64)
        filled = 0
        while filled <= self.seq_len:
            sequence = order.documents[slot]
            first = file.starts[sequence] + offset
            part = file.ids[first : min(file.starts[sequence + 1], first + self.seq_len + 1 - filled)]
            window[filled : filled + len(part)] = part
            filled += len(part)
            slot, offset = slot + 1, 0
        return window
