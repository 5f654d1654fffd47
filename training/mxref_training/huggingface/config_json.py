"""The `config.json` of a Llama and the `[model]` table of a configuration, each from the other.

Both are plain tables here, so that a configuration can be completed from a folder before it is checked. The rotary
embedding is read in both forms of Transformers: `rope_theta` and `rope_scaling`, or `rope_parameters` of version 5.
Source: Transformers 5.23, `LlamaConfig` and `modeling_rope_utils`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxref.tomlio import shown
from mxref_training.errors import HuggingFaceError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"

_NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
}
"""Keys of `[model]` that both have, and what Hugging Face calls them."""

_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}

_DEFAULTS: dict[str, Any] = {
    "max_seq": 2048,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "rope_theta": 10000.0,
}
"""What Transformers takes for a key that is missing. Sizes have to be there."""

_ONLY: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys that have one value in every Llama 3, which is also their default."""


def config_json(model: Mapping[str, Any], dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        model: a complete `[model]` table, as `mxref.tomlio.to_table` makes it.
        dtype: of the weights that are not packed: `float32` or `bfloat16`.
        end_of_text: id of the token that ends a document; None if there is no tokenizer.
    """
    scaling = model.get("rope_scaling")
    rope = scaling and {"rope_type": "llama3", **{_SCALING[key]: value for key, value in scaling.items()}}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        **_ONLY,
        **{theirs: model[key] for key, theirs in _NAMES.items() if key != "rope_scaling"},
        "rope_scaling": rope,
        "head_dim": model["width"] // model["heads"],
        "initializer_range": model["init_std"],
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; HuggingFaceError if it cannot be read."""
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no table")
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else err
        raise HuggingFaceError(
            f"cannot read {path}: {reason}; give a folder in the layout of Hugging Face, with config.json and "
            "model.safetensors"
        ) from err
    return found


def model_table(folder: Path) -> dict[str, Any]:
    """Return the `[model]` table of a folder's config.json, without keys for initial weights.

    Raises:
        HuggingFaceError: no Llama 3, quantized weights, or a key that is missing or has a value that is not supported.
    """
    found, where = read_config(folder), folder / CONFIG
    if found.get("model_type") != "llama":
        raise HuggingFaceError(
            f"{where}: model_type = {shown(found.get('model_type'))} is not 'llama', the only supported one"
        )
    if found.get("quantization_config"):
        raise HuggingFaceError(
            f"{where} has a quantization_config: quantized weights cannot be trained; give the folder of the model in "
            "float32 or bfloat16"
        )
    for key, wanted in _ONLY.items():
        if found.get(key, wanted) != wanted:
            raise HuggingFaceError(
                f"{where}: {key} = {shown(found[key])}, but only {shown(wanted)} is supported"
            )
    table = {key: found[theirs] for key, theirs in _NAMES.items() if found.get(theirs) is not None}
    theta, scaling = _rope(found, where)
    table |= {"rope_theta": theta} if theta is not None else {}
    table.pop("rope_scaling", None)
    table |= {"rope_scaling": scaling} if scaling else {}
    if "heads" in table:
        table.setdefault("kv_heads", table["heads"])
    table = _DEFAULTS | table
    for key, theirs in _NAMES.items():
        if key not in table and key != "rope_scaling":
            raise HuggingFaceError(f"{where}: {theirs} is missing")
        number = table.get(key)
        if key in ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "max_seq") and (
            type(number) is not int or number < 1
        ):
            raise HuggingFaceError(f"{where}: {theirs} = {shown(number)} is no positive integer")
    head = found.get("head_dim")
    if head is not None and head * table["heads"] != table["width"]:
        raise HuggingFaceError(
            f"{where}: head_dim = {head}, but only hidden_size / num_attention_heads = {table['width']} / "
            f"{table['heads']} is supported"
        )
    return table


def _rope(found: Mapping[str, Any], where: Path) -> tuple[Any, dict[str, Any] | None]:
    """Return base and scaling of the rotary embedding, None where config.json says nothing."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise HuggingFaceError(f"{where}: rope_scaling = {shown(rope)} is no table")
    theta = rope.get("rope_theta", found.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise HuggingFaceError(
            f"{where}: rope_type = {shown(kind)}, but only 'default' and 'llama3' are supported"
        )
    for theirs in _SCALING.values():
        if theirs not in rope:
            raise HuggingFaceError(f"{where}: {theirs} is missing in rope_scaling")
    return theta, {key: rope[theirs] for key, theirs in _SCALING.items()}


def completed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a configuration with the shape and tokenizer of the folder that `run.init_from` names.

    Keys that `[model]` leaves out come from config.json. Without `data.tokenizer` the folder's tokenizer.json is taken.
    A table without `run.init_from` is returned as it is.

    Raises:
        HuggingFaceError: as in `model_table`, or there is no tokenizer.
    """
    done = dict(table)
    run, model, data = (done.get(name, {}) for name in ("run", "model", "data"))
    if not all(isinstance(part, Mapping) for part in (run, model, data)) or not run.get("init_from"):
        return done
    folder = Path(str(run["init_from"]))
    done["model"] = model_table(folder) | dict(model)
    if not data.get("tokenizer"):
        path = folder / TOKENIZER
        if not path.is_file():
            raise HuggingFaceError(
                f"{folder} has no {TOKENIZER}, and weights without their tokenizer mean nothing: set data.tokenizer"
            )
        done["data"] = {**data, "tokenizer": str(path)}
    return done


def require_same_shape(model: Mapping[str, Any], folder: Path) -> None:
    """Raise HuggingFaceError, which names the first key with both values, unless a folder holds such a model.

    Args:
        model: a complete `[model]` table. `max_seq` may be below max_position_embeddings: the weights do not depend
            on it.
        folder: in the layout of Hugging Face.
    """
    table = model_table(folder)
    for key, theirs in _NAMES.items():
        mine, other = model.get(key), table.get(key)
        if mine == other or (key == "max_seq" and mine is not None and mine < other):
            continue
        raise HuggingFaceError(
            f"model.{key} = {_or_none(mine)}, but {folder / CONFIG} has {theirs} = {_or_none(other)}: leave the table "
            "[model] out of the configuration, and the model has the folder's shape"
        )


def _or_none(value: Any) -> str:
    return "none" if value is None else shown(value)
