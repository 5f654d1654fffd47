"""What of an operand and its error lies in the mean of each Hadamard group, and what does not.

The mean of a group of n elements is its component along 1/sqrt(n) (1, .., 1), the DC component. The rotation R of the
group is orthogonal, so the component is read in the rotated group, along R 1/sqrt(n): nothing has to be rotated back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mxref.steps.hadamard import Rotation, hadamard
from mxref_torch.checks.measures import Slab
from mxref_training.probe.split import over

GROUP = 16
"""Elements of a group of an operand that is not rotated."""


@dataclass
class _Sums:
    signal: float = 0.0
    noise: float = 0.0
    cross: float = 0.0
    mean_signal: float = 0.0
    """Squares of the groups' mean components."""
    mean_noise: float = 0.0
    mean_cross: float = 0.0
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

    def add(self, slab: Slab) -> None:
        """Add rows as `Rounded.slabs` yields them, the contraction axis last; it is filled up with zeros."""
        v, q, _, valid = slab
        v, e = torch.where(valid, v, 0.0), torch.where(valid, q - v, 0.0)
        groups = [self._groups(each) for each in (v, e)]
        along = self._direction.to(v.device, torch.float64)
        mean, error = (each @ along for each in groups)
        first = groups[0][:, 0].square().sum()
        found = (
            v.square().sum(), e.square().sum(), (v * e).sum(),
            mean.square().sum(), error.square().sum(), (mean * error).sum(), first,
        )  # fmt: skip
        for each, value in zip(fields(_Sums), torch.stack(found).tolist(), strict=True):
            setattr(self._sums, each.name, getattr(self._sums, each.name) + value)

    def _groups(self, values: Tensor) -> Tensor:
        missing = -values.shape[-1] % self.n
        return torch.nn.functional.pad(values, (0, missing)).reshape(-1, self.n)

    def row(self) -> dict[str, float | None]:
        """Return the shares and biases as a row of the probe has them."""
        s = self._sums
        return {
            "group": self.n,
            "dc_source": over(s.mean_signal, s.signal),
            "dc_first": None if self.rotation is None else over(s.first, s.signal),
            "dc_noise": over(s.mean_noise, s.noise),
            "dc_bias": over(s.mean_cross, s.mean_signal),
            "rest_bias": over(s.cross - s.mean_cross, s.signal - s.mean_signal),
        }
