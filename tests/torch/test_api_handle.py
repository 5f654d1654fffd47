"""The handle of a converted model: it follows optimizers, counts micro-batches, and its state resumes a run."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from api_setup import FP8, PLAIN, REFERENCE, SR, Model, Recorder, assert_same, batch, grads, loss_of, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from mxref.recipe_files import recipe_from_table
from mxref_torch import Handle, advance, check_census, convert
from mxref_torch.errors import LayerError, StepError


def started(recipe: Any = SR, backend: Any = REFERENCE, **given: Any) -> tuple[Model, Handle, Any]:
    model = Model()
    handle = convert(model, recipe, backend=backend, seed=3, **given)
    return model, handle, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, numbers: range, parts: int = 1) -> None:
    for number in numbers:
        for ids in batch(number, 32 * parts).chunk(parts, dim=1):
            loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", [SR, FP8], ids=["SR", "fp8"])
def test_a_followed_loop_takes_the_steps_of_one_that_counts_itself(recipe: Any) -> None:
    model, handle, optimizer = started(recipe)
    handle.follow(optimizer)
    train(model, optimizer, range(3))
    assert handle.step == handle.context.step == 3
    by_hand, other, optimizer = started(recipe)
    for other.step in range(3):
        other.context.token_origin, other.context.global_tokens = 0, 1 << 30
        train(by_hand, optimizer, range(other.step, other.step + 1))
        advance(by_hand)
    assert_same(dict(model.named_parameters()), dict(by_hand.named_parameters()))


def test_micro_batches_draw_the_bits_of_the_whole_batch() -> None:
    made = []
    for parts in (1, 2):
        backend = Recorder()
        model = nn.Sequential(nn.Linear(32, 32))
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 1024).reshape(32, 32))
        handle = convert(model, SR, backend=backend, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle.follow(optimizer)
        for step in range(2):
            x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step), requires_grad=True)
            for part in x.chunk(parts):
                model(part).backward(part.detach())
            optimizer.step()
        made.append(
            [
                np.concatenate(backend.codes(i, step), axis)
                for step in range(2)
                for i, axis in ((0, 0), (2, 0), (4, 1), (5, 1))
            ]
        )
    assert all(map(same, *made))
    # Two steps and two micro-batches have bits of their own.
    whole = made[0]
    assert not same(whole[0][:64], whole[0][64:])


def test_equal_micro_batches_draw_different_bits_however_they_run() -> None:
    x = torch.full((32, 32), 0.3)
    model = nn.Sequential(nn.Linear(32, 32))
    loops = {
        "one after the other": lambda: [model(x).sum().backward() for _ in range(2)],
        "forward passes first": lambda: sum(model(x).sum() for _ in range(2)).backward(),
        "past the model, forward passes first": lambda: sum(model[0](x).sum() for _ in range(2)).backward(),
        "past the model": lambda: [model[0](x).sum().backward() for _ in range(2)],
        "evaluation between": lambda: [(model(x).sum().backward(), evaluated()) for _ in range(2)],
        "reentrant": lambda: [
            checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()
            for _ in range(2)
        ],
    }

    def evaluated() -> None:
        with torch.no_grad():
            model(x)

    backend = Recorder()
    handle = convert(model, SR, backend=backend, seed=3)
    handle.follow(torch.optim.SGD(model.parameters(), lr=0.1))
    for name, loop in loops.items():
        handle.restart()
        backend.made.clear()
        loop()
        made = backend.codes(5)
        assert [same(codes, made[0]) for codes in made] == [True, *[False] * (len(made) - 1)], name
        assert len(made) == 2, name
        handle.restart()


def test_a_place_that_is_set_by_hand_stays() -> None:
    model, handle, optimizer = started()
    handle.follow(optimizer)
    handle.context.global_tokens = 64
    for handle.context.token_origin in (0, 32):
        loss_of(model, batch(0)).backward()
    assert (handle.context.token_origin, handle.context.global_tokens) == (32, 64)
    optimizer.step()
    assert (handle.step, handle.context.token_origin, handle.context.global_tokens) == (1, 32, 64)


def test_short_micro_batches_begin_at_whole_blocks() -> None:
    model, handle, optimizer = started()
    handle.follow(optimizer)
    origins = []
    for _ in range(3):
        origins.append(handle.context.token_origin)
        loss_of(model, batch(0, 10)).backward()
    assert origins == [0, 32, 64]


def test_ranks_draw_bits_of_their_own_and_too_many_tokens_are_refused() -> None:
    model, handle, optimizer = started()
    with pytest.raises(LayerError, match="rank = 2 of ranks = 2: a rank is from 0"):
        handle.follow(optimizer, rank=2, ranks=2)
    handle.follow(optimizer, rank=1, ranks=1 << 20)
    assert handle.context.token_origin == (1 << 30) // (1 << 20) // 256 * 256 == 1024
    for _ in range(2):
        loss_of(model, batch(0, 512)).backward()
    handle._follower._tokens = 32
    with pytest.raises(StepError, match="more than 1024 tokens ran in a step on this rank"):
        model(batch(0))


def test_a_closure_runs_within_its_step() -> None:
    model, handle, optimizer = started()
    handle.follow(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert handle.step == 2
    searching = torch.optim.LBFGS(model.parameters(), max_iter=3)
    handle.follow(searching)

    def again() -> torch.Tensor:
        searching.zero_grad()
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    with pytest.raises(StepError, match="the weights have changed since a forward pass of step"):
        searching.step(again)


def test_several_optimizers_take_one_step_together() -> None:
    model, handle, _ = started()
    of_blocks = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    of_rest = torch.optim.AdamW([model.embed.weight, model.lm_head.weight], lr=0.1)
    with pytest.raises(
        LayerError, match="no followed optimizer holds the weights of lm_head: make the optimizer after"
    ):
        handle.follow(of_blocks)
    handle.follow(of_blocks, of_rest)
    for _ in range(2):
        loss_of(model, batch(0)).backward()
        of_rest.step()
        of_blocks.step()
        of_rest.step()  # nothing was trained since
    assert handle.step == 2


def test_optimizers_that_step_within_the_backward_pass_take_one_step_together() -> None:
    model, handle, _ = started()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handle.follow(*optimizers.values())
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    for number in range(2):
        loss_of(model, batch(number)).backward()
        model.zero_grad()
    assert handle.step == 2


def test_optimizers_that_would_not_be_followed_are_refused() -> None:
    model, handle, optimizer = started()
    with pytest.raises(LayerError, match="takes one or more optimizers, got none"):
        handle.follow()
    with pytest.raises(LayerError, match="takes optimizers of torch.optim, got SGDish"):
        handle.follow(type("SGDish", (), {})())
    other = torch.optim.SGD(Model().parameters(), lr=0.1)
    with pytest.raises(LayerError, match="holds the weights of blocks.0.up, .* lm_head: make"):
        handle.follow(other)
    handle.follow(optimizer)
    with pytest.raises(LayerError, match="followed already: each of its steps would count twice"):
        handle.follow(optimizer)
    with pytest.raises(LayerError, match="another handle follows an optimizer of this model"):
        Handle(model).follow(optimizer)
    handle.unfollow()
    Handle(model).follow(optimizer)
    model.requires_grad_(False)
    convert(model, SR, backend=REFERENCE).follow(other)  # nothing of the model is trained


def test_the_weights_of_a_step_that_is_not_followed_are_still_guarded() -> None:
    model, handle, optimizer = started()
    handle.follow(optimizer)
    train(model, optimizer, range(1))
    loss_of(model, batch(0)).backward()
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    with pytest.raises(StepError, match="random bits would be drawn again"):
        loss_of(model, batch(0))
    handle.restart()
    loss_of(model, batch(0)).backward()


def phases(until: int) -> Any:
    """Return a recipe with FP8 before a step, and SR from it on."""
    table = {"gemm": "ordered", "all": {"rounding": "sr"}, "schedule": [{"until": until, "recipe": "fp8"}]}
    return recipe_from_table(table)


RESUMED = {"SR": SR, "fp8": FP8, "a phase ends with the save": phases(2), "a phase ends after it": phases(3)}


@pytest.mark.parametrize("recipe", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_goes_on_to_the_bit(recipe: Any, tmp_path: Any) -> None:
    model, handle, optimizer = started(recipe)
    handle.follow(optimizer)
    train(model, optimizer, range(2), parts=2)
    torch.save({"model": model.state_dict(), "handle": handle.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, range(2, 4), parts=2)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed, again, optimizer = started(recipe)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["handle"])
    assert again.step == 2
    again.follow(optimizer)
    train(resumed, optimizer, range(2, 4), parts=2)
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()))


def test_a_state_of_another_run_is_refused() -> None:
    _, handle, _ = started(FP8)
    state = handle.state_dict()
    for wrong, message in (
        ({}, "has the keys 'step', 'seed' and 'fp8', got keys $"),
        (state | {"seed": 4}, "saved seed is 4, .* pass seed=4 to convert"),
        (state | {"step": -1}, "step = -1, but it must be a whole number"),
        (state | {"fp8": {}}, "has none for 'blocks.0.down.fp8.amax', so it is of another model"),
        (state | {"fp8": state["fp8"] | {"x": torch.zeros(3)}}, "names 'x'"),
    ):
        with pytest.raises(LayerError, match=message):
            handle.load_state_dict(wrong)
    assert handle.state_dict()["step"] == 0


def test_state_dicts_are_those_of_the_plain_model() -> None:
    for recipe in (SR, FP8):
        model, _, optimizer = started(recipe)
        train(model, optimizer, range(1))
        plain = Model()
        assert list(model.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(model.state_dict(), strict=True)
        model.load_state_dict(Model().state_dict(), strict=True)
        assert_same(model.state_dict(), Model().state_dict())


def test_unconvert_puts_the_plain_layers_back() -> None:
    plain = Model().train()
    seen: list[str] = []
    plain.blocks[0].up.register_forward_hook(lambda *_: seen.append("before"))
    removable = plain.blocks[0].up.register_forward_pre_hook(lambda *_: seen.append("removed"))
    layers = dict(plain.named_modules())
    parameters = {name: id(p) for name, p in plain.named_parameters()}
    handle = convert(plain, PLAIN, backend=REFERENCE)
    plain(batch(0))
    assert seen == ["removed", "before"]
    removable.remove()
    plain.blocks[0].up.register_forward_hook(lambda *_: seen.append("after"))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    handle.follow(optimizer)
    plain.eval()
    assert handle.unconvert() is plain
    seen.clear()
    want, got = Model().eval()(batch(0)), plain(batch(0))
    assert torch.equal(got, want)
    assert seen == ["before", "after"]
    assert {name: id(p) for name, p in plain.named_parameters()} == parameters
    assert all(module is layers[name] and not module.training for name, module in plain.named_modules())
    assert not plain._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(LayerError, match="not converted any more, or was converted again"):
        handle.unconvert()


def test_unconvert_after_parameters_were_replaced_and_after_a_second_conversion() -> None:
    model, first, _ = started()
    model.double().float()  # in place
    model.lm_head.weight = nn.Parameter(torch.ones(32, 32))
    second = convert(model, FP8, backend=REFERENCE)
    with pytest.raises(LayerError, match="converted again; use the newest handle"):
        first.unconvert()
    second.unconvert()
    assert type(model.lm_head) is nn.Linear
    assert (model.lm_head.weight == 1).all()
    with pytest.raises(LayerError, match="no layer of the model is converted"):
        Handle(model)


def test_the_handle_shows_its_layers() -> None:
    _, handle, optimizer = started(FP8, filter_fn=["blocks.*"])
    handle.follow(optimizer)
    digest = FP8.digest
    assert repr(handle).splitlines() == [
        "Handle of 4 converted layers of 5: backend reference, seed 3, step 0, follows 1 optimizers",
        "  layers             fprop  dgrad  wgrad  recipe",
        f"  blocks.*.up    x2  fp8    fp8    fp8    {digest}",
        f"  blocks.*.down  x2  fp8    fp8    fp8    {digest}",
        "  100.0 % of the weights in the matrices of the model's blocks are in low precision",
    ]
    assert handle.layers == ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    assert set(handle.recipes.values()) == {FP8}


def test_the_census_of_a_handle_knows_its_layers() -> None:
    model, handle, _ = started(SR, filter_fn="blocks.*")
    handle.context.reset_census()
    loss_of(model, batch(0)).backward()
    check_census(handle, model, SR)
    assert sum(handle.context.census.values()) == 12
    with pytest.raises(LayerError, match="not converted: lm_head"):
        check_census(handle.context, model, SR)


def test_a_copy_has_a_handle_of_its_own() -> None:
    model, handle, optimizer = started()
    handle.follow(optimizer)
    train(model, optimizer, range(2))
    twin = copy.deepcopy(model)
    own = Handle(twin)
    assert own.context is not handle.context
    followed = torch.optim.SGD(twin.parameters(), lr=0.1)
    own.follow(followed)
    own.context.reset_census()
    handle.context.reset_census()
    loss_of(twin, batch(5)).backward()
    check_census(own, twin, SR)
    assert not handle.context.census
    loss_of(model, batch(5)).backward()
    assert_same(grads(twin), grads(model))
    followed.step()
    assert (own.step, handle.step) == (3, 2)
    own.unconvert()
    assert type(twin.lm_head) is nn.Linear
    assert twin.lm_head.weight is not model.lm_head.weight


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_no_step_whoever_skips_it(fused: bool) -> None:
    """A fused optimizer is called for a step that a scaler skips, and skips the update itself."""
    model, handle, _ = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    handle.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for bad in (False, True, False):
        scaler.scale(loss_of(model, batch(0))).backward()
        seen.append((handle.step, handle.context.token_origin))
        if bad:
            model.lm_head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    tokens = handle.context.token_origin
    assert (handle.step, tokens) == (2, 0)
    assert [step for step, _ in seen] == [0, 1, 1]
    # The repeated step draws other bits than the one that was skipped.
    assert seen[1][1] < seen[2][1]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("step", -1), ("step", 1.5), ("step", True), ("token_origin", -32), ("global_tokens", 0)],
)
def test_a_place_in_training_is_whole_and_not_negative(name: str, wrong: Any) -> None:
    _, handle, _ = started()
    before = getattr(handle.context, name)
    for owner in (handle, handle.context) if name == "step" else (handle.context,):
        with pytest.raises(LayerError, match=f"{name} = {wrong!r}, but it must be a whole number from"):
            setattr(owner, name, wrong)
    assert getattr(handle.context, name) == before


def test_what_belongs_to_the_context_is_not_set_on_the_handle() -> None:
    _, handle, _ = started()
    for name in ("token_origin", "global_tokens", "sole_uses"):
        with pytest.raises(AttributeError, match=name):
            setattr(handle, name, 0)
