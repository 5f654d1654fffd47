"""Weights in block formats, in the two conventions that inference engines read.

compressed-tensors: `weight_packed` [N, K / 2] (MXFP4) or `weight` in E4M3 [N, K] (MXFP8), and `weight_scale`
[N, K / 32]. Quark: `weight` [N, K / 2] and `weight_scale` [N, K / 32]. Codes have the first element in the low nibble,
scales are E8M0 bytes, and blocks lie along the inputs K, as `mxref` stores them.
Sources: compressed-tensors 0.20.0, `MXFP4PackedCompressor`, `MXFP8QuantizationCompressor` and the presets `MXFP4A16`
and `MXFP8A16`; amd-quark 0.13, `QTensorConfig`, `Pack_fp4` and `unpack_params`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxref.backend import Backend
from mxref.errors import ShapeError
from mxref.formats import MXFP4, MXFP8_E4M3, BlockFormat
from mxref.placement import Placement
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import GemmRole
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from mxref_torch.bridge import from_backend, to_backend
from mxref_training.errors import HuggingFaceError
from mxref_training.export.folder import TensorGroup

SCALE = "weight_scale"


@dataclass(frozen=True)
class Convention:
    """How loaders of one kind store packed weights."""

    name: str
    formats: Mapping[BlockFormat, str]
    """The formats that it has, and the name of the tensor of codes in each."""
    config: Callable[[OperandSpec, Sequence[str]], dict[str, Any]]
    """Makes `quantization_config` from a packed weight's treatment and the linear layers that stay in BF16."""


def _compressed_tensors(spec: OperandSpec, ignore: Sequence[str]) -> dict[str, Any]:
    made = spec.format
    assert isinstance(made, BlockFormat)  # checked by `packed_layers`
    weights = {
        "num_bits": made.element.bits,
        "type": "float",
        "symmetric": True,
        "group_size": made.k,
        "strategy": "group",
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    stored = "mxfp4-pack-quantized" if made is MXFP4 else "mxfp8-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": stored,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


_QUARK_RULES = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN)


def _quark(spec: OperandSpec, ignore: Sequence[str]) -> dict[str, Any]:
    weight = {
        "dtype": "fp4",
        "is_dynamic": False,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": MXFP4.k,
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": "e8m0",
        # Quark has no name for RCEIL and for thresholds. Loaders of finished weights do not read the key.
        "scale_calculation_mode": spec.scale_rule.value if spec.scale_rule in _QUARK_RULES else None,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "is_scale_quant": False,
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": None,
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": list(ignore),
        "algo_config": None,
        "softmax_quant_spec": None,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


CONVENTIONS = {
    made.name: made
    for made in (
        Convention("compressed-tensors", {MXFP4: "weight_packed", MXFP8_E4M3: "weight"}, _compressed_tensors),
        Convention("quark", {MXFP4: "weight"}, _quark),
    )
}
"""The conventions, by name."""


def packed_layers(convention: Convention, layers: Mapping[str, Recipe], tied: bool) -> dict[str, OperandSpec]:
    """Return how the weight of each packed linear layer is quantized; the others stay in BF16.

    Args:
        convention: how the weights will be stored.
        layers: the recipe of each linear layer of the model, by its name.
        tied: whether `lm_head` has the embedding's weight.

    Raises:
        HuggingFaceError: a weight that no loader can read, no packed layer at all, or layers of different formats.
    """
    found: dict[str, OperandSpec] = {}
    for name, recipe in layers.items():
        if recipe.kind(GemmRole.FPROP) == "bf16":
            continue
        spec = recipe.fprop.w
        _require_readable(convention, name, spec)
        found[name] = spec
    if not found:
        raise HuggingFaceError(
            "Fprop reads every weight in BF16 under this recipe, so there is nothing to pack: name another recipe "
            "(--recipe mxfp4) or a dialect (--dialect ocp), or export without --packed"
        )
    if tied and "lm_head" in found:
        raise HuggingFaceError(
            "lm_head has the weight of the embedding, which loaders keep in BF16, but the recipe quantizes it: name a "
            'recipe with keep_bf16 = ["lm_head"]'
        )
    first, *others = found
    for name in others:
        if found[name].format != found[first].format:
            raise HuggingFaceError(
                f"{first} is {found[first].format.title} and {name} is {found[name].format.title}, but "
                "quantization_config names one format: name a recipe with one format (--recipe)"
            )
    return found


def _require_readable(convention: Convention, name: str, spec: OperandSpec) -> None:
    way_out = "name another treatment of the weights, as in --dialect ocp or --recipe mxfp4"
    if spec.format not in convention.formats:
        known = ", ".join(made.title for made in convention.formats)
        raise HuggingFaceError(
            f"Fprop reads the weight of {name} in {spec.format.title}, but {convention.name} stores {known}: {way_out}"
        )
    for key, what in (("hadamard", "undoes a Hadamard transform"), ("prescale", "undoes a prescale")):
        if value := getattr(spec, key):
            value = str(value).lower()
            raise HuggingFaceError(
                f"the weight of {name} has {key} = {value}, but no loader {what}: {way_out}"
            )
    if spec.rounding is Rounding.SR:
        raise HuggingFaceError(
            f'the weight of {name} has rounding = "sr", which draws other bits at every step: {way_out}'
        )


def packed_part(
    convention: Convention, layer: str, weight: Tensor, spec: OperandSpec, backend: Backend
) -> TensorGroup:
    """Return the packed weight of a linear layer.

    Args:
        convention: how it is stored.
        layer: name of the layer.
        weight: float32 [N, K].
        spec: how it is quantized.
        backend: quantizes.

    Raises:
        ShapeError: K is no multiple of the block length, or under tiles N is not; the message names the layer.
    """
    made = spec.format
    assert isinstance(made, BlockFormat)  # checked by `packed_layers`
    rows, length = weight.shape
    codes, scales = f"{layer}.{convention.formats[made]}", f"{layer}.{SCALE}"

    def make() -> dict[str, Tensor]:
        device = "cpu" if "cpu" in backend.capabilities.devices else min(backend.capabilities.devices)
        try:
            q = backend.quantize(to_backend(weight.to(device), backend), spec, axis=-1, placement=Placement())
        except ShapeError as err:
            raise ShapeError(f"{layer}: {err}") from err
        stored = from_backend(q.codes, backend).cpu()
        if made is MXFP8_E4M3:
            stored = stored.view(torch.float8_e4m3fn)
        return {codes: stored, scales: from_backend(q.scales, backend).cpu()}

    return TensorGroup({codes: rows * made.code_bytes(length), scales: rows * (length // made.k)}, make)
