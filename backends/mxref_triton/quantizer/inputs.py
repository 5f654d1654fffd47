"""Inputs as the matrices that kernels read: any tensor, its block axis moved last, in as few pieces as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Matrix:
    """A two-dimensional piece of a tensor, block axis last."""

    tensor: torch.Tensor
    """[rows, length], of any strides."""
    first_row: int
    """Index of its first row among all rows of the whole."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.tensor.shape[0])

    @property
    def stride(self) -> int:
        """Elements between rows."""
        return int(self.tensor.stride(0))

    @property
    def step(self) -> int:
        """Elements between neighbours of a row."""
        return int(self.tensor.stride(1))

    def reads_words(self) -> bool:
        """Return whether rows can be read as whole 32-bit words."""
        per_word = 4 // self.tensor.element_size()
        (rows, length), (stride, step) = self.tensor.shape, self.tensor.stride()
        return (
            step == 1
            and length % per_word == 0
            and (rows == 1 or stride % per_word == 0)
            and self.tensor.data_ptr() % 4 == 0
        )

    def reads_words_across(self) -> bool:
        """Return whether neighbouring rows can be read together, as whole 32-bit words of one element of each."""
        return Matrix(self.tensor.T, 0).reads_words()


def matrices(x: torch.Tensor, axis: int, joined: bool = True) -> Iterator[Matrix]:
    """Yield a tensor with `axis` moved last as matrices: as few as its strides allow, or one per index if not `joined`.

    The rows of one matrix that is not joined differ in the index of the last of the other axes only.
    """
    if x.dim() == 2:
        yield Matrix(x.t() if axis in (0, -2) else x, 0)
        return
    moved = x.movedim(axis, -1)
    length = moved.shape[-1]
    if moved.dim() == 1:
        yield Matrix(moved[None], 0)
        return
    if joined:
        try:
            whole = moved.view(-1, length)
        except RuntimeError:  # what torch raises on strides that do not join
            pass
        else:
            yield Matrix(whole, 0)
            return
    rows = moved.shape[-2]
    for i, index in enumerate(itertools.product(*map(range, moved.shape[:-2]))):
        yield Matrix(moved[index], i * rows)
