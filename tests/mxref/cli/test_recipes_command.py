"""`mxref recipes`: every shipped recipe with its digest, and its text as a file."""

import pytest
from click.testing import CliRunner

from mxref import load_recipe
from mxref.cli import main
from mxref.recipe_files import shipped_recipes

pytest.importorskip("mxref_training")


def run(*args):
    return CliRunner().invoke(main, ["recipes", *args], catch_exceptions=False)


def test_every_shipped_recipe_is_listed_with_its_digest():
    rows = [line.split() for line in run().stdout.splitlines()]
    found = {row[0]: row[1] for row in rows if len(row) > 1}
    assert {name: found[name] for name in shipped_recipes()} == {
        name: load_recipe(name).digest for name in shipped_recipes()
    }
    assert "nvfp4_style_tail" in found


def test_a_printed_recipe_is_a_file_to_start_from(tmp_path):
    for name in shipped_recipes():
        file = tmp_path / "mine.toml"
        file.write_text(run(name).stdout)
        assert load_recipe(file) == load_recipe(name)
    assert load_recipe("nvfp4_style_tail").at(0, 10) == load_recipe("nvfp4_style")
    assert load_recipe("nvfp4_style_tail").at(9, 10) == load_recipe("bf16")


def test_an_unknown_name_is_refused():
    found = run("tsneg")
    assert found.exit_code == 2
    assert "unknown recipe 'tsneg' (did you mean 'tseng'?)" in found.stderr
