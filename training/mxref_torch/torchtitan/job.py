"""A job of torchtitan with converted layers: the converter, its checks, the steps, and the place in checkpoints.

The converter gives a model's configuration the recipe, and the model is converted when it is built.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from mxref.errors import UnsupportedError
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.conversion.candidates import chosen_linears
from mxref_torch.conversion.convert import convert
from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.names import named_linears
from mxref_torch.optimizer_step import fp8_history
from mxref_torch.step_context import StepContext


class MXLinearConverter(QuantizationConverter):
    """Convert the linear layers of a model to a recipe of mxref.

    The model of the returned configuration converts itself when it is built, on the meta device. torchtitan then
    applies activation checkpointing, compilation per block and FSDP2 to the converted layers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Configuration of the converter; strings and numbers alone can be written into a job's log."""

        recipe: Recipe | str | Path
        """The treatment of the three GEMMs; or the name of a shipped recipe, or a TOML file."""
        backend: str | None = None
        """Name of the backend that computes the block formats. None: that of `mxref_torch.convert`."""
        seed: int = 0
        """Of the random bits, 0 to 2^64 - 1."""
        fqns: list[str] = field(default_factory=list)
        """Globs over the layers to convert, or parts of their names, as in torchtitan's converters; empty: all."""
        filter_fqns: list[str] = field(default_factory=list)
        """The layers to leave alone, in the same two forms. Those of the recipe's `keep_bf16` join them."""
        steps: int | None = None
        """Optimizer steps of the run, of which a schedule may name shares. None: `training.steps` of the job."""

        def to_dict(self) -> dict[str, Any]:
            """Return what the log of a job holds: the recipe as its name and digest."""
            digest = load_recipe(self.recipe).digest
            name = digest if isinstance(self.recipe, Recipe) else str(self.recipe)
            return {key: getattr(self, key) for key in self.__slots__} | {"recipe": name, "digest": digest}

    def __init__(self, config: Config) -> None:
        self.config = config
        load_recipe(config.recipe)  # an unknown one is refused before a model is built

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """Return the configuration of the converted model; LayerError for one that is converted already."""
        if hasattr(model_config, "mxref"):
            raise LayerError(
                "the model's configuration has an MXLinearConverter already; give one recipe with `layers`"
            )
        target: Any = _converted_class(type(model_config)._owner).Config
        return derive(model_config, target, mxref=self.config)


@functools.cache
def _converted_class(model: Any) -> Any:
    """Return the subclass of a model class that converts itself; torchtitan's own converters make classes so too."""

    class Converted(model):
        @dataclass(kw_only=True, slots=True)
        class Config(model.Config):
            mxref: Any

            def update_from_config(self, *, config: Any, **given: Any) -> None:
                model.Config.update_from_config(self, config=config, **given)
                if (training := getattr(config, "training", None)) is not None:
                    prepare(config)
                    if self.mxref.steps is None:
                        self.mxref = replace(self.mxref, steps=training.steps)

        def __init__(self, config: Any) -> None:
            model.__init__(self, config)
            _convert(self, config.mxref)

    Converted.__name__ = Converted.__qualname__ = f"MX{model.__name__}"
    Converted.__doc__ = f"{model.__name__} with linear layers that compute by a recipe of mxref."
    return Converted


def _convert(model: BaseModel, conversion: MXLinearConverter.Config) -> None:
    recipe = load_recipe(conversion.recipe)
    chosen = _chosen_names(named_linears(model), conversion, recipe)
    # torchtitan builds on the meta device, where the places and recipes of the layers would have no values.
    with torch.device("cpu"):
        handle = convert(
            model,
            recipe,
            filter_fn=lambda _, name: name in chosen,
            backend=conversion.backend,
            seed=conversion.seed,
            steps=conversion.steps,
            layer_class=ModuleMXLinear,
        )
    vars(model)[RECIPE] = recipe.digest
    logger.info(f"mxref: {handle!r}")


def _chosen_names(
    linears: Mapping[str, nn.Linear], conversion: MXLinearConverter.Config, recipe: Recipe
) -> set[str]:
    """Return the names of the layers that a converter's configuration chooses; LayerError if there is none."""
    wanted, left = (
        chosen_linears(linears, [entry if set(entry) & set("*?[") else f"*{entry}*" for entry in entries])
        if entries
        else {}
        for entries in (conversion.fqns, conversion.filter_fqns)
    )
    chosen = {name for name in wanted or linears if name not in left and not recipe.keeps(name)}
    if not chosen:
        raise LayerError(
            f"fqns, filter_fqns and keep_bf16 leave none of {len(linears)} linear layers to convert"
        )
    return chosen


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


RECIPE = "mxref_recipe"
"""The attribute of a converted model that holds the digest of its recipe, with layers and schedule."""


def follow(
    optimizers: Iterable[Optimizer], model_parts: Sequence[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Let each converted part of a model follow its optimizers; a `post_optimizer_build_fn` of torchtitan.

    A configuration that `MXLinearConverter` made calls it by itself. The handle of a part is its `mxref_handle`.

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
    """Take the largest amax over the ranks, before the first of a part's optimizers closes the step: its hook."""
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
    """torchtitan's own manager, with one more state: the place of converted layers in training."""

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
        """Restore the state of a checkpoint; LayerError for another recipe or seed, or other FP8 layers."""
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
    """Check a job's configuration, `Trainer.Config`, and let it follow the optimizers and save the place in training.

    LayerError or UnsupportedError for a job that would compute something else, which the how-to page lists.
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
    split = parallelism.pipeline_parallel_schedule in _SPLIT_BACKWARD
    if parallelism.pipeline_parallel_degree > 1 and (split or parallelism.pipeline_parallel_schedule_csv):
        raise UnsupportedError(
            "the pipeline schedule may run Dgrad and Wgrad as two backward passes, and a converted layer computes both "
            "in one; set parallelism.pipeline_parallel_schedule to 'Interleaved1F1B', '1F1B' or 'GPipe'"
        )
