"""The converter: it gives a model's configuration the recipe, and the model is converted when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.model import BaseModel

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.torchtitan.model import converted_config


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
        """Name of the backend that computes the block formats. None: that of `mxref.get_backend()`."""
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
            recipe = load_recipe(self.recipe)
            return {
                "recipe": recipe.digest if isinstance(self.recipe, Recipe) else str(self.recipe),
                "digest": recipe.digest,
                "backend": self.backend,
                "seed": self.seed,
                "fqns": self.fqns,
                "filter_fqns": self.filter_fqns,
                "steps": self.steps,
            }

    def __init__(self, config: Config) -> None:
        self.config = config
        load_recipe(config.recipe)  # an unknown one is refused before a model is built

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """Return the configuration of the converted model; its class is a subclass of the given one."""
        return converted_config(model_config, self.config)
