"""`mxref probe`: the numbers are those of the layer's own GEMMs, and what cannot be probed is refused in a sentence."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import mxref
import mxref_torch
from html_page import Page
from mxref.cli import main
from mxref.discovery import get_backend
from mxref.recipe import BF16_RECIPE, Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.roles import GemmRole
from mxref_torch.layer.linear import MXLinear
from mxref_training.errors import ConfigError
from mxref_training.probe import batch, measure
from mxref_training.probe.arms import NamedRecipe, resolved
from mxref_training.probe.batch import Shape, Side, make_batch
from mxref_training.probe.errors import ProductError, exact_product
from mxref_training.probe.layer import Captured, LayerProbe
from mxref_training.probe.moments import find_moments
from mxref_training.probe.results import load, rows
from narrow_backend import Narrow
from training_setup import CONFIG, CORPUS, change, run

LAYERS = 7
REFERENCE = get_backend("reference")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fp8"
    run(folder, "fp8", change(CONFIG, checkpoint_every=3, keep=5, threads=1))
    return folder


@pytest.fixture(autouse=True)
def _corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up tokens of the run; reading a corpus has its own tests."""
    monkeypatch.setattr(batch, "prepare_corpus", lambda _config: CORPUS)


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["probe", "--backend", "reference", *map(str, arguments)])


def refused(*arguments: object) -> str:
    done = called(*arguments)
    *_, last = done.output.splitlines()
    assert (done.exit_code, done.output.count("error: ")) == (2, 1), done.output
    assert last.startswith("error: ")
    return last


@pytest.fixture(scope="module")
def found(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a probe of two checkpoints."""
    out = tmp_path_factory.mktemp("probe") / "new" / "pages"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "prepare_corpus", lambda _config: CORPUS)
        done = called(
            trained / "checkpoints" / "step-3",
            trained,
            "--recipe",
            "mxfp4",
            "--recipe",
            "mxfp4_h16",
            "--out",
            out,
        )
    assert done.exit_code == 0, done.output
    assert str(out / "probe.html") in done.output
    assert "step 6: 7 of 7 layers" in done.output
    return out


def test_every_recipe_layer_and_gemm_has_its_rows(found: Path) -> None:
    results = load(found)
    assert [recipe["name"] for recipe in results["recipes"]] == ["bf16", "mxfp4", "mxfp4_h16"]
    assert [moment["step"] for moment in results["moments"]] == [3, 6]
    products, operands = rows(results, "products"), rows(results, "operands")
    assert len(products) == 2 * 3 * LAYERS * 3
    assert len(operands) == 2 * len(products)
    places = {(row["moment"], row["recipe"], row["layer"], row["role"]) for row in products}
    assert len(places) == len(products)
    assert {row["formats"] for row in products if row["recipe"] == "mxfp4_h16"} == {"mxfp4"}
    for row in products:
        low, high = (40, 80) if row["recipe"] == "bf16" else (5, 30)
        assert low < row["snr"] < high, row
    for row in operands:
        assert sum(row[f"noise_{cause}"] for cause in ("scale", "dead", "clip", "grid")) == pytest.approx(
            row["noise"], rel=1e-4, abs=1e-12
        )
    sizes = {row["recipe"]: row["group"] for row in operands}
    assert sizes == {"bf16": 16, "mxfp4": 16, "mxfp4_h16": 16}


def test_results_say_what_they_stand_on(found: Path, trained: Path) -> None:
    results = load(found)
    assert results["batch"]["name"] == "val sequences 0 to 1 of 32 tokens"
    tokens = CORPUS.val.ids[:65].astype(np.int64)
    windows = np.stack([tokens[:33], tokens[32:]]).astype("<i8")
    assert results["batch"]["sha256"] == hashlib.sha256(windows.tobytes()).hexdigest()
    assert [recipe["digest"] for recipe in results["recipes"]][1] == load_recipe("mxfp4").digest
    manifest = json.loads((trained / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert results["moments"][0]["model_sha256"] == manifest["model.safetensors"]["sha256"]
    assert results["data"] == {"hashes": CORPUS.hashes, "other": []}
    assert {"torch", "mxref"} <= set(results["versions"])
    assert results["hardware"]["device"] == "cpu"
    assert (found / "probe.json").stat().st_size < 120_000


def test_the_page_stands_alone_and_has_every_figure(found: Path) -> None:
    page = (found / "probe.html").read_text(encoding="utf-8")
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.tags.count("svg") == 3
    for text in ("mxfp4_h16", "dead zone", "Wgrad X", "step 3", load_recipe("mxfp4").digest, "versions"):
        assert text in page or text.capitalize() in page, text
    lines = (found / "probe.md").read_text(encoding="utf-8").splitlines()
    assert any(
        "A recipe with phases is shown as it is at the step of the checkpoint." in line for line in lines
    )
    assert sum(line.startswith("|") and "mxfp4_h16" in line for line in lines) == 2 + 1
    assert any(line.startswith("**In dW, against mxfp4 (") for line in lines)


def test_the_pages_are_made_again_from_the_numbers(found: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(found / "probe.json", alone)
    done = CliRunner().invoke(main, ["report", str(alone), "--csv", str(tmp_path / "csv")])
    assert done.exit_code == 0, done.output
    for name in ("probe.html", "probe.md"):
        assert (alone / name).read_bytes() == (found / name).read_bytes()
    assert (tmp_path / "csv" / "probe.csv").read_bytes() == (found / "probe.csv").read_bytes()


def test_the_csv_has_a_line_for_each_gemm(found: Path) -> None:
    with (found / "probe.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows(load(found), "products"))
    own = next(x for x in lines if (x["recipe"], x["role"]) == ("mxfp4", "wgrad"))
    assert (own["a_operand"], own["b_operand"], own["formats"]) == ("dy", "x", "mxfp4")
    assert float(own["snr"]) < 30
    assert own["digest"] == load_recipe("mxfp4").digest


def test_a_second_probe_gives_the_same_file(found: Path, trained: Path, tmp_path: Path) -> None:
    where = trained / "checkpoints" / "step-3"
    assert (
        called(where, trained, "--recipe", "mxfp4", "--recipe", "mxfp4_h16", "--out", tmp_path).exit_code == 0
    )
    assert (tmp_path / "probe.json").read_bytes() == (found / "probe.json").read_bytes()
    assert (tmp_path / "probe.html").read_bytes() == (found / "probe.html").read_bytes()


RECIPES = {
    "fp8": load_recipe("fp8"),
    "sr": recipe_from_table(
        {"dialect": "amd", "all": {"rounding": "sr", "hadamard": 16, "signs": "per_step"}}
    ),
    "from Fprop": recipe_from_table(
        {
            "dgrad": {"source": "fprop", "rounding": "sr"},
            "wgrad": {"source": "fprop", "gain": 1.5, "out": "bf16"},
        }
    ),
    "mixed": recipe_from_table(
        {
            "all": {"format": "mxfp8_e4m3"},
            "dgrad": {"format": "mxfp4", "prescale": True, "w": {"scale_rule": "ceil"}},  # W not as in Fprop
            "wgrad": {"format": "mxfp4", "prescale": True},
        }
    ),
}


def layer_and_batch(recipe: Recipe, dtype: torch.dtype) -> tuple[MXLinear, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model[0].weight.normal_(0, 0.1, generator=generator)
    x, dy = (torch.randn(64, n, generator=generator).to(dtype) for n in (64, 96))
    handle = mxref_torch.convert(model, recipe, backend=REFERENCE, seed=9)
    handle.context.step, handle.context.global_tokens = 3, 64
    layer = model[0]
    assert isinstance(layer, MXLinear)
    return layer, x, dy


@pytest.mark.parametrize("name", RECIPES)
def test_the_products_are_those_of_the_layer_itself(name: str) -> None:
    layer, x, dy = layer_and_batch(RECIPES[name], torch.bfloat16)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    computed = dict(zip(GemmRole, (y.detach(), x.grad, layer.weight.grad), strict=True))
    plain, *_ = layer_and_batch(BF16_RECIPE, torch.bfloat16)
    own = Captured("layer", plain, x.detach(), dy, 3)
    ((_, products, _),) = LayerProbe(own).rows({name: RECIPES[name]})
    for row, role in zip(products, GemmRole, strict=True):
        w = plain.weight.detach()
        sides = {GemmRole.FPROP: (x.detach(), w), GemmRole.DGRAD: (dy, w), GemmRole.WGRAD: (dy, x.detach())}
        expected = ProductError.of(exact_product(role, *sides[role]), computed[role]).row()
        assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_operands_are_those_of_telemetry(name: str) -> None:
    layer, x, dy = layer_and_batch(RECIPES[name], torch.float32)
    parent = nn.Sequential(layer)
    with mxref_torch.telemetry(parent) as seen:
        parent(x.requires_grad_()).backward(dy)
    plain, *_ = layer_and_batch(BF16_RECIPE, torch.float32)
    ((_, _, operands),) = LayerProbe(Captured("0", plain, x.detach(), dy, 3)).rows({name: RECIPES[name]})
    measured = {(row["role"], row["operand"]): row for row in seen.rows if "snr" in row}
    for row in operands:
        other = measured[row["role"], row["operand"]]
        assert -10 * math.log10(row["noise"]) == pytest.approx(other["snr"], rel=1e-9)
        assert (row["zeroed"], row["clipped"]) == pytest.approx((other["zeroed"], other["clipped"]))


@pytest.mark.parametrize("rows", [96, 40], ids=["at once", "in parts"])
def test_the_error_of_a_tile_is_split_by_tile(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a tile has a factor of its own, and one for each row would take more of the error for scale bias.

    Parts of 40 rows would cut a tile, so each has 32.
    """
    monkeypatch.setattr("mxref_training.probe.layer.at_once", lambda _: rows * 64)
    recipe = recipe_from_table({"all": {"block": "32x32", "scale_rule": "ceil"}})
    layer, x, dy = layer_and_batch(BF16_RECIPE, torch.float32)
    ((_, _, operands),) = LayerProbe(Captured("0", layer, x, dy, 3)).rows({"tiles": recipe})
    (row,) = (row for row in operands if (row["role"], row["operand"]) == ("fprop", "w"))
    w = layer.weight.detach().numpy()
    v, q = w.astype(np.float64), mxref.dequantize(mxref.quantize(w, recipe.fprop.w), "float64")
    inner = q != 0  # CEIL clips nothing
    cross, signal = (
        np.where(inner, t, 0).reshape(3, 32, 2, 32).sum(axis=(1, 3)) for t in ((q - v) * v, v * v)
    )
    assert row["noise_scale"] == pytest.approx((cross**2 / signal).sum() / (v * v).sum(), rel=1e-6)


@pytest.mark.parametrize("signs", [{}, {"sign_vector": "+-+++---+--+-++-"}, {"signs": "fixed"}])
def test_the_means_of_groups_do_not_depend_on_the_signs(signs: dict[str, str]) -> None:
    """What of an operand lies in the means is read along the transform that its rounding has seen."""
    plain = recipe_from_table({"dialect": "amd"})
    turned = recipe_from_table({"dialect": "amd", "all": {"hadamard": 16, **signs}})
    layer, x, dy = layer_and_batch(plain, torch.float32)
    probe = LayerProbe(Captured("layer", layer, x, dy, 3))
    found = {name: operands for name, _, operands in probe.rows({"plain": plain, "turned": turned})}
    for before, after in zip(found["plain"], found["turned"], strict=True):
        assert after["dc_source"] == pytest.approx(before["dc_source"], rel=1e-6)


def test_no_update_and_no_trace_is_left(trained: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(trained.rglob("*")) if path.is_file()}
    assert called(trained, "--recipe", "mxfp4", "--out", tmp_path).exit_code == 0
    assert before == {path: path.read_bytes() for path in sorted(trained.rglob("*")) if path.is_file()}


def test_a_schedule_is_probed_as_it_is_at_the_checkpoints_step() -> None:
    plan = recipe_from_table(
        {"all": {"format": "mxfp4"}, "schedule": [{"until": 4, "recipe": {"all": {"format": "fp8"}}}]}
    )
    layer, *_ = layer_and_batch(BF16_RECIPE, torch.float32)
    for step, kind in ((3, "fp8"), (4, "block"), (10, "block")):
        of = resolved([NamedRecipe("plan", "plan", plan)], {"l": layer}, REFERENCE, 0, step, 8)["plan"]["l"]
        assert of.kind(GemmRole.FPROP) == kind


def test_layers_in_bf16_under_every_recipe_are_left_out(found: Path) -> None:
    assert not any(row["layer"] == "lm_head" for row in rows(load(found), "products"))


def test_a_glob_chooses_layers(trained: Path, tmp_path: Path) -> None:
    done = called(
        trained,
        "--recipe",
        "mxfp4",
        "--layers",
        "*.down_proj",
        "--side",
        "train",
        "--first",
        2,
        "--out",
        tmp_path,
    )
    assert done.exit_code == 0, done.output
    results = load(tmp_path)
    assert {row["layer"] for row in rows(results, "products")} == {"model.layers.0.mlp.down_proj"}
    assert results["batch"]["name"] == "train sequences 2 to 3 of 32 tokens"


def test_other_tokens_than_the_runs_are_said(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type(CORPUS)(
        CORPUS.train,
        CORPUS.train.__class__(CORPUS.val.ids[::-1].copy(), "f" * 64),
        CORPUS.tokenizer,
        "",
    )
    monkeypatch.setattr(batch, "prepare_corpus", lambda _config: other)
    done = called(trained, "--recipe", "mxfp4", "--layers", "*.down_proj", "--out", tmp_path)
    assert "the val tokens are not those of the run" in done.output
    assert load(tmp_path)["data"]["other"] == ["val"]


def test_the_phase_of_a_recipe_is_said(trained: Path, tmp_path: Path) -> None:
    """The last of the run's six steps is in BF16."""
    plan = tmp_path / "healed.toml"
    plan.write_text('schedule = [{start = 5, name = "tail", recipe = "bf16"}]\n')
    places = [trained / "checkpoints" / "step-3", trained]
    done = called(*places, "--recipe", plan, "--recipe", "mxfp4", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if ": phase " in line] == [
        "step 3: phase main of healed",
        "step 6: phase tail of healed",
    ]


def test_what_is_no_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path / "missing")
    assert "no run of `mxref train`" in refused(tmp_path)
    empty = Path(shutil.copytree(trained, tmp_path / "empty"))
    shutil.rmtree(empty / "checkpoints")
    assert "has no checkpoint yet" in refused(empty)
    assert "step-99" in refused(trained / "checkpoints" / "step-99")
    assert "a second time" in refused(trained, trained / "checkpoints" / "step-6")


def test_a_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    weights = copy / "checkpoints" / "step-6" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert "model.safetensors does not have the size and SHA-256" in refused(copy, "--recipe", "mxfp4")
    (copy / "config.toml").unlink()
    assert "config.toml" in refused(copy, "--recipe", "mxfp4")
    (copy / "checkpoints" / "step-6" / "state.json").write_text("{}")
    assert "state.json" in refused(copy)


def test_checkpoints_of_two_models_are_refused(trained: Path, tmp_path: Path) -> None:
    other = replace(change(CONFIG, steps=1, threads=1), model=replace(CONFIG.model, ffn=96))
    run(tmp_path / "other", "bf16", other)
    assert "another model" in refused(trained, tmp_path / "other")


def test_a_choice_that_does_not_fit_is_refused(trained: Path, tmp_path: Path) -> None:
    mxfp4 = trained, "--recipe", "mxfp4"
    assert "matches no linear layer" in refused(*mxfp4, "--layers", "*.nothing")
    assert "computes these layers in BF16" in refused(*mxfp4, "--layers", "lm_head")
    assert "no recipe has this name" in refused(*mxfp4, "--without", "mxfp5")
    assert "unknown recipe" in refused(trained, "--recipe", "mxfp5")
    assert "needs the first 1,601 tokens of the val side" in refused(*mxfp4, "--batch", 50)
    assert "--length 64 is above model.max_seq = 32" in refused(*mxfp4, "--length", 64)
    assert called(*mxfp4, "--draws", 1).exit_code == 2
    tall = tmp_path / "h256.toml"
    tall.write_text("all = { format = 'mxfp4', hadamard = 256 }")
    said = refused(trained, "--recipe", tall)
    assert "recipe h256" in said
    assert "--without h256" in said


@pytest.fixture
def few(tmp_path: Path) -> str:
    """A backend without Hadamard transforms."""
    file = tmp_path / "few.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from mxref.reference import ReferenceBackend\n"
        "class Few(ReferenceBackend):\n"
        "    name = 'few'\n"
        "    capabilities = replace(ReferenceBackend.capabilities, hadamard_sizes=frozenset())\n"
        "backend = Few()\n"
    )
    return f"{file}:backend"


def test_recipes_that_the_backend_does_not_have_are_named(trained: Path, few: str) -> None:
    recipes = "--recipe", "mxfp4", "--recipe", "mxfp4_h16", "--recipe", "tseng"
    done = CliRunner().invoke(main, ["probe", str(trained), "--backend", few, *recipes])
    assert done.exit_code == 2
    assert "recipe mxfp4_h16: backend 'few' does not declare" in done.output
    assert "--without mxfp4_h16 --without tseng" in done.output


def test_of_all_shipped_recipes_those_are_probed_that_the_backend_has(
    trained: Path, few: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = "--layers", "*.0.*.down_proj", "--length", "8", "--out", str(out)
    done = CliRunner().invoke(main, ["probe", str(trained), "--backend", few, *arguments])
    assert done.exit_code == 0, done.output
    assert "left out mxfp4_h16: backend 'few' does not declare" in done.output
    probed = {recipe["name"] for recipe in load(out)["recipes"]}
    assert {"bf16", "mxfp4"} <= probed
    assert not {"mxfp4_h16", "tseng"} & probed


def test_a_product_that_leaves_the_backends_range_is_computed_again() -> None:
    _, x, dy = layer_and_batch(BF16_RECIPE, torch.float32)
    products = []
    for backend in (REFERENCE, Narrow({1, 3})):
        model = nn.Sequential(nn.Linear(64, 96, bias=False))
        nn.init.constant_(model[0].weight, 0.3)
        mxref_torch.convert(model, BF16_RECIPE, backend=backend)
        layer = model[0]
        assert isinstance(layer, MXLinear)
        ((_, rows_of, _),) = LayerProbe(Captured("0", layer, x, dy, 0)).rows({"mxfp4": load_recipe("mxfp4")})
        products.append(rows_of)
    assert products[0] == products[1]


def test_a_batch_that_memory_cannot_hold_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "memory_limit", lambda _device: 1000)
    assert "lower --batch or --length" in refused(trained, "--recipe", "mxfp4")


def test_batches_are_sequences_in_order() -> None:
    made = make_batch(CORPUS, CONFIG, Shape(Side.TRAIN, 3, 16, 5))
    np.testing.assert_array_equal(made.inputs.ravel(), CORPUS.train.ids[80:128])
    np.testing.assert_array_equal(made.targets.ravel(), CORPUS.train.ids[81:129])
    with pytest.raises(ConfigError, match="the first 209 tokens"):
        make_batch(CORPUS, CONFIG, Shape(Side.VAL, 3, 16, 10))


def test_the_newest_checkpoint_is_that_of_a_folder(trained: Path) -> None:
    (moment,) = find_moments([trained])
    assert (moment.step, moment.seed, moment.name) == (6, 3, "step 6")
    facts: dict[str, Any] = moment.facts()
    assert facts["tokens"] == 6 * 4 * 32
