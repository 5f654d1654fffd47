"""Wgrad adds to a gradient in place, only if one layer reads the weight, with the bits of autograd's sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mxref_torch
from mxref import get_backend
from mxref.errors import DtypeError, MxrefError, ShapeError, UnsupportedError
from mxref.recipe_files import recipe_from_table
from mxref_torch import (
    check_census,
    convert,
    operators,
    sole_uses,
)
from mxref_torch.operators import blocks
from mxref_training import steps
from narrow_backend import Narrow
from training_setup import SR, change, lines, run, weights

# The 4/3 that undoes a prescale fills a product's mantissa, so that the order of sums shows.
MXFP4 = recipe_from_table({"gemm": "ordered", "keep_bf16": [], "all": {"prescale": True}})
NVFP4 = recipe_from_table({"gemm": "ordered", "keep_bf16": [], "all": {"format": "nvfp4"}})
LAYERS, STEPS, MICRO_BATCHES = 7, 3, 3


def counting(base: str) -> Any:
    """A backend that counts the products that it adds."""
    backend = get_backend(base)

    class Counting(type(backend)):  # type: ignore[misc]
        added = 0

        def _add_product(self, *request: Any) -> None:
            self.added += 1
            super()._add_product(*request)

    return Counting()


@pytest.mark.parametrize(
    ("base", "recipe"),
    [("numba", SR), ("reference", MXFP4), ("numba", NVFP4)],
    ids=["SR", "prescaled", "nvfp4"],
)
def test_training_in_place_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, recipe: Any
) -> None:
    try:
        backends = [counting(base) for _ in range(2)]
    except MxrefError:
        pytest.skip(f"backend {base!r} cannot be loaded here")
    gradients: list[list[bytes]] = []
    clip = steps.clip_gradients

    def recorded(parameters: Any, limit: float) -> Any:
        held = list(parameters)
        gradients[-1] += [p.grad.numpy().tobytes() for p in held]
        return clip(held, limit)

    monkeypatch.setattr(steps, "clip_gradients", recorded)
    config = change(steps=STEPS, batch=6, micro_batch=2)
    for name, backend in zip(("in place", "by autograd"), backends, strict=True):
        gradients.append([])
        run(tmp_path / name, recipe, config, backend=backend)
        monkeypatch.setattr(mxref_torch, "sole_uses", lambda loss: {})
    layers = LAYERS + (recipe is not SR)  # lm_head
    assert [b.added for b in backends] == [STEPS * (MICRO_BATCHES - 1) * layers, 0]
    assert gradients[0] == gradients[1]
    assert weights(tmp_path / "in place") == weights(tmp_path / "by autograd")
    assert lines(tmp_path / "in place") == lines(tmp_path / "by autograd")


class NarrowSums(Narrow):
    """Spoils one of the gradients to which it adds, and sets its flag, unless it is widened."""

    def __init__(self, spoiled: int) -> None:
        super().__init__(set())
        self.spoiled_sum, self.sums = spoiled, 0

    def _add_product(self, a: Any, b: Any, onto: Any, profile: Any) -> None:
        super()._add_product(a, b, onto, profile)
        self.sums += not self.wide
        if self.sums == self.spoiled_sum and not self.wide:
            onto *= 7
            self.flag = True


def test_gradients_that_are_spoiled_are_not_added_to_when_the_step_is_done_over(tmp_path: Path) -> None:
    config = change(steps=2, batch=6, micro_batch=2)
    spoiled = (0, 1, 2 * LAYERS)
    results = [run(tmp_path / str(n), SR, config, backend=NarrowSums(n)) for n in spoiled]
    assert [r.widened_steps for r in results] == [0, 1, 1]
    assert len({weights(tmp_path / str(n)) for n in spoiled}) == 1


class Shared(nn.Module):
    """A weight that two depths read, one that the embedding reads too, and one with a single reader."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.twice, self.once = (nn.Linear(64, 64, bias=bias) for bias in (False, True))
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.embed(ids))
        return self.head(self.once(self.twice(torch.tanh(x))))


def built(recipe: Any = MXFP4, model: type[nn.Module] = Shared) -> Any:
    torch.manual_seed(0)
    made = model()
    backend = counting("reference")
    context = convert(made, recipe, backend=backend, seed=1).context
    if isinstance(made, Shared):
        made.head.weight = made.embed.weight  # which convert would refuse
    return made, context, backend


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 32, (64,), generator=torch.Generator().manual_seed(number))


def micro_batches(model: nn.Module, context: Any, in_place: bool, count: int = 3) -> dict[str, bytes]:
    """The gradients after some micro-batches."""
    model.zero_grad()
    for number in range(count):
        context.token_origin, context.global_tokens = 64 * number, 64 * count
        loss = model(batch(number)).square().mean()
        context.sole_uses = sole_uses(loss) if in_place else {}
        loss.backward()
    context.sole_uses = {}
    return {name: p.grad.numpy().tobytes() for name, p in model.named_parameters()}


def test_a_weight_with_several_readers_is_left_to_autograd() -> None:
    model, context, backend = built()
    assert list(sole_uses(model(batch(0)).sum()).values()) == [model.once.weight]
    context.reset_census()
    want = micro_batches(model, context, in_place=False)
    assert backend.added == 0
    context.reset_census()
    assert micro_batches(model, context, in_place=True) == want
    assert backend.added == 2
    check_census(context, model, MXFP4, 3, calls={"twice": 2})


def test_one_by_one_the_gradients_of_two_readers_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what `sole_uses` leaves out is not left out for nothing."""
    model, context, backend = built()
    want = micro_batches(model, context, in_place=False)
    monkeypatch.setitem(globals(), "sole_uses", every_use)
    got = micro_batches(model, context, in_place=True)
    assert backend.added == 2 * 4
    assert got["once.weight"] == want["once.weight"]
    assert got["twice.weight"] != want["twice.weight"]
    assert got["embed.weight"] != want["embed.weight"]


def every_use(loss: torch.Tensor) -> dict[Any, torch.Tensor]:
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [source for source, _ in node.next_functions]
    layers = (node for node in found if isinstance(getattr(node, "layer", None), mxref_torch.MXLinear))
    return {node: node.next_functions[1][0].variable for node in layers}


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.once = nn.Linear(64, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.silu(self.once(self.embed(ids)))


@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")  # one of the cases
def test_a_gradient_that_autograd_has_to_make_or_that_is_listened_to_is_left_to_it() -> None:
    model, context, backend = built(model=Single)
    weight = model.once.weight

    def added(**fields: Any) -> int:
        """How many products one more micro-batch adds in place."""
        before = backend.added
        loss = model(batch(5)).square().mean()
        context.sole_uses = fields.get("uses", sole_uses(loss))
        loss.backward()
        return backend.added - before

    assert added() == 0  # there is no gradient yet
    assert added() == 1
    assert added(uses={}) == 0  # nobody asked for it
    heard: list[bool] = []
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda g: heard.append(True))
        assert added() == 0
        handle.remove()
    assert heard == [True, True]
    assert added() == 1
    weight.grad = weight.grad.t().contiguous().t()
    assert added() == 0
    weight.grad = None
    assert added() == 0
    assert added() == 1
    # A graph that was not looked at is as ever.
    context.sole_uses = {}
    (dw,) = torch.autograd.grad(model(batch(5)).square().mean(), weight)
    assert dw.shape == weight.shape
    assert backend.added == 3


@pytest.mark.parametrize("table", [{"wgrad": {"format": "bf16"}}, {"wgrad": {"format": "fp8"}}])
def test_other_formats_are_left_to_autograd(table: dict[str, Any]) -> None:
    model, context, backend = built(recipe_from_table({"gemm": "ordered", **table}), Single)
    want = micro_batches(model, context, in_place=False)
    mxref_torch.advance(model)
    context.token_origin = 0
    fresh, fresh_context, _ = built(recipe_from_table({"gemm": "ordered", **table}), Single)
    assert micro_batches(fresh, fresh_context, in_place=True) == want
    assert backend.added == 0


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does
def test_recomputation_and_compilation() -> None:
    model, context, backend = built(model=Single)
    want = micro_batches(model, context, in_place=False)
    plain = model.forward
    model.forward = lambda ids: checkpoint(plain, ids, use_reentrant=False)
    assert micro_batches(model, context, in_place=True) == want
    assert backend.added == 2
    model.forward = plain
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert micro_batches(model, context, in_place=False) == want
    context.sole_uses = sole_uses(model(batch(0)).sum())
    model.zero_grad()
    for number in range(3):
        context.token_origin, context.global_tokens = 64 * number, 192
        loss = compiled(batch(number)).square().mean()
        assert not sole_uses(loss)
        loss.backward()
    assert {name: p.grad.numpy().tobytes() for name, p in model.named_parameters()} == want
    assert backend.added == 2


def operands(key: str, rows: int, seed: int) -> list[torch.Tensor]:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    place, stream = operators.batch_place(0), operators.stream_words(0, 0, 0)
    return list(
        blocks.quantize(
            x, place, key, operators.spec_text(MXFP4.wgrad.x), "", stream, None, operators.WHOLE, False
        )
    )


def test_the_operator_changes_what_it_is_given_and_nothing_on_an_error() -> None:
    key, spec = operators.register_backend(get_backend("reference")), operators.spec_text(MXFP4.wgrad.x)
    a, b = operands(key, 32, 0), operands(key, 16, 1)
    census: operators.Census = operators.Census()
    arguments = (a, b, key, spec, spec, 64, "ordered")
    product = blocks.scaled_gemm(*arguments, "float32", "wgrad", None)
    onto = torch.randn(32, 16)
    held, version, tally = onto.clone(), onto._version, operators.register_census(census)
    assert blocks.add_product(onto, *arguments, "wgrad", tally) is None
    assert torch.equal(onto, held + product)
    assert onto._version > version
    assert list(census.values()) == [1]
    for wrong, error in (
        (held.t(), ShapeError), (held[:, :8], ShapeError), (held.half(), DtypeError),
        (torch.zeros(16, 32).t(), ShapeError),
    ):  # fmt: skip
        before = wrong.clone()
        with pytest.raises(error, match="add_product"):
            blocks.add_product(wrong, *arguments, "wgrad", tally)
        assert torch.equal(wrong, before)
    with pytest.raises(UnsupportedError, match="mxref::add_product has no gradient"):
        blocks.add_product(onto.requires_grad_(), *arguments, "wgrad", tally)
    assert list(census.values()) == [1]
