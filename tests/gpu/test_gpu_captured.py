"""A step captured as one CUDA graph: the bits of the same step uncaptured, and no wait for the GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn import functional as F

from compiled_gradients import Model, recipe_of
from mxref import get_backend
from mxref_torch import CapturedStep, check_census, convert
from mxref_torch.captured.operations import WARM_UP
from mxref_torch.errors import LayerError

WIDTH, BATCH, LENGTH, STEPS = 512, 4, 256, 7
TOKENS = BATCH * LENGTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def loss_of(model: Any, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * factor.mean()


def trained(recipe: str, parts: int, capture: bool, compiled: bool, spoiled: int = -1) -> Any:
    """Return the outcomes and the weights of some steps; the later ones are checked not to wait for the GPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Model(WIDTH).cuda()
    context = convert(model, recipe_of(recipe), backend=get_backend("triton"), seed=3).context
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-8, fused=True)
    take = CapturedStep(
        model, context, loss_of, optimizer, tokens=TOKENS, micro_batches=parts, clip=0.5, capture=capture
    )
    generator, outcomes = torch.Generator().manual_seed(0), []
    for number in range(STEPS):
        ids = torch.randint(64, (BATCH, LENGTH + 1), generator=generator)
        factor = torch.full((BATCH,), float("inf") if number == spoiled else 1.0)
        context.reset_census()
        torch.cuda.set_sync_debug_mode("error" if number > WARM_UP else "default")
        try:
            outcomes.append(take(ids, factor))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if number <= WARM_UP:
            check_census(context, model, recipe_of(recipe), parts)
    outcomes.append(take.finish())
    return outcomes[1:], {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp4_h16", "tseng"])
def test_the_bits_are_those_of_the_step_without_a_graph(recipe, parts, compiled, cases):
    if recipe == "tseng" and not getattr(get_backend("triton").capabilities, "device_steps", False):
        pytest.skip("the backend does not read the step from the device")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outcomes, weights = trained(recipe, parts, capture=True, compiled=compiled)
        want, plain = trained(recipe, parts, capture=False, compiled=compiled)
    finally:
        torch.use_deterministic_algorithms(False)
    assert outcomes == want
    assert all(outcome.updated for outcome in outcomes)
    assert len({outcome.loss for outcome in outcomes}) == STEPS
    for name, t in plain.items():
        assert torch.equal(weights[name], t), name
    cases(STEPS)


@pytest.mark.parametrize("spoiled", [1, WARM_UP + 2])
def test_an_update_that_is_not_finite_is_left_out_on_the_gpu(spoiled):
    outcomes, weights = trained("mxfp4_h16", 1, capture=True, compiled=False, spoiled=spoiled)
    assert [outcome.updated for outcome in outcomes] == [number != spoiled for number in range(STEPS)]
    assert all(bool(torch.isfinite(t).all()) for t in weights.values())


def test_an_x_that_is_prepared_for_several_layers_gives_the_bits_of_one_that_is_not(monkeypatch, cases):
    """A compiler merges the calls of layers with a common X; without one, each layer quantizes X itself."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    backend, found, folded = get_backend("triton"), [], []
    prepare = type(backend)._prepare
    try:
        for reads in (True, False):
            calls: list[int] = []
            monkeypatch.setattr(
                backend, "_prepare", lambda *given, calls=calls: calls.append(1) or prepare(backend, *given)
            )
            monkeypatch.setattr(backend, "reads_left_layouts", reads)
            found.append(trained("mxfp4_h16", 1, capture=True, compiled=True))
            folded.append(len(calls))
    finally:
        torch.use_deterministic_algorithms(False)
    (outcomes, weights), (want, plain) = found
    assert folded[0] > folded[1]
    assert outcomes == want
    for name, t in plain.items():
        assert torch.equal(weights[name], t), name
    cases(STEPS)


def test_a_loss_that_waits_for_the_gpu_is_named_and_the_model_trains_on():
    torch.manual_seed(0)
    model: Any = Model(WIDTH).cuda()
    handle = convert(model, recipe_of("mxfp4_h16"), backend=get_backend("triton"), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-8, fused=True)
    seen: list[float] = []

    def waiting(model: Any, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids, factor)
        seen.append(loss.item())
        return loss

    take = CapturedStep(model, handle, waiting, optimizer, tokens=TOKENS)
    ids, factor = torch.randint(64, (BATCH, LENGTH + 1)), torch.ones(BATCH)
    for _ in range(WARM_UP):
        take(ids, factor)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    torch.cuda.manual_seed(5)
    drawn = [torch.randn(64, device="cuda")]
    with pytest.raises(LayerError, match="cannot be captured as a CUDA graph"):
        take(ids, factor)
    drawn.append(torch.randn(64, device="cuda"))
    torch.cuda.manual_seed(5)
    assert all(torch.equal(t, torch.randn(64, device="cuda")) for t in drawn)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    assert take.finish() is not None
    take = CapturedStep(model, handle, waiting, optimizer, tokens=TOKENS, capture=False)
    for _ in range(2):
        take(ids, factor)
    outcome = take.finish()
    assert outcome is not None
    assert (outcome.step, outcome.updated) == (WARM_UP + 1, True)
    assert outcome.loss < seen[0]
