"""The converter: it gives a model's configuration the recipe, and the model is converted when it is built."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.model import BaseModel

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.errors import LayerError
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


def chosen_names(names: Collection[str], config: MXLinearConverter.Config) -> set[str]:
    """Return the names of the layers that a configuration converts.

    Raises:
        LayerError: an entry that matches no layer, or no layer left.
    """
    wanted = _matched(names, config.fqns, "fqns") if config.fqns else set(names)
    recipe = load_recipe(config.recipe)
    chosen = {
        name for name in wanted - _matched(names, config.filter_fqns, "filter_fqns") if not recipe.keeps(name)
    }
    if not chosen:
        raise LayerError(f"fqns, filter_fqns and keep_bf16 leave none of {len(names)} linear layers to convert")
    return chosen


def _matched(names: Collection[str], entries: Collection[str], key: str) -> set[str]:
    found: set[str] = set()
    for entry in entries:
        some = {name for name in names if _matches(name, entry)}
        if not some:
            raise LayerError(f"{key}: {entry!r} matches no linear layer; the first is named {next(iter(names))!r}")
        found |= some
    return found


def _matches(name: str, entry: str) -> bool:
    return fnmatchcase(name, entry) if set(entry) & set("*?[") else entry in name
