"""A linear layer that several ranks compute together: each has a part of its outputs or of its inputs.

Split by outputs (columns of X W^T), every rank reads all of X and gets its part of Y, and dX is the sum over ranks.
Split by inputs, every rank reads its part of X, and Y is the sum over ranks. Sums are float32, and rounded to the type
of X. A BF16 GEMM rounds its part first, so a BF16 layer rounds twice: its parts, and their sum. Operators see the part
that lies on this rank alone, and draw the random bits of its place.
Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mxref.placement import Placement
from mxref.recipe import Recipe
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.operands import width_units

_AXES = ("outputs", "inputs")


@dataclass(frozen=True)
class TensorSplit:
    """How a layer's weight [outputs, inputs] is split."""

    axis: int
    """0: its outputs; 1: its inputs."""
    mesh: DeviceMesh
    """The ranks, along one axis."""

    @property
    def tensors(self) -> frozenset[str]:
        """Which of `x`, `w` and `dy` a rank has only a part of."""
        return frozenset({"w", ("dy", "x")[self.axis]})

    def placements(self, shape: tuple[int, int]) -> dict[str, Placement]:
        """Return where a rank's part lies in each split tensor of a layer whose whole weight has a shape."""
        size = shape[self.axis]
        first = self.mesh.get_local_rank() * (size // self.mesh.size())
        weight = (first, 0) if self.axis == 0 else (0, first)
        name = ("dy", "x")[self.axis]
        # The tokens of X and dY, along their first axis, are placed by the context.
        return {"w": Placement(None, weight, shape), name: Placement(None, (0, first), (0, size))}

    def own(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of the weight that lies on this rank, a plain tensor through which gradients pass."""
        assert isinstance(weight, DTensor)
        return weight.to_local()

    def read(self, x: torch.Tensor) -> Any:
        """Return X in float32, as a rank reads it; the backward pass sums dX where each rank has a part of it."""
        return x.float() if self.axis == 1 else _AddGradients.apply(x.float(), self.mesh.get_group())  # type: ignore[no-untyped-call]

    def summed(self, y: torch.Tensor) -> Any:
        """Return Y in float32 from what a rank computes of it: the sum over ranks where each has a part of X."""
        return y if self.axis == 0 else _AddParts.apply(y, self.mesh.get_group())  # type: ignore[no-untyped-call]

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the largest amax of all ranks; of NaN it is infinity, from which no scale is made either."""
        finite = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return _reduced(finite, "max", self.mesh.get_group())


def _reduced(tensor: torch.Tensor, how: str, group: Any) -> torch.Tensor:
    found: torch.Tensor = funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), how, group))  # type: ignore[no-untyped-call]
    return found


class _AddGradients(torch.autograd.Function):
    """Returns X unchanged in the forward pass, and the sum of dX over ranks in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(dy, "sum", ctx.group), None


class _AddParts(torch.autograd.Function):
    """Returns the sum of Y over ranks in the forward pass, and dY unchanged in the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Any) -> torch.Tensor:
        return _reduced(y, "sum", group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy.view_as(dy), None


def check_split(name: str, shape: tuple[int, int], axis: int, ranks: int, recipe: Recipe) -> None:
    """Raise LayerError unless each rank gets whole blocks and Hadamard groups of a weight [outputs, inputs]."""
    needs = [
        (unit, f"of which {role.value} has blocks and Hadamard groups that must not lie on two ranks")
        for along, unit, role, _ in width_units(recipe)
        if along == axis
    ]
    size, (unit, why) = shape[axis], max(needs, default=(1, "to be split evenly"))
    if size % ranks or size // ranks % unit:
        raise LayerError(
            f"{name} has {size} {_AXES[axis]}, and {ranks} ranks would have {size / ranks:g} each, not a multiple of "
            f"{unit}, {why}: split it over fewer ranks, or change the width"
        )


def check_layer(name: str, layer: MXLinear, axis: int, ranks: int) -> None:
    """Raise LayerError as of `check_split`, under each recipe that a whole layer has at some step."""
    schedule = layer.context.schedule
    phases = [] if schedule is None else [phase[schedule.names[layer.index]] for phase in schedule.recipes]
    for recipe in phases or [layer.recipe]:
        check_split(name, (layer.out_features, layer.in_features), axis, ranks, recipe)


def split_layer(name: str, layer: MXLinear, axis: int, mesh: DeviceMesh) -> None:
    """Have several ranks, along one axis of a mesh, compute a converted layer together; its weight becomes a DTensor.

    Call it on every rank, before `fully_shard`. Random bits are those of the part's place in the whole weight, of which
    axis 0 or 1 is split. Each rank has the same values.

    Raises:
        LayerError: the layer has a bias or is split already; or as of `check_split`.
    """
    if layer.split is not None or layer.bias is not None:
        what = "has a bias" if layer.split is None else "is split already"
        raise LayerError(f"{name} {what}, so it cannot be split over ranks")
    check_layer(name, layer, axis, mesh.size())
    whole = layer.weight
    weight = distribute_tensor(whole.detach(), mesh, [Shard(axis)], src_data_rank=None)
    layer.weight = nn.Parameter(weight, requires_grad=whole.requires_grad)
    split, shape = TensorSplit(axis, mesh), (layer.out_features, layer.in_features)
    layer.split = split
    layer.out_features, layer.in_features = split.own(layer.weight.detach()).shape
    for tensor, placement in split.placements(shape).items():
        layer.lies_at(tensor, placement)
