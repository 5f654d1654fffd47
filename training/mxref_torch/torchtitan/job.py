"""What converted layers add to a job of torchtitan: its checks, the steps, and the place in training in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims

from mxref.errors import UnsupportedError
from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.optimizer_step import fp8_history

RECIPE = "mxref_recipe"
"""The attribute of a converted model that holds the digest of its recipe, with layers and schedule."""


def follow(
    optimizers: Iterable[Optimizer], model_parts: Sequence[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Let each converted part of a model follow its optimizers; a `post_optimizer_build_fn` of torchtitan.

    A configuration that `MXLinearConverter` made calls it by itself. The handle of a part is its `mxref_handle`.

    Args:
        optimizers: torchtitan's container.
        model_parts: the stages of the pipeline on this rank, or the whole model.
        parallel_dims: says which ranks have tokens of their own.

    Raises:
        LayerError: a converted lm_head under a loss in chunks, or an error of `Handle.follow`.
    """
    mesh = parallel_dims.get_optional_mesh("loss")
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    known = list(optimizers)
    for part in model_parts:
        if not converted(part):
            continue  # a stage of embeddings alone
        if getattr(part, "_skip_lm_head", False) and isinstance(part.lm_head, MXLinear):
            raise LayerError(
                "lm_head is converted, and ChunkedLossWrapper would run it several times in a forward pass with the "
                "same random bits; add 'lm_head' to filter_fqns, or set loss to CrossEntropyLoss.Config"
            )
        held = set(part.parameters())
        own = [one for one in known if any(p in held for group in one.param_groups for p in group["params"])]
        handle = Handle(part)
        if mesh is not None:
            own[0].register_step_pre_hook(partial(_reduce_amaxes, part, mesh.get_group()))
        handle.follow(*own, rank=rank, ranks=ranks)
        vars(part)["mxref_handle"] = handle


@torch.no_grad()
def _reduce_amaxes(part: nn.Module, group: dist.ProcessGroup, *_: Any) -> None:
    """Take the largest amax of FP8's tensors over the ranks before a step is closed, so that all have the same scales.

    It is the first of a part's optimizers that closes the step, so this is a hook of that one.
    """
    amaxes = [tensor for name, tensor in fp8_history(part).items() if name.endswith(".amax")]
    if amaxes:
        largest = torch.stack(amaxes)  # [layers, 3]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(amaxes, list(largest.unbind()))


def handles(model_parts: Iterable[nn.Module]) -> list[Handle]:
    """Return the handles that `follow` made for the parts of a model."""
    return [vars(part)["mxref_handle"] for part in model_parts if "mxref_handle" in vars(part)]


KEY = "mxref"
"""The place in training among the states of a checkpoint, and its name in `checkpoint.exclude_from_loading`."""

_WAY_OUT = (
    f"add {KEY!r} to checkpoint.exclude_from_loading, to go on from its weights under the recipe of this job"
)


class MXCheckpointManager(CheckpointManager):
    """torchtitan's own manager, with one more state: the place of converted layers in training.

    A configuration that `MXLinearConverter` made puts it in the place of `CheckpointManager` by itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Configuration of torchtitan's own manager."""

    def __init__(
        self, config: Config, *, model_parts: list[nn.Module], states: dict[str, Any], **components: Any
    ) -> None:
        place = PlaceInTraining(handles(model_parts))
        super().__init__(config, model_parts=model_parts, states=states | {KEY: place}, **components)

    def _load(self, step: int = -1) -> bool:
        try:
            loaded = super()._load(step)
        except CheckpointException as err:
            if f"{KEY}." not in str(err):
                raise
            raise LayerError(
                f"the checkpoint has no {KEY!r} state that fits this model: it was saved without converted layers, or "
                f"under another recipe; {_WAY_OUT}"
            ) from err
        if loaded and KEY in self.exclude_from_loading:
            # Without a history the next step draws its own bits and makes FP8's scales anew.
            for handle in self.states[KEY].handles:
                handle.step = self.states["train_state"].step
        return loaded


class PlaceInTraining(Stateful):
    """Step, seed and recipe of a converted model and the history of FP8's scales, over all its parts on this rank."""

    def __init__(self, of: Sequence[Handle]) -> None:
        self.handles = tuple(of)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; each tensor of FP8's history has a key of its own, so that stages do not collide."""
        states = [handle.state_dict() for handle in self.handles]
        if not states:
            return {}
        history = {name: tensor for state in states for name, tensor in state["fp8"].items()}
        return {"step": states[0]["step"], "seed": states[0]["seed"], "recipe": self._recipe, "fp8": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Raises:
            LayerError: the state of another recipe or seed, or of other FP8 layers.
        """
        if self.handles and state["recipe"] != self._recipe:
            raise LayerError(
                f"the checkpoint was saved under the recipe {state['recipe']}, and the model is converted to "
                f"{self._recipe}; convert it to the same recipe, or {_WAY_OUT}"
            )
        for handle in self.handles:
            history = {name: state["fp8"][name] for name in handle.state_dict()["fp8"]}
            handle.load_state_dict({"step": state["step"], "seed": state["seed"], "fp8": history})

    @property
    def _recipe(self) -> str:
        return str(getattr(self.handles[0].model, RECIPE))


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
        before = config.model_spec.post_optimizer_build_fn
        if before is not follow and getattr(before, "func", None) is not _then_follow:
            config.model_spec.post_optimizer_build_fn = partial(_then_follow, before) if before else follow


def _then_follow(before: Any, *arguments: Any) -> None:
    """Call what the model calls once its optimizers are built, and then `follow`."""
    before(*arguments)
    follow(*arguments)


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
    if parallelism.tensor_parallel_degree > 1:
        raise UnsupportedError(
            f"parallelism.tensor_parallel_degree = {parallelism.tensor_parallel_degree}: a converted layer needs its "
            "whole weight, because blocks and Hadamard groups must not straddle ranks; set it to 1 and use FSDP, "
            "context or pipeline parallelism"
        )
    if parallelism.spmd_backend == "full_dtensor":
        raise UnsupportedError(
            "parallelism.spmd_backend = 'full_dtensor' passes DTensors to the layers, and mxref's operators take plain "
            "tensors; set 'partial_dtensor'"
        )
    if config.debug.spmd_typechecking:
        raise UnsupportedError("debug.spmd_typechecking: mxref's operators have no SPMD types; switch it off")
    split = parallelism.pipeline_parallel_schedule in _SPLIT_BACKWARD
    if parallelism.pipeline_parallel_degree > 1 and (split or parallelism.pipeline_parallel_schedule_csv):
        raise UnsupportedError(
            "the pipeline schedule may run Dgrad and Wgrad as two backward passes, and a converted layer computes both "
            "in one; set parallelism.pipeline_parallel_schedule to 'Interleaved1F1B', '1F1B' or 'GPipe'"
        )
