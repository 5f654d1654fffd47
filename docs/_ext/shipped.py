"""Sphinx extension: the recipes, presets and ladders that are shipped, and the keys of a configuration.

Everything is read from the TOML files and the dataclasses, so a new file or key appears by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rst_text import Text, attribute_docs, list_table
from sphinx.application import Sphinx

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, shipped_recipes
from mxref.roles import OPERANDS, GemmRole
from mxref.tomlio import to_table
from mxref_training.config import TrainConfig
from mxref_training.config_files import PRESETS, load_config, names
from mxref_training.lab.ladder import SHIPPED, Arm, Ladder, load_ladder
from mxref_training.model.llama import parameter_count
from mxref_training.treatment import describe

_PAPER = re.compile(r"arXiv (\d{4}\.\d{4,5})")


def head(file: Path) -> str:
    """Return the first paragraph of the comment at the head of a file."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    words = takewhile(bool, (line.lstrip("#").strip() for line in lines))
    return " ".join(words)


def linked(text: str) -> str:
    """Return a text with its papers as links."""
    return _PAPER.sub(r"`arXiv \1 <https://arxiv.org/abs/\1>`__", text.replace("*", r"\*"))


def papers(text: str) -> str:
    """Return the papers that a text names, as links."""
    return ", ".join(linked(f"arXiv {number}") for number in dict.fromkeys(_PAPER.findall(text)))


def body(file: Path) -> list[str]:
    """Return what follows the comment at the head of a file, as a block of TOML."""
    lines = file.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return ["", ".. code-block:: toml", "", *(f"   {line}".rstrip() for line in lines[start:]), ""]


def differing(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the keys in which a recipe differs from `Recipe()`, each at the widest place that it holds for."""
    table, default = to_table(recipe), to_table(Recipe())
    cells = {
        f"{role.value}.{operand.tensor}": table[role.value][operand.tensor]
        for role in GemmRole
        for operand in OPERANDS[role]
    }
    usual = default["fprop"]["x"]
    found = []
    for key in dict.fromkeys(key for cell in cells.values() for key in cell):
        values = {place: cell.get(key) for place, cell in cells.items()}
        found += _widest(key, values, usual.get(key))
    for role in GemmRole:
        whole = {key: value for key, value in table[role.value].items() if not isinstance(value, dict)}
        found += [(f"{role.value}.{key}", _value(value)) for key, value in whole.items()]
    for key in ("gemm", "fp8_scaling", "keep_bf16", "layers", "schedule"):
        if key in table and table[key] != default.get(key, []):
            found.append((key, _value(table[key])))
    return found


def _widest(key: str, values: dict[str, Any], usual: Any) -> Iterator[tuple[str, str]]:
    """Yield one line for all operands, for a GEMM or for an operand."""
    if len({str(value) for value in values.values()}) == 1:
        value = next(iter(values.values()))
        if value != usual:
            yield f"all.{key}", _value(value)
        return
    for role in GemmRole:
        own = {place: value for place, value in values.items() if place.startswith(f"{role.value}.")}
        together = len({str(value) for value in own.values()}) == 1
        for place, value in own.items():
            if value != usual:
                yield f"{role.value if together else place}.{key}", _value(value)
                if together:
                    break


def _value(value: Any) -> str:
    """Return a value as TOML has it; tables of layers and phases by their recipe's formats and places."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        places = {key: item for key, item in value.items() if key != "recipe"}
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in places.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _title(name: str, sign: str) -> list[str]:
    return ["", name, sign * len(name), ""]


def recipes() -> list[str]:
    """Return the overview of the shipped recipes, and a section for each."""
    shipped = shipped_recipes()
    rows = [
        [
            f":ref:`{name} <recipe-{name}>`",
            f"`{load_recipe(file).digest}`",
            "; ".join(_words(load_recipe(file))),
            papers(head(file)),
        ]
        for name, file in shipped.items()
    ]
    lines = list_table(["name", "digest", "treatment", "source"], rows, (18, 16, 48, 18))
    for name, file in shipped.items():
        recipe = load_recipe(file)
        lines += [
            "",
            f".. _recipe-{name}:",
            *_title(name, "~"),
            linked(head(file)),
            "",
            f"Digest: `{recipe.digest}`.",
            "",
        ]
        cells = [[f"`{key}`", f"`{value}`"] for key, value in differing(recipe)]
        lines += list_table(["differs from the default in", "value"], cells, (40, 60))
    return lines


def _words(recipe: Recipe) -> list[str]:
    """Return the treatment of the three GEMMs, equal ones together."""
    roles: dict[str, list[str]] = {}
    for role, text in describe(recipe):
        roles.setdefault(text, []).append(role)
    return [text if len(roles) == 1 else f"{' and '.join(names)}: {text}" for text, names in roles.items()]


def presets() -> list[str]:
    """Return the overview of the presets, and a section for each."""
    loaded = {name: load_config(name) for name in names(PRESETS)}
    rows = [
        [
            f":ref:`{name} <preset-{name}>`",
            f"{parameter_count(config.model):,}",
            f"{config.run.steps:,}",
            f"{config.run.steps * config.run.step_tokens:,}",
            config.data.train,
        ]
        for name, config in loaded.items()
    ]
    rows.sort(key=lambda row: int(row[1].replace(",", "")))
    lines = list_table(["name", "parameters", "steps", "tokens", "`data.train`"], rows, (20, 24, 14, 24, 18))
    for row in rows:
        name = row[0].split("`")[1].split()[0]
        file = PRESETS / f"{name}.toml"
        lines += ["", f".. _preset-{name}:", *_title(name, "~"), linked(head(file)), *body(file)]
    return lines


def keys() -> list[str]:
    """Return a table of keys for each table of a configuration."""
    lines: list[str] = []
    for section in fields(TrainConfig):
        lines += _table_of(section.name, _dataclass(get_type_hints(TrainConfig)[section.name]))
    return lines


def _table_of(name: str, table: type) -> list[str]:
    docs, hints = attribute_docs(table), get_type_hints(table)
    rows, nested = [], []
    for field in fields(table):
        inner = _dataclass(hints[field.name])
        if inner:
            nested += _table_of(f"{name}.{field.name}", inner)
        default = (
            "required" if field.default is MISSING and field.default_factory is MISSING else _default(field)
        )
        said = docs.get(field.name, "")
        rows.append([f"`{field.name}`", default, f"{said} {_choices(hints[field.name], said)}".strip()])
    summary = " ".join((table.__doc__ or "").split("\n\n")[0].split())
    return [
        *_title(f"[{name}]", "~"),
        summary,
        "",
        *list_table(["key", "default", "meaning"], rows, (24, 16, 60)),
        *nested,
    ]


def _dataclass(hint: Any) -> type | None:
    return next(
        (kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None
    )


def _choices(hint: Any, said: str) -> str:
    """Return the members of an enumeration with their meaning, without those that the text has named enough."""
    kind = next(
        (kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Enum)), None
    )
    if kind is None:
        return ""
    docs = attribute_docs(kind)
    shown = [member for member in kind if member.name in docs or f"`{member.value}`" not in said]
    return " ".join(
        f"`{member.value}`: {docs[member.name]}" if member.name in docs else f"`{member.value}`."
        for member in shown
    )


def _default(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    if value is None:
        return "none"
    return f"`{_value(value.value if isinstance(value, Enum) else value)}`"


def ladders() -> list[str]:
    """Return the overview of the ladders, and a section for each with its arms and questions."""
    loaded = {file.stem: load_ladder(file) for file in sorted(SHIPPED.glob("*.toml"))}
    rows = [
        [
            f":ref:`{name} <ladder-{name}>`",
            f":ref:`{ladder.train.preset} <preset-{ladder.train.preset}>`",
            str(len(ladder.arm)),
            str(sum(ladder.repetitions(arm) for arm in ladder.arm)),
            ladder.title,
        ]
        for name, ladder in loaded.items()
    ]
    lines = list_table(["name", "preset", "arms", "runs", "title"], rows, (18, 18, 10, 10, 44))
    for name, ladder in loaded.items():
        lines += ["", f".. _ladder-{name}:", *_title(name, "~"), linked(head(SHIPPED / f"{name}.toml")), ""]
        lines += [f"Reference: `{ladder.target.reference}`. Preset: `{ladder.train.preset}`.", ""]
        arms = [_arm(ladder, arm) for arm in ladder.arm]
        lines += list_table(["arm", "digest", "runs", "treatment", "paper"], arms, (20, 17, 8, 43, 12))
        for contrast in ladder.contrast:
            lines += ["", f"- `{contrast.name}`: {contrast.question}"]
        lines.append("")
    return lines


def _arm(ladder: Ladder, arm: Arm) -> list[str]:
    recipe = ladder.resolve(arm)
    claim = arm.paper.overhead if arm.paper else ""
    return [
        f"`{arm.name}`",
        f"`{recipe.digest}`",
        str(ladder.repetitions(arm)),
        "; ".join(_words(recipe)),
        claim,
    ]


PAGES = {
    "shipped-recipes": (recipes, "reference/recipes"),
    "shipped-presets": (presets, "reference/presets"),
    "configuration-keys": (keys, "reference/presets"),
    "shipped-ladders": (ladders, "reference/ladders"),
}
"""Each directive with what it writes and the page that it stands on."""


def directive(write: Callable[[], Iterable[str]]) -> type[Text]:
    """Return a directive that parses what a function writes."""

    class Written(Text):
        def lines(self) -> Iterable[str]:
            return write()

    return Written


def outdated(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """Return the pages, which depend on files that Sphinx does not watch."""
    return {page for _, page in PAGES.values()}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    for name, (write, _) in PAGES.items():
        app.add_directive(name, directive(write))
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
