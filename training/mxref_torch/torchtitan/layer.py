"""`MXLinear` as a module of torchtitan: initialised, checked and distributed by torchtitan's protocol."""

from __future__ import annotations

from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module

from mxref.errors import UnsupportedError
from mxref.recipe import Recipe
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.linear import MXLinear
from mxref_torch.shared.context import StepContext

_GIVEN = ("_param_init", "_sharding_config")
"""What `Linear.Config.build` of torchtitan sets on a layer."""


class ModuleFp8Scales(Fp8Scales, Module):
    """FP8's scales: `Module.init_states` calls their `reset_parameters` once they have memory."""


class ModuleMXLinear(MXLinear, Module):
    """The converted form of torchtitan's `Linear`, with its initialisation and its keys in checkpoints."""

    scales_class = ModuleFp8Scales

    def __init__(self, source: nn.Linear, recipe: Recipe, context: StepContext, index: int) -> None:
        super().__init__(source, recipe, context, index)
        for name in _GIVEN:
            if name in vars(source):
                setattr(self, name, vars(source)[name])

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Declare the layout of the weight to torchtitan; UnsupportedError where the layer would not be whole."""
        require_whole_layers(parallel_dims.tp, parallel_dims.spmd_backend)
        super().parallelize(parallel_dims)


def require_whole_layers(tensor_parallel_degree: int, spmd_backend: str) -> None:
    """Raise UnsupportedError where a layer would get a part of its weight, or DTensors."""
    if tensor_parallel_degree > 1:
        raise UnsupportedError(
            f"parallelism.tensor_parallel_degree = {tensor_parallel_degree}: a converted layer needs its whole weight, "
            "because blocks and Hadamard groups must not straddle ranks; set it to 1 and use FSDP, context or "
            "pipeline parallelism"
        )
    if spmd_backend == "full_dtensor":
        raise UnsupportedError(
            "parallelism.spmd_backend = 'full_dtensor' passes DTensors to the layers, and mxref's operators take plain "
            "tensors; set 'spmd_types', torchtitan's default"
        )
