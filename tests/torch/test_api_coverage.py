"""How much of a model is converted: Conv1D of Transformers is, and what is in no linear layer is named and counted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from api_setup import REFERENCE, Model, batch, loss_of
from torch import nn
from transformers.pytorch_utils import Conv1D

from mxref.recipe import BF16_RECIPE
from mxref.recipe_files import recipe_from_table
from mxref_torch import MXLinear, advance, check_census, convert, sole_uses, telemetry
from mxref_torch.errors import LayerError

BLOCKS = recipe_from_table({"gemm": "ordered", "all": {"rounding": "sr"}, "wgrad": {"hadamard": 16}})
MIXED = recipe_from_table(
    {"gemm": "ordered", "fprop": {"format": "fp8"}, "dgrad": {"rounding": "sr"}, "wgrad": {"format": "bf16"}}
)
NONE = recipe_from_table({"keep_bf16": ["*"]})
SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2, "num_local_experts": 4,
    "moe_intermediate_size": 32,
}  # fmt: skip


def model_of(kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    ids = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    config = getattr(transformers, f"{kind}Config")(**(sizes or SIZES), **ids)
    return getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)


def gpt2() -> Any:
    return model_of("GPT2", vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
                    embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip


class Two(nn.Module):
    """A block of two layers of other widths, each an nn.Linear or a Conv1D with the same numbers."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.Sequential(
            *(Conv1D(n, k) if conv else nn.Linear(k, n) for n, k in ((96, 32), (64, 96)))
        )
        for layer in self.layers:
            weight = torch.randn(
                96, layer.bias.numel() if layer is self.layers[1] else 32, generator=generator
            )
            with torch.no_grad():
                layer.bias.copy_(torch.arange(len(layer.bias)) / 8)
                # The first weight is drawn as [outputs, inputs], the second as [inputs, outputs].
                drawn = weight if layer is self.layers[0] else weight.t()
                layer.weight.copy_(drawn.t() if conv else drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.clause("linear.formats")
@pytest.mark.parametrize("recipe", [BLOCKS, MIXED], ids=["blocks", "mixed"])
def test_a_conv1d_computes_as_a_linear_layer_and_keeps_its_parameters(recipe: Any) -> None:
    found: list[list[torch.Tensor]] = []
    rows: list[Any] = []
    for conv in (True, False):
        model = Two(conv)
        before = dict(model.named_parameters())
        handle = convert(model, recipe, backend=REFERENCE, seed=5)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        handle.follow(optimizer)
        assert all(isinstance(layer, MXLinear) for layer in model.layers)
        for step in range(2):
            x = torch.randn(37, 32, generator=torch.Generator().manual_seed(step), requires_grad=True)
            for _ in range(2):  # the second micro-batch may add to the gradient in place
                loss = (y := model(x)).square().mean()
                handle.context.sole_uses = sole_uses(loss)
                loss.backward()
            assert all(p.grad.shape == p.shape for p in model.parameters())
            weights = [p.grad.t() if conv and p.dim() == 2 else p.grad for p in model.parameters()]
            found.append([y, x.grad, *(g.clone() for g in weights)])
            optimizer.step()
            optimizer.zero_grad()
        with telemetry(handle) as seen:
            model(x).sum().backward()
        rows.append(seen.rows)
        assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
        handle = convert(model, recipe, backend=REFERENCE)
        assert type(handle.unconvert().layers[0]) is (Conv1D if conv else nn.Linear)
    for got, want in zip(found[:2], found[2:], strict=True):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert rows[0] == rows[1]


def test_a_conv1d_of_other_widths_or_another_forward_is_refused() -> None:
    model = Two(conv=True)
    model.layers.append(Conv1D(48, 64))
    with pytest.raises(LayerError, match=r"layers.2: out_features = 48 is not a multiple of 32"):
        convert(model, BLOCKS, backend=REFERENCE)
    model.layers[2] = type("Own", (Conv1D,), {"forward": lambda self, x: x})(64, 64)
    with pytest.raises(LayerError, match=r"layers.2 is a Own with a forward of its own"):
        convert(model, BLOCKS, backend=REFERENCE)


def test_gpt2_is_converted_whole() -> None:
    model = gpt2()
    handle = convert(model, BLOCKS, backend=REFERENCE)
    assert len(handle.layers) == 9
    assert str(handle).endswith(
        "100.0 % of the weights in the matrices of the model's blocks are in low precision"
    )
    loss_of(lambda ids: model(ids).logits, batch(0)).backward()
    check_census(handle, model, BLOCKS)


@pytest.mark.parametrize(
    ("kind", "experts", "share"),
    [
        ("Mixtral", "gate.weight (x2), model.layers.*.mlp.experts.gate_up_proj (x2), ", 39.8),
        ("Qwen3Moe", "experts.gate_up_proj (x2), model.layers.*.mlp.experts.down_proj (x2)", 39.8),
        ("GptOss", "router.weight (x2), model.layers.*.mlp.experts.gate_up_proj (x2)", 39.8),
    ],
)  # fmt: skip
def test_stacked_experts_are_named_and_counted(kind: str, experts: str, share: float) -> None:
    sizes = dict(SIZES) if kind != "Qwen3Moe" else {**SIZES, "num_experts": 4}
    model = model_of(kind, **sizes)
    with pytest.warns(UserWarning, match=f"quantizes {share} % of the weights") as caught:
        handle = convert(model, BLOCKS, backend=REFERENCE)
    assert len(caught) == 1
    for text in (str(caught[0].message), str(handle)):
        assert experts in text
        assert "bias" not in text
        assert f"{share} % of the weights in the matrices of the model's blocks" in text


class Own(nn.Module):
    """A block that multiplies with a Parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))


def own_model(**more: nn.Module) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList([Own(), Own()]), "lm_head": nn.Linear(32, 64)} | more)


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        (
            own_model(),
            BLOCKS,
            r"blocks.\*.weight \(x2\): in no nn.Linear; lm_head: kept in BF16 by the recipe",
        ),
        (own_model(head=nn.Linear(32, 64)), BLOCKS, "quantize no matrix of the model's blocks"),
        (nn.Sequential(nn.Linear(32, 32)), NONE, r"\(0: kept in BF16"),
    ],
)
def test_a_recipe_that_reaches_no_matrix_of_the_blocks_is_refused(
    model: Any, recipe: Any, message: str
) -> None:
    with pytest.raises(LayerError, match=message):
        convert(model, recipe, backend=REFERENCE)
    assert not any(isinstance(module, MXLinear) for module in model.modules())


def test_a_filter_or_a_recipe_in_bf16_may_reach_no_block() -> None:
    model = own_model(head=nn.Linear(32, 64))
    with pytest.warns(UserWarning, match="quantizes 0.0 % .* own precision: blocks"):
        convert(model, BLOCKS, filter_fn="head", backend=REFERENCE)
    with pytest.warns(UserWarning, match="quantizes 0.0 %"):
        convert(own_model(), BF16_RECIPE, backend=REFERENCE)


def added(model: Any) -> None:
    model.blocks[0].adapter = nn.Linear(32, 32)
    model.blocks[1].adapter = nn.Linear(32, 32)


def replaced(model: Any) -> None:
    model.blocks[1].up = nn.Linear(32, 64)


@pytest.mark.parametrize(
    ("change", "named"), [(added, r"blocks.\*.adapter \(x2\);"), (replaced, "blocks.1.up;")]
)
@pytest.mark.parametrize("opens", ["follow", "advance", "step"])
def test_a_layer_that_came_after_convert_is_noticed_once_at_the_next_step(
    change: Any, named: str, opens: str
) -> None:
    model = Model()
    handle = convert(model, BLOCKS, filter_fn="blocks.*", backend=REFERENCE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if opens == "follow":
        handle.follow(optimizer)

    def take(number: int) -> None:
        loss_of(model, batch(number)).backward()
        optimizer.step()
        if opens == "advance":
            handle.advance()
        elif opens == "step":
            advance(model)
            handle.step += 1

    take(0)
    change(model)
    with pytest.warns(UserWarning, match=f"came into the model after convert, .*: {named} ") as caught:
        take(1)
    assert len([each for each in caught if "came into" in str(each.message)]) == 1
    take(2)
    handle.unconvert()
    assert handle.step == 3
