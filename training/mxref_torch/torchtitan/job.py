"""What a job of torchtitan must be for converted layers, and what they add to it."""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import derive
from torchtitan.protocols.model_spec import ModelSpec

from mxref.errors import UnsupportedError
from mxref_torch.errors import LayerError
from mxref_torch.torchtitan.checkpoints import MXCheckpointManager
from mxref_torch.torchtitan.following import follow
from mxref_torch.torchtitan.layer import require_whole_layers

_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Pipeline schedules that run Dgrad and Wgrad of a layer as two backward passes."""


def prepare(config: Any) -> None:
    """Check a job's configuration, and let it follow the optimizers and save the place in training.

    Args:
        config: `Trainer.Config` of torchtitan, which is changed in place.

    Raises:
        LayerError: master weights that are not float32, or another manager of checkpoints than torchtitan's own.
        UnsupportedError: CUDA graphs, tensor parallelism, type checking of SPMD code, or a split backward pass.
    """
    _check(config)
    if type(config.checkpoint) is CheckpointManager.Config:
        config.checkpoint = derive(config.checkpoint, MXCheckpointManager.Config)
    elif config.checkpoint.enable and not isinstance(config.checkpoint, MXCheckpointManager.Config):
        raise LayerError(
            f"checkpoint is a {type(config.checkpoint).__qualname__}, which would not save the step and FP8's scales; "
            "use torchtitan's CheckpointManager.Config or a subclass of mxref_torch.torchtitan.MXCheckpointManager"
        )
    if config.model_spec is not None:
        _follow_after_build(config.model_spec)


def _check(config: Any) -> None:
    if config.training.dtype != "float32":
        raise LayerError(
            f"training.dtype = {config.training.dtype!r}: master weights must be float32, or small updates are lost; "
            "set 'float32' and choose the type of the GEMMs by training.mixed_precision_param"
        )
    if not config.training.disable_cuda_graphs:
        raise UnsupportedError(
            "torchtitan would replay the step as a CUDA graph, with the random bits and the recipe of the captured "
            "step; set training.disable_cuda_graphs"
        )
    parallelism = config.parallelism
    require_whole_layers(parallelism.tensor_parallel_degree, parallelism.spmd_backend)
    if config.debug.spmd_typechecking:
        raise UnsupportedError("debug.spmd_typechecking: mxref's operators have no SPMD types; switch it off")
    split = parallelism.pipeline_parallel_schedule in _SPLIT_BACKWARD
    if parallelism.pipeline_parallel_degree > 1 and (split or parallelism.pipeline_parallel_schedule_csv):
        raise UnsupportedError(
            "the pipeline schedule may run Dgrad and Wgrad as two backward passes, and a converted layer computes both "
            "in one; set parallelism.pipeline_parallel_schedule to 'Interleaved1F1B', '1F1B' or 'GPipe'"
        )


def _follow_after_build(spec: ModelSpec) -> None:
    """Call `follow` after the function that the model calls already once its optimizers are built."""
    before = spec.post_optimizer_build_fn
    if before is follow or isinstance(before, _Both):
        return
    spec.post_optimizer_build_fn = follow if before is None else _Both(before)


class _Both:
    """A function that a model calls once its optimizers are built, and then `follow`."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, *arguments: Any) -> None:
        self.before(*arguments)
        follow(*arguments)
