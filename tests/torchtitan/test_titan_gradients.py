"""torchtitan's smallest Llama, converted, against mxref_training's Llama with the same weights: equal bits."""

from __future__ import annotations

import cpu_job
import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.llama3 import model_registry

from mxref_torch import convert
from mxref_torch.layer.linear import MXLinear
from mxref_torch.torchtitan import ModuleMXLinear, MXLinearConverter
from mxref_training.config import ModelConfig
from mxref_training.model.llama import Llama

SHAPE = ModelConfig(layers=6, width=256, heads=16, kv_heads=16, ffn=768, vocab=2048, max_seq=64)
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Modules of torchtitan's Llama and of mxref_training's."""


def theirs(recipe: str, **options: object) -> torch.nn.Module:
    """Build torchtitan's debug model in the layout of Hugging Face: q, k and v apart, channel pairs (i, i + E / 2)."""
    config = model_registry("debugmodel").model
    for layer in config.layers:
        attention = layer.attention
        layer.attention = make_gqa_config(
            dim=SHAPE.width,
            n_heads=SHAPE.heads,
            wqkv_param_init={"weight": torch.nn.init.xavier_normal_},
            wo_param_init=attention.wo.param_init,
            inner_attention=attention.inner_attention,
            rope=CosSinRoPE.Config(dim=SHAPE.head_dim, max_seq_len=SHAPE.max_seq, theta=SHAPE.rope_theta),
        )
    cpu_job.attend_on_a_cpu(config)
    converter = MXLinearConverter.Config(recipe=recipe, backend="numba", **options)
    with torch.device("meta"):
        model = converter.build().convert(config).build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def ours(model: torch.nn.Module, recipe: str) -> Llama:
    """Build mxref_training's Llama with the weights of torchtitan's."""
    llama = Llama(SHAPE, compute_dtype=torch.float32)
    llama.load_state_dict({our_name(name): tensor for name, tensor in model.state_dict().items()})
    convert(llama, recipe, filter_fn="*.layers.*", backend="numba")
    # The one table that differs: torchtitan computes its angles in float32, mxref_training in float64.
    table = torch.cat((llama.model.rotary_emb.cos, llama.model.rotary_emb.sin), dim=-1)
    for layer in model.layers.values():
        assert torch.allclose(layer.attention.rope.cache, table, atol=1e-4)
        layer.attention.rope.cache.copy_(table)
    return llama


def our_name(name: str) -> str:
    """Return the name of a parameter of mxref_training's Llama, given that of torchtitan's."""
    module, _, key = name.rpartition(".")
    if module.startswith("layers."):
        _, number, inner = module.split(".", 2)
        return f"model.layers.{number}.{NAMES[inner]}.{key}"
    return f"{NAMES[module]}.{key}"


@pytest.mark.parametrize("recipe", ["mxfp4_h16", "fp8"])
def test_loss_and_gradients_equal_those_of_the_same_weights_in_our_llama(recipe: str) -> None:
    model = theirs(recipe)
    llama = ours(model, recipe)
    tokens = torch.randint(SHAPE.vocab, (2, 65), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in (model, llama):
        logits = each(tokens[:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
    assert torch.equal(*losses)
    gradients = {name: parameter.grad for name, parameter in llama.named_parameters()}
    compared = 0
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0
        assert torch.equal(parameter.grad, gradients[our_name(name)]), name
        compared += 1
    assert compared == len(gradients) == 6 * 9 + 3


def test_recipe_names_choose_layers_of_torchtitan() -> None:
    model = theirs("mxfp4_h16", fqns=["layers.1", "*.wq"], filter_fqns=["w2"])
    found = {name for name, module in model.named_modules() if isinstance(module, MXLinear)}
    block = {
        "attention.qkv_linear.wk",
        "attention.qkv_linear.wv",
        "attention.wo",
        "feed_forward.w1",
        "feed_forward.w3",
    }
    expected = {f"layers.1.{name}" for name in block}
    assert found == expected | {f"layers.{i}.attention.qkv_linear.wq" for i in range(SHAPE.layers)}
    assert all(isinstance(model.get_submodule(name), ModuleMXLinear) for name in found)


def test_same_initial_weights_as_the_unconverted_model() -> None:
    weights = []
    for converters in (None, [MXLinearConverter.Config(recipe="fp8", backend="numba")]):
        config = model_registry("debugmodel", converters=converters).model
        cpu_job.attend_on_a_cpu(config)
        with torch.device("meta"):
            model = config.build()
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_states()
        weights.append(model.state_dict())
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
