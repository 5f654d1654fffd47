"""Which layers convert replaces, and what it and a step refuse because it would silently compute something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from api_setup import FP8, PLAIN, REFERENCE, SR, Model, assert_same, batch, grads, loss_of
from torch import nn

import mxref_torch
from mxref.recipe_files import recipe_from_table
from mxref_torch import CapturedStep, MXLinear, convert
from mxref_torch.errors import LayerError

ALL = recipe_from_table({"gemm": "ordered", "keep_bf16": []})
BLOCKS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


@pytest.mark.parametrize(
    ("filter_fn", "chosen"),
    [
        (None, [*BLOCKS, "lm_head"]),
        ("*.up", ["blocks.0.up", "blocks.1.up"]),
        (["blocks.0.*", "lm_head"], ["blocks.0.up", "blocks.0.down", "lm_head"]),
        (("blocks.*",), BLOCKS),
        (lambda module, name: isinstance(module, nn.Linear) and "blocks" in name, BLOCKS),
        (lambda module, name: module.bias is None, ["blocks.0.up", "blocks.1.up", "lm_head"]),
    ],
)
def test_a_filter_chooses_layers(filter_fn: Any, chosen: list[str]) -> None:
    model = Model()
    handle = convert(model, PLAIN, filter_fn=filter_fn, backend=REFERENCE)
    assert list(handle.layers) == chosen
    for name, module in model.named_modules():
        assert isinstance(module, MXLinear) == (name in chosen)


def test_a_layer_draws_the_same_bits_whichever_others_are_chosen() -> None:
    """Its index counts all linear layers: a loss that reads the last block alone gives it the same gradient."""
    found = []
    for filter_fn in ("blocks.1.*", "blocks.*"):
        model = Model()
        convert(model, SR, filter_fn=filter_fn, backend=REFERENCE, seed=1)
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        model.blocks[1](x).square().sum().backward()
        found.append(grads(model))
    assert_same(*found)


@pytest.mark.parametrize(
    ("filter_fn", "message"),
    [
        ("head", "filter_fn: 'head' matches no linear layer; the first linear layer is named 'blocks.0.up'"),
        (["*.up", "embed"], "filter_fn: 'embed' matches no"),
        ([], "a list of globs, got ..; the first linear layer"),
        (lambda module, name: False, "filter_fn chose none of 5 linear layers; the first .* 'blocks.0.up'"),
        (lambda module, name: None, "filter_fn chose none of 5 linear layers"),
        (3, "filter_fn is a function, a glob or a list of globs, got 3"),
        ([3], "filter_fn is a function, a glob or a list of globs, got .3."),
    ],
)
def test_a_filter_that_chooses_nothing_is_refused(filter_fn: Any, message: str) -> None:
    model = Model()
    with pytest.raises(LayerError, match=message):
        convert(model, PLAIN, filter_fn=filter_fn, backend=REFERENCE)
    assert not any(isinstance(module, MXLinear) for module in model.modules())


@pytest.fixture
def fast_path() -> Iterator[None]:
    assert torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, 32)


@pytest.mark.usefixtures("fast_path")
def test_an_encoder_layer_reads_its_weights_itself_in_evaluation() -> None:
    for chosen, message in (
        (None, "^layer.self_attn is an nn.Multi|^layer is an nn.Tr"),
        ("layer.linear?", "^layer is an nn.TransformerEncoderLayer, which has a fast path"),
    ):
        with pytest.raises(LayerError, match=message):
            convert(Encoder(), ALL, filter_fn=chosen, backend=REFERENCE)
    torch.backends.mha.set_fastpath_enabled(False)
    model = Encoder().eval()
    with pytest.warns(UserWarning, match=r"in no nn.Linear and stay .*: layer.self_attn.in_proj_weight$"):
        handle = convert(model, ALL, filter_fn="layer.linear?", backend=REFERENCE)
    with torch.no_grad():
        model.layer(torch.ones(2, 4, 32))
    assert sum(handle.context.census.values()) == 2


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="newer PyTorch")
def test_a_loss_that_reads_its_layer_is_refused() -> None:
    model = nn.ModuleDict({"loss": nn.LinearCrossEntropyLoss(32, 64)})
    with pytest.raises(
        LayerError, match="^loss is an nn.LinearCrossEntropyLoss, which multiplies with the weight"
    ):
        convert(model, ALL, backend=REFERENCE)


def every_reader() -> dict[str, Callable[[], nn.Module]]:
    """Return the modules of torch.nn that hold a linear layer, by name, made small."""
    made: dict[str, Callable[[], nn.Module]] = {
        "MultiheadAttention": lambda: nn.MultiheadAttention(32, 2),
        "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(32, 2, 64),
        "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(32, 2, 64),
        "Transformer": lambda: nn.Transformer(32, 2, 1, 1, 64),
        "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 20, [10]),
    }
    if hasattr(nn, "LinearCrossEntropyLoss"):
        made["LinearCrossEntropyLoss"] = lambda: nn.LinearCrossEntropyLoss(32, 64)
    return made


def test_every_module_of_torch_that_holds_a_linear_layer_is_known() -> None:
    """A module that a later torch adds has to be looked at: does it read weights past the layer?"""
    import ast
    import inspect

    known = set(every_reader()) | {"TransformerEncoder", "TransformerDecoder"}
    found = set()
    for name, kind in vars(nn).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, nn.Module)
            and kind.__module__.startswith("torch.nn.modules")
        ):
            tree = ast.parse(inspect.getsource(kind).lstrip())
            calls = {
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            if (
                calls & {"Linear", "NonDynamicallyQuantizableLinear", "MultiheadAttention"}
                and "Lazy" not in name
            ):
                found.add(name)
    assert {"MultiheadAttention", "TransformerEncoderLayer", "AdaptiveLogSoftmaxWithLoss"} <= found
    assert found <= known, found - known


def test_a_low_precision_weight_that_something_else_reads_is_refused() -> None:
    model = Model()
    model.lm_head.weight = model.embed.weight
    with pytest.raises(
        LayerError,
        match="^lm_head shares its weight with embed.weight, which reads it in full precision.*keep_bf16",
    ):
        convert(model, ALL, backend=REFERENCE)
    convert(model, PLAIN, backend=REFERENCE)  # lm_head is kept in BF16
    assert model.lm_head.weight is model.embed.weight
    loss_of(model, batch(0)).backward()
    pair = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    pair[1].weight = pair[0].weight
    with pytest.raises(LayerError, match="^0 shares its weight with 1.weight"):
        convert(pair, ALL, filter_fn="0", backend=REFERENCE)
    convert(pair, ALL, backend=REFERENCE)
    again = nn.Sequential(pair[0], pair[0])
    convert(again, FP8, backend=REFERENCE)


def test_master_weights_are_float32() -> None:
    model = Model()
    model.embed.bfloat16()
    with pytest.raises(LayerError, match="^embed.weight is torch.bfloat16: master weights must be float32"):
        convert(model, PLAIN, backend=REFERENCE)
    model.embed.requires_grad_(False)
    convert(model, PLAIN, backend=REFERENCE)
    model = Model().requires_grad_(False)
    model.blocks[0].up.bfloat16()
    with pytest.raises(LayerError, match="^blocks.0.up.weight is torch.bfloat16"):
        convert(model, PLAIN, backend=REFERENCE)
    convert(model, PLAIN, filter_fn="blocks.1.*", backend=REFERENCE)


CAST = r"^blocks.0.up.weight is torch.bfloat16: master weights must be float32.*call model.float\(\) before convert"


def test_a_cast_before_follow_and_within_each_kind_of_step_is_refused() -> None:
    def started() -> tuple[Any, Any, Any]:
        model = Model()
        return (
            model,
            convert(model, PLAIN, backend=REFERENCE),
            torch.optim.AdamW(model.parameters(), fused=True),
        )

    def cast(model: Any) -> None:
        model.blocks.bfloat16()

    model, handle, optimizer = started()
    cast(model)
    with pytest.raises(LayerError, match=CAST):
        handle.follow(optimizer)

    model, handle, _ = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.follow(optimizer)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        if step:
            cast(model)
            with pytest.raises(LayerError, match=CAST):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()

    model, handle, optimizer = started()
    loss_of(model, batch(0)).backward()
    cast(model)
    with pytest.raises(LayerError, match=CAST):
        mxref_torch.advance(model)

    model, handle, optimizer = started()
    take = CapturedStep(model, handle, loss_of, optimizer, tokens=32, capture=False)
    take(batch(0))
    take.finish()
    cast(model)
    with pytest.raises(LayerError, match=CAST):
        take(batch(1))


def test_a_frozen_part_may_have_another_type() -> None:
    model = Model()
    model.embed.requires_grad_(False)
    handle = convert(model, PLAIN, backend=REFERENCE)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    model.embed.bfloat16()
    handle.follow(optimizer)
