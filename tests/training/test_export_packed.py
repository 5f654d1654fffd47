"""`mxref export --packed`: readers of other programs give what `mxref` decodes; what they cannot read is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mxref
from exported import SCALED, TIED, exported, ours, refused, stored, trained, weights
from mxref.dialects import DIALECTS
from mxref.discovery import get_backend
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.roles import GemmRole
from mxref.tomlio import to_table
from mxref_torch import convert
from mxref_training.config_files import RECIPES, names
from mxref_training.errors import HuggingFaceError
from mxref_training.export.packed import CONVENTIONS, packed_layers

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

LINEAR = [f"model.layers.{i}.{part}" for i in range(2) for part in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose recipe has AMD's scale rule: neither that of the loaders' presets, of `ocp`, nor of Dgrad's W."""
    out = tmp_path_factory.mktemp("run") / "run"
    recipe: Any = recipe_from_table({"dialect": "amd", "dgrad": {"w": {"scale_rule": "ceil"}}})
    return trained(out, SCALED, recipe)


def packed(run: Path, out: Path, kind: str, *options: object) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`quantization_config` and the tensors of a new folder."""
    exported(run, out, "--packed", kind, "--backend", "reference", *options)
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    return config["quantization_config"], stored(out)


def decoded(weight: Tensor, spec: Any) -> np.ndarray[Any, Any]:
    """What the specification makes of a weight, as the bits of bfloat16."""
    return mxref.dequantize(mxref.quantize(weight.numpy(), spec), "bfloat16").view(np.uint16)


def bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    assert tensor.dtype is torch.bfloat16
    return tensor.contiguous().view(torch.uint16).numpy()


def compressed_tensors_reads(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> Tensor:
    """The weight of a layer as the package decompresses it, by the scheme that config.json gives."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(config)
    (scheme,) = read.config_groups.values()
    assert not isinstance(scheme, list)
    state = {name.removeprefix(f"{layer}."): t for name, t in tensors.items() if name.startswith(f"{layer}.")}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    assert set(state) <= {"weight", *compressor.compression_param_names(scheme)}
    return compressor.decompress(state, scheme)["weight"]


def quark_reads(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> Tensor:
    """The weight of a layer by the description of Quark's files: two E2M1 codes in a byte, the first in the low nibble,
    and a byte of scale for 32 elements of a row.

    The package amd-quark 0.13 is not loaded here: it compiles code when it is imported.
    """
    spec = config["global_quant_config"]["weight"]
    assert (spec["dtype"], spec["scale_format"], spec["qscheme"]) == ("fp4", "e8m0", "per_group")
    assert layer not in config["exclude"]
    codes, scales = (
        tensors[f"{layer}.weight"].to(torch.int64),
        tensors[f"{layer}.weight_scale"].to(torch.int64),
    )
    rows = codes.shape[0]
    nibbles = torch.stack((codes % 16, codes // 16), dim=-1).reshape(rows, -1, spec["group_size"])
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = magnitudes[nibbles % 8] * torch.where(nibbles >= 8, -1.0, 1.0).double()
    found = values * torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales - 127)[..., None]
    return found.reshape(rows, -1).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "names", "reads"),
    [
        ("compressed-tensors", {"weight_packed", "weight_scale"}, compressed_tensors_reads),
        ("quark", {"weight", "weight_scale"}, quark_reads),
    ],
)
def test_mxfp4_is_read_back_bit_for_bit(
    kind: str, names: set[str], reads: Any, run: Path, tmp_path: Path
) -> None:
    config, tensors = packed(run, tmp_path / "hf", kind)
    own, spec = weights(run), DIALECTS["amd"].spec
    for layer in LINEAR:
        weight = own[f"{layer}.weight"]
        outputs, inputs = weight.shape
        mine = {name.removeprefix(f"{layer}."): t for name, t in tensors.items() if name.startswith(layer)}
        assert set(mine) == names
        codes = next(t for name, t in mine.items() if name != "weight_scale")
        assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (outputs, inputs // 2))
        assert mine["weight_scale"].dtype is torch.uint8
        assert tuple(mine["weight_scale"].shape) == (outputs, inputs // 32)
        np.testing.assert_array_equal(bits(reads(config, tensors, layer)), decoded(weight, spec))
    rest = {name for name in own if name.removesuffix(".weight") not in LINEAR}
    assert rest >= {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"}
    for name in rest:
        assert torch.equal(tensors[name], own[name].to(torch.bfloat16))
    assert len(tensors) == 2 * len(LINEAR) + len(rest)
    assert config.get("ignore", config.get("exclude")) == ["lm_head"]
    other = decoded(own[f"{LINEAR[0]}.weight"], "ocp")
    assert (other != bits(reads(config, tensors, LINEAR[0]))).any(), "the scale rule decides bits here"


def test_the_codes_are_those_that_fprop_multiplies(run: Path, tmp_path: Path) -> None:
    _, tensors = packed(run, tmp_path / "hf", "compressed-tensors")
    model = ours(run, SCALED)
    handle = convert(model, recipe_from_table({"dialect": "amd"}), backend=get_backend("reference"), seed=3)
    for name in LINEAR[::5]:
        layer: Any = model.get_submodule(name)
        with torch.no_grad():
            fprop = layer.gemms[GemmRole.FPROP]
            operand = layer.operands("w", layer.weight, handle.context.batch_place, (fprop,))[GemmRole.FPROP]
        assert torch.equal(tensors[f"{name}.weight_packed"], operand.codes)
        assert torch.equal(tensors[f"{name}.weight_scale"], operand.scales)


def test_mxfp8_is_read_back_bit_for_bit(run: Path, tmp_path: Path) -> None:
    config, tensors = packed(run, tmp_path / "hf", "compressed-tensors", "--recipe", "mxfp8")
    assert config["format"] == "mxfp8-quantized"
    own, spec = weights(run), load_recipe("mxfp8").fprop.w
    for layer in LINEAR:
        assert tensors[f"{layer}.weight"].dtype is torch.float8_e4m3fn
        found = compressed_tensors_reads(config, tensors, layer)
        np.testing.assert_array_equal(bits(found), decoded(own[f"{layer}.weight"], spec))


@pytest.mark.parametrize(("recipe", "preset"), [("mxfp4", "MXFP4A16"), ("mxfp8", "MXFP8A16")])
def test_the_scheme_is_the_preset_of_compressed_tensors(
    recipe: str, preset: str, run: Path, tmp_path: Path
) -> None:
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    config, _ = packed(run, tmp_path / "hf", "compressed-tensors", "--recipe", recipe)
    read = QuantizationConfig.model_validate(config)
    (scheme,) = read.config_groups.values()
    wanted = preset_name_to_scheme(preset, ["Linear"])
    assert not isinstance(scheme, list)
    assert scheme.weights is not None
    assert wanted.weights is not None
    assert scheme.weights.model_dump() == wanted.weights.model_dump(), "as the package writes it"
    assert scheme.input_activations is scheme.output_activations is None
    assert infer_module_format(torch.nn.Linear, wanted) == scheme.format == read.format
    assert set(config) <= set(read.model_dump()), "the package knows every key"


def test_transformers_loads_the_packed_folder(run: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    packed(run, tmp_path / "hf", "compressed-tensors", "--max-shard-size", "20KB")
    logging.disable_progress_bar()
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    plain = ours(run, SCALED)
    with torch.no_grad():
        ids = torch.arange(30)[None]
        logits = theirs(ids).logits
        for name in LINEAR:
            values = decoded(plain.get_parameter(f"{name}.weight"), DIALECTS["amd"].spec)
            np.testing.assert_array_equal(bits(theirs.get_submodule(name).weight.detach()), values)
            plain.get_parameter(f"{name}.weight").copy_(
                torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
            )
        # The model computes in bfloat16.
        torch.testing.assert_close(logits.float(), plain(ids), rtol=0.02, atol=0.02 * float(logits.std()) * 5)


def test_layers_that_a_recipe_keeps_in_bf16_are_on_the_list(tmp_path: Path) -> None:
    recipe: Any = recipe_from_table(
        {"layers": [{"match": ["*.down_proj"], "recipe": {"all": {"format": "bf16"}}}]}
    )
    run = trained(tmp_path / "run", SCALED, recipe)
    config, tensors = packed(run, tmp_path / "hf", "compressed-tensors")
    kept = [name for name in LINEAR if name.endswith("down_proj")]
    assert config["ignore"] == [*kept, "lm_head"]
    assert all(tensors[f"{name}.weight"].dtype is torch.bfloat16 for name in kept)


@pytest.mark.parametrize(("steps", "rule"), [(1, "even"), (2, "floor")])
def test_a_schedule_counts_up_to_the_last_step(tmp_path: Path, steps: int, rule: str) -> None:
    """The second step has FLOOR: a phase begins with it, of which a checkpoint just before it has nothing."""
    table = {"dialect": "amd", "schedule": [{"start": 1, "recipe": {"all": {"scale_rule": "floor"}}}]}
    recipe: Any = recipe_from_table(table)
    run = trained(tmp_path / "run", SCALED, recipe, stop_after=steps)
    config, tensors = packed(run, tmp_path / "hf", "quark")
    assert config["global_quant_config"]["weight"]["scale_calculation_mode"] == rule
    weight = weights(run)[f"{LINEAR[0]}.weight"]
    spec = replace(DIALECTS["amd"].spec, scale_rule=rule)
    np.testing.assert_array_equal(bits(quark_reads(config, tensors, LINEAR[0])), decoded(weight, spec))


def test_the_recipe_in_a_checkpoint_is_the_recipe() -> None:
    for name in names(RECIPES):
        recipe = load_recipe(name)
        assert recipe_from_table(json.loads(json.dumps(to_table(recipe)))) == recipe, name


@pytest.mark.parametrize(
    ("kind", "recipe", "said"),
    [
        ("compressed-tensors", {"all": {"format": "bf16"}}, "Fprop reads every weight in BF16 under this recipe"),
        ("compressed-tensors", {"fprop": {"format": "bf16"}}, "Fprop reads every weight in BF16 under this recipe"),
        ("compressed-tensors", {"all": {"format": "fp8"}}, "q in FP8, but compressed-tensors stores MXFP4, MXFP8 E4M3"),
        ("compressed-tensors", {"all": {"format": "mxfp8_e5m2"}}, "weight of q in MXFP8 E5M2, but"),
        ("quark", {"all": {"format": "mxfp8_e4m3"}}, "weight of q in MXFP8 E4M3, but quark stores MXFP4:"),
        ("quark", {"all": {"hadamard": 16}}, "q has hadamard = 16, but no loader undoes a Hadamard transform"),
        ("quark", {"all": {"prescale": True}}, "weight of q has prescale = true, but no loader undoes a prescale"),
        ("quark", {"all": {"rounding": "sr"}}, 'has rounding = "sr", which draws other bits at every step'),
        (
            "compressed-tensors",
            {"layers": [{"match": ["down"], "recipe": {"all": {"format": "mxfp8_e4m3"}}}]},
            "q is MXFP4 and down is MXFP8 E4M3, but quantization_config names one format",
        ),
    ],
)  # fmt: skip
def test_what_loaders_cannot_read_is_refused_with_the_way_out(
    kind: str, recipe: dict[str, Any], said: str
) -> None:
    layers = recipe_from_table(recipe).at(0).by_layer(["q", "down", "lm_head"])
    with pytest.raises(HuggingFaceError) as caught:
        packed_layers(CONVENTIONS[kind], layers, tied=False)
    assert said in str(caught.value)
    assert "--recipe" in str(caught.value)


def test_a_packed_lm_head_cannot_share_the_embedding() -> None:
    layers = Recipe(keep_bf16=()).by_layer(["q", "lm_head"])
    assert set(packed_layers(CONVENTIONS["quark"], layers, tied=False)) == {"q", "lm_head"}
    with pytest.raises(HuggingFaceError, match="lm_head has the weight of the embedding"):
        packed_layers(CONVENTIONS["quark"], layers, tied=True)


def test_the_way_out_works(tmp_path: Path) -> None:
    """A run with Hadamard-transformed weights is refused, before anything is written, and goes out under a dialect."""
    run = trained(tmp_path / "run", TIED, "mxfp4_h16")
    options = ("--no-tokenizer", "--packed", "quark", "--backend", "reference")
    assert "--dialect ocp" in refused(run, tmp_path / "hf", *options)
    assert not (tmp_path / "hf").exists()
    config, tensors = packed(run, tmp_path / "hf", "quark", "--dialect", "ocp")
    layer = "model.layers.0.mlp.down_proj"
    weight = weights(run)[f"{layer}.weight"]
    np.testing.assert_array_equal(bits(quark_reads(config, tensors, layer)), decoded(weight, "ocp"))


def test_a_weight_that_blocks_do_not_fit_names_its_layer(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", replace(TIED, width=80, heads=2, kv_heads=1, ffn=64), "bf16")
    text = refused(
        run,
        tmp_path / "hf",
        "--no-tokenizer",
        "--packed",
        "quark",
        "--recipe",
        "mxfp4",
        "--backend",
        "reference",
    )
    assert "model.layers.0.self_attn.q_proj: " in text
    assert "80" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
