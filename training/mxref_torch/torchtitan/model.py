"""A model class of torchtitan whose linear layers are converted when it is built."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.config.override import derive
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.logging import logger

from mxref.recipe_files import load_recipe
from mxref_torch.conversion.convert import convert
from mxref_torch.errors import LayerError
from mxref_torch.names import named_linears
from mxref_torch.torchtitan.choice import Conversion, chosen_names
from mxref_torch.torchtitan.following import RECIPE
from mxref_torch.torchtitan.job import prepare
from mxref_torch.torchtitan.layer import ModuleMXLinear


def converted_config(config: BaseModel.Config, conversion: Conversion) -> BaseModel.Config:
    """Return the configuration of the model that converts itself.

    Raises:
        LayerError: a configuration that is converted already.
    """
    if hasattr(config, "mxref"):
        raise LayerError(
            "the model's configuration has an MXLinearConverter already; give one recipe with `layers`"
        )
    target: Any = _converted_class(type(config)._owner).Config
    return derive(config, target, mxref=conversion)


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


def _convert(model: BaseModel, conversion: Conversion) -> None:
    chosen = chosen_names(named_linears(model), conversion)
    # torchtitan builds on the meta device, where the places and recipes of the layers would have no values.
    with torch.device("cpu"):
        handle = convert(
            model,
            conversion.recipe,
            filter_fn=lambda _, name: name in chosen,
            backend=conversion.backend,
            seed=conversion.seed,
            steps=conversion.steps,
            layer_class=ModuleMXLinear,
        )
    vars(model)[RECIPE] = load_recipe(conversion.recipe).digest
    logger.info(f"mxref: {handle!r}")
