"""The documentation: its examples run and print what is written, and the example backend gives the reference's bits."""

from __future__ import annotations

import csv
import doctest
import os
import re
import shlex
import tomllib
from dataclasses import fields
from enum import Enum
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import mxref
from mxref import DIALECTS, GemmProfile, OperandSpec, Recipe, ScaleRule, UnsupportedError
from mxref.cli import main
from mxref.discovery import get_backend
from mxref.recipe import WgradSpec
from mxref.recipe_files import recipe_from_table
from mxref.reference import backend as reference
from places import ROOT

DOCS = ROOT / "docs"
SLOW_FILES = ROOT / "tests" / "slow_files.csv"
TOY = f"{DOCS}/examples/toy_backend.py:backend"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for room in (".", "tutorials", "how-to", "reference", "explanation")
    for path in (DOCS / room).glob("*.rst")
)


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page, without their indentation."""
    found = re.findall(rf"^( *)\.\. code-block:: {language}\n\n((?:\1   .*\n|\n)+)", text(page), re.MULTILINE)
    return [re.sub(rf"^{indent}   ", "", body, flags=re.MULTILINE).strip() + "\n" for indent, body in found]


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_is_written(page, monkeypatch):
    if ">>> import torch" in text(page) or ">>> from mxref_training" in text(page):
        pytest.importorskip("torch")
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MXREF_BACKEND", raising=False)
    result = doctest.testfile(str(DOCS / page), module_relative=False, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted or Path(page).stem not in ("quickstart", "recipe", "backends")


def test_explained_block_is_what_the_command_prints():
    (shown,) = [b for b in blocks("tutorials/quickstart.rst", "console") if "Block 0" in b]
    command, _, output = shown.partition("\n")
    words = shlex.split(command.removeprefix("$ mxref "))
    printed = CliRunner().invoke(main, words, env={"COLUMNS": "80"}).stdout
    assert [line.rstrip() for line in printed.strip().splitlines()] == output.rstrip().splitlines()


def test_every_command_that_is_shown_exists():
    shown = re.findall(r"^ *\$ (?:\S+=\S+ )?mxref (\w[\w-]*)", "".join(map(text, PAGES)), re.MULTILINE)
    assert len(shown) > 10
    known = main.list_commands(None)
    assert set(shown) <= set(known)


def test_the_clause_that_the_recipes_page_quotes_names_every_key_and_value():
    quoting, page = text("reference/recipes.rst"), text("spec/recipe.rst")
    assert ".. quoted-clause:: recipe.overlay" in quoting
    every = (
        *fields(OperandSpec),
        *(f for f in fields(WgradSpec) if f.name not in ("dy", "x")),
        *fields(Recipe),
    )
    for field in every:
        if field.name not in {role.value for role in mxref.GemmRole}:
            assert f"`{field.name}`" in quoting, field.name
    for field in every:
        assert f"`{field.name}`" in page or f"`[{field.name}]`" in page, field.name
        for value in type(field.default) if isinstance(field.default, Enum) else ():
            assert f"`{value.value}`" in page, value
    for name in DIALECTS:
        assert f"* - `{name}`" in page
        assert f".. clause:: dialect.{name}" in page


def test_toml_of_the_page_that_writes_a_recipe_is_valid():
    recipes = [recipe_from_table(tomllib.loads(block)) for block in blocks("how-to/recipe.rst", "toml")]
    assert len(recipes) == 3
    assert recipes[0].dgrad.dy.rounding.value == "sr"
    assert [str(f) for f in recipes[1].formats(mxref.GemmRole.FPROP)] == ["bf16", "bf16"]
    assert recipes[2].source(mxref.GemmRole.WGRAD).value == "fprop"


def test_toml_of_the_page_of_layers_and_phases_is_a_plan():
    pytest.importorskip("mxref_training")
    (block,) = blocks("how-to/layers-and-phases.rst", "toml")
    plan = recipe_from_table(tomllib.loads(block))
    names = [f"model.layers.{i}.mlp.{part}_proj" for i in range(3) for part in ("up", "down")] + ["lm_head"]

    def treatments(step):
        found = plan.at(step, 100).by_layer(names).values()
        return [f"{r.fprop.x.format} {r.wgrad.dy.rounding.value}" for r in found]

    assert [(span.name, span.first, span.end) for span in plan.spans(100)] == [
        ("fp8", 0, 10), ("main", 10, 90), ("tail", 90, 100)
    ]  # fmt: skip
    assert treatments(10) == ["mxfp4 rne", "mxfp4 sr"] * 2 + ["bf16 rne"] * 3
    assert treatments(0) == ["fp8 rne"] * 6 + ["bf16 rne"]
    assert treatments(99) == ["bf16 rne"] * 7


def test_toml_of_the_ablation_page_is_a_ladder(tmp_path):
    pytest.importorskip("mxref_training.lab.ladder")
    from mxref_training.lab.ladder import load_ladder

    (tmp_path / "ladder.toml").write_text("\n".join(blocks("how-to/ablation.rst", "toml")))
    ladder = load_ladder(tmp_path / "ladder.toml")
    assert [arm.name for arm in ladder.arm] == ["fp8", "h16"]
    assert [(contrast.arm, contrast.against) for contrast in ladder.contrast] == [("h16", "fp8")]


def test_figure_names_modules_that_exist():
    figure = (DOCS / "_static" / "dataflow.svg").read_text()
    names = set(re.findall(r">([\w/]+\.py)<", figure))
    assert len(names) >= 10
    for name in names:
        assert (ROOT / "mxref" / name).is_file() or (ROOT / "training" / name).is_file(), name


@pytest.mark.study
def test_every_rendered_measurement_is_on_a_page_and_the_tables_of_the_pages_are_current(monkeypatch):
    """Where a table is out of date: `make tables`."""
    for package in ("torch", "triton", "numba", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    monkeypatch.setattr(os, "fsync", os.fstat)  # what is collected on the way need not outlive the test
    from committed import filled, names, pages
    from measured import STUDIES

    rendered = {name: text for study in STUDIES for name, text in import_module(study).parts().items()}
    assert all(text.count("\n") > 5 for text in rendered.values())
    shown = {path: path.read_text(encoding="utf-8") for path in pages()}
    plots = re.findall(r"/_measured/([\w.]+)", "".join(shown.values()))
    assert [name for name in plots if name.endswith(".inc")] == []
    # A narrow variant takes the place of its plot by itself.
    expected = [
        name for name in rendered if name.replace(".narrow.svg", ".svg") not in set(rendered) - {name}
    ]
    assert sorted([*plots, *(name for page in shown.values() for name in names(page))]) == sorted(expected)
    assert [str(path) for path, page in shown.items() if page != filled(page, rendered)] == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (".. begin b.inc, made by `make tables`\n.. end of b.inc\n", "no study has"),
        (".. begin a.inc, made by `make tables`\n.. end of b.inc\n", "does not close"),
    ],
)
def test_a_table_that_no_study_has_and_one_that_is_not_closed_are_refused(page, problem, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from committed import RegionError, filled

    with pytest.raises(RegionError, match=problem):
        filled(page, {"a.inc": "1\n"})
    assert filled(page.replace("b.inc", "a.inc"), {"a.inc": "1\n"}).count("\n1\n") == 1


def test_links_of_the_backends_readme_exist():
    page = (ROOT / "backends" / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page)
    assert len(links) >= 2
    assert [link for link in links if not (ROOT / "backends" / link).exists()] == []


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(5, 64), (32, 33), (64, 3), (2, 3, 32), (0, 32)]),
    axis=st.integers(-2, 1),
    spread=st.sampled_from([1, 20, 150]),
    zero_scale=st.sampled_from([0, 127]),
)
def test_toy_backend_gives_the_reference_bits(seed, shape, axis, spread, zero_scale):
    toy = get_backend(TOY)
    g = np.random.default_rng(seed)
    # Grid points and midpoints at scales down to subnormals and up to the largest, with zeros, NaN and Inf among them.
    x = g.choice([0.0, -0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, -1, -5], shape)
    with np.errstate(over="ignore", under="ignore"):
        x = (x * np.exp2(g.integers(-spread, spread, shape).clip(-149, 125))).astype(np.float32)
    x[g.random(shape) < 0.003] = g.choice([np.nan, np.inf, -np.inf])
    x[g.random(shape[:1]) < 0.2] = 0
    spec = OperandSpec(zero_scale=zero_scale)
    q, expected = (b.quantize(x, spec, axis=axis, pad=True) for b in (toy, reference))
    assert q == expected
    np.testing.assert_array_equal(toy.dequantize(q), reference.dequantize(expected))


@pytest.mark.parametrize("spread", [1, 30])
def test_toy_backend_multiplies_as_the_reference(spread):
    toy = get_backend(TOY)
    g = np.random.default_rng(spread)
    a, b = (
        (g.standard_normal((m, 128)) * np.exp2(g.integers(-4 * spread, 4 * spread, (m, 128)))).astype(
            np.float32
        )
        for m in (7, 9)
    )
    a[3, 5] = np.nan
    a[4] = -0.0
    qa, qb = (reference.quantize(t, OperandSpec()) for t in (a, b))
    np.testing.assert_array_equal(
        toy.scaled_gemm(qa, qb), reference.scaled_gemm(qa, qb, profile=GemmProfile.ORDERED)
    )


def test_toy_backend_refuses_what_it_does_not_declare():
    toy, x = get_backend(TOY), np.ones((2, 32), np.float32)
    for spec in (
        OperandSpec(scale_rule=ScaleRule.EVEN),
        OperandSpec(hadamard=16),
        OperandSpec(prescale=True),
    ):
        with pytest.raises(UnsupportedError, match="'toy' does not declare"):
            toy.quantize(x, spec)
    with pytest.raises(UnsupportedError, match="gemms"):
        toy.scaled_gemm(
            toy.quantize(x, OperandSpec()), toy.quantize(x, OperandSpec()), profile=GemmProfile.EXACT
        )


def test_slow_files_are_files_of_the_tests():
    """A name that is out of date begins nowhere, and its file comes last."""
    with SLOW_FILES.open(encoding="utf-8", newline="") as file:
        names = [row["file"] for row in csv.DictReader(file)]
    assert len(set(names)) == len(names) > 0
    assert [name for name in names if not (SLOW_FILES.parent / name).is_file()] == []
