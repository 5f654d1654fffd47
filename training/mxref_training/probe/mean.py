"""Splits an operand and its error into the mean of each Hadamard group and the rest.

The mean of a group of n elements is its component along 1/sqrt(n) (1, .., 1), the DC component. The rotation R of the
group is orthogonal, so the component is read in the rotated group, along R 1/sqrt(n): nothing has to be rotated back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mxref.steps.hadamard import Rotation, hadamard
from mxref_training.probe.split import Sums, over

GROUP = 16
"""Elements of a group of an operand that is not rotated."""


@dataclass
class _Sums:
    signal: float = 0.0
    """Squares of the groups' mean components."""
    noise: float = 0.0
    cross: float = 0.0
    first: float = 0.0
    """Squares of the first coefficients of the rotated groups."""


class MeanSplit:
    """The split of an operand whose rows come in parts.

    Args:
        rotation: that of the operand; None: it is not rotated, and its groups have `GROUP` elements.
    """

    def __init__(self, rotation: Rotation | None) -> None:
        self.rotation = rotation
        self.n = GROUP if rotation is None else rotation.n
        ones = torch.full((self.n,), self.n**-0.5)
        self._direction = ones if rotation is None else torch.from_numpy(hadamard(ones.numpy(), rotation))
        self._sums = _Sums()

    def add(self, v: Tensor, e: Tensor) -> None:
        """Add rows of the source and the error, float64, the contraction axis last."""
        source, error = (self._groups(each) for each in (v, e))
        along = self._direction.to(v.device, torch.float64)
        means = source @ along, error @ along
        found = (
            *(a @ b for a, b in ((means[0], means[0]), (means[1], means[1]), means)),
            source[:, 0].square().sum(),
        )
        for each, value in zip(fields(_Sums), torch.stack(found).tolist(), strict=True):
            setattr(self._sums, each.name, getattr(self._sums, each.name) + value)

    def _groups(self, values: Tensor) -> Tensor:
        """Return rows as groups [.., n]; rows of a format without blocks are filled up with zeros."""
        values = values.flatten(1)
        missing = -values.shape[1] % self.n
        return (torch.nn.functional.pad(values, (0, missing)) if missing else values).reshape(-1, self.n)

    def row(self, whole: Sums) -> dict[str, float | None]:
        """Return the shares and biases as a row of the probe has them.

        Args:
            whole: the sums over all elements.
        """
        s = self._sums
        return {
            "group": self.n,
            "dc_source": over(s.signal, whole.signal),
            "dc_first": None if self.rotation is None else over(s.first, whole.signal),
            "dc_noise": over(s.noise, whole.noise),
            "dc_bias": over(s.cross, s.signal),
            "rest_bias": over(whole.cross - s.cross, whole.signal - s.signal),
        }
