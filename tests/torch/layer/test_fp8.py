"""The FP8 baseline: casts against ml_dtypes, scales against the formula, history over steps."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from mxref import get_backend
from mxref.recipe import Fp8Scaling
from mxref.recipe_files import recipe_from_table
from mxref_torch import (
    advance,
    convert,
)
from mxref_torch.layer.fp8 import FORMATS, Fp8Scales, advance_scales, cast, scale_from_amax
from mxref_torch.operators import dense
from mxref_torch.optimizer_step import fp8_history, load_fp8_history

LIMITS = {"x": 448.0, "w": 448.0, "dy": 57344.0}
DTYPES = {"x": ml_dtypes.float8_e4m3fn, "w": ml_dtypes.float8_e4m3fn, "dy": ml_dtypes.float8_e5m2}
FLT_MAX = float(np.finfo(np.float32).max)


def bits_of(q):
    return q.view(torch.uint8).numpy()


def scalar_cast(x, scale, tensor):
    """One element after another: multiply in float32, saturate, round by ml_dtypes; NaN stays NaN."""
    limit, dtype = np.float32(LIMITS[tensor]), DTYPES[tensor]
    out = np.empty(x.shape, np.uint8)
    with np.errstate(all="ignore"):
        for i, value in enumerate(x):
            v = np.float32(value) * np.float32(scale)
            if np.isnan(v):
                v = np.float32(np.nan)
            elif abs(v) > limit:
                v = np.copysign(limit, v)
            out[i] = np.array([v], np.float32).astype(dtype).view(np.uint8)[0]
    return out


def assert_same_codes(got, expected, tensor):
    """Equal codes, any NaN being equal to any NaN."""
    nan = np.isnan(expected.view(DTYPES[tensor]).astype(np.float32))
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    assert np.isnan(got[nan].view(DTYPES[tensor]).astype(np.float32)).all()


def scalar_scale(amax, tensor, previous=1.0):
    """The formula for one tensor, in Python."""
    if not np.isfinite(amax) or amax == 0:
        return np.float32(previous)
    with np.errstate(over="ignore"):
        return np.minimum(np.float32(LIMITS[tensor]) / np.float32(amax), np.float32(FLT_MAX))


@pytest.mark.clause("fp8.cast", evidence="peer")
@pytest.mark.parametrize("tensor", ["x", "w", "dy"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 7e-39, 3e38])
def test_cast_is_saturating_rne_for_every_bfloat16(tensor, scale):
    values = np.arange(1 << 16, dtype=np.uint16)
    x = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    floats = x.float().numpy()
    some = np.unique(np.r_[0:65536:61, 0x7F7F:0x7F90, 0xFF7F:0xFF90])
    got = bits_of(cast(x, torch.tensor(scale), tensor))
    assert_same_codes(got[some], scalar_cast(floats[some], scale, tensor), tensor)


@pytest.mark.clause("fp8.cast", evidence="peer")
@pytest.mark.parametrize("tensor", ["x", "dy"])
def test_ties_and_the_edge_of_the_range(tensor):
    grid = np.arange(256, dtype=np.uint8).view(DTYPES[tensor]).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    middles = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)  # exact in float32
    limit = np.float32(LIMITS[tensor])
    edges = np.array([limit, limit * 1.01, limit * 1.125, limit * 2, FLT_MAX, np.inf], np.float32)
    x = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9e9)), edges, -edges]
    )
    got = bits_of(cast(torch.from_numpy(x), torch.tensor(1.0), tensor))
    np.testing.assert_array_equal(got, scalar_cast(x, 1.0, tensor))
    assert np.abs(got.view(DTYPES[tensor]).astype(np.float32)).max() == limit


@pytest.mark.clause("fp8.scale", evidence="known answer")
@pytest.mark.parametrize("tensor", ["x", "w", "dy"])
def test_scale_formula(tensor):
    rng = np.random.default_rng(1)
    amax = np.abs(rng.standard_normal(3000) * 10.0 ** rng.integers(-44, 38, 3000)).astype(np.float32)
    amax = np.append(amax, np.float32([0, 1e-45, 1e-38, FLT_MAX, np.inf, np.nan]))
    previous = np.full_like(amax, 0.125)
    limit = torch.full((len(amax),), LIMITS[tensor])
    got = scale_from_amax(torch.from_numpy(amax), limit, torch.from_numpy(previous)).numpy()
    np.testing.assert_array_equal(got, [scalar_scale(a, tensor, 0.125) for a in amax])
    assert got.max() == np.float32(FLT_MAX)
    assert list(got[[-6, -2, -1]]) == [0.125] * 3


def with_neighbours(values):
    """Float32 bits of values and of the next ones on both sides."""
    return np.unique(np.concatenate([values.view(np.uint32) + np.uint32(d) for d in (0, 1, 0xFFFFFFFF)]))


@pytest.mark.clause("fp8.cast")
@pytest.mark.parametrize("tensor", ["x", "dy"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-38])
def test_cast_matches_the_oracle(tensor, scale):
    grid = np.arange(256, dtype=np.uint8).view(DTYPES[tensor]).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    turns = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [1e-45, -1e-45, -0.0]])
    with np.errstate(over="ignore"):
        values = (turns / scale).astype(np.float32)
    bits = np.concatenate([with_neighbours(values), np.uint32([0x7F7FFFFF, 0x7F800000, 0xFF800000])])
    scale = np.float32(scale)
    name = FORMATS[tensor].name
    want = [oracle.fp8_cast(b, int(scale.view(np.uint32)), name) for b in bits.tolist()]
    got = bits_of(cast(torch.from_numpy(bits.view(np.float32)), torch.tensor(scale), tensor))
    assert_same_codes(got, np.array(want, np.uint8), tensor)


@pytest.mark.clause("fp8.scale")
@pytest.mark.parametrize("tensor", ["x", "dy"])
def test_scale_matches_the_oracle(tensor):
    rng = np.random.default_rng(4)
    bits = np.append(
        rng.integers(0, 0x7F800001, 4000), [0, 1, 2, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    )
    amax = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    got = scale_from_amax(amax, torch.full_like(amax, LIMITS[tensor]), torch.full_like(amax, 0.125))
    want = [oracle.fp8_scale(b, FORMATS[tensor].name) for b in bits.tolist()]
    previous = int(np.float32(0.125).view(np.uint32))
    assert got.numpy().view(np.uint32).tolist() == [previous if w is None else w for w in want]
    assert want.count(None) == 3


@pytest.mark.clause("fp8.formats", evidence="known answer")
def test_weights_and_activations_are_e4m3_and_gradients_e5m2():
    assert {name: format.name for name, format in FORMATS.items()} == {"x": "E4M3", "w": "E4M3", "dy": "E5M2"}


@pytest.mark.clause("fp8.current", "fp8.scale", evidence="known answer")
def test_current_scaling_has_no_state_and_uses_the_tensor_itself():
    scales = Fp8Scales(Fp8Scaling.CURRENT)
    assert scales.state_dict() == {}
    for amax in (3.0, 1e-3, 0.0, np.inf, np.nan):
        q = scales.quantize("dy", torch.tensor([0.0, -amax]))
        scale = scalar_scale(amax, "dy")
        assert q.inverse.numpy() == np.float32(1) / scale
        np.testing.assert_equal(q.amax.item(), np.float32(amax))
        scales.record_amax("dy", q.amax)
        advance_scales([scales])


@pytest.mark.clause("fp8.delayed", "fp8.scale", evidence="known answer")
def test_delayed_scaling_over_steps():
    scales = Fp8Scales(Fp8Scaling.DELAYED)
    steps = [[2.0, 5.0], [0.5], [0.0], [np.inf, 1.0], [np.nan, 7.0], [3.0, 9.0], [4.0]]
    in_force = None
    for micro_batches in steps:
        for amax in micro_batches:
            x = torch.tensor([amax / 2, -amax, 0.1 if amax else 0.0])
            q = scales.quantize("x", x)
            scale = scalar_scale(amax, "x") if in_force is None else in_force
            assert q.inverse.numpy() == np.float32(1) / scale
            assert_same_codes(bits_of(q.data), scalar_cast(x.numpy(), scale, "x"), "x")
            scales.record_amax("x", q.amax)
            scales.record_amax("x", q.amax)  # recomputation sees it again
        advance_scales([scales])
        in_force = scalar_scale(np.max(micro_batches), "x", 1.0 if in_force is None else in_force)
        assert scales.scale[0].item() == in_force
    # The steps with amax 0, inf and NaN kept the scale of amax 0.5; the last two gave their own.
    assert in_force == np.float32(448) / np.float32(4)


@pytest.mark.clause("fp8.delayed", "fp8.scale", evidence="known answer")
class Operations(TorchDispatchMode):
    """Counts what is asked of torch."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.number += 1
        return function(*arguments, **(named or {}))


def histories(count):
    """Layers with a history of every kind: unseen, zero, NaN, infinite, tiny, no scale yet."""
    amaxes = [-1.0, 0.0, float("nan"), float("inf"), 1e-42, 0.25, 448.0, 3e38]
    made = []
    for i in range(count):
        scales = Fp8Scales(Fp8Scaling.DELAYED)
        scales.amax.copy_(torch.tensor([amaxes[(i + j) % len(amaxes)] for j in range(3)]))
        scales.scale.copy_(torch.tensor([[0.0, 2.0, 0.5][(i // len(amaxes) + j) % 3] for j in range(3)]))
        made.append(scales)
    return made


@pytest.mark.parametrize("held", [None, False, True])
def test_layers_advance_together_as_one_by_one(held):
    together, alone = histories(24), histories(24)
    flag = None if held is None else torch.tensor(held)
    advance_scales([Fp8Scales(Fp8Scaling.CURRENT), *together], flag)
    for new, old in zip(together, alone, strict=True):
        for i, tensor in enumerate(FORMATS):
            amax, before = old.amax[i].item(), old.scale[i].item()
            kept = amax < 0 or held
            want = before if kept else scalar_scale(amax, tensor, before if before != 0 else 1.0)
            assert new.scale[i].item() == np.float32(want), (amax, before)
            assert new.amax[i].item() == -1
        advance_scales([old], flag)
        assert torch.equal(old.scale, new.scale)


def test_advancing_takes_as_many_operations_for_many_layers_as_for_two():
    numbers = []
    for count in (2, 20):
        made = histories(count)
        with Operations() as counted:
            advance_scales(made)
        numbers.append(counted.number)
    assert numbers[0] == numbers[1] < 25


def test_a_first_step_without_a_usable_amax_leaves_scale_one():
    scales = Fp8Scales(Fp8Scaling.DELAYED)
    scales.record_amax("x", torch.tensor(0.0))
    scales.record_amax("w", torch.tensor(float("nan")))
    advance_scales([scales])
    assert scales.scale.tolist() == [1.0, 1.0, 0.0]  # dY was not seen: its first step is still to come
    q = scales.quantize("dy", torch.tensor([4.0]))
    assert q.inverse.item() == np.float32(1) / np.float32(57344 / 4)


RECIPE = recipe_from_table({"all": {"format": "fp8"}, "keep_bf16": []})


def model_and_context(recipe=RECIPE, inputs=64, outputs=96):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    return model, convert(model, recipe, backend=get_backend("reference"), seed=0).context


def decoded(x, tensor, scale):
    q = scalar_cast(x.reshape(-1), scale, tensor).view(DTYPES[tensor])
    return q.astype(np.float64).reshape(x.shape), np.float64(np.float32(1) / np.float32(scale))


def assert_bounded(got, a, b, inverses):
    """Class `fp32` of the profile `bounded`, and one rounding for each of the two factors."""
    exact = a @ b.T * inverses[0] * inverses[1]
    total = np.abs(a) @ np.abs(b).T * inverses[0] * inverses[1]
    bound = (a.shape[1] + 2) * 2.0**-24 * total + a.shape[1] * 2.0**-149
    assert (np.abs(got - exact) <= bound).all()


@pytest.mark.clause("fp8.gemm", "fp8.formats", "fp8.delayed", evidence="peer")
def test_a_layer_against_its_derivation_over_three_steps():
    model, context = model_and_context()
    rng = np.random.default_rng(2)
    scale = {}
    for step in range(3):
        context.step = step
        seen = {"x": [], "w": [], "dy": []}
        for _ in range(2):
            x = (rng.standard_normal((24, 64)) * 10.0**step).astype(np.float32)
            dy = (rng.standard_normal((24, 96)) * 10.0**-step).astype(np.float32)
            w = model[0].weight.detach().numpy()
            amax = {"x": np.abs(x).max(), "w": np.abs(w).max(), "dy": np.abs(dy).max()}
            used = {name: scale.get(name, scalar_scale(amax[name], name)) for name in amax}
            (xd, xi), (wd, wi), (dyd, dyi) = (
                decoded(t, name, used[name]) for t, name in ((x, "x"), (w, "w"), (dy, "dy"))
            )
            leaf = torch.from_numpy(x).requires_grad_()
            model[0].weight.grad = None
            y = model(leaf)
            y.backward(torch.from_numpy(dy))
            assert_bounded(y.detach().numpy(), xd, wd, (xi, wi))
            assert_bounded(leaf.grad.numpy(), dyd, wd.T, (dyi, wi))
            assert_bounded(model[0].weight.grad.numpy(), dyd.T, xd.T, (dyi, xi))
            for name in seen:
                seen[name].append(amax[name])
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        advance(model)
        scale = {name: scalar_scale(max(seen[name]), name) for name in seen}
        assert model[0].fp8.scale.tolist() == [scale[name] for name in ("x", "w", "dy")]


@pytest.mark.clause("fp8.delayed")
def test_history_is_checkpointed_and_not_touched_by_evaluation():
    model, context = model_and_context()
    x = torch.randn(8, 64)
    model(x).sum().backward()
    advance(model)
    before = {name: t.clone() for name, t in fp8_history(model).items()}
    assert set(before) == {"0.fp8.scale", "0.fp8.amax"}
    with torch.no_grad():
        model(x * 100)
    assert all(torch.equal(t, before[name]) for name, t in fp8_history(model).items())

    restored, its_context = model_and_context()
    restored.load_state_dict(model.state_dict())
    load_fp8_history(restored, before)
    context.step = its_context.step = 1
    with torch.no_grad():
        model(x)  # fills the cache of weights; training must still see the weight's amax
    for m in (model, restored):
        m[0].weight.grad = None
        m(x * 3).square().sum().backward()
    assert torch.equal(model[0].weight.grad, restored[0].weight.grad)
    assert torch.equal(model[0].fp8.amax, restored[0].fp8.amax)
    assert (model[0].fp8.amax > 0).all()


def test_meta_device_history_starts_when_it_has_memory():
    scales = Fp8Scales(Fp8Scaling.DELAYED, torch.device("meta")).to_empty(device="cpu")
    scales.scale.fill_(3.0)
    scales.reset_parameters()
    assert scales.scale.tolist() == [0.0] * 3


def test_x_is_saved_once_in_fp8():
    model, _ = model_and_context()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(16, 64, requires_grad=True))
    sizes = {(t.dtype, tuple(t.shape)) for t in saved}
    assert (torch.float8_e4m3fn, (16, 64)) in sizes
    assert not any(t.numel() >= 16 * 64 and t.element_size() > 1 and t.shape != (96, 64) for t in saved)


@pytest.mark.clause("fp8.gemm")
def test_gemm_multiplies_fp8_operands_without_rounding_them():
    rng = np.random.default_rng(3)
    a = torch.from_numpy(rng.standard_normal((33, 512)).astype(np.float32)).to(torch.float8_e5m2)
    b = torch.from_numpy(rng.standard_normal((47, 512)).astype(np.float32)).to(torch.float8_e4m3fn)
    got = dense.dense_gemm(a, b, "dgrad")
    assert got.dtype == torch.float32
    a64, b64 = (t.to(torch.float64).numpy() for t in (a, b))
    assert_bounded(got.numpy().astype(np.float64), a64, b64, (1.0, 1.0))


@pytest.mark.clause("fp8.scale", evidence="known answer")
def test_an_empty_batch_keeps_the_scale():
    scales = Fp8Scales(Fp8Scaling.DELAYED)
    q = scales.quantize("x", torch.empty(0, 64))
    assert q.amax.item() == 0
    assert q.data.shape == (0, 64)
