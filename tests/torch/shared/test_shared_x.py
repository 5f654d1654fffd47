"""Layers that read one X quantize it once: eager by what was made of it before, compiled by one common call."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from compiled_gradients import Block, recipe_of
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import convert
from mxref_torch.shared.inputs import SharedOperands

SR_ON_X = {"all": {"format": "mxfp4"}, "wgrad": {"x": {"rounding": "sr"}}}
FIXED = {"all": {"format": "mxfp4", "hadamard": 32, "signs": "per_step"}}
OWN = {"all": {"format": "mxfp4", "hadamard": 32, "signs": "per_step_layer"}}


class Counting(ReferenceBackend):
    """Counts quantizations by shape; both orientations in one read are one."""

    def __init__(self) -> None:
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def quantize(self, x: Any, spec: Any, **named: Any) -> Any:
        self.shapes[tuple(x.shape)] += 1
        return super().quantize(x, spec, **named)

    def quantize_dual(self, x: Any, specs: Any, **named: Any) -> Any:
        self.shapes[tuple(x.shape)] += 1
        return super().quantize_dual(x, specs, **named)


def trained(recipe: Any, cloned: bool) -> tuple[dict[str, bytes], Counter[tuple[int, ...]]]:
    """Return output and gradients of a block, and the quantizations; `cloned` gives each layer an X of its own."""
    torch.manual_seed(0)
    block: Any = nn.ModuleDict({"block": Block(64)})
    backend = Counting()
    context = convert(block, recipe, backend=backend, seed=5).context
    if cloned:
        for layer in (block.block.up, block.block.gate):
            layer.register_forward_pre_hook(lambda _, given: (given[0].clone(),))
    found = {}
    for context.step in range(2):
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(context.step)).requires_grad_()
        y = block.block(x.bfloat16())
        y.float().square().sum().backward()
        for name, t in {"y": y, "x": x.grad, **{n: p.grad for n, p in block.named_parameters()}}.items():
            found[f"{name} of step {context.step}"] = t.detach().float().numpy().tobytes()
        assert not len(context.shared)
    return found, backend.shapes


@pytest.mark.parametrize(
    ("recipe", "saved"),
    [
        (recipe_of("mxfp4"), 2), (recipe_from_table(FIXED), 2), (recipe_from_table(OWN), 0),
        (recipe_from_table(SR_ON_X), 0), (recipe_of("fp8"), 0), (recipe_of("bf16"), 0),
    ],
    ids=["mxfp4", "signs of the step", "signs of the layer", "sr", "fp8", "bf16"],
)  # fmt: skip
def test_the_bits_are_those_of_layers_that_share_nothing(recipe: Any, saved: int) -> None:
    (found, shapes), (want, apart) = trained(recipe, cloned=False), trained(recipe, cloned=True)
    assert found == want
    # Of each of the two steps one read of X [32, 64] is saved; dY and the other layers are as they were.
    assert apart[32, 64] - shapes[32, 64] == saved
    assert apart - shapes == Counter({(32, 64): saved} if saved else {})


def test_current_scaling_of_fp8_shares_and_delayed_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxref_torch.layer.fp8 import Fp8Scales

    right, seen = Fp8Scales.quantize, []
    monkeypatch.setattr(
        Fp8Scales, "quantize", lambda self, name, x, *whole: seen.append(name) or right(self, name, x, *whole)
    )
    for scaling, times in (("current", 1), ("delayed", 2)):
        block: Any = nn.ModuleDict({"block": Block(64)})
        convert(block, recipe_from_table({"all": {"format": "fp8"}, "fp8_scaling": scaling}), seed=5)
        seen.clear()
        with torch.no_grad():
            block.block(torch.ones(1, 32, 64))
        assert seen.count("x") == times + 1


def test_nothing_is_kept_longer_than_the_tensor_lives() -> None:
    held = SharedOperands()
    x = torch.ones(4)
    made = held.of(x, "q")
    assert made is not None
    operand = torch.ones(4)
    made["key"], alive = operand, weakref.ref(operand)
    assert held.of(x, "k") is made
    assert held.of(x, "q") == {}  # of another forward pass
    made = held.of(x, "k")
    assert made is not None
    made["key"] = operand
    del made, operand
    assert alive() is not None
    x.add_(1)
    assert held.of(x, "v") == {}
    gc.collect()
    assert alive() is None
    several = [torch.ones(4) for _ in range(5)]
    for each in several:
        held.of(each, "q")
    assert len(held) == 2
    del several, each
    gc.collect()
    assert not len(held)


def test_a_new_step_or_micro_batch_and_a_copy_begin_with_nothing() -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64))
    context = convert(model, recipe_of("mxfp4"), backend=Counting(), seed=1).context
    x = torch.ones(32, 64)
    for change in ({"step": 1}, {"token_origin": 32}, {"global_tokens": 64}):
        with torch.no_grad():
            model(x)
        assert len(context.shared) == 1
        assert not len(pickle.loads(pickle.dumps(context.shared)))
        assert not len(copy.deepcopy(context.shared))
        for name, value in change.items():
            setattr(context, name, value)
        assert not len(context.shared)
    with torch.inference_mode():
        model(torch.ones(32, 64))
    assert not len(context.shared)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiler_finds_the_common_call() -> None:
    graphs: list[Counter[str]] = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=counting,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    block: Any = nn.ModuleDict({"block": Block(64)})
    convert(block, recipe_of("mxfp4_h16"), backend=Counting(), seed=5)
    run = torch.compile(block.block, backend=compiler, fullgraph=True)
    run(torch.randn(1, 32, 64).bfloat16().requires_grad_()).float().sum().backward()
    # X of up and gate, and that of down.
    assert graphs[0]["mxref.quantize_dual.default"] == 2
    assert graphs[0]["mxref.quantize.default"] == 3  # the weights
