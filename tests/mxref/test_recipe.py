"""Recipes, overlays and dialects as data."""

import hashlib
from dataclasses import fields, replace

import numpy as np
import pytest

from mxref import DIALECTS, GemmRole, OperandSpec, Recipe, load_recipe, quantize
from mxref.dialects import dialect
from mxref.errors import FileFormatError, RecipeError
from mxref.formats import E2M1, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.layouts.packed import unpack
from mxref.recipe_files import recipe_from_table
from mxref.roles import OPERANDS
from mxref.tomlio import dumps, merge, to_table


@pytest.mark.clause("recipe.overlay", evidence="known answer")
def test_later_layers_win():
    recipe = recipe_from_table(
        {
            "dialect": "amd",
            "all": {"rounding": "rtz", "hadamard": 16},
            "wgrad": {"rounding": "rna", "dy": {"rounding": "sr"}},
        }
    )
    assert recipe.fprop.x == OperandSpec(scale_rule="even", zero_scale=127, rounding="rtz", hadamard=16)
    assert recipe.wgrad.x.rounding == "rna"
    assert recipe.wgrad.dy.rounding == "sr"
    assert recipe.wgrad.dy.scale_rule == "even"


def test_empty_recipe_is_the_default():
    assert recipe_from_table({}) == Recipe()


def test_a_recipe_file_says_something(tmp_path):
    """An empty file, as a failed redirection leaves it, is no recipe; nor is one that another file names."""
    (tmp_path / "empty.toml").write_text("# nothing\n")
    (tmp_path / "outer.toml").write_text('schedule = [{ until = "10%", recipe = "empty.toml" }]\n')
    for name in ("empty.toml", "outer.toml"):
        with pytest.raises(RecipeError, match=r"empty\.toml is empty: say at least one key"):
            load_recipe(tmp_path / name)


def test_a_byte_order_mark_is_named(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbfdialect = 'amd'\n")
    with pytest.raises(FileFormatError, match=r"windows\.toml begins with a byte order mark.*without BOM"):
        load_recipe(path)


@pytest.mark.parametrize("name", DIALECTS)
def test_toml_round_trip(name, tmp_path):
    recipe = recipe_from_table(
        {"dialect": name, "gemm": "exact", "dgrad": {"format": "fp8"}, "keep_bf16": ["a.*", "b"]}
    )
    path = tmp_path / "recipe.toml"
    path.write_text(dumps(recipe))
    assert load_recipe(path) == recipe
    assert load_recipe(path).digest == recipe.digest


@pytest.mark.clause("recipe.overlay")
def test_one_gemm_may_have_no_blocks_under_a_dialect_of_nvfp4():
    recipe = recipe_from_table({"dialect": "te_nvfp4", "dgrad": {"format": "bf16"}})
    assert recipe.fprop.x == recipe.fprop.w == dialect("te_nvfp4").spec
    assert {str(spec.format) for spec in recipe.operands(GemmRole.DGRAD)} == {"bf16"}


@pytest.mark.clause("recipe.digest")
def test_the_digest_sees_every_field():
    base = Recipe()
    other = {"scale_rule": "ceil", "rounding": "sr", "sr_bits": 8, "block": "32x32", "zero_scale": 127}
    other |= {"nonfinite": "raise", "prescale": True}
    digests = {base.digest}
    for key, value in other.items():
        digests.add(recipe_from_table({"fprop": {"x": {key: value}}}).digest)
    both = {"format": "bf16", "hadamard": 16}
    for key, value in both.items():
        digests.add(recipe_from_table({"fprop": {key: value}}).digest)
    digests.add(recipe_from_table({"fprop": {"hadamard": 16, "signs": "fixed"}}).digest)
    digests.add(recipe_from_table({"fprop": {"hadamard": 2, "sign_vector": "+-"}}).digest)
    real, ordered = (
        recipe_from_table({"fprop": {"format": "nvfp4", "arithmetic": value}}).digest
        for value in ("real", "te")
    )
    assert real != ordered
    digests.add(ordered)
    digests.add(recipe_from_table({"fprop": {"format": "nvfp4", "four_over_six": "squared"}}).digest)
    digests |= {replace(base, gemm="exact").digest, replace(base, fp8_scaling="current").digest}
    digests.add(replace(base, keep_bf16=()).digest)
    for role in GemmRole:
        for key, value in {"out": "bf16", "gain": 1.25, "source": "fprop"}.items():
            if (role, key) != ("fprop", "source"):
                digests.add(recipe_from_table({role: {key: value}}).digest)
    assert len(digests) == 1 + len(fields(OperandSpec)) + 3 + 8


@pytest.mark.clause("recipe.digest", evidence="known answer")
def test_keys_of_a_gemm_at_their_default_leave_the_digest():
    """The shipped recipes are older than these keys, and runs are known by their digests."""
    given = {"out": "tensor", "gain": 1}
    table = {"fprop": given, "dgrad": given | {"source": "tensor"}, "wgrad": given | {"source": "tensor"}}
    assert recipe_from_table(table).digest == Recipe().digest


@pytest.mark.clause("recipe.digest", evidence="known answer")
def test_the_digest_is_of_json_text_written_out():
    operand = (
        '{"block": "1x32", "format": "mxfp4", "hadamard": 0, "nonfinite": "nan_block", "prescale": false, '
        '"rounding": "rne", "scale_rule": "floor", "signs": "none", "sr_bits": 16, "zero_scale": 0}'
    )
    text = (
        f'{{"dgrad": {{"dy": {operand}, "w": {operand}}}, "fp8_scaling": "delayed", '
        f'"fprop": {{"w": {operand}, "x": {operand}}}, "gemm": "ordered", "keep_bf16": ["lm_head"], '
        f'"wgrad": {{"dy": {operand}, "x": {operand}}}}}'
    )
    assert Recipe().digest == hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.clause("recipe.unknown", evidence="known answer")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"al": {}}, "unknown key 'al'"),
        ({"fprob": {}}, "did you mean 'fprop'"),
        ({"all": {"roundin": "sr"}}, "did you mean 'rounding'"),
        ({"fprop": {"dy": {}}}, "recipe.fprop: unknown key 'dy'"),
        ({"fprop": {"x": {"hadamrd": 16}}}, "did you mean 'hadamard'"),
        ({"all": {"scale_rule": "flor"}}, "'flor' is not one of floor, ceil, rceil, even"),
        ({"all": {"sr_bits": "16"}}, "expected int, got '16'"),
        ({"all": {"prescale": 1}}, "expected bool, got 1"),
        ({"all": {"sr_bits": 23}}, "sr_bits = 23 is outside 1 .. 22"),
        ({"all": {"zero_scale": 1}}, "neither 0 nor 127"),
        ({"all": {"hadamard": 48}}, "hadamard = 48 is not 0"),
        ({"all": {"signs": "fixed"}}, "without a Hadamard transform"),
        ({"all": {"sign_vector": "+-"}}, "sign_vector has 2 signs and hadamard = 0"),
        ({"all": {"sign_vector": "", "hadamard": 2}}, "recipe.all.sign_vector is empty"),
        ({"all": {"sign_vector": "+x", "hadamard": 2}}, "recipe.all.sign_vector has 'x' at place 1"),
        ({"all": {"sign_vector": "+-", "hadamard": 2, "signs": "fixed"}}, "beside signs = 'fixed'"),
        ({"dialect": "nvida"}, "did you mean 'nvidia'"),
        ({"all": 3}, "expected a table, got 3"),
        ({"keep_bf16": "lm_head"}, "expected a list"),
        ({"gemm": "fast"}, "'fast' is not one of"),
        ({"wgrad": {"out": "fp16"}}, r"recipe.wgrad.out = 'fp16' is not one of tensor, bf16"),
        ({"all": {"gain": 2.0}}, "recipe.all: unknown key 'gain'"),
        ({"dgrad": {"gian": 2.0}}, "recipe.dgrad: unknown key 'gian'.* 'gain'"),
        ({"dgrad": {"gain": 0}}, "recipe.dgrad: gain = 0 is not a positive number"),
        ({"dgrad": {"gain": 1e39}}, r"gain = 1e\+39 is not a positive number that float32 holds"),
        ({"fprop": {"source": "fprop"}}, "recipe.fprop: unknown key 'source'"),
        (
            {"wgrad": {"source": "fprop", "format": "fp8"}},
            "wgrad: source = 'fprop' needs block formats in fprop, and no FP8",
        ),
        (
            {"wgrad": {"source": "fprop"}, "fprop": {"format": "bf16"}},
            r"fprop, .* set wgrad.source = 'tensor'",
        ),
        (
            {"dgrad": {"source": "fprop"}, "fprop": {"hadamard": 16}},
            "values of fprop.w, .* under hadamard = 16",
        ),
        ({"dgrad": {"source": "fprop"}, "fprop": {"w": {"prescale": True}}}, "under prescale = true"),
    ],
)
def test_mistakes_are_named(table, message):
    with pytest.raises(RecipeError, match=message):
        recipe_from_table(table)


@pytest.mark.clause("recipe.unknown", "linear.rotation", evidence="known answer")
@pytest.mark.parametrize("role", GemmRole)
def test_operands_of_one_gemm_with_two_rotations_are_refused(role):
    first, second = (operand.tensor for operand in OPERANDS[role])
    message = f"{role}: both operands of a GEMM share hadamard, got 16 for {first} and 0 for {second}"
    with pytest.raises(RecipeError, match=message):
        recipe_from_table({role: {first: {"hadamard": 16}}})
    with pytest.raises(RecipeError, match=f"share signs, got none for {first} and fixed for {second}"):
        recipe_from_table({role: {"hadamard": 16, second: {"signs": "fixed"}}})


@pytest.mark.clause("recipe.formats", "recipe.unknown", "linear.formats", evidence="known answer")
@pytest.mark.parametrize("role", GemmRole)
def test_operands_of_one_gemm_in_two_formats_are_refused(role):
    first, second = (operand.tensor for operand in OPERANDS[role])
    with pytest.raises(
        RecipeError, match=f"{role}: .*share kind of format, got fp8 for {first} and block for {second}"
    ):
        recipe_from_table({role: {first: {"format": "fp8"}}})


def test_unreadable_files(tmp_path):
    with pytest.raises(FileFormatError, match="cannot read"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(FileFormatError, match=r"bad.toml is not valid TOML.*line 1"):
        load_recipe(tmp_path / "bad.toml")


@pytest.mark.clause("recipe.unknown", evidence="known answer")
def test_operand_specs_take_names_and_refuse_others():
    assert OperandSpec(rounding="sr") == replace(OperandSpec(), rounding=OperandSpec(rounding="sr").rounding)
    with pytest.raises(RecipeError, match="rounding = 'up' is not one of rne, rna, rtz, sr"):
        OperandSpec(rounding="up")


@pytest.mark.clause("dialect.ocp", "dialect.amd", "dialect.nvidia", "dialect.tseng", evidence="known answer")
def test_dialects():
    assert dialect("ocp").spec == OperandSpec()
    assert to_table(dialect("amd").spec) | {"scale_rule": "floor", "zero_scale": 0} == to_table(OperandSpec())
    assert dialect("amd").spec.scale_rule == "even"
    assert dialect("nvidia").spec == OperandSpec(scale_rule="rceil")
    tseng = dialect("tseng")
    assert tseng.spec == OperandSpec(rounding="sr", prescale=True, hadamard=64, signs="per_step_layer")
    assert tseng.roles == (GemmRole.DGRAD, GemmRole.WGRAD)
    assert all(d.domain and d.evidence for d in DIALECTS.values())


@pytest.mark.clause("dialect.ocp", "dialect.amd", "dialect.nvidia", evidence="known answer")
@pytest.mark.parametrize(
    ("name", "bytes_", "codes"),  # of 7, of 6.5, and of nothing but zeros
    [
        ("ocp", [0x7F, 0x7F, 0], [7, 7]),
        ("amd", [0x80, 0x7F, 0x7F], [6, 7]),
        ("nvidia", [0x80, 0x80, 0], [6, 5]),
    ],
)
def test_blocks_that_tell_the_dialects_apart(name, bytes_, codes):
    """7 = 1.75 * 4 and 6.5 = 1.625 * 4: EVEN goes up at 1.75, RCEIL above 1.5, FLOOR never."""
    x = np.zeros((3, 32), np.float32)
    x[0, 5], x[1, 5] = 7, -6.5
    q = quantize(x, DIALECTS[name].spec)
    assert q.scales[:, 0].tolist() == bytes_
    assert unpack(q.codes, E2M1)[:, 5].tolist() == [codes[0], codes[1] | 8, 0]


@pytest.mark.clause("linear.roles", evidence="known answer")
def test_operands_of_the_three_gemms():
    assert {role: [(o.tensor, o.id, o.axis) for o in pair] for role, pair in OPERANDS.items()} == {
        "fprop": [("x", 0, 1), ("w", 1, 1)],
        "dgrad": [("dy", 2, 1), ("w", 3, 0)],
        "wgrad": [("dy", 4, 0), ("x", 5, 0)],
    }
    recipe = recipe_from_table({"wgrad": {"dy": {"rounding": "sr"}}})
    assert [spec.rounding for spec in recipe.operands(GemmRole.WGRAD)] == ["sr", "rne"]


def test_merge_changes_neither_argument():
    base, overlay = {"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}
    assert merge(base, overlay) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert base == {"a": {"b": 1}, "c": 2}
    assert overlay == {"a": {"d": 3}}


@pytest.mark.clause("recipe.overlay", "linear.formats", evidence="known answer")
def test_a_format_is_given_by_object_or_by_name_and_written_by_name():
    assert OperandSpec(format="mxfp8_e4m3") == OperandSpec(MXFP8_E4M3)
    assert OperandSpec("mxfp8_e4m3").format is MXFP8_E4M3
    recipe = recipe_from_table(
        {"all": {"format": "mxfp8_e4m3", "scale_rule": "rceil"}, "wgrad": {"format": "bf16"}}
    )
    assert recipe.formats(GemmRole.FPROP) == (MXFP8_E4M3, MXFP8_E4M3)
    assert [recipe.kind(role) for role in GemmRole] == ["block", "block", "bf16"]
    table = to_table(recipe)
    assert (table["fprop"]["x"]["format"], table["wgrad"]["dy"]["format"]) == ("mxfp8_e4m3", "bf16")
    assert recipe_from_table(table) == recipe
    assert recipe.digest != Recipe().digest
    for wrong in ("mxfp8", "MXFP4", 8, None, {"name": "mxfp4"}):
        with pytest.raises(RecipeError, match="is not one of bf16, fp8, mxfp4, mxfp8_e4m3, mxfp8_e5m2"):
            OperandSpec(format=wrong)


@pytest.mark.clause("recipe.formats", "linear.formats", evidence="known answer")
def test_two_block_formats_of_one_gemm_may_differ():
    recipe = recipe_from_table(
        {
            "all": {"format": "mxfp8_e4m3"},
            "dgrad": {"dy": {"format": "mxfp8_e5m2"}},
            "wgrad": {"x": {"format": "mxfp4"}},
        }
    )
    assert recipe.formats(GemmRole.DGRAD) == (MXFP8_E5M2, MXFP8_E4M3)
    assert recipe.formats(GemmRole.WGRAD) == (MXFP8_E4M3, MXFP4)
    assert {recipe.kind(role) for role in GemmRole} == {"block"}
    with pytest.raises(
        RecipeError,
        match="fprop: both operands of a GEMM share kind of format, got block for x and bf16 for w",
    ):
        recipe_from_table({"fprop": {"w": {"format": "bf16"}}})


@pytest.mark.clause("linear.formats", evidence="known answer")
def test_two_block_lengths_in_one_gemm_are_refused():
    short = OperandSpec(format=replace(MXFP8_E4M3, name="short", k=16))
    with pytest.raises(
        RecipeError, match="fprop: both operands of a GEMM share block length, got 32 for x and 16 for w"
    ):
        Recipe(fprop=replace(Recipe().fprop, w=short))


@pytest.mark.clause("scale.block.tile")
def test_tiles_of_a_format_with_another_block_length_are_refused():
    """Else `32x32` would quantize tiles of 16 columns."""
    short = replace(MXFP8_E4M3, name="short", k=16)
    with pytest.raises(RecipeError, match="'32x32' with the format short, whose blocks have 16 elements"):
        OperandSpec(format=short, block="32x32")
    assert OperandSpec(format=short).block == "1x16"
    assert OperandSpec(format=short, block="4x16").block.rows == 4
