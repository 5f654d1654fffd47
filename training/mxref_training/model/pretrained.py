"""Weights of a Hugging Face folder for a Llama."""

from __future__ import annotations

from pathlib import Path

import torch

from mxref.tomlio import to_table
from mxref_training.distributed.sharded import put
from mxref_training.errors import HuggingFaceError
from mxref_training.huggingface.config_json import require_same_shape
from mxref_training.huggingface.weights import Weights
from mxref_training.model.llama import Llama
from mxref_training.wording import counted

_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_UNUSED = ".rotary_emb.inv_freq"
"""Old checkpoints hold the rotary frequencies, which follow from the configuration."""


def require_fitting(model: Llama, folder: Path) -> list[str]:
    """Return the names of the tensors that a folder has for a model; nothing but headers is read.

    Raises:
        HuggingFaceError: config.json differs from the model's configuration, or a tensor is missing, unknown, or of
            another shape or type.
    """
    require_same_shape(to_table(model.config), folder)
    weights = Weights.open(folder)
    parameters = dict(model.named_parameters())
    names = [name for name in weights.files if not name.endswith(_UNUSED)]
    if model.config.tie_embeddings and _LM_HEAD in names:
        names.remove(_LM_HEAD)
    _require_none(set(parameters) - set(names), f"{folder} lacks")
    _require_none(set(names) - set(parameters), f"{folder} holds more than the model:")
    for name in names:
        shape, wanted = weights.shape(name), tuple(parameters[name].shape)
        if shape != wanted:
            raise HuggingFaceError(f"{folder}: {name} has shape {shape}, and the model has {wanted}")
    return names


@torch.no_grad()
def load_pretrained(model: Llama, folder: str | Path) -> None:
    """Give a model the weights of a folder in Hugging Face's layout.

    The names of a model's parameters are those of `LlamaForCausalLM`. Of a parameter that is spread over ranks
    (a DTensor) each rank takes its own part.

    Args:
        model: its parameters have memory; they keep their types and devices.
        folder: config.json, and safetensors files in float32, bfloat16 or float16.

    Raises:
        HuggingFaceError: config.json differs from the model's configuration, a tensor is missing, unknown, or of
            another shape or type, or a file is damaged.
    """
    folder = Path(folder)
    names, weights = require_fitting(model, folder), Weights.open(folder)
    if (
        model.config.tie_embeddings
        and {_LM_HEAD, _EMBEDDING} <= set(weights.files)
        and not torch.equal(weights.tensor(_LM_HEAD), weights.tensor(_EMBEDDING))
    ):
        raise HuggingFaceError(
            f"{folder}: config.json has tie_word_embeddings = true, but {_LM_HEAD} is not {_EMBEDDING}: one of "
            "the two files is wrong"
        )
    parameters = dict(model.named_parameters())
    for name in names:
        put(parameters[name], weights.tensor(name))


def _require_none(names: set[str], what: str) -> None:
    """Raise HuggingFaceError, which names the first of the tensors, unless there is none."""
    if names:
        more = f" and {counted(len(names) - 1, 'tensor')} more" if len(names) > 1 else ""
        raise HuggingFaceError(f"{what} {min(names)}{more}; give the folder of another model")
