"""`mxref export`: a checkpoint's weights and tokenizer as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mxref.backend import Backend
from mxref.errors import RecipeError
from mxref.recipe import OperandSpec, Recipe
from mxref.recipe_files import recipe_from_table
from mxref.tomlio import build, to_table
from mxref_training.config import ModelConfig
from mxref_training.data.tokenizer import Tokenizer
from mxref_training.errors import CheckpointError, HuggingFaceError
from mxref_training.export.folder import TensorGroup, dump, require_free, write_folder
from mxref_training.export.packed import CONVENTIONS, packed_layers, packed_part
from mxref_training.export.tokenizer_files import find_tokenizer, tokenizer_files
from mxref_training.huggingface.config_json import CONFIG, config_json
from mxref_training.model.llama import Llama, parameter_count
from mxref_training.probe.moments import Moment, find_moments

GIB = 2**30
MAX_SHARD = 5 * GIB
"""Bytes of tensors in one file, unless another number is given."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Packing:
    """How linear layers are packed."""

    convention: str
    """`compressed-tensors` or `quark`."""
    backend: Backend
    """Quantizes the weights; every backend makes the same bits."""
    recipe: Recipe | None = None
    """Treatment of the weights in Fprop; None is the recipe of the run."""


@dataclass(frozen=True)
class Exported:
    """A description of the written folder."""

    step: int
    parameters: int
    files: list[str]
    """Files of tensors."""
    packed: int
    """Linear layers that were packed."""


def export_model(
    source: Path,
    out: Path,
    *,
    dtype: str = "float32",
    packing: Packing | None = None,
    tokenizer: str | None = None,
    with_tokenizer: bool = True,
    max_shard: int = MAX_SHARD,
) -> Exported:
    """Write the model of a run as a folder that `LlamaForCausalLM.from_pretrained` loads.

    Args:
        source: `RUN/checkpoints/step-N`, or a run's folder for its newest checkpoint.
        out: the new folder; nothing is there, or an empty folder.
        dtype: `float32`, the weights as they are, or `bfloat16`, rounded to nearest, ties to even.
        packing: packs linear layers; the other weights are bfloat16 then.
        tokenizer: a tokenizer.json, which must be that of the run; default where the run had it.
        with_tokenizer: write the tokenizer's files.
        max_shard: bytes of tensors in one file.

    Raises:
        CheckpointError: `source` is no checkpoint, or a damaged one.
        HuggingFaceError: `out` is not free or cannot be written, a weight is not finite in `dtype`, the tokenizer is
            not found, or the recipe's weights cannot be packed.
        ShapeError: a weight that blocks do not fit.
    """
    require_free(out)
    moment = find_moments([source])[0]
    model = _model_config(moment)
    found = None
    if with_tokenizer:
        found = find_tokenizer(
            moment.identity["data"]["tokenizer"], tokenizer, moment.config().data.tokenizer
        )
    narrow = "bfloat16" if packing else dtype
    config = config_json(to_table(model), narrow, found.eot if found is not None else None)
    layers: dict[str, OperandSpec] = {}
    if packing:
        convention = CONVENTIONS[packing.convention]
        linear = _linear_layers(model)
        by_layer = _recipe(moment, packing).by_layer(linear)
        layers = packed_layers(convention, by_layer, model.tie_embeddings)
        ignore = [name for name in linear if name not in layers]
        config["quantization_config"] = convention.config(next(iter(layers.values())), ignore)
    parts = []
    for name, weight in _weights(moment, model).items():
        layer = name.removesuffix(".weight")
        if packing and layer in layers:
            _require_finite(name, weight)
            parts.append(packed_part(convention, layer, weight, layers[layer], packing.backend))
        else:
            parts.append(_plain_part(name, weight, DTYPES[narrow]))
    files = write_folder(out, parts, _texts(config, found, model), max_shard)
    return Exported(moment.step, parameter_count(model), files, len(layers))


def _texts(config: dict[str, object], tokenizer: Tokenizer | None, model: ModelConfig) -> dict[str, str]:
    texts = {CONFIG: dump(config)}
    if tokenizer is not None:
        texts["generation_config.json"] = dump({"eos_token_id": tokenizer.eot})
        texts |= tokenizer_files(tokenizer, model.max_seq)
    return texts


def _model_config(moment: Moment) -> ModelConfig:
    try:
        return build(ModelConfig, moment.identity["model"], "model")
    except RecipeError as err:
        raise CheckpointError(f"the checkpoint {moment.path} is damaged: {err}; take another one") from err


def _linear_layers(config: ModelConfig) -> list[str]:
    model = Llama(config, device="meta")
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _recipe(moment: Moment, packing: Packing) -> Recipe:
    """Return the recipe that was in force at the last step of a checkpoint."""
    recipe = packing.recipe or recipe_from_table(moment.identity["recipe"])
    return recipe.at(max(0, moment.step - 1), moment.config().run.steps)


def _weights(moment: Moment, config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by the names of Transformers, in the order of the model."""
    stored = moment.store.load(moment.step, ["model"]).tensors["model"]
    names = [name for name, _ in Llama(config, device="meta").named_parameters()]
    if lost := [name for name in names if name not in stored]:
        raise CheckpointError(f"the checkpoint {moment.path} does not fit its model: it lacks {lost[0]}")
    return {name: stored[name] for name in names}


def _plain_part(name: str, weight: Tensor, dtype: torch.dtype) -> TensorGroup:
    def make() -> dict[str, Tensor]:
        narrow = weight.to(dtype)
        _require_finite(name, narrow)
        return {name: narrow}

    return TensorGroup({name: weight.numel() * dtype.itemsize}, make)


def _require_finite(name: str, weight: Tensor) -> None:
    if not bool(torch.isfinite(weight).all()):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise HuggingFaceError(
            f"{name} holds a value that is not finite in {dtype}: export an earlier checkpoint"
            + ("" if dtype == "float32" else ", or choose --dtype float32")
        )
