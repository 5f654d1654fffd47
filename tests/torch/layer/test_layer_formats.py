"""Block formats other than MXFP4 in the linear layer, and places of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from layer_setup import (
    BACKENDS,
    IN,
    LAYER,
    NVFP4,
    OUT,
    SEED,
    STEP,
    as_numpy,
    build,
    recipe_of,
    recorder,
    tensors,
)
from mxref import Stream, UnsupportedError, get_backend, linear_gemm, load_recipe, quantize
from mxref.capabilities import every_gemm
from mxref.errors import RecipeError
from mxref.formats import BF16, FP8, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.formats import NVFP4 as NVFP4_FORMAT
from mxref.placement import Placement
from mxref.recipe import GemmProfile
from mxref.reference import ReferenceBackend
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.rounding import Rounding
from mxref_torch import LayerError, MXLinear, check_census, check_stochastic_rounding, convert

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
MIXES = {
    "e4m3": {"all": {"format": E4M3, "scale_rule": "rceil"}},
    "hybrid": {
        "all": {"format": E4M3},
        "dgrad": {"dy": {"format": E5M2}},
        "wgrad": {"dy": {"format": E5M2}},
    },
    "mxfp4 with mxfp8": {
        "fprop": {"w": {"format": E4M3}},
        "dgrad": {"dy": {"format": E5M2}},
        "wgrad": {"x": {"format": E5M2, "prescale": True}},
    },
    "SR, H16, tiles": {"all": {"format": E4M3, "rounding": "sr", "hadamard": 16, "block": "32x32"}},
    "one GEMM": {"all": {"format": "fp8"}, "fprop": {"format": E4M3}, "dgrad": {"format": "bf16"}},
}


@pytest.mark.clause("linear.formats")
def test_each_gemm_has_its_own_format():
    model, context = build(recipe_of(MIXES["one GEMM"]))
    x, dy = tensors(tokens=32)
    y = model(x)
    y.backward(dy)
    assert context.census == {
        (GemmRole.FPROP, MXFP8_E4M3, MXFP8_E4M3): 1,
        (GemmRole.DGRAD, BF16, BF16): 1,
        (GemmRole.WGRAD, FP8, FP8): 1,
    }
    wanted = x @ model.layer.weight.T
    assert 0.01 < ((y - wanted).norm() / wanted.norm()).item() < 0.07


def test_saved_operands_take_the_memory_of_their_format():
    saved = []
    for format in (MXFP4, MXFP8_E5M2, NVFP4_FORMAT):
        model, _ = build(recipe_of({"all": {"format": format.name}}))
        x, _ = tensors()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
        ):
            model(x)
        assert (IN, format.code_bytes(len(x))) in saved
        assert (IN, len(x) // format.k) in saved
        assert ((1,) in saved) is format.tensor_scale
        saved.clear()


@pytest.mark.clause("linear.roles", "linear.tensor_scale")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gemms_of_the_recipe_nvfp4_are_those_of_linear_gemm(backend):
    recipe = load_recipe("nvfp4").by_layer([f"layers.{i}.up" for i in range(8)])["layers.0.up"]
    assert recipe == replace(recipe_of(NVFP4), keep_bf16=recipe.keep_bf16)
    model, context = build(recipe_of(NVFP4), backend)
    context.step = STEP
    x, dy = tensors()
    y = model(x)
    y.backward(dy)
    w, x_, dy_ = (as_numpy(t) for t in (model.layer.weight, x, dy))
    for role, a, b, got in (
        (GemmRole.FPROP, x_, w, y),
        (GemmRole.DGRAD, dy_, w, x.grad),
        (GemmRole.WGRAD, dy_, x_, model.layer.weight.grad),
    ):
        want = linear_gemm(role, a, b, recipe, get_backend("reference"), Stream(SEED, STEP, LAYER))
        assert as_numpy(got).tobytes() == want.tobytes(), role


@pytest.mark.clause("linear.tensor_scale")
def test_each_micro_batch_and_each_axis_has_a_scale_of_its_own_and_the_weight_one():
    watched = recorder("reference")
    model, context = build(recipe_of(NVFP4), watched)
    context.step, context.global_tokens = STEP, 64
    x, dy = tensors()
    with torch.no_grad():
        x[40, 3] = 50.0
        dy[3, 40] = 70.0
    for context.token_origin in (0, 32):
        part = slice(context.token_origin, context.token_origin + 32)
        model(x[part]).backward(dy[part])
    scales = {operand: [float(q.tensor_scale[0]) for q in seen] for operand, seen in watched.seen.items()}
    assert scales[0][0] < scales[0][1] == pytest.approx(50 / 2688)
    assert scales[2][1] < scales[2][0] == pytest.approx(70 / 2688)
    assert scales[4][0] != scales[2][0]  # after the transform along the tokens
    assert scales[1] == scales[3] == scales[1][:1] * 2


def test_both_operands_share_the_kind_of_format():
    with pytest.raises(RecipeError, match="share kind of format"):
        recipe_of({"fprop": {"x": {"format": E4M3}, "w": {"format": "fp8"}}})


@pytest.mark.clause("linear.formats")
def test_a_census_tells_formats_of_operands_apart():
    recipe = recipe_of(MIXES["hybrid"])
    model, context = build(recipe)
    x, dy = tensors(tokens=32)
    model(x).backward(dy)
    alone = nn.Sequential(model.layer)  # without the layer that keep_bf16 names
    check_census(context, alone, replace(recipe, keep_bf16=()))
    message = r"dgrad in mxfp8_e5m2 x mxfp8_e4m3: 1 ran, 0 expected; .*wgrad in mxfp8_e4m3: 0 ran, 1 expected"
    with pytest.raises(LayerError, match=message):
        check_census(context, alone, replace(recipe_of(MIXES["e4m3"]), keep_bf16=()))


class FourOnly(ReferenceBackend):
    name = "four only"
    capabilities = replace(
        ReferenceBackend.capabilities,
        formats=frozenset({MXFP4}),
        gemms=every_gemm({GemmProfile.ORDERED}, {MXFP4}),
    )


class Bounded(ReferenceBackend):
    name = "bounded"
    capabilities = replace(
        ReferenceBackend.capabilities,
        gemms=every_gemm({GemmProfile.BOUNDED}, ReferenceBackend.capabilities.formats),
    )


@pytest.mark.parametrize("backend", [FourOnly(), Bounded()], ids=lambda backend: backend.name)
def test_convert_refuses_a_format_that_the_backend_lacks(backend):
    ordered = recipe_of(MIXES["e4m3"] | {"keep_bf16": []})
    for recipe in (ordered, "mxfp8") if isinstance(backend, FourOnly) else (ordered,):
        model = nn.Sequential(nn.Linear(32, 32))
        with pytest.raises(UnsupportedError, match="gemms") as caught:
            convert(model, recipe, backend=backend)
        assert "mxfp8_e4m3" in str(caught.value)
        assert ("set gemm = 'bounded'" in str(caught.value)) is (backend.name == "bounded")
        assert type(model[0]) is nn.Linear


def test_widths_are_multiples_of_the_format_s_block():
    with pytest.raises(LayerError, match=r"0: in_features = 48 is not a multiple of 32.*k = 32"):
        convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8", backend="reference")


SR = {"e4m3": {"all": {"format": E4M3, "rounding": "sr", "sr_bits": 4}},
      "e5m2 prescaled": {"all": {"format": E5M2, "rounding": "sr", "prescale": True, "hadamard": 32}}}  # fmt: skip


class Nearest(ReferenceBackend):
    name = "nearest"

    def _quantize(self, x, plan):
        return super()._quantize(
            x, replace(plan, spec=replace(plan.spec, rounding=Rounding.RNE), stream=None)
        )


class Repeating(ReferenceBackend):
    name = "repeating"

    def _quantize(self, x, plan):
        stream = plan.stream and replace(plan.stream, step=0)
        return super()._quantize(x, replace(plan, stream=stream))


@pytest.mark.parametrize("name", SR)
def test_stochastic_rounding_is_checked_in_the_format_s_own_grid(name):
    recipe = recipe_of(
        {"keep_bf16": [], "fprop": SR[name]["all"], "all": {"format": SR[name]["all"]["format"]}}
    )
    check_stochastic_rounding("reference", recipe)
    for backend, fault in ((Nearest(), "spread"), (Repeating(), "same bits for another step")):
        with pytest.raises(LayerError, match=rf"fprop\.x .*{fault}"):
            check_stochastic_rounding(backend, recipe)


@pytest.mark.clause("quantize.parts")
@pytest.mark.parametrize("format", [MXFP4, MXFP8_E4M3], ids=str)
def test_a_weight_shard_draws_the_bits_of_its_place(format):
    recipe = recipe_of({"all": {"format": format, "rounding": "sr"}})
    model, context = build(recipe)
    whole = model.layer.weight.detach()
    for rows, columns in ((slice(64, 128), slice(0, IN)), (slice(0, OUT), slice(32, 64))):
        source = nn.Linear(1, 1, bias=False)
        source.weight = nn.Parameter(whole[rows, columns].clone())
        source.out_features, source.in_features = source.weight.shape
        shard = MXLinear(source, recipe, context, LAYER)
        shard.lies_at("w", Placement(origin=(rows.start, columns.start), global_shape=(OUT, IN)))
        for role in (GemmRole.FPROP, GemmRole.DGRAD):
            operand = OPERANDS[role][1]
            stream = Stream(SEED, 0, LAYER, operand.id)
            q = quantize(
                whole.numpy(), recipe.operands(role)[1], axis=operand.axis, placement=Placement(stream)
            )
            taken, along = (rows, columns) if operand.axis == 1 else (columns, rows)
            with torch.no_grad():
                made = shard.operands("w", shard.weight, context.batch_place, (shard.gemms[role],))[role]
            part = slice(*(format.code_bytes(n) for n in (along.start, along.stop)))
            assert torch.equal(made.codes, torch.from_numpy(q.codes[taken, part])), (role, rows)
            part = slice(along.start // format.k, along.stop // format.k)
            assert torch.equal(made.scales, torch.from_numpy(q.scales[taken, part]))


def test_a_place_is_that_of_a_tensor():
    model, _ = build(recipe_of({}))
    with pytest.raises(LayerError, match="no tensor of a linear layer is named 'y'; take x, w, dy"):
        model.layer.lies_at("y", Placement())


def test_formats_are_named_in_words():
    from mxref.recipe_files import load_recipe
    from mxref_training.treatment import describe

    found = dict(describe(load_recipe("mxfp8_hybrid")))
    assert found["Fprop"] == "MXFP8 E4M3, RCEIL"
    assert found["Dgrad"] == "MXFP8 E5M2 on dY, MXFP8 E4M3 on W, RCEIL"
    prescaled = recipe_of({"wgrad": {"prescale": True, "dy": {"format": E5M2}}})
    assert dict(describe(prescaled))["Wgrad"] == "MXFP8 E5M2 on dY, MXFP4 on X, FLOOR, × 3/4, × 7/8"


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hybrid"])
def test_shipped_recipes_of_mxfp8_train(tmp_path, recipe):
    from training_setup import CONFIG, change, lines, run

    result = run(tmp_path, recipe, change(CONFIG, steps=2, eval_every=2))
    assert not result.diverged
    assert [line["step"] for line in lines(tmp_path) if "val_loss" in line][-1] == 2
