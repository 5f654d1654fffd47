"""Telemetry of a step: every number against a naive NumPy computation, and no bit of the step moved."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import apart
import mxref
import mxref_torch
from mxref import Placement, Stream
from mxref.formats import BlockFormat
from mxref.recipe import OperandSpec, Recipe
from mxref.recipe_files import recipe_from_table
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import draw_rotation, hadamard
from mxref_torch.checks.measures import Rounded, Telemetry, highest_scale

TOKENS, INPUTS, OUTPUTS, STEP, SEED = 48, 64, 32, 7, 5

RECIPES: dict[str, dict[str, Any]] = {
    "floor": {"all": {"format": "mxfp4"}},
    "sr and random signs": {
        "dialect": "amd",
        "all": {"rounding": "sr", "hadamard": 16, "signs": "per_step_layer"},
    },
    "mxfp8": {"all": {"format": "mxfp8_e4m3", "hadamard": 32}},
    "nvidia": {"dialect": "nvidia", "all": {"prescale": True}},
    "fp8, delayed": {"all": {"format": "fp8"}},
    "fp8, current": {"all": {"format": "fp8"}, "fp8_scaling": "current"},
    "mixed": {
        "fprop": {"format": "mxfp8_e5m2"},
        "dgrad": {"format": "fp8"},
        "wgrad": {"format": "mxfp4", "rounding": "sr"},
    },
    "nothing coincides": apart.FIRST,
    "nvfp4": {
        "all": {"format": "nvfp4"},
        "fprop": {"w": {"block": "16x16"}},
        "wgrad": {"hadamard": 16, "signs": "fixed", "rounding": "sr"},
    },
    "wgrad in bf16": {"fprop": {"format": "mxfp4"}, "dgrad": {"format": "bf16"}, "wgrad": {"format": "bf16"}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(INPUTS, INPUTS, bias=False)
        self.second = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))


def converted(recipe: Recipe, net: nn.Module | None = None) -> tuple[nn.Module, mxref_torch.StepContext]:
    net = net or Net()
    context = mxref_torch.convert(net, recipe, backend="reference", seed=SEED)
    context = getattr(context, "context", context)
    context.step = STEP
    return net, context


def tokens(number: int = 0, count: int = TOKENS) -> torch.Tensor:
    """An input with zeros, outliers and subnormal blocks, so that every count has something to count."""
    rng = np.random.default_rng(number)
    x = rng.standard_normal((count, INPUTS)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[3, 5] = 300.0
    x[:, 32:40] *= 1e-3
    x[32:, :] *= np.float32(2.0**-126)
    x[5] = 0
    return torch.from_numpy(x)


def backward(net: nn.Module, x: torch.Tensor) -> None:
    net(x).square().sum().backward()


def naive(
    layer: Any, role: GemmRole, which: int, source: np.ndarray[Any, Any], scale: float | None
) -> dict[str, Any]:
    """The row of an operand from its definition, element by element."""
    operand, spec = OPERANDS[role][which], layer.recipe.operands(role)[which]
    if spec.format.kind == "fp8":
        v = source.astype(np.float64)
        q, limit = _fp8(source, operand.tensor, np.float32(scale))
        scales: list[float] = [1 / float(np.float32(1) / np.float32(scale))]
        low = high = None
        nonfinite = 0.0
    else:
        v, q, limit, codes = _block(layer, spec, role, which, source)
        own = np.abs(v).reshape(*codes.shape, spec.format.k).max(axis=2) > 0
        scales = [float(code) for code in codes[own]]
        low = 100 * np.mean(codes[own] == 0)
        high = 100 * np.mean(codes[own] >= highest_scale(spec.scale_rule, spec.format))
        nonfinite = 0.0
    pairs = list(zip(v.ravel().tolist(), q.ravel().tolist(), limit.ravel().tolist(), strict=True))
    real = [(a, b, c) for a, b, c in pairs if a]
    signal, noise = sum(a * a for a, _, _ in pairs), sum((b - a) ** 2 for a, b, _ in pairs)
    return {
        "elements": len(pairs),
        "nonzero": len(real),
        "clipped": 100 * sum(abs(a) > c for a, _, c in real) / len(real),
        "zeroed": 100 * sum(b == 0 for _, b, _ in real) / len(real),
        "snr": 10 * math.log10(signal / noise),
        "bias": sum(math.copysign(b - a, (b - a) * a) for a, b, _ in real) / sum(abs(a) for a, _, _ in real),
        "scale_min": min(scales),
        "scale_max": max(scales),
        "scale_low": low,
        "scale_high": high,
        "nonfinite": nonfinite,
    }


def _fp8(source: Any, tensor: str, scale: np.float32) -> tuple[Any, Any]:
    name, largest = ("float8_e5m2", 57344.0) if tensor == "dy" else ("float8_e4m3fn", 448.0)
    scaled = np.clip(source.astype(np.float32) * scale, -largest, largest)
    inverse = float(np.float32(1) / scale)
    q = scaled.astype(getattr(ml_dtypes, name)).astype(np.float64) * inverse
    return q, np.full(source.shape, largest * inverse * (1 + 2.0**-20))


def _block(layer: Any, spec: OperandSpec, role: GemmRole, which: int, source: Any) -> tuple[Any, ...]:
    operand, format = OPERANDS[role][which], spec.format
    assert isinstance(format, BlockFormat)
    stream = Stream(SEED, STEP, layer.index, operand.id)
    stored = mxref.quantize(
        source, spec, axis=operand.axis, placement=Placement(stream), pad=operand.tensor != "w"
    )
    rows = np.moveaxis(source, operand.axis, 1).astype(np.float32)
    v = np.pad(rows, [(0, 0), (0, stored.length - rows.shape[1])])
    if spec.hadamard:
        v = hadamard(v, draw_rotation(spec.hadamard, spec.signs, stream))
    factor = {"E2M1": 3 / 4, "E4M3": 7 / 8, "E5M2": 7 / 8}[format.element.name] if spec.prescale else 1.0
    tensor = stored.tensor_scale
    whole = mxref.MXArray(stored.codes, stored.scales, v.shape, 1, format=format, tensor_scale=tensor)
    q = mxref.dequantize(whole, "float64" if tensor is None else "float32").astype(np.float64) / factor
    largest = {"E2M1": 6.0, "E4M3": 448.0, "E5M2": 57344.0}[format.element.name]
    unit = largest / factor * np.array(format.scale.values)[stored.scales]
    if tensor is not None:
        unit = unit * float(tensor[0]) * (1 + 2.0**-20)
    return v.astype(np.float64), q, np.repeat(unit, format.k, axis=1), stored.scales


def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record every call of `MXLinear.operands`: the layer, the tensor, its values, what was made, and for whom."""
    calls: list[tuple[Any, ...]] = []
    original = mxref_torch.MXLinear.operands

    def recorded(
        self: Any, tensor: str, values: Any, place: Any, gemms: Any, record_amax: bool = False
    ) -> Any:
        made = original(self, tensor, values, place, gemms, record_amax)
        calls.append((self, tensor, values.detach().clone(), made, record_amax))
        return made

    monkeypatch.setattr(mxref_torch.MXLinear, "operands", recorded)
    return calls


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_that_of_its_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_from_table(RECIPES[name])
    net, _ = converted(recipe)
    if "delayed" in name:  # the scales of a second step come from the first
        backward(net, tokens(1) / 4)
        mxref_torch.advance(net)
        net.zero_grad()
    calls = reads(monkeypatch)
    with mxref_torch.telemetry(net) as seen:
        backward(net, tokens())
    rows = {(row["layer"], row["role"], row["operand"]): row for row in seen.rows}
    wanted = 0
    for name_of, layer in (("first", net.first), ("second", net.second)):
        source = {tensor: values for which, tensor, values, _, _ in calls if which is layer}
        for role in GemmRole:
            kind = recipe.kind(role)
            if kind == "bf16" or (role is GemmRole.DGRAD and layer is net.first):
                continue  # nothing is quantized, or no GEMM runs
            for which, operand in enumerate(OPERANDS[role]):
                scale = _scale(layer, operand.tensor, source[operand.tensor]) if kind == "fp8" else None
                expected = naive(layer, role, which, source[operand.tensor].numpy(), scale)
                row = rows[name_of, role.value, operand.tensor]
                assert row["format"] == layer.recipe.operands(role)[which].format.name
                for key, value in expected.items():
                    assert row[key] == (
                        value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)
                    ), (
                        key,
                        row,
                    )
                wanted += 1
    gradients = [row for row in rows.values() if row["operand"] == "dw"]
    assert len(gradients) == (0 if recipe.kind(GemmRole.WGRAD) == "bf16" else 2)
    assert len(rows) == wanted + len(gradients)


def test_a_limit_of_clipping_without_the_prescale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only FLOOR tells: under it a prescaled element lies above the largest one, and is not clipped."""
    right = Rounded.slabs

    def planted(self: Any, *given: Any) -> Any:
        for v, q, limit, valid in right(self, *given):
            yield v, q, limit * self.prescale, valid

    monkeypatch.setattr(Rounded, "slabs", planted)
    with pytest.raises(AssertionError, match="clipped"):
        test_every_number_is_that_of_its_definition("nothing coincides", monkeypatch)


def _scale(layer: Any, tensor: str, values: torch.Tensor) -> float:
    """The scale of FP8 that is in force: that of the buffer, or one from the tensor's own largest magnitude."""
    kept = layer.fp8.scale[("x", "w", "dy").index(tensor)].item() if hasattr(layer, "fp8") else 0.0
    largest = np.float32(57344.0 if tensor == "dy" else 448.0)
    return kept or float(largest / np.float32(values.abs().max().item()))


@pytest.mark.parametrize("name", ["sr and random signs", "mixed", "fp8, current"])
def test_alignment_is_that_of_the_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, context = converted(recipe_from_table(RECIPES[name]))
    calls = reads(monkeypatch)
    exact, quantized = [], []
    with mxref_torch.telemetry(net) as seen:
        for number in range(2):
            context.token_origin, context.global_tokens = number * 64, 128
            before = len(calls)
            net.zero_grad()
            backward(net, tokens(number, 64))
            source = {t: v.double() for layer, t, v, _, _ in calls[before:] if layer is net.second}
            exact.append(source["dy"].T @ source["x"])
            quantized.append(net.second.weight.grad.double())
    row = next(row for row in seen.rows if (row["layer"], row["operand"]) == ("second", "dw"))
    e, q = torch.stack(exact).flatten(), torch.stack(quantized).flatten()
    assert row["cosine"] == pytest.approx(float(e @ q / (e.norm() * q.norm())), rel=1e-5)
    assert row["norm_ratio"] == pytest.approx(float(q.norm() / e.norm()), rel=1e-5)
    assert row["cosine"] < 0.9999


def run(net: nn.Module, context: Any, measured: bool, steps: int = 2) -> tuple[list[Any], list[Any]]:
    """Train a few steps of two micro-batches; return all gradients, weights and buffers, and the rows."""
    held, rows = [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(steps):
        context.step, context.global_tokens = step, 128
        with mxref_torch.telemetry(net) if measured else nullcontext(Telemetry({})) as seen:
            for number in range(2):
                context.token_origin = number * 64
                loss = net(tokens(number, 64)).square().sum()
                context.sole_uses = mxref_torch.sole_uses(loss) if number else {}
                loss.backward()
                context.sole_uses = {}
        rows += seen.rows
        held += [p.grad.clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]
        optimizer.step()
        optimizer.zero_grad()
        mxref_torch.advance(net)
        held += [p.detach().clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]
    return held, rows


@pytest.mark.parametrize("name", ["sr and random signs", "fp8, delayed", "mixed", "nvfp4"])
def test_nothing_of_the_step_moves(name: str) -> None:
    recipe = recipe_from_table(RECIPES[name])
    (plain, own), (watched, other) = (converted(recipe) for _ in range(2))
    without, _ = run(plain, own, measured=False)
    state = torch.random.get_rng_state()
    held, rows = run(watched, other, measured=True)
    assert rows
    assert all(torch.equal(a, b) for a, b in zip(without, held, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert other.census == own.census
    assert other.counted() == own.counted()
    assert not watched.first._forward_hooks
    assert not watched.second._forward_hooks


@pytest.mark.parametrize("name", ["sr and random signs", "fp8, delayed", "nvfp4"])
def test_the_operands_measured_are_those_that_the_step_multiplies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, context = converted(recipe_from_table(RECIPES[name]))
    context.token_origin, context.global_tokens = 96, 1024
    calls = reads(monkeypatch)
    with mxref_torch.telemetry(net):
        backward(net, tokens(0, 64))
    compared = 0
    for layer, tensor, _, made, recorded in calls:
        if not recorded:
            continue
        again = next(m for own, t, _, m, other in calls if own is layer and t == tensor and not other)
        for role, operand in made.items():
            assert all(
                torch.equal(_bytes(a), _bytes(b))
                for a, b in zip(operand.saved(), again[role].saved(), strict=True)
            )
            compared += 1
    # X of both layers for two GEMMs, dY for two, and for Wgrad alone in the first; W of each GEMM alone.
    assert compared == 2 * 2 + 2 + 1 + 3


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_measures_every_micro_batch_once(reentrant: bool) -> None:
    recipe = recipe_from_table(RECIPES["sr and random signs"])

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.net, x, use_reentrant=reentrant)

    def rows(net: nn.Module) -> list[dict[str, Any]]:
        net, _ = converted(recipe, net)
        with mxref_torch.telemetry(net) as seen:
            backward(net, tokens().requires_grad_())
        return [row | {"layer": row["layer"].removeprefix("net.")} for row in seen.rows]

    assert rows(Checkpointed()) == rows(Net())


def test_a_shared_layer_finds_the_input_of_each_use() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Net().first

        def forward(self, x: torch.Tensor) -> Any:
            return self.first(torch.nn.functional.relu(self.first(x), inplace=True))

    net, _ = converted(recipe_from_table(RECIPES["floor"]), Twice())
    with mxref_torch.telemetry(net) as seen:
        backward(net, tokens())
    (row,) = (row for row in seen.rows if (row["role"], row["operand"]) == ("fprop", "x"))
    assert row["elements"] == 2 * TOKENS * INPUTS
    (gradient,) = (row for row in seen.rows if row["operand"] == "dw")
    assert 0.9 < gradient["cosine"] < 1


def test_evaluation_bf16_and_kept_layers_have_no_rows() -> None:
    net, _ = converted(recipe_from_table({"all": {"format": "mxfp4"}, "keep_bf16": ["second"]}))
    with mxref_torch.telemetry(net) as seen:
        with torch.no_grad():
            net(tokens())
        assert seen.rows == []
        backward(net, tokens())
    assert {row["layer"] for row in seen.rows} == {"first"}
    net, _ = converted(recipe_from_table({"all": {"format": "bf16"}}))
    with mxref_torch.telemetry(net) as seen:
        backward(net, tokens())
    assert seen.rows == []


def test_a_block_of_nan_counts_apart() -> None:
    net, _ = converted(recipe_from_table(RECIPES["floor"]))
    x = tokens()
    x[0, 0] = math.nan
    with mxref_torch.telemetry(net) as seen:
        backward(net, x)
    row = next(row for row in seen.rows if (row["layer"], row["operand"]) == ("first", "x"))
    clean = tokens()
    clean[0, :32] = 0
    blocks = TOKENS * INPUTS // 32
    assert row["nonfinite"] == pytest.approx(100 / (blocks - 2))  # row 5 is zero and has no scale of its own
    assert row["nonzero"] == int(clean.ne(0).sum())
    assert math.isfinite(row["snr"])
    gradient = next(row for row in seen.rows if row["operand"] == "dw")
    assert gradient["cosine"] is None


def test_a_model_or_its_handle_is_taken_and_nothing_else() -> None:
    net, _ = converted(recipe_from_table(RECIPES["floor"]))

    class Handle:
        model = net

    with mxref_torch.telemetry(Handle()) as seen:
        backward(net, tokens())
    assert isinstance(seen, Telemetry)
    assert seen.rows
    with (
        pytest.raises(mxref_torch.LayerError, match="expected a model.*got str"),
        mxref_torch.telemetry("net"),
    ):
        pass


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing
def test_compiled_layers_are_measured_eagerly() -> None:
    net, _ = converted(recipe_from_table(RECIPES["floor"]))
    compiled = torch.compile(net, backend="eager")
    backward(compiled, tokens())
    mxref_torch.restart(net)
    with mxref_torch.telemetry(compiled) as seen:
        backward(compiled, tokens())
    assert {row["layer"] for row in seen.rows} == {"first", "second"}
    torch.compiler.reset()


def test_autocast_and_a_recipe_for_a_region_are_measured_as_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = converted(recipe_from_table({"all": {"format": "bf16"}}))
    calls = reads(monkeypatch)
    with mxref_torch.telemetry(net) as seen:
        with mxref_torch.recipe("mxfp4", net), torch.autocast("cpu", torch.bfloat16):
            loss = net(tokens(0, 64)).float().square().sum()
        loss.backward()
    assert {row["format"] for row in seen.rows} == {"mxfp4"}
    read = [(own, values) for layer, t, values, _, own in calls if layer is net.second and t == "x"]
    (step,), (again,) = ([values for own, values in read if own is whose] for whose in (True, False))
    assert step.dtype is again.dtype is torch.bfloat16
    assert torch.equal(step, again)


def test_a_backward_pass_within_autocast_is_measured_without_it() -> None:
    rows = []
    for within in (True, False):
        net, _ = converted(recipe_from_table({"all": {"format": "mxfp4"}}))
        with mxref_torch.telemetry(net) as seen:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(tokens(0, 64)).float().square().sum()
                if within:
                    loss.backward()
            if not within:
                loss.backward()
        rows.append(seen.rows)
    assert rows[0] == rows[1]
