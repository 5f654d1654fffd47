"""A step whose outcome is read a step late: on a CPU without its graph, which tests/gpu has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from usual import usual

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F

from compiled_gradients import Model, recipe_of
from mxref import get_backend
from mxref.errors import ShapeError, UnsupportedError
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import CapturedStep, StepOutcome, advance, check_census, convert
from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError, StepError

LR, CLIP, BATCH, LENGTH = 2.0**-8, 0.5, 4, 32
TOKENS = BATCH * LENGTH
STEPS = 5
PHASES = recipe_from_table(
    {
        "dialect": "amd",
        "all": {"hadamard": 16},
        "schedule": [{"until": 3, "recipe": {"all": {"format": "fp8"}}}],
    }
)


def loss_of(model: nn.Module, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * factor.mean()


def batches(spoiled: dict[int, float] | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        factor = torch.full((BATCH,), (spoiled or {}).get(number, 1.0))
        yield torch.randint(64, (BATCH, LENGTH + 1), generator=generator), factor


def made(recipe: str, backend: Any = None) -> tuple[Any, Any, torch.optim.AdamW]:
    torch.manual_seed(0)
    model: Any = Model(64, 1)
    chosen = PHASES if recipe == "phases" else recipe_of(recipe)
    context = convert(model, chosen, backend=backend or get_backend("numba"), seed=3).context
    return model, context, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def weights(model: nn.Module) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in model.state_dict().items()}


def plainly(recipe: str, parts: int, spoiled: dict[int, float] | None = None) -> tuple[list[float], Any]:
    """Return losses and weights of a plain loop, which asks for each value at once."""
    model, context, optimizer = made(recipe)
    losses = []
    for context.step, batch in enumerate(batches(spoiled)):
        context.global_tokens, total = TOKENS, 0.0
        for number, part in enumerate(zip(*(t.chunk(parts) for t in batch), strict=True)):
            context.token_origin = number * TOKENS // parts
            loss = loss_of(model, *part) / parts
            total += loss.item()
            loss.backward()
        if math.isfinite(total):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        optimizer.zero_grad()
        advance(model)
        losses.append(total)
    return losses, weights(model)


def stepping(recipe: str, parts: int, backend: Any = None) -> tuple[CapturedStep, Any]:
    model, context, optimizer = made(recipe, backend)
    take = CapturedStep(
        model, context, loss_of, optimizer, tokens=TOKENS, micro_batches=parts, clip=CLIP, capture=False
    )
    return take, model


def taken(take: CapturedStep, spoiled: dict[int, float] | None = None) -> list[StepOutcome]:
    outcomes = [take(*batch) for batch in batches(spoiled)]
    assert outcomes[0] is None
    last = take.finish()
    assert take.finish() is None
    found = [outcome for outcome in (*outcomes, last) if outcome is not None]
    assert [outcome.step for outcome in found] == list(range(STEPS))
    return found


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp4_h16", "tseng", "mixed", "keys", "phases"])
def test_losses_and_weights_are_those_of_a_plain_loop(recipe: str, parts: int) -> None:
    small = {1: 2.0**-7, 4: 2.0**-5}
    want, trained = plainly(recipe, parts, small)
    take, model = stepping(recipe, parts)
    found = taken(take, small)
    assert [outcome.loss for outcome in found] == want
    assert {outcome.norm > CLIP for outcome in found} == {False, True}  # a norm below it scales nothing
    assert all(outcome.updated and not outcome.nonfinite and not outcome.widened for outcome in found)
    assert weights(model) == trained
    assert take.context.step == STEPS - 1


def test_every_phase_has_a_capture_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    take, model = stepping("phases", 1)
    replayed = []

    class Graph:
        def replay(self) -> None:
            replayed.append(take.context.step)
            take._runner._whole()

    monkeypatch.setattr(take._runner, "capture", True)
    monkeypatch.setattr(take._runner, "_captured", Graph)
    found = taken(take)
    assert replayed == [2]  # the steps 3 and 4 warm up the second phase
    want, trained = plainly("phases", 1)
    assert [outcome.loss for outcome in found] == want
    assert weights(model) == trained


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_h16"])
def test_a_loss_that_is_not_finite_updates_nothing(recipe: str) -> None:
    spoiled = {1: math.inf, 3: math.nan}
    want, trained = plainly(recipe, 1, spoiled)
    take, model = stepping(recipe, 1)
    found = taken(take, spoiled)
    assert [outcome.updated for outcome in found] == [True, False, True, False, True]
    assert [outcome.loss for outcome in found if outcome.updated] == [x for x in want if math.isfinite(x)]
    assert math.isnan(found[1].norm)
    assert weights(model) == trained


def test_the_weight_whose_gradient_is_not_finite_is_named() -> None:
    take, model = stepping("bf16", 1)
    before = weights(model)
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * math.inf)
    take(*next(batches()))
    outcome = take.finish()
    assert outcome is not None
    assert math.isfinite(outcome.loss)
    assert not math.isfinite(outcome.norm)
    assert not outcome.updated
    assert outcome.nonfinite == "blocks.0.up.weight"
    assert weights(model) == before


class Ranged(ReferenceBackend):
    """Spoils the products of one step unless it is widened, and says so in a word on the device."""

    def __init__(self, where: int) -> None:
        self.where, self.context, self.wide = where, None, False
        self.word = torch.zeros(1, dtype=torch.int32)
        self.repeated: list[int] = []

    def range_words(self) -> tuple[torch.Tensor, ...]:
        return (self.word,)

    @contextmanager
    def widened(self) -> Iterator[None]:
        self.wide = True
        yield
        self.wide = False
        self.repeated.append(self.context.step)

    def scaled_gemm(self, a: Any, b: Any, **named: Any) -> Any:
        out = super().scaled_gemm(a, b, **named)
        if self.context.step == self.where and not self.wide:
            self.word.fill_(1)
            return out * 0 + 1
        return out


@pytest.mark.parametrize("where", [0, 2, STEPS - 1])
@pytest.mark.parametrize("recipe", ["mxfp4_h16", "mixed"])
def test_a_step_out_of_range_is_repeated_before_the_next_one_counts(recipe: str, where: int) -> None:
    want, trained = plainly(recipe, 1)
    backend: Any = Ranged(where)
    take, model = stepping(recipe, 1, backend)
    backend.context = take.context
    found = taken(take)
    assert backend.repeated == [where]
    assert [outcome.widened for outcome in found] == [number == where for number in range(STEPS)]
    assert [outcome.loss for outcome in found] == want
    assert weights(model) == trained


def test_the_learning_rate_follows_a_scheduler_and_a_number() -> None:
    take, _ = stepping("bf16", 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(take.optimizer, 0.5)
    rates = []
    for number, batch in enumerate(batches()):
        if number == 3:
            take.optimizer.param_groups[0]["lr"] = 0.25
        take(*batch)
        rates.append(float(take.optimizer.param_groups[0]["lr"]))
        take.finish()
        if number < 2:
            schedule.step()
    assert rates == [LR, LR / 2, LR / 4, 0.25, 0.25]


def test_the_census_counts_each_step_that_ran_one_operation_at_a_time() -> None:
    take, model = stepping("mxfp4_h16", 2)
    for batch in batches():
        take.context.reset_census()
        take(*batch)
        check_census(take.context, model, recipe_of("mxfp4_h16"), 2)


def test_what_cannot_be_captured_is_refused() -> None:
    model, context, optimizer = made("mxfp4_h16")
    with pytest.raises(
        UnsupportedError, match="CUDA graph needs a GPU, and the model is on cpu: pass capture=False"
    ):
        CapturedStep(model, context, loss_of, optimizer, tokens=TOKENS, capture=True)
    plain = torch.optim.AdamW(model.parameters(), lr=LR)
    with pytest.raises(LayerError, match="needs a fused optimizer.*: pass fused=True to AdamW"):
        CapturedStep(model, context, loss_of, plain, tokens=TOKENS)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(
        LayerError, match=r"has hooks, which a CUDA graph does not run .*CapturedStep moves the step itself"
    ):
        CapturedStep(model, context, loss_of, optimizer, tokens=TOKENS)
    hook.remove()
    assert CapturedStep(model, Handle(model), loss_of, optimizer, tokens=TOKENS).context is context
    take = CapturedStep(model, context, loss_of, optimizer, tokens=TOKENS, micro_batches=3)
    batch = next(batches())
    with pytest.raises(ShapeError, match=r"shape \(4, 33\) does not split into 3 equal micro-batches"):
        take(*batch)
    take = CapturedStep(model, context, loss_of, optimizer, tokens=TOKENS)
    take(*batch)
    with pytest.raises(ShapeError, match="takes one shape"):
        take(*(t[:2] for t in batch))
    with pytest.raises(StepError, match="step 0 was started already"):
        take(*batch, step=0)
    model.head.to("meta")
    with pytest.raises(LayerError, match=r"one device, got \['cpu', 'meta'\]"):
        CapturedStep(model, context, loss_of, optimizer, tokens=TOKENS)


class Weights(ReferenceBackend):
    """Counts the reads of weights [128, 64], a shape that nothing else has here."""

    reads = 0

    def quantize(self, x: Any, spec: Any, **named: Any) -> Any:
        self.reads += tuple(x.shape) == (128, 64)
        return super().quantize(x, spec, **named)

    def quantize_dual(self, x: Any, specs: Any, **named: Any) -> Any:
        self.reads += tuple(x.shape) == (128, 64)
        return super().quantize_dual(x, specs, **named)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recipe", usual(["fp8", "mxfp4_h16", "mixed"], "mxfp4_h16"))
def test_compiled_blocks_read_weights_that_were_made_once_for_all_micro_batches(
    recipe: str,
) -> None:
    torch._dynamo.reset()
    want, trained = plainly(recipe, 2)
    backend = Weights()
    take, model = stepping(recipe, 2, backend)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert [outcome.loss for outcome in taken(take)] == want
    # up and gate
    assert backend.reads == STEPS * (0 if recipe == "fp8" else 2)
    assert list(weights(model).values()) == list(trained.values())
