"""The references that are made from code and files: nothing is missing, nothing twice, and the cells are right."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module

import click
import pytest

pytest.importorskip("mxref_training.config")
pytest.importorskip("sphinx")

import command_line
import shipped

from mxref.recipe_files import load_recipe, recipe_from_table, shipped_recipes
from mxref.tomlio import merge
from mxref_training.config import TrainConfig
from mxref_training.config_files import PRESETS
from mxref_training.lab.ladder import SHIPPED, load_ladder
from places import ROOT

DOCS = ROOT / "docs"
PUBLIC = (
    "mxref", "mxref.conformance", "mxref.explain", "mxref.formats", "mxref_numba", "mxref_triton", "mxref_torch"
)  # fmt: skip
COMMANDS = dict(command_line.commands())


def documented() -> list[str]:
    """Return the names that the pages of the API describe."""
    pages = [
        (DOCS / "reference" / f"{page}.rst").read_text(encoding="utf-8") for page in ("api", "api-torch")
    ]
    found = re.findall(
        r"^\.\. (?:auto(?:function|class|exception)|py:data):: ([\w.]+)$", "\n".join(pages), re.M
    )
    return [str(name) for name in found]


def thing(name: str) -> object:
    package, _, last = name.rpartition(".")
    return getattr(import_module(package), last)


def test_every_public_name_is_described_exactly_once() -> None:
    names = documented()
    assert len(names) == len(set(names))
    for package in PUBLIC:
        pytest.importorskip(package)
    public = {f"{package}.{name}" for package in PUBLIC for name in import_module(package).__all__}
    described = {id(thing(name)) for name in names}
    assert len(described) == len(names)
    assert [name for name in public if id(thing(name)) not in described] == []
    beyond = {name for name in names if name not in public}
    assert {name.rpartition(".")[0] for name in beyond} <= {"mxref.vectors", "mxref.vectors.run"}


def test_the_summary_of_a_task_names_what_the_task_describes() -> None:
    for page in ("api", "api-torch"):
        text = (DOCS / "reference" / f"{page}.rst").read_text(encoding="utf-8")
        for part in re.split(r"^.+\n-{3,}\n", text, flags=re.M)[1:]:
            (summary,) = re.findall(r"\.\. autosummary::\n   :nosignatures:\n\n((?:   .+\n)+)", part) or [""]
            told = re.findall(r"^\.\. auto(?:function|class|exception):: ([\w.]+)$", part, re.M)
            if summary:
                assert summary.split() == told


@pytest.mark.parametrize("name", COMMANDS)
def test_the_section_of_a_command_has_every_option(name: str) -> None:
    command = COMMANDS[name]
    text = "\n".join(command_line.section(name, command))
    options = re.findall(r"^\.\. option:: (.+)$", text, re.M)
    assert len(options) == len(command_line.options(command))
    for option, spelled in zip(command_line.options(command), options, strict=True):
        assert all(opt in spelled for opt in (*option.opts, *option.secondary_opts))
        assert option.help
        if isinstance(option.type, click.Choice):
            assert all(f"`{choice}`" in text for choice in option.type.choices)
    assert "`MXREF_BACKEND`" in text or not any("--backend" in spelled for spelled in options)
    assert all(example in text for example in command_line.examples(command))


def test_commands_and_exit_codes_are_those_of_the_program() -> None:
    assert set(command_line.EXIT_CODES) <= set(COMMANDS)
    groups = {name for name, command in COMMANDS.items() if isinstance(command, click.Group)}
    assert {name.split()[0] for name in COMMANDS if " " in name} == groups == {"vectors"}
    said = "\n".join(command_line.section("conform", COMMANDS["conform"]))
    assert "**Exit code 1**" in said
    assert "**Exit code" not in "\n".join(command_line.section("explain", COMMANDS["explain"]))


def test_facts_of_an_option() -> None:
    @click.command()
    @click.option("--some", type=click.IntRange(2, 9), default=0, multiple=False, help="A *number*.")
    @click.option("--yes/--no", default=True, help="Or not.")
    @click.option("--many", multiple=True, envvar="MANY", help="Names.")
    def command() -> None:
        """Do it.

        \b
        Examples:
          mxref explain 1 2 3  three numbers
        """

    text = "\n".join(command_line.section("some", command))
    assert ".. option:: --some N\n\n   A \\*number\\*. From 2 to 9. Default: `0`." in text
    assert ".. option:: --yes, --no\n\n   Or not. Default: `--yes`." in text
    assert "Names. Environment variable: `MANY`. May be given several times." in text
    assert "   $ mxref explain 1 2 3  # three numbers" in text


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_cells_of_a_recipe_make_the_recipe(name: str) -> None:
    """The keys that are shown, read as a file, give the digest that is shown."""
    recipe = load_recipe(shipped_recipes()[name])
    text = "\n".join(shipped.recipes())
    assert f".. _recipe-{name}:" in text
    assert f"Digest: `{recipe.digest}`." in text
    cells = dict(shipped.differing(recipe))
    assert all(f"`{key}`" in text for key in cells)
    schedule = [key for key in cells if key in ("layers", "schedule")]
    table: dict[str, object] = {}
    for key, value in cells.items():
        if key not in schedule:
            table = merge(table, tomllib.loads(f"{key} = {value}"))
    made = recipe_from_table(table)
    assert made.digest == recipe.digest or (
        schedule and made.fprop == recipe.fprop and made.wgrad == recipe.wgrad
    )


def test_every_preset_and_ladder_has_its_section() -> None:
    presets, ladders = "\n".join(shipped.presets()), "\n".join(shipped.ladders())
    for file in PRESETS.glob("*.toml"):
        assert f".. _preset-{file.stem}:" in presets
    for file in SHIPPED.glob("*.toml"):
        assert f".. _ladder-{file.stem}:" in ladders
        for arm in load_ladder(file).arm:
            assert f"`{arm.name}`" in ladders
    assert "426,624" in presets


def test_every_key_of_a_configuration_is_listed_with_its_meaning() -> None:
    lines = shipped.keys()
    rows = [lines[i : i + 3] for i, line in enumerate(lines) if line.startswith("   * - `")]
    assert len(rows) > 50
    assert [row[0] for row in rows if row[2].strip() == "-"] == []
    assert {f"[{section}]" for section in TrainConfig.__dataclass_fields__} <= set(lines)
