"""Every value of a key is either accepted and can be written back, or refused by a typed error that names the key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from mxref.dialects import dialect
from mxref.errors import FileFormatError, MxrefError, RecipeError
from mxref.recipe import DgradSpec, FpropSpec, OperandSpec, Recipe, WgradSpec
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.roles import OPERANDS
from mxref.tomlio import MAX_DEPTH, build, dumps, merge, read_toml, to_table
from mxref_training.config import DataConfig, ModelConfig, OptimConfig, RopeScaling, RunConfig, TrainConfig
from mxref_training.config_files import PRESETS, config_from_table, load_config
from mxref_training.errors import ConfigError
from mxref_training.lab.ladder import Arm, Claim, Ladder, LossTarget, TrainOverlay, load_ladder


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


BAD: dict[str, Any] = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e308": 1e308, "5e-324": 5e-324, "-1.5": -1.5,
    "-1": -1, "0": 0, "10^30": 10**30, "-10^30": -(10**30), "2^64": 2**64, "10^400": 10**400, "10^5000": 10**5000,
    "empty": "", "long": "x" * 5000, "null": "a\0b", "surrogate": "a\udcff", "dollars": "$\\foo$",
    "date": date(2026, 1, 2), "datetime": datetime(2026, 1, 2, 3), "time": time(1, 2),
    "true": True, "None": None, "bytes": b"x", "object": object(), "complex": 1j,
    "list": [], "numbers": [1, 2.5], "deep list": nested(5000, list), "table": {}, "deep table": nested(5000, dict),
    "huge in a list": [10**5000], "odd key": {3: 4}, "array": np.zeros(3), "float32 nan": np.float32(math.nan),
}  # fmt: skip
TINY = read_toml(PRESETS / "tiny.toml")


def leaves(cls: type, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of a configuration, tables included."""
    for name, hint in get_type_hints(cls).items():
        yield (*prefix, name)
        inner = [h for h in (hint, *getattr(hint, "__args__", ())) if is_dataclass(h)]
        for one in inner:
            yield from leaves(one, (*prefix, name))


def table_at(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def assert_can_be_written(obj: Any) -> None:
    """The files of a run hold it: TOML, and JSON without its extensions."""
    assert dumps(obj).encode()
    json.dumps(to_table(obj), allow_nan=False).encode()


def tried(make: Any, key: str, written: bool = True) -> bool:
    """Return whether a value was accepted; any error but a typed one of one short line passes through."""
    try:
        made = make()
    except MxrefError as err:
        message = str(err)
        assert key in message
        assert len(message) < 600
        assert "\n" not in message
        message.encode()
        return False
    if written:
        assert_can_be_written(made)
    return True


@pytest.mark.parametrize("path", list(leaves(TrainConfig)), ids=".".join)
def test_every_key_of_a_configuration(path: tuple[str, ...]) -> None:
    accepted = []
    for name, value in BAD.items():
        table = merge({**TINY, path[0]: TINY.get(path[0], {})}, table_at(path, value))
        if tried(lambda table=table: config_from_table(table), path[-1]):
            accepted.append(name)
    assert not {"nan", "inf", "-inf", "10^400", "10^5000", "surrogate", "null", "date", "deep list"} & set(
        accepted
    )


SPEC_PATHS = [
    (*place, f.name)
    for place in (("all",), ("fprop",), ("dgrad", "w"), ("wgrad", "x"))
    for f in fields(OperandSpec)
]
RECIPE_PATHS = [
    ("dialect",), ("all",), ("gemm",), ("fp8_scaling",), ("keep_bf16",), ("fprop",), ("fprop", "x"), *SPEC_PATHS
]  # fmt: skip


@pytest.mark.clause("recipe.unknown")
@pytest.mark.parametrize("path", RECIPE_PATHS, ids=".".join)
def test_every_key_of_a_recipe(path: tuple[str, ...]) -> None:
    for value in BAD.values():
        tried(lambda value=value: recipe_from_table(table_at(path, value)), path[-1])


def test_a_mistake_is_named_in_the_layer_where_it_stands() -> None:
    for place in (("all",), ("fprop",), ("dgrad", "w")):
        where = ".".join(("recipe", *place))
        for key, value, message in (
            ("roundin", "sr", f"{where}: unknown key 'roundin' (did you mean 'rounding'?)"),
            ("sr_bits", "16", f"{where}.sr_bits: expected int, got '16' (str)"),
            ("sr_bits", 23, f"{where}.sr_bits = 23 is outside 1 .. 22"),
            ("rounding", "up", f"{where}.rounding = 'up' is not one of rne, rna, rtz, sr"),
            ("hadamard", 48, f"{where}.hadamard = 48 is not 0"),
        ):
            with pytest.raises(RecipeError) as caught:
                recipe_from_table(table_at(place, {key: value}))
            assert str(caught.value).startswith(message)
    with pytest.raises(RecipeError, match="recipe.fprop.x: signs = 'fixed' without a Hadamard transform"):
        recipe_from_table({"all": {"signs": "fixed"}})


PYTHON = {
    OperandSpec: OperandSpec(),
    FpropSpec: FpropSpec(),
    DgradSpec: DgradSpec(),
    WgradSpec: WgradSpec(),
    Recipe: Recipe(),
    TrainConfig: load_config("tiny"),
    ModelConfig: load_config("tiny").model,
    RopeScaling: RopeScaling(),
    OptimConfig: load_config("tiny").optim,
    RunConfig: load_config("tiny").run,
    DataConfig: DataConfig(),
}


@pytest.mark.parametrize("cls", PYTHON, ids=lambda cls: cls.__name__)
def test_every_field_from_python(cls: type) -> None:
    for f in fields(cls):
        for value in BAD.values():
            tried(lambda f=f, value=value: replace(PYTHON[cls], **{f.name: value}), f.name)


def test_numbers_of_numpy_become_pythons() -> None:
    spec = OperandSpec(hadamard=np.int64(16), sr_bits=np.uint8(3))
    assert [type(spec.hadamard), type(spec.sr_bits)] == [int, int]
    recipe = Recipe(*(cls(spec, spec) for cls in (FpropSpec, DgradSpec, WgradSpec)))
    assert len(recipe.digest) == 12
    assert type(replace(load_config("tiny").optim, lr=np.float32(0.5)).lr) is float


LADDER = {
    "title": "t",
    "train": {"preset": "tiny"},
    "target": {"reference": "a", "high_precision": ""},
    "arm": [{"name": "a", "label": "A", "paper": {"overhead": "8 %", "source": "s"}}],
}


@pytest.mark.parametrize(
    "path",
    [
        *[("arm", f.name) for f in fields(Arm)],
        *[("arm", "paper", f.name) for f in fields(Claim)],
        *[("target", f.name) for f in fields(LossTarget)],
        *[("train", f.name) for f in fields(TrainOverlay)],
        *[(f.name,) for f in fields(Ladder)],
    ],
    ids=".".join,
)
def test_every_key_of_a_ladder(path: tuple[str, ...]) -> None:
    for value in BAD.values():
        if path[0] == "arm" and len(path) > 1:
            table = {**LADDER, "arm": [merge(LADDER["arm"][0], table_at(path[1:], value))]}
        else:
            table = merge(LADDER, table_at(path, value))

        def make(table: dict[str, Any] = table) -> TrainConfig:
            ladder = build(Ladder, table, "ladder")
            return load_config(ladder.train.preset, [ladder.train.overlay()])

        # An overlay may be empty, and an unknown preset names itself.
        tried(make, "" if path[0] == "train" else path[-1] if path[-1] != "high_precision" else "")


def test_a_claim_that_begins_above_its_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins above its end"):
        Claim("9-8 %", "s")


@pytest.mark.parametrize(
    "key", ["run.steps", "optim.lr", "data.train", "optim.schedule", "model.rope_scaling"]
)
@pytest.mark.parametrize(
    "text",
    ["inf", "nan", "-inf", "2026-01-02", "[" * 5000 + "]" * 5000, "1" * 5000, "0x" + "f" * 5000, "'a\\u0000b'",
     '"a\\u0000b"', "", "{a = 1}", "1e999"],
)  # fmt: skip
def test_settings_of_the_command_line(key: str, text: str) -> None:
    tried(lambda: load_config("tiny", [f"{key}={text}"]), key.split(".")[-1])


@pytest.mark.parametrize(
    "text", ["run" + ".a" * 5000 + "=1", "x" * 5000 + ".a=1", "=", "run.steps", "a" * 5000]
)
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", [text])
    assert len(str(caught.value)) < 300


def test_toml_that_is_nested_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    for text in (
        f"a = {'[' * 5000}{']' * 5000}",
        f"a{'.a' * 5000} = 1",
        f"[a{'.a' * 5000}]",
        f"a = {'{a = ' * 5000}1{'}' * 5000}",
        f"a = {'[' * (MAX_DEPTH + 1)}{']' * (MAX_DEPTH + 1)}",
    ):
        path.write_text(text)
        with pytest.raises(FileFormatError, match=rf"deep.toml is not valid TOML: .* {MAX_DEPTH} deep"):
            read_toml(path)
    for read in (load_config, load_recipe, load_ladder):
        with pytest.raises(FileFormatError, match=f"{MAX_DEPTH} deep"):
            read(path)
    path.write_text(f"a = {'[' * (MAX_DEPTH - 1)}{']' * (MAX_DEPTH - 1)}")
    assert read_toml(path)["a"]


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for data in (b"a = " + b"1" * 5000, b"\xff\xfe", b"a = 1\x00", b"a = 2026-99-99"):
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match="is not valid TOML"):
            read_toml(path)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "a/" * 2500, "x" * 5000 + ".toml", "a\0b", "a\0b.toml", "", ".", "/"]
)
def test_names_and_paths_that_cannot_be(name: str) -> None:
    for read in (load_config, load_recipe, load_ladder):
        with pytest.raises(MxrefError) as caught:
            read(name)
        assert len(str(caught.value)) < 600


def test_dialects_are_names() -> None:
    for value in BAD.values():
        with pytest.raises(RecipeError, match="unknown dialect"):
            dialect(value)


def test_operands_are_all_covered() -> None:
    assert {role.value for role in OPERANDS} == {"fprop", "dgrad", "wgrad"}
