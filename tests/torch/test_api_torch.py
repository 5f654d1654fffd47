"""Converted models within PyTorch: autocast, checkpointing, compilation, inputs by name, copies and files."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from api_setup import FP8, PLAIN, REFERENCE, SR, Model, Recorder, assert_same, batch, grads, loss_of, same
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import warm
from mxref import get_backend
from mxref.errors import DtypeError
from mxref.recipe_files import recipe_from_table
from mxref_torch import Handle, check_census, convert, find_nonfinite, telemetry
from mxref_torch.errors import LayerError, StepError
from mxref_torch.operators import blocks

BF16 = recipe_from_table({"all": {"format": "bf16"}, "keep_bf16": []})


def converted(recipe: Any = SR, backend: Any = REFERENCE) -> tuple[Model, Handle]:
    model = Model()
    return model, convert(model, recipe, backend=backend, seed=3)


# Autocast.


@pytest.mark.parametrize("recipe", [SR, FP8, BF16], ids=["SR", "fp8", "bf16"])
def test_under_autocast_a_layer_returns_bfloat16_and_computes_by_its_recipe(recipe: Any) -> None:
    found = []
    for automatic in (True, False):
        layer = nn.Sequential(nn.Linear(32, 32))
        with torch.no_grad():
            layer[0].weight.copy_(torch.linspace(-1, 1, 1024).reshape(32, 32))
            layer[0].bias.fill_(0.01)
        convert(layer, recipe, backend=REFERENCE, seed=3)
        x = torch.linspace(-3, 2, 1024).reshape(32, 32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=automatic):
            y = layer(x if automatic else x.bfloat16())
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        assert x.grad.dtype is layer[0].weight.grad.dtype is torch.float32
        found.append((y.detach(), x.grad, layer[0].weight.grad, layer[0].bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "mxfp4"])
def test_a_backward_pass_within_autocast_has_the_gradients_of_one_outside(recipe: str) -> None:
    made = []
    for within in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        convert(model, recipe, backend=REFERENCE)
        x = torch.linspace(-3, 2, 1024).reshape(32, 32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        made.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_under_autocast_all_bf16_is_torchs_own_linear() -> None:
    plain, model = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))
    model[0].load_state_dict(plain.state_dict())
    convert(model, BF16, backend=REFERENCE)
    x = torch.linspace(-3, 2, 1024).reshape(32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = model(x), plain(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)  # torch rounds once more or less for the bias


def test_autocast_to_float16_is_refused() -> None:
    model, _ = converted()
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(DtypeError, match="or autocast to bfloat16"),
    ):
        model.blocks(torch.ones(32, 32))


# Activation checkpointing.


def save_products(context: Any, op: Any, *arguments: Any, **given: Any) -> CheckpointPolicy:
    products = op is blocks.scaled_gemm
    return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "none": lambda block, x: block(x),
    "full": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_products),
    ),
}


@pytest.mark.parametrize("recipe", [SR, FP8], ids=["SR", "fp8"])
def test_checkpointing_changes_no_gradient_and_no_random_bit(recipe: Any) -> None:
    """Two micro-batches in each of two steps, which lie at places of their own."""
    found: dict[str, Any] = {}
    for name, run in WAYS.items():
        backend = Recorder()
        model, handle = converted(recipe, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle.follow(optimizer)
        for step in range(2):
            for part in range(2):
                x = model.embed(batch(2 * step + part))
                for block in model.blocks:
                    x = run(block, x)
                model.lm_head(x).square().mean().backward()
            got = grads(model)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = got, backend
        assert_same(got, found["none"][0])
        for operand in (2, 4):  # dY, which no recomputation makes
            made, first = (b.codes(operand, 1) for b in (backend, found["none"][1]))
            assert len(made) == len(first)
            assert all(map(same, made, first))
    if recipe is SR:
        # Full checkpointing makes X twice, with the same bits; selective does too, and multiplies once.
        assert len(found["full"][1].codes(0)) == 2 * len(found["none"][1].codes(0))
        twice = found["full"][1].codes(5)
        assert all(any(same(codes, one) for one in found["none"][1].codes(5)) for codes in twice)


def test_selective_checkpointing_saves_the_products() -> None:
    counts = {}
    for name in ("none", "full", "selective"):
        backend = Recorder()
        model, _ = converted(PLAIN, backend)
        WAYS[name](model.blocks[0], torch.ones(32, 32, requires_grad=True)).sum().backward()
        counts[name] = backend.products
    assert counts == {"none": 6, "full": 8, "selective": 6}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_at_another_place_is_refused(reentrant: bool) -> None:
    model, handle = converted()
    handle.follow(torch.optim.SGD(model.parameters(), lr=0.1))
    hidden = [torch.ones(32, 32, requires_grad=True) for _ in range(2)]
    losses = [checkpoint(model.blocks, x, use_reentrant=reentrant).sum() for x in hidden]
    handle.context.token_origin = 64
    if reentrant:  # torch computes forward and backward anew: gradients of another forward pass
        losses[0].backward()
        return
    with pytest.raises(
        StepError, match=r"another place \(step 0, token 64\) than it ran at \(step 0, token 0\)"
    ):
        losses[0].backward()


# Compilation.


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("recipe", "part"), [(SR, "block"), (FP8, "model")], ids=["SR", "fp8"])
def test_a_compiled_model_is_followed_as_an_eager_one(recipe: Any, part: str) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, handle = converted(recipe)
        run: Any = model
        if compiled and part == "block":
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
        elif compiled:
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle.follow(optimizer)
        for step in range(2):
            handle.context.reset_census()
            for number in range(2):
                loss_of(run, batch(2 * step + number)).backward()
            check_census(handle, run, recipe, 2)
            assert handle.context.token_origin == 64
            optimizer.step()
            optimizer.zero_grad()
        assert (handle.step, handle.context.token_origin) == (2, 0)
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Copies and files.


def test_a_saved_model_computes_in_another_process(tmp_path: Path) -> None:
    model, handle = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.follow(optimizer)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model, tmp_path / "model.pt")
    loss_of(model, batch(1)).backward()
    torch.save(grads(model), tmp_path / "gradients.pt")
    script = """
import sys
import torch
from api_setup import SR, assert_same, batch, grads, loss_of
from mxref_torch import Handle, check_census

model = torch.load(sys.argv[1], weights_only=False)
handle = Handle(model)
assert handle.step == 1
handle.context.reset_census()
loss_of(model, batch(1)).backward()
check_census(handle, model, SR)
assert_same(grads(model), torch.load(sys.argv[2]))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model.pt"), str(tmp_path / "gradients.pt")]
    process = warm.Popen(command, cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True)
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 0, said


def test_a_backend_without_a_name_travels_itself() -> None:
    model, handle = converted(PLAIN, Recorder())
    twin = copy.deepcopy(model)
    assert isinstance(Handle(twin).context.backend, Recorder)
    assert Handle(twin).context.backend is not handle.context.backend
    assert Handle(copy.deepcopy(converted()[0])).context.backend is get_backend("reference")
    twin.blocks(torch.ones(32, 32)).sum().backward()
    assert Handle(twin).context.backend.made
    assert not handle.context.backend.made


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"layer": nn.Linear(32, 32)})
    return model, torch.randn(32, 32).requires_grad_()


def test_a_layer_takes_its_input_by_name() -> None:
    model, x = made()
    plain = model.layer(input=x)
    convert(model, PLAIN, backend=REFERENCE)
    y = model.layer(input=x)
    assert y.shape == plain.shape
    assert torch.equal(y, model.layer(x))


def test_telemetry_and_the_search_see_an_input_by_name() -> None:
    model, x = made()
    handle = convert(model, PLAIN, backend=REFERENCE)
    with telemetry(handle) as seen:
        model.layer(input=x).sum().backward()
    assert {row["operand"] for row in seen.rows} == {"x", "w", "dy", "dw"}
    with find_nonfinite(model) as search:
        model.layer(input=x * torch.inf)
    assert search.found == "X of layer"


def test_telemetry_refuses_a_model_without_converted_layers() -> None:
    model, x = made()
    with pytest.raises(LayerError, match="no layer of the model is converted; call"), telemetry(model):
        model.layer(x).sum().backward()
    # The search needs no conversion.
    with find_nonfinite(model) as search:
        model.layer(x / 0).sum().backward()
    assert search.found == "X of layer"
