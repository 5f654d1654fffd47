"""The training linear layer: its three GEMMs, how often it makes each operand, and what it saves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from layer_setup import (
    BACKENDS,
    IN,
    OUT,
    STEP,
    TABLES,
    TOKENS,
    Laying,
    as_numpy,
    assert_composed,
    build,
    formats,
    recipe_of,
    recorder,
    tensors,
)
from mxref import GemmRole, get_backend
from mxref.errors import DtypeError, ShapeError
from mxref.formats import BF16, FP8, MXFP4
from mxref.tomlio import merge
from mxref_torch import advance, weights_held


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
def test_tokens_that_fill_no_block_are_padded_for_wgrad():
    recipe = recipe_of(TABLES["SR everywhere"])
    model, context = build(recipe)
    x, dy = tensors(tokens=41)
    assert_composed(model, context, recipe, x, dy)

    recipe = recipe_of({})
    model, context = build(recipe)
    x, dy = tensors(tokens=41)
    assert_composed(model, context, recipe, x, dy)
    longer, _ = build(recipe)
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


@pytest.mark.clause("random.index")
def test_micro_batches_draw_the_bits_of_the_whole_batch():
    recipe = recipe_of(TABLES["SR everywhere"])
    x, dy = tensors()
    codes = []
    for parts in ([slice(0, 64)], [slice(0, 32), slice(32, 64)]):
        watched = recorder("reference")
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


@pytest.mark.clause("random.index")
def test_sr_along_the_features_alone_lets_a_micro_batch_begin_anywhere():
    recipe = recipe_of({"fprop": {"x": {"rounding": "sr"}}, "dgrad": {"dy": {"rounding": "sr"}}})
    model, context = build(recipe)
    x, dy = tensors(tokens=41)
    assert_composed(model, context, recipe, x, dy, origin=41, total=123)


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


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"all": {"format": "fp8"}},
        {"wgrad": {"source": "fprop"}},
        {"all": {"format": "nvfp4"}, "wgrad": {"source": "fprop"}},
    ],
    ids=str,
)
def test_recomputation_changes_nothing(table):
    recipe = recipe_of(merge({"all": {"rounding": "sr"}}, table))
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
        ("torch.int64", ()),  # the mark of the recipe
        ("torch.int64", (3,)),  # the place
        ("torch.uint8", (IN, TOKENS // 32)),
        ("torch.uint8", (IN, TOKENS // 2)),
    ]
    x_bytes = sum(t.numel() for t in saved if t.dtype is torch.uint8)
    assert x_bytes * 8 == x.numel() * 4.25


def test_of_fprops_operand_its_own_codes_are_saved():
    model, _ = build(
        recipe_of({"fprop": {"x": {"format": "mxfp8_e4m3"}}, "wgrad": {"format": "bf16", "source": "fprop"}})
    )
    x, _ = tensors(dtype=torch.bfloat16)
    packed = sorted(tuple(t.shape) for t in saved_by(model, x) if t.dtype is torch.uint8)
    assert packed == [(TOKENS, IN // 32), (TOKENS, IN)]


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


def test_bad_inputs_are_named():
    model, _ = build(recipe_of({}))
    with pytest.raises(DtypeError, match="float16"):
        model(torch.zeros(4, IN, dtype=torch.float16))
    with pytest.raises(ShapeError, match="input has 32 features, the weight 64"):
        model(torch.zeros(4, IN // 2))


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


def test_what_two_gemms_read_at_once_in_mxfp4_is_read_once():
    assert reads_of(recipe_of({})) == [(0, 5), (1,), (2, 4), (3,)]
    assert reads_of(recipe_of({}), micro_batches=2) == [(0, 5), (1,), (2, 4), (3,)] * 2
    assert reads_of(formats("mxfp4", "bf16", "mxfp4")) == [(0, 5), (1,), (4,)]
    assert reads_of(formats("fp8", "mxfp4", "mxfp4")) == [(5,), (2, 4), (3,)]
    assert reads_of(recipe_of({}), lambda model, x: x.requires_grad_(False)) == [(0, 5), (1,), (4,)]
    assert reads_of(recipe_of({}), lambda model, x: model.requires_grad_(False)) == [(0,), (1,), (2,), (3,)]


def test_evaluation_makes_only_what_fprop_reads():
    watched = recorder("reference")
    model, _ = build(recipe_of({}), watched)
    x, _ = tensors()
    with torch.no_grad():
        model(x)
        model(x)
    assert watched.reads == [(0,), (1,)] * 2


@pytest.mark.clause("conformance.dual")
def test_a_weight_is_prepared_once_for_all_gemms_of_an_opened_step():
    recipe = recipe_of(TABLES["SR everywhere"])
    results = []
    for backend in (Laying(), get_backend("reference")):
        model, context = build(recipe, backend)
        context.global_tokens = 3 * TOKENS
        for context.step in range(2):
            x, dy = tensors(seed=context.step)
            with weights_held(model):
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
            assert backend.read == 2 * (3 + 3)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
