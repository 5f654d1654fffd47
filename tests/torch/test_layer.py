"""The training linear layer: its three GEMMs against explicit compositions, and its guards."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mxref import (
    GemmRole,
    PreparedArray,
    Stream,
    get_backend,
    quantize,
    scaled_gemm,
)
from mxref.errors import DtypeError, MxrefError, ShapeError, UnsupportedError
from mxref.formats import BF16, E2M1, FP8, MXFP4
from mxref.layouts.packed import unpack
from mxref.placement import Placement
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref.roles import OPERANDS
from mxref_torch import (
    MXLinear,
    advance,
    check_census,
    check_stochastic_rounding,
    convert,
    expected_census,
    operators,
)
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.errors import LayerError
from mxref_torch.operand import Bf16Operand

try:
    BACKENDS = ["reference", get_backend("numba").name]
except MxrefError:
    BACKENDS = ["reference"]

SEED, STEP, LAYER, TOKENS, IN, OUT = 0xFEDC_BA98_7654_3210, 3, 1, 64, 64, 128

TABLES = {
    "ocp": {},
    "amd": {"dialect": "amd", "all": {"hadamard": 16}},
    "rceil, SR in the backward": {
        "dialect": "nvidia",
        "dgrad": {"dy": {"rounding": "sr"}},
        "wgrad": {"rounding": "sr", "x": {"sr_bits": 20}},
    },
    "RHT per step": {"all": {"hadamard": 16, "signs": "per_step"}, "wgrad": {"hadamard": 32}},
    "32x32": {"all": {"block": "32x32"}, "fprop": {"x": {"block": "1x32"}}},
    "tseng": {"dialect": "tseng", "fprop": {"rounding": "rne", "prescale": False}},
    "SR everywhere": {"all": {"rounding": "sr", "sr_bits": 8}},
}


def recipe_of(table):
    return recipe_from_table({"gemm": "ordered", "keep_bf16": ["kept"], **table})


def formats(fprop, dgrad, wgrad):
    return recipe_of({"fprop": {"format": fprop}, "dgrad": {"format": dgrad}, "wgrad": {"format": wgrad}})


class Model(nn.Module):
    """A kept layer first, so that the converted one has index 1."""

    def __init__(self, bias=False):
        super().__init__()
        self.kept = nn.Linear(IN, 10)
        self.layer = nn.Linear(IN, OUT, bias=bias)

    def forward(self, x):
        return self.layer(x)


def build(recipe, backend="reference", **kwargs):
    torch.manual_seed(0)
    model = Model(**kwargs)
    backend = get_backend(backend) if isinstance(backend, str) else backend
    return model, convert(model, recipe, backend=backend, seed=SEED)


def tensors(tokens=TOKENS, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, n, generator=generator) for n in (IN, OUT))
    return x.to(dtype).requires_grad_(), dy.to(dtype)


def as_numpy(t):
    t = t.detach()
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype is torch.bfloat16 else t.numpy()


def composed(role, a, b, recipe, out_dtype, origin=0, total=None):
    """One GEMM from `mxref.quantize` and `mxref.scaled_gemm` alone."""
    operands = []
    for t, spec, operand in zip((a, b), recipe.operands(role), OPERANDS[role], strict=True):
        t = as_numpy(t)
        placement = Placement(Stream(SEED, STEP, LAYER, operand.id))
        if operand.tensor != "w" and spec.rounding == "sr":
            placement = replace(placement, origin=(origin, 0), global_shape=(total or t.shape[0], t.shape[1]))
        pad = operand.tensor != "w" and operand.axis == 0
        operands.append(quantize(t, spec, axis=operand.axis, placement=placement, pad=pad))
    return scaled_gemm(*operands, profile=recipe.gemm, out_dtype=out_dtype)


def assert_composed(model, context, recipe, x, dy, origin=0, total=None):
    context.step, context.token_origin, context.global_tokens = STEP, origin, total
    y = model(x)
    y.backward(dy)
    name = str(x.dtype).removeprefix("torch.")
    w = model.layer.weight
    placed = {"origin": origin, "total": total}
    expected = {
        "Y": (y, composed(GemmRole.FPROP, x, w, recipe, name, **placed)),
        "dX": (x.grad, composed(GemmRole.DGRAD, dy, w, recipe, name, **placed)),
        "dW": (w.grad, composed(GemmRole.WGRAD, dy, x, recipe, "float32", **placed)),
    }
    for what, (got, wanted) in expected.items():
        np.testing.assert_array_equal(as_numpy(got), wanted, err_msg=what)


@pytest.mark.clause("linear.roles", "linear.source")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLES)
def test_the_three_gemms_are_their_composition(name, backend):
    recipe = recipe_of(TABLES[name])
    for dtype, origin, total in ((torch.float32, 64, 192), (torch.bfloat16, 0, None)):
        model, context = build(recipe, backend)
        x, dy = tensors(dtype=dtype)
        assert_composed(model, context, recipe, x, dy, origin, total)


@pytest.mark.clause("linear.roles", "quantize.padding")
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_fill_no_block_are_padded_for_wgrad(backend):
    recipe = recipe_of(TABLES["SR everywhere"])
    model, context = build(recipe, backend)
    x, dy = tensors(tokens=41)
    assert_composed(model, context, recipe, x, dy)

    recipe = recipe_of({})
    model, context = build(recipe, backend)
    x, dy = tensors(tokens=41)
    assert_composed(model, context, recipe, x, dy)
    longer, _ = build(recipe, backend)
    longer(F.pad(x.detach(), (0, 0, 0, 23))).backward(F.pad(dy, (0, 0, 0, 23)))
    assert torch.equal(model.layer.weight.grad, longer.layer.weight.grad)


def test_the_exact_profile_reaches_the_gemm():
    recipe = recipe_of({"gemm": "exact", "all": {"scale_rule": "even"}})
    model, context = build(recipe)
    x, dy = tensors(tokens=32)
    assert_composed(model, context, recipe, x, dy)


def test_batches_of_sequences_and_bias():
    recipe = recipe_of({})
    model, _ = build(recipe, bias=True)
    x, dy = tensors()
    flat = model(x)
    flat.backward(dy)
    grads = x.grad, model.layer.weight.grad, model.layer.bias.grad
    model.zero_grad()
    x.grad = None
    model(x.reshape(2, 32, IN)).backward(dy.reshape(2, 32, OUT))
    again = x.grad, model.layer.weight.grad, model.layer.bias.grad
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    torch.testing.assert_close(grads[2], dy.sum(0))
    without = flat - model.layer.bias
    torch.testing.assert_close(
        without, torch.from_numpy(as_numpy(F.linear(x, model.layer.weight))), atol=0.9, rtol=0
    )


@pytest.mark.clause("linear.formats")
@pytest.mark.parametrize(
    "combination",
    list(itertools.product((BF16, FP8, MXFP4), repeat=3)),
    ids=lambda formats: "-".join(map(str, formats)),
)
def test_all_combinations_of_formats(combination):
    recipe = formats(*combination)
    model, context = build(recipe)
    x, dy = tensors()
    y = model(x)
    y.backward(dy)
    assert context.census == dict.fromkeys(zip(GemmRole, combination, combination, strict=True), 1)
    exact = {
        GemmRole.FPROP: (y, x @ model.layer.weight.T),
        GemmRole.DGRAD: (x.grad, dy @ model.layer.weight),
        GemmRole.WGRAD: (model.layer.weight.grad, dy.T @ x),
    }
    # Each GEMM shows the error of its own format, and not that of another role's.
    error = {
        BF16: (1e-4, 0.01),
        FP8: (0.01, 0.07),
        MXFP4: (0.1, 0.3),
    }
    for (role, (got, wanted)), format in zip(exact.items(), combination, strict=True):
        relative = ((got - wanted).norm() / wanted.norm()).item()
        low, high = error[format]
        assert low < relative < high, (role, format, relative)


@pytest.mark.clause("linear.formats", evidence="peer")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_bf16_is_torchs_own_bf16_linear(dtype):
    model, _ = build(formats("bf16", "bf16", "bf16"))
    x, dy = tensors(dtype=dtype)
    y = model(x)
    y.backward(dy)
    plain_x, plain_w = (
        x.detach().clone().requires_grad_(),
        model.layer.weight.detach().clone().requires_grad_(),
    )
    plain = F.linear(plain_x.bfloat16(), plain_w.bfloat16()).to(dtype)
    plain.backward(dy)
    for got, wanted in ((y, plain), (x.grad, plain_x.grad), (model.layer.weight.grad, plain_w.grad)):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def recorder(base):
    """Return a backend that does as another and keeps the operands' codes by operand id, and each read's ids."""

    class Recorder(type(get_backend(base))):
        name = "recorder"

        def __init__(self):
            super().__init__()
            self.seen, self.reads = {}, []

        def quantize(self, x, spec, *, placement, **kwargs):
            q = super().quantize(x, spec, placement=placement, **kwargs)
            self.keep((placement,), (q,))
            return q

        def quantize_dual(self, x, specs, *, placements, **kwargs):
            pair = super().quantize_dual(x, specs, placements=placements, **kwargs)
            self.keep(placements, pair)
            return pair

        def keep(self, placements, arrays):
            operands = tuple(placement.stream.operand for placement in placements)
            self.reads.append(operands)
            for operand, q in zip(operands, arrays, strict=True):
                self.seen.setdefault(operand, []).append(q)

    return Recorder()


@pytest.mark.clause("random.index")
@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_draw_the_bits_of_the_whole_batch(backend):
    recipe = recipe_of(TABLES["SR everywhere"])
    x, dy = tensors()
    codes = []
    for parts in ([slice(0, 64)], [slice(0, 32), slice(32, 64)]):
        watched = recorder(backend)
        model, context = build(recipe, watched)
        context.step, context.global_tokens = STEP, TOKENS
        for part in parts:
            context.token_origin = part.start
            model(x[part]).backward(dy[part])
        rows, columns = (
            [np.concatenate([q.codes for q in watched.seen[i]], axis) for i in ids]
            for ids, axis in (((0, 2), 0), ((4, 5), 1))
        )
        codes.append([*rows, *columns])
    for whole, split in zip(*codes, strict=True):
        np.testing.assert_array_equal(whole, split)


def test_weights_are_quantized_once_per_step_and_version():
    watched = recorder("reference")
    model, context = build(recipe_of({}), watched)
    x, dy = tensors()

    def weights():
        return [len(watched.seen.get(i, [])) for i in (1, 3)]

    def step():
        for _ in range(2):
            model(x).backward(dy)
        with torch.no_grad():
            model(x)

    step()
    assert weights() == [1, 1]
    with torch.no_grad():
        model.layer.weight.add_(0.01)
    step()
    assert weights() == [2, 2]
    model.layer.weight.data = model.layer.weight.detach() + 0.01
    step()
    assert weights() == [3, 3]
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    step()
    assert weights() == [4, 4]
    context.step += 1
    step()
    assert weights() == [5, 5]
    advance(model)
    assert model.layer._weights == {}
    step()
    assert weights() == [6, 6]


def test_a_weight_draws_other_bits_at_another_step():
    watched = recorder("reference")
    model, context = build(recipe_of(TABLES["SR everywhere"]), watched)
    x, dy = tensors()
    for context.step in (0, 1):
        model(x).backward(dy)
    advance(model)
    model(x).backward(dy)
    first, second, third = (q.codes for q in watched.seen[1])
    assert not np.array_equal(first, second)
    assert np.array_equal(second, third)


def reads_of(recipe, change=lambda model, x: None, micro_batches=1):
    watched = recorder("reference")
    model, _ = build(recipe, watched)
    x, dy = tensors()
    change(model, x)
    for _ in range(micro_batches):
        model(x).backward(dy)
    return watched.reads


def test_what_two_gemms_read_in_mxfp4_is_read_once():
    assert reads_of(recipe_of({})) == [(0, 5), (1, 3), (2, 4)]
    assert reads_of(recipe_of({}), micro_batches=2) == [(0, 5), (1, 3), (2, 4), (0, 5), (2, 4)]
    assert reads_of(formats("mxfp4", "bf16", "mxfp4")) == [(0, 5), (1,), (4,)]
    assert reads_of(formats("fp8", "mxfp4", "mxfp4")) == [(5,), (2, 4), (3,)]
    assert reads_of(recipe_of({}), lambda model, x: x.requires_grad_(False)) == [(0, 5), (1,), (4,)]
    assert reads_of(recipe_of({}), lambda model, x: model.requires_grad_(False)) == [(0,), (1, 3), (2,)]


def test_evaluation_makes_only_what_fprop_reads():
    watched = recorder("reference")
    model, _ = build(recipe_of({}), watched)
    x, dy = tensors()
    with torch.no_grad():
        model(x)
        model(x)
    assert watched.reads == [(0,), (1,), (0,)]
    model(x).backward(dy)
    # W as Fprop reads it is there already.
    assert watched.reads[3:] == [(0, 5), (2, 4), (3,)]


@pytest.mark.clause("random.index")
@pytest.mark.parametrize("backend", BACKENDS)
def test_sr_along_the_features_alone_lets_a_micro_batch_begin_anywhere(backend):
    recipe = recipe_of({"fprop": {"x": {"rounding": "sr"}}, "dgrad": {"dy": {"rounding": "sr"}}})
    model, context = build(recipe, backend)
    x, dy = tensors(tokens=41)
    assert_composed(model, context, recipe, x, dy, origin=41, total=123)


class Laying(ReferenceBackend):
    """Its GEMM reads a layout of B, whose parts share memory with B and with each other."""

    name = "laying"

    def __init__(self):
        self.prepared, self.read = [], 0

    def _prepare(self, q, profile):
        self.prepared.append(tuple(q.shape))
        scales = q.scales.copy()
        return q.codes, scales, scales[:1]

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if isinstance(b, PreparedArray):
            self.read += 1
            codes, scales, first = b.layout
            assert np.array_equal(scales[:1], first)
            assert type(b.codes) is type(codes)
            b = replace(b, codes=codes, scales=scales)
        return super()._scaled_gemm(a, b, profile, out_dtype)


@pytest.mark.clause("conformance.dual")
def test_a_weight_is_prepared_once_for_all_gemms_of_a_step():
    recipe = recipe_of(TABLES["SR everywhere"])
    results = []
    for backend in (Laying(), get_backend("reference")):
        model, context = build(recipe, backend)
        context.global_tokens = 3 * TOKENS
        for context.step in range(2):
            x, dy = tensors(seed=context.step)
            for context.token_origin in range(0, 3 * TOKENS, TOKENS):
                y = model(x)
                y.backward(dy)
            with torch.no_grad():
                model(x)
            if context.step == 0:
                advance(model)
        results.append((y, x.grad, model.layer.weight.grad))
        if isinstance(backend, Laying):
            assert backend.prepared == [(OUT, IN), (IN, OUT)] * 2
            # Fprop and Dgrad; what Wgrad reads is of one micro-batch alone.
            assert backend.read == 2 * (3 + 1 + 3)
            assert [len(kept.layout) for _, kept in model.layer._weights.values()] == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_weight_that_one_gemm_reads_is_not_prepared_for_it():
    backend = Laying()
    model, context = build(recipe_of({}), backend)
    x, dy = tensors()
    for total in (None, TOKENS):
        context.global_tokens = total
        model(x).backward(dy)
    assert backend.prepared == []
    advance(model)
    with torch.no_grad():
        for _ in range(2):
            model(x)
    assert (backend.prepared, backend.read) == ([(OUT, IN)], 2)


def test_a_backward_draws_the_bits_of_its_forwards_step():
    recipe = recipe_of(TABLES["SR everywhere"])
    results = []
    for moves in (False, True):
        model, context = build(recipe)
        context.step, context.global_tokens = STEP, 2 * TOKENS
        x, dy = tensors()
        y = model(x)
        if moves:
            context.step, context.token_origin = STEP + 1, TOKENS
        y.backward(dy)
        results.append((x.grad, model.layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_recomputation_changes_nothing(format):
    recipe = recipe_of({"all": {"format": format, "rounding": "sr"}})
    results = []
    for recompute in (False, True):
        model, context = build(recipe)
        context.step = STEP
        for seed in (0, 1):
            x, dy = tensors(seed=seed)
            y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            y.backward(dy)
        advance(model)
        results.append([x.grad, model.layer.weight.grad, *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def saved_by(model, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    return saved


def test_only_packed_x_and_the_weight_itself_are_saved():
    model, _ = build(formats("mxfp4", "mxfp4", "mxfp4"))
    x, _ = tensors(dtype=torch.bfloat16)
    saved = saved_by(model, x)
    (weight,) = (t for t in saved if t.dtype is torch.float32)
    assert weight.data_ptr() == model.layer.weight.data_ptr()
    assert weight.shape == model.layer.weight.shape
    rest = sorted((str(t.dtype), tuple(t.shape)) for t in saved if t.dtype is not torch.float32)
    assert rest == [
        ("torch.int64", (3,)),
        ("torch.uint8", (IN, TOKENS // 32)),
        ("torch.uint8", (IN, TOKENS // 2)),
    ]
    x_bytes = sum(t.numel() for t in saved if t.dtype is torch.uint8)
    assert x_bytes * 8 == x.numel() * 4.25


def test_what_no_gradient_needs_is_not_saved():
    model, _ = build(formats("mxfp4", "bf16", "mxfp4"))
    x, _ = tensors()
    model.layer.weight.requires_grad_(False)
    assert not any(t.dtype is torch.uint8 for t in saved_by(model, x))
    model.layer.weight.requires_grad_(True)
    assert {t.dtype for t in saved_by(model, x.detach())} == {torch.int64, torch.uint8}
    with torch.no_grad():
        assert saved_by(model, x) == []
    model.requires_grad_(False)
    assert saved_by(model.eval(), x.detach()) == []


def test_evaluation_equals_training_forward():
    for table in TABLES.values():
        model, context = build(recipe_of(table))
        context.step = STEP
        x, _ = tensors()
        trained = model(x)
        with torch.no_grad():
            assert torch.equal(trained, model(x))


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, OUT))


def run_chain(model, micro_batches=2, needs_dx=True):
    x, dy = tensors()
    for _ in range(micro_batches):
        model(x if needs_dx else x.detach()).backward(dy)


def test_census_of_a_faithful_model():
    model, recipe = chain(), recipe_of({"dgrad": {"format": "fp8"}, "keep_bf16": ["4"]})
    context = convert(model, recipe, backend=get_backend("reference"), seed=0)
    run_chain(model)
    check_census(context, model, recipe, micro_batches=2)
    assert context.census == expected_census(chain(), recipe, 2)
    assert context.census[GemmRole.DGRAD, FP8, FP8] == 4
    assert context.census[GemmRole.WGRAD, BF16, BF16] == 2
    context.reset_census()
    model[2].weight.requires_grad_(False)
    run_chain(model, 1, needs_dx=False)
    check_census(context, model, recipe, without_dgrad=["0"])
    with pytest.raises(LayerError, match="dgrad in fp8: 1 ran, 2 expected"):
        check_census(context, model, recipe)
    with pytest.raises(LayerError, match="no linear layer is named 'one'"):
        expected_census(model, recipe, without_dgrad=["one"])


def test_census_of_a_layer_that_several_depths_share():
    recipe = recipe_of({"keep_bf16": ["4"]})
    model = chain()
    model.insert(3, model[2])  # layer "2" runs twice
    model.insert(4, nn.ReLU())
    recipe = recipe_of({"keep_bf16": ["6"]})
    context = convert(model, recipe, backend=get_backend("reference"), seed=0)
    assert model[2] is model[3]
    run_chain(model)
    with pytest.raises(LayerError, match=r"fprop in mxfp4: 6 ran, 4 expected.* named in `calls`"):
        check_census(context, model, recipe, micro_batches=2)
    check_census(context, model, recipe, micro_batches=2, calls={"2": 2})
    with pytest.raises(LayerError, match="calls: no linear layer is named '3'"):
        expected_census(model, recipe, calls={"3": 2})


def test_census_catches_a_layer_that_runs_in_another_precision():
    recipe = recipe_of({"keep_bf16": []})

    def plain(model):
        model[2] = nn.Linear(64, 64)

    def secretly_bf16(model):
        for gemm in model[2].gemms.values():
            gemm.kind = Bf16Operand

    def bypassed(model):
        model[2].forward = lambda x: F.linear(x, model[2].weight, model[2].bias)

    def backward_in_bf16(model):
        model[2].gemms[GemmRole.WGRAD].kind = Bf16Operand

    for fault in (plain, secretly_bf16, bypassed, backward_in_bf16):
        model = chain()
        context = convert(model, recipe, backend=get_backend("reference"), seed=0)
        fault(model)
        run_chain(model)
        with pytest.raises(LayerError, match=r"wgrad in mxfp4: 4 ran, 6 expected"):
            check_census(context, model, recipe, micro_batches=2)


class Fault(ReferenceBackend):
    """A reference whose stochastic rounding is wrong in one way."""

    def __init__(self, fault):
        self.name = fault.__name__
        self.fault = fault

    def quantize(self, x, spec, **kwargs):
        return self.fault(super().quantize, x, spec, **kwargs)

    def quantize_dual(self, x, specs, *, placements, pads):
        return tuple(
            self.quantize(x, spec, axis=axis, placement=placement, pad=pad)
            for spec, axis, placement, pad in zip(specs, (1, 0), placements, pads, strict=True)
        )


def does_nothing(quantize, x, spec, **kwargs):
    return quantize(x, replace(spec, rounding="rne"), **kwargs)


def truncates(quantize, x, spec, **kwargs):
    return quantize(x, replace(spec, sr_bits=1), **kwargs)


def one_draw_for_all_rows(quantize, x, spec, *, axis, **kwargs):
    q = quantize(x, spec, axis=axis, **kwargs)
    q.codes[:] = q.codes[:1]
    return q


def with_stream(placement, **fields):
    return replace(placement, stream=replace(placement.stream, **fields))


def step_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=with_stream(placement, step=0), **kwargs)


def operand_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=with_stream(placement, operand=0), **kwargs)


def seed_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=with_stream(placement, seed=0), **kwargs)


def place_is_ignored(quantize, x, spec, *, placement, **kwargs):
    return quantize(x, spec, placement=Placement(placement.stream), **kwargs)


def no_prescale(quantize, x, spec, **kwargs):
    return quantize(x, replace(spec, prescale=False), **kwargs)


SR_TABLES = {
    "plain": {"all": {"rounding": "sr"}},
    "tseng": {"dialect": "tseng"},
    "per step": {"all": {"rounding": "sr", "hadamard": 16, "signs": "per_step"}},
    "few bits": {"all": {"rounding": "sr", "sr_bits": 1, "block": "32x32"}},
    "only wgrad": {"wgrad": {"x": {"rounding": "sr"}}},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SR_TABLES)
def test_stochastic_rounding_passes(name, backend):
    check_stochastic_rounding(get_backend(backend), recipe_of(SR_TABLES[name]))


@pytest.mark.parametrize(
    ("fault", "message", "table"),
    [
        (does_nothing, "0.00 times the spread", "plain"),
        (does_nothing, "wgrad.x .* 0.00 times the spread", "only wgrad"),
        (truncates, "spread|biased", "plain"),
        (one_draw_for_all_rows, "0.00 times the spread", "plain"),
        (step_is_ignored, "same bits for another step", "plain"),
        (operand_is_ignored, "same bits for another operand", "plain"),
        (seed_is_ignored, "same bits for another seed", "plain"),
        (place_is_ignored, "for a micro-batch", "only wgrad"),
        (place_is_ignored, "for a micro-batch", "plain"),
        (no_prescale, "spread|biased", "tseng"),
    ],
)
def test_stochastic_rounding_that_is_wrong_is_caught(fault, message, table):
    with pytest.raises(LayerError, match=message):
        check_stochastic_rounding(Fault(fault), recipe_of(SR_TABLES[table]))


def test_signs_that_change_do_not_hide_bits_that_do_not():
    class OneStep(ReferenceBackend):
        name = "one step"

        def _quantize(self, x, plan):
            return super()._quantize(x, replace(plan, stream=replace(plan.stream, step=0)))

    with pytest.raises(LayerError, match="same bits for another step"):
        check_stochastic_rounding(OneStep(), recipe_of(SR_TABLES["per step"]))


@pytest.mark.parametrize("native", [False, True])
def test_stochastic_rounding_that_is_wrong_only_for_both_orientations_is_caught(native):
    class OneStream(ReferenceBackend):
        name = "one stream"

        def _quantize_dual(self, x, row, column):
            column = replace(column, spec=replace(column.spec, rounding="rne"), stream=None)
            return super()._quantize_dual(x, row, column)

    backend = OneStream()
    if native:
        backend.capabilities = replace(backend.capabilities, native_sr=True)
    message = "wgrad.* times the spread" if native else "wgrad.dy .* draws other bits where both orientations"
    with pytest.raises(LayerError, match=message):
        check_stochastic_rounding(backend, recipe_of({"wgrad": {"dy": {"rounding": "sr"}}}))
    alone = {"dgrad": {"format": "bf16"}, "wgrad": {"dy": {"rounding": "sr"}}}
    check_stochastic_rounding(backend, recipe_of(alone))


@pytest.mark.clause("rounding.native_sr")
def test_bits_of_the_hardwares_own_are_taken_where_they_are_declared():
    class OwnBits(ReferenceBackend):
        """Draws other random bits at every call, as hardware does."""

        name = "own bits"
        seeds = np.random.default_rng(0)

        def _quantize(self, x, plan):
            stream = replace(plan.stream, seed=int(self.seeds.integers(1 << 63)))
            return super()._quantize(x, replace(plan, stream=stream))

    recipe = recipe_of(SR_TABLES["plain"])
    with pytest.raises(LayerError, match="other bits for a micro-batch"):
        check_stochastic_rounding(OwnBits(), recipe)
    declared = OwnBits()
    declared.capabilities = replace(declared.capabilities, native_sr=True)
    check_stochastic_rounding(declared, recipe)

    x = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    spec, stream = recipe.fprop.x, Stream(SEED)
    first, second = (declared.quantize(x, spec, placement=Placement(stream)) for _ in range(2))
    down = quantize(x, replace(spec, rounding="rtz"))
    assert (first.scales == down.scales).all()
    assert (first.codes != second.codes).any()
    steps = unpack(first.codes, E2M1).astype(int) - unpack(down.codes, E2M1)
    assert set(steps.ravel().tolist()) == {0, 1}


def test_recipes_without_sr_ask_nothing_of_the_backend():
    check_stochastic_rounding(Fault(does_nothing), recipe_of({"wgrad": {"format": "bf16", "rounding": "sr"}}))


@pytest.mark.parametrize(
    ("change", "table", "message"),
    [
        (lambda m: m.bfloat16(), {}, r"kept.weight is torch.bfloat16: master weights must be float32"),
        (lambda m: m.append_layer(48, 32), {}, r"extra: in_features = 48 is not a multiple of 32"),
        (
            lambda m: m.append_layer(32, 48),
            {},
            r"extra: out_features = 48 .* dgrad .* add 'extra' to keep_bf16",
        ),
        (
            lambda m: m.append_layer(32, 96),
            {"all": {"hadamard": 64}, "fprop": {"hadamard": 0}},
            r"extra: out_features = 96 is not a multiple of 64",
        ),
        (
            lambda m: m.append_layer(64, 48),
            {"dgrad": {"format": "bf16"}, "all": {"block": "32x32"}},
            r"out_features = 48 .* fprop .* block 32x32",
        ),
        (
            lambda m: m.append_layer(64, 48),
            {"dgrad": {"format": "bf16"}, "fprop": {"format": "bf16"}, "wgrad": {"block": "32x32"}},
            r"out_features = 48 .* wgrad .* block 32x32",
        ),
        (lambda m: None, {"keep_bf16": ["kept", "lm_heat"]}, r"'lm_heat' matches no linear layer"),
    ],
)
def test_convert_refuses_what_it_cannot_do(change, table, message):
    class Extended(Model):
        def append_layer(self, inputs, outputs):
            self.extra = nn.Linear(inputs, outputs)

    model = Extended()
    change(model)
    with pytest.raises(LayerError, match=message):
        convert(model, recipe_of(table), backend=get_backend("reference"), seed=0)
    assert not any(isinstance(m, MXLinear) for m in model.modules())


def test_convert_refuses_what_the_backend_does_not_declare():
    class Small(ReferenceBackend):
        name = "small"
        capabilities = type(ReferenceBackend.capabilities)(hadamard_sizes=frozenset({16}))

    with pytest.raises(UnsupportedError, match="hadamard_sizes"):
        convert(Model(), recipe_of({"all": {"hadamard": 32}}), backend=Small(), seed=0)
    with pytest.raises(UnsupportedError, match="gemms"):
        convert(Model(), recipe_of({"gemm": "bounded"}), backend=Small(), seed=0)
    with pytest.raises(LayerError, match="inside a module"):
        convert(nn.Linear(32, 32), recipe_of({}), backend=Small(), seed=0)
    with pytest.raises(MxrefError, match="seed"):
        convert(Model(), recipe_of({}), backend=get_backend("reference"), seed=-1)


def test_convert_keeps_parameters_and_can_be_repeated():
    model = Model(bias=True)
    shared = nn.ModuleDict({"a": model.layer, "b": nn.ModuleDict({"c": model.layer})})
    model.shared = shared
    model.twin = model.layer
    model.layer.eval()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    convert(model, formats("fp8", "mxfp4", "bf16"), backend=get_backend("reference"), seed=0)
    convert(model, recipe_of({}), backend=get_backend("reference"), seed=0)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert model.layer is model.twin is model.shared["a"] is model.shared["b"]["c"]
    assert model.kept.training
    assert not model.layer.training
    assert model.layer.index == 1


def test_bad_inputs_are_named():
    model, _ = build(recipe_of({}))
    with pytest.raises(DtypeError, match="float16"):
        model(torch.zeros(4, IN, dtype=torch.float16))
    with pytest.raises(ShapeError, match="input has 32 features, the weight 64"):
        model(torch.zeros(4, IN // 2))


def test_bridge_shares_memory_and_refuses_other_devices():
    backend = get_backend("reference")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = torch.randn(4, 6).to(dtype).t()
        array = to_backend(t, backend)
        assert array.shape == (6, 4)
        np.testing.assert_array_equal(array.astype(np.float32), t.float().numpy())
        array[0, 0] = 7
        assert t[0, 0] == 7
        back = from_backend(array, backend)
        assert back.dtype == dtype
        assert torch.equal(back, t)
    with pytest.raises(LayerError, match="works on cpu, got a tensor on meta"):
        to_backend(torch.empty(2, device="meta"), backend)


def samples():
    key = operators.register_backend(get_backend("reference"))
    place, stream = operators.step_place(1, 32, 128), operators.stream_words(SEED, 2, 0)
    spec, rotated = (
        operators.spec_text(recipe_of({"all": {"rounding": "sr", "hadamard": h}}).fprop.x) for h in (0, 64)
    )
    x = torch.randn(64, 64)
    yield operators.quantize, (x, place, key, spec, 1, stream, operators.WHOLE, True)
    yield (
        operators.quantize,
        (x[:41].bfloat16().t(), operators.step_place(0), key, rotated, 0, stream, operators.WHOLE, True),
    )
    a = operators.quantize(x, place, key, spec, 1, stream, operators.WHOLE, True)
    b = operators.quantize(x[:32], place, key, spec, 1, stream, operators.WHOLE, False)
    other = operators.stream_words(SEED, 2, 5)
    yield operators.quantize_dual, (x, place, key, spec, rotated, stream, other, operators.WHOLE, False)
    yield (
        operators.quantize_dual,
        (x[:, :41].t(), operators.step_place(0), key, spec, rotated, stream, other, operators.WHOLE, True),
    )
    laying = operators.register_backend(Laying())
    for name in (key, laying):
        yield operators.prepare, (*b, name, spec, 64, "ordered")
        layout = operators.prepare(*b, name, spec, 64, "ordered")
        assert len(layout) == 3 * (name == laying)
        for out in ("float32", "bfloat16"):
            yield operators.scaled_gemm, (*a, *b, layout, name, spec, spec, 64, "ordered", out, "fprop", None)
        yield (
            operators.add_product,
            (torch.randn(64, 32), *a, *b, layout, name, spec, spec, 64, "ordered", "wgrad", None),
        )
    yield operators.dense_gemm, (x.bfloat16().t(), x.bfloat16().t(), "wgrad", None)


def test_an_operator_refuses_to_be_differentiated():
    x, w = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(16, 64).bfloat16()
    with pytest.raises(
        UnsupportedError, match="mxref::dense_gemm has no gradient, and an argument requires one"
    ):
        operators.dense_gemm(x, w, "fprop")
    with torch.no_grad():
        assert not operators.dense_gemm(x, w, "fprop").requires_grad


def test_opcheck():
    for op, arguments in samples():
        torch.library.opcheck(op, arguments)
    x = torch.randn(64, 64)
    arguments = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2), "dgrad", None
    # The schema check compares the arguments before and after, which torch cannot do for FP8.
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(operators.dense_gemm, arguments, test_utils=checks)


def test_operators_refuse_what_does_not_fit():
    key = operators.register_backend(get_backend("reference"))
    plain, rotated = (operators.spec_text(recipe_of({"all": {"hadamard": h}}).fprop.x) for h in (0, 16))
    stream, place = operators.stream_words(0, 0, 0), operators.step_place(0)
    q = operators.quantize(torch.ones(32, 32), place, key, plain, 1, stream, operators.WHOLE, True)
    with pytest.raises(ShapeError, match="different Hadamard"):
        operators.scaled_gemm(*q, *q, [], key, plain, rotated, 32, "ordered", "float32", "fprop", None)
    with pytest.raises(MxrefError, match="'referense' is not registered .did you mean 'reference'"):
        operators.quantize(torch.ones(32, 32), place, "referense", plain, 1, stream, operators.WHOLE, True)
    other = Fault(does_nothing)
    other.name = "reference"
    assert operators.register_backend(other) not in ("reference", key)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does
@pytest.mark.parametrize(
    ("table", "backend"),
    [
        (TABLES["SR everywhere"], ReferenceBackend),
        ({}, Laying),
        ({"all": {"format": "fp8"}}, ReferenceBackend),
    ],
    ids=["mxfp4", "mxfp4 with a layout", "fp8"],
)
def test_compiled_in_one_graph_for_all_steps(table, backend):
    recipe = recipe_of(table)
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model, context = build(recipe, backend())
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        steps = []
        for step in range(4):
            context.step, context.token_origin, context.global_tokens = step, 64 * step, 64 * (step + 1)
            x, dy = tensors(seed=step)
            model.zero_grad()
            with torch.compiler.set_stance("fail_on_recompile" if compiled and step else "default"):
                y = run(x)
            y.backward(dy)
            steps.append([y.detach(), x.grad, model.layer.weight.grad, *(b.clone() for b in model.buffers())])
            advance(model)
        check_census(context, nn.ModuleDict({"layer": model.layer}), recipe_of({**table, "keep_bf16": []}), 4)
        results.append(steps)
    for eager, graph in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))
