"""The converter: it gives a model's configuration the recipe, and the model is converted when it is built."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import derive
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.conversion.convert import convert
from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_linears
from mxref_torch.step_context import StepContext
from mxref_torch.torchtitan.job import RECIPE, prepare


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
        """
        Names of the layers to convert. An entry with `*`, `?` or `[` is a glob over the qualified name; another entry
        selects the layers whose name contains it, as in torchtitan's converters. Empty: all linear layers.
        """
        filter_fqns: list[str] = field(default_factory=list)
        """Names of the layers to leave alone, in the same two forms. Those of the recipe's `keep_bf16` join them."""
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
        """Return the configuration of the converted model; its class is a subclass of the given one.

        Raises:
            LayerError: a configuration that is converted already.
        """
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


def _chosen_names(names: Collection[str], conversion: MXLinearConverter.Config, recipe: Recipe) -> set[str]:
    """Return the names of the layers that a converter's configuration chooses.

    Raises:
        LayerError: an entry that matches no layer, or no layer left.
    """
    found: dict[str, set[str]] = {"fqns": set(), "filter_fqns": set()}
    for key, matched in found.items():
        for entry in getattr(conversion, key):
            glob = set(entry) & set("*?[")
            some = {name for name in names if (fnmatchcase(name, entry) if glob else entry in name)}
            if not some:
                raise LayerError(
                    f"{key}: {entry!r} matches no linear layer; the first is named {next(iter(names))!r}"
                )
            matched |= some
    wanted = (found["fqns"] or set(names)) - found["filter_fqns"]
    chosen = {name for name in wanted if not recipe.keeps(name)}
    if not chosen:
        raise LayerError(
            f"fqns, filter_fqns and keep_bf16 leave none of {len(names)} linear layers to convert"
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
