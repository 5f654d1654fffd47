"""Recipes of layers and phases: what a file says, what it resolves to, and what is refused."""

import tomllib

import pytest

from mxref import GemmRole, Recipe, load_recipe
from mxref.errors import FileFormatError, RecipeError
from mxref.recipe import BF16_RECIPE
from mxref.recipe_files import recipe_from_table
from mxref.recipe_plan import LayerRule, Phase, RecipePlan
from mxref.tomlio import dumps, to_table

PARTS = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = [f"model.layers.{i}.{part}" for i in range(12) for part in PARTS] + ["lm_head"]
BF16_TABLE = to_table(BF16_RECIPE) | {"keep_bf16": []}
FP8, BF16 = {"all": {"format": "fp8"}}, {"all": {"format": "bf16"}}

DIGESTS = {
    "bf16": "e918ace77d78",
    "fp8": "e3ef073b6a72",
    "mxfp4": "f61568aab71f",
    "mxfp4_h16": "3488571ec2ca",
    "mxfp4_h32": "66588375da0c",
    "mxfp8": "cedbd7195567",
    "mxfp8_hybrid": "366e2ae8b103",
    "nvfp4": "90830c5461ad",
    "nvfp4_style": "bbd90e5738fa",
    "tseng": "8d22ee746a65",
}


def plan(**keys):
    return recipe_from_table({"dialect": "amd", "all": {"hadamard": 16}, **keys})


def formats(recipe, names=NAMES):
    """The format of Fprop's X of every layer."""
    return {name: found.fprop.x.format.name for name, found in recipe.by_layer(names).items()}


@pytest.mark.clause("recipe.layers", evidence="known answer")
def test_globs_and_blocks_select_layers_and_the_last_entry_wins():
    recipe = plan(
        layers=[
            {"blocks": "-2:", "recipe": BF16},
            {"match": ["*.down_proj", "*.q_proj"], "blocks": "0:11", "recipe": FP8},
            {"match": ["*.10.mlp.*"], "recipe": {"all": {"format": "mxfp8_e4m3"}}},
        ]
    )
    for name, found in formats(recipe).items():
        if name == "lm_head":
            assert found == "bf16"
            continue
        block, part = int(name.split(".")[2]), name.partition(f"layers.{name.split('.')[2]}.")[2]
        expected = "mxfp4"
        if block >= 10:
            expected = "bf16"
        if block < 11 and part != "mlp.up_proj":
            expected = "fp8"
        if block == 10 and part.startswith("mlp."):
            expected = "mxfp8_e4m3"
        assert found == expected, name


@pytest.mark.clause("recipe.layers", evidence="known answer")
@pytest.mark.parametrize(
    ("blocks", "numbers"),
    [
        ("-1", [70]), ("0", [3]), ("-4", [3]), ("-2:", [10, 70]), (":1", [3]), ("1:3", [4, 10]),
        (":", [3, 4, 10, 70]), ("-3:-1", [4, 10]), ("0:4", [3, 4, 10, 70]),
        ("-15%", [70]), ("-25%", [70]), ("-25.000001 %", [10, 70]), ("50%", [3, 4]), ("-100%", [3, 4, 10, 70]),
    ],
)  # fmt: skip
def test_places_count_the_numbers_that_there_are(blocks, numbers):
    names = [f"encoder.{i}.experts.{k}.up" for i in (70, 3, 10, 4) for k in range(2)] + [
        "encoder.7th.x",
        "out",
    ]
    found = plan(layers=[{"blocks": blocks, "recipe": FP8}]).by_layer(names)
    chosen = {name for name, recipe in found.items() if recipe.kind(GemmRole.FPROP) == "fp8"}
    assert chosen == {f"encoder.{i}.experts.{k}.up" for i in numbers for k in range(2)}


@pytest.mark.clause("recipe.layers", evidence="known answer")
def test_the_layers_of_match_choose_the_series_that_blocks_count():
    names = [f"{part}.blocks.{i}" for part in ("vision", "text") for i in range(3)] + ["head.0", "head.2"]
    chosen = plan(layers=[{"match": ["text.*", "out*"][:1], "blocks": "-1", "recipe": FP8}]).by_layer(names)
    assert [name for name, found in chosen.items() if found.kind(GemmRole.FPROP) == "fp8"] == [
        "text.blocks.2"
    ]
    with pytest.raises(
        RecipeError, match=r"several series: head\.\*, text\.blocks\.\*, vision\.blocks\.\*; choose"
    ):
        plan(layers=[{"blocks": "-1", "recipe": FP8}]).by_layer(names)
    first = plan(layers=[{"blocks": "-1", "recipe": FP8}]).by_layer(["0", "2", "4"])
    assert [found.kind(GemmRole.FPROP) for found in first.values()] == ["block", "block", "fp8"]


@pytest.mark.clause("recipe.layers", "recipe.schedule", evidence="known answer")
def test_a_table_is_laid_over_the_files_own_treatment_and_a_name_replaces_it(tmp_path):
    (tmp_path / "other.toml").write_text('dialect = "nvidia"\nkeep_bf16 = ["a"]\n')
    (tmp_path / "plan.toml").write_text(
        'dialect = "amd"\nall.hadamard = 16\nkeep_bf16 = ["b"]\n'
        '[[layers]]\nmatch = ["x"]\nrecipe.all.rounding = "rtz"\n'
        '[[layers]]\nmatch = ["y"]\nrecipe = "other.toml"\n'
        '[[schedule]]\nuntil = 1\nrecipe.fprop.format = "bf16"\n'
        '[[schedule]]\nuntil = 2\nrecipe = "other.toml"\n'
        "[[schedule]]\nuntil = 3\nrecipe.layers = []\nrecipe.keep_bf16 = []\n"
    )
    recipe = load_recipe(tmp_path / "plan.toml")
    names = ["a", "b", "x", "y", "z"]

    def treatments(step):
        found = recipe.at(step).by_layer(names)
        return [
            f"{r.fprop.x.format.name} {r.fprop.x.scale_rule.value} {r.fprop.x.rounding.value} {r.fprop.x.hadamard}"
            for r in found.values()
        ]

    own, kept = "mxfp4 even rne 16", "bf16 floor rne 0"
    x, other = "mxfp4 even rtz 16", "mxfp4 rceil rne 0"
    assert treatments(0) == ["bf16 even rne 16", kept, x, other, "bf16 even rne 16"]
    assert treatments(1) == [kept, other, other, other, other]
    assert treatments(2) == [own, own, own, own, own]
    assert treatments(3) == treatments(99) == [own, kept, x, other, own]
    assert [span.name for span in recipe.spans()] == ["phase 1", "other", "phase 3", "main"]


@pytest.mark.clause("recipe.schedule", evidence="known answer")
def test_shares_are_of_the_run_and_begin_at_whole_steps():
    schedule = [{"until": "10%", "recipe": FP8}, {"start": "90%", "name": "tail", "recipe": BF16}]
    recipe = plan(schedule=schedule)
    for steps, first, last in ((10, 1, 9), (11, 2, 10), (15, 2, 14), (1000, 100, 900)):
        assert [(s.name, s.first, s.end) for s in recipe.spans(steps)] == [
            ("phase 1", 0, first), ("main", first, last), ("tail", last, steps)
        ]  # fmt: skip
    third = plan(schedule=[{"start": "0.3%", "until": "58.5%", "recipe": FP8}])
    # In binary fractions 0.003 * 1000 and 0.585 * 1000 would not be whole.
    assert [s.first for s in third.spans(1000)] == [0, 3, 585]
    assert recipe.at(0, 10).fprop.x.format.name == "fp8"
    assert recipe.at(9, 10) == recipe.at(99, 10) == plan(all={"hadamard": 16, "format": "bf16"})
    assert recipe.at(5, 10) == plan()


@pytest.mark.clause("recipe.schedule", evidence="known answer")
def test_a_phase_begins_where_the_one_before_it_ends():
    recipe = plan(schedule=[{"start": 2, "until": 4, "recipe": FP8}, {"recipe": BF16, "name": "rest"}])
    assert [(s.name, s.first, s.end) for s in recipe.spans()] == [
        ("main", 0, 2), ("phase 1", 2, 4), ("rest", 4, None)
    ]  # fmt: skip
    assert recipe.spans(9)[-1].end == 9
    whole = plan(schedule=[{"until": 4, "recipe": FP8}, {"until": 9, "recipe": BF16}])
    assert [s.name for s in whole.spans(9)] == ["phase 1", "phase 2"]


@pytest.mark.clause("recipe.layers", "recipe.schedule", "recipe.unknown", evidence="known answer")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer": []}, r"unknown key 'layer' \(did you mean 'layers'"),
        ({"layers": {}}, "recipe.layers: expected an array of tables"),
        ({"layers": [3]}, r"recipe.layers\[0\]: expected a table, got 3"),
        ({"layers": [{"match": ["a"]}]}, r"recipe.layers\[0\]: key 'recipe' is missing"),
        ({"layers": [{"recipe": "bf16"}]}, "selects layers by match, by blocks or by both, and has neither"),
        ({"layers": [{"match": [], "blocks": "0", "recipe": "bf16"}]}, "match is empty"),
        ({"layers": [{"matches": ["a"], "recipe": "bf16"}]}, "did you mean 'match'"),
        ({"layers": [{"match": "a", "recipe": "bf16"}]}, "match: expected a list, got 'a'"),
        ({"layers": [{"blocks": -2, "recipe": "bf16"}]}, "blocks: expected str, got -2"),
        (
            {"layers": [{"blocks": "last", "recipe": "bf16"}]},
            r"blocks = 'last' is neither a block like '-1' nor",
        ),
        ({"layers": [{"blocks": "0:8:2", "recipe": "bf16"}]}, "blocks = '0:8:2' is neither"),
        (
            {"layers": [{"blocks": "-0%", "recipe": "bf16"}]},
            r"blocks = '-0%' is neither .* '-15%' \(the last",
        ),
        ({"layers": [{"blocks": "100.1%", "recipe": "bf16"}]}, "blocks = '100.1%' is neither"),
        (
            {"layers": [{"match": ["a"], "recipe": "bf61"}]},
            r"layers\[0\].recipe: unknown recipe 'bf61' .*'bf16'",
        ),
        ({"layers": [{"match": ["a"], "recipe": 3}]}, "expected a table, a shipped name or a file, got 3"),
        (
            {"layers": [{"match": ["a"], "recipe": {"all": {"roundin": "sr"}}}]},
            r"layers\[0\].recipe.all: .*'rounding'",
        ),
        ({"layers": [{"match": ["a"], "recipe": {"keep_bf16": ["b"]}}]}, "has no keep_bf16 of its own"),
        (
            {"layers": [{"match": ["a"], "recipe": {"schedule": [{}]}}]},
            "a layer's recipe has no schedule of its own",
        ),
        (
            {"layers": [{"match": ["a"], "recipe": {"layers": [{}]}}]},
            "a layer's recipe has no layers of its own",
        ),
        ({"schedule": [{"until": 3, "recipe": {"schedule": [{}]}}]}, "of a phase has no schedule of its own"),
        ({"schedule": [{"recipe": "bf16"}]}, r"schedule\[0\] \(bf16\) lasts for the whole run"),
        ({"schedule": [{"until": 3}]}, "key 'recipe' is missing"),
        ({"schedule": [{"form": 3, "recipe": "bf16"}]}, r"schedule\[0\]: unknown key 'form'"),
        (
            {"schedule": [{"until": -3, "recipe": "bf16"}]},
            r"until = -3 is neither a step like 100 nor a share",
        ),
        ({"schedule": [{"until": 0.1, "recipe": "bf16"}]}, "until = 0.1 is neither"),
        ({"schedule": [{"until": True, "recipe": "bf16"}]}, "until = True is neither"),
        ({"schedule": [{"until": "101%", "recipe": "bf16"}]}, "until = '101%' is neither"),
        (
            {"schedule": [{"until": 0, "recipe": "bf16"}]},
            r"schedule\[0\] \(bf16\) is empty: it begins after 0 steps and ends after 0 steps",
        ),
        (
            {"schedule": [{"start": "20%", "until": "10%", "recipe": "bf16"}]},
            "is empty: it begins after 20% of the run and ends after 10% of the run",
        ),
        (
            {"schedule": [{"start": 3, "recipe": "bf16"}, {"start": 9, "recipe": "fp8"}]},
            "another phase follows it: set its `until`",
        ),
        (
            {"schedule": [{"until": 3, "recipe": "bf16"}, {"start": 2, "until": 4, "recipe": "fp8"}]},
            r"schedule\[1\] \(fp8\) begins after 2 steps, and the phase before it ends later, after 3 steps",
        ),
        (
            {
                "schedule": [
                    {"start": "50%", "until": "60%", "recipe": "bf16"},
                    {"start": "0%", "recipe": "fp8"},
                ]
            },
            r"schedule\[1\] \(fp8\) begins after 0% of the run, and .* ends later, after 60% of the run",
        ),
        (
            {"schedule": [{"start": "100%", "recipe": "bf16"}]},
            r"\(bf16\) begins after 100% of the run, of which no step is left",
        ),
        ({"schedule": [{"until": 3, "name": "main", "recipe": "bf16"}]}, "name = 'main' is empty or 'main'"),
        ({"schedule": [{"until": 3, "name": " ", "recipe": "bf16"}]}, "name = ' ' is empty"),
    ],
)
def test_mistakes_in_a_file_are_named(keys, message):
    with pytest.raises(RecipeError, match=message):
        plan(**keys)


@pytest.mark.clause("recipe.layers", evidence="known answer")
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [{"match": ["model.layer.*"], "recipe": FP8}],
            r"layers\[0\].match: 'model.layer.\*' matches no .*'model.layers",
        ),
        ([{"match": ["lm_head"], "recipe": FP8}], r"'lm_head' matches only layers that keep_bf16 names"),
        (
            [{"match": ["*.q_proj"], "recipe": FP8}, {"blocks": ":", "recipe": BF16}],
            r"layers\[0\] has no effect",
        ),
        ([{"blocks": "12", "recipe": FP8}], r"layers\[0\].blocks = '12' selects none of 12 blocks"),
        ([{"blocks": "-13:", "recipe": FP8}], r"layers\[0\].blocks = '-13:': the model has 12 blocks"),
        ([{"blocks": "4:2", "recipe": FP8}], "'4:2' selects none of 12 blocks"),
        (
            [{"match": ["*.3.*"], "blocks": "0", "recipe": FP8}],
            "blocks = '0' and match have no layer in common",
        ),
        (
            [{"match": ["*head", "*.3.*"], "blocks": "3", "recipe": FP8}],
            "'\\*head' matches only layers that keep_bf16",
        ),
    ],
)
def test_what_does_not_fit_a_model_is_refused(layers, message):
    with pytest.raises(RecipeError, match=message):
        plan(layers=layers).by_layer(NAMES)


def test_blocks_of_names_without_numbers():
    with pytest.raises(
        RecipeError, match=r"layers\[0\].blocks counts numbered blocks, and no layer has a number"
    ):
        plan(layers=[{"blocks": "0", "recipe": FP8}]).by_layer(["up", "down"])


@pytest.mark.clause("recipe.schedule", evidence="known answer")
def test_what_does_not_fit_a_run_is_refused():
    recipe = plan(schedule=[{"until": 5, "recipe": FP8}, {"start": 8, "recipe": BF16}])
    recipe.spans(9)
    with pytest.raises(
        RecipeError, match=r"schedule\[1\] \(phase 2\) begins after 8 steps, and the run has 8 steps"
    ):
        recipe.spans(8)
    with pytest.raises(
        RecipeError, match=r"schedule\[0\] \(phase 1\) ends after 5 steps, and the run has 4 steps"
    ):
        recipe.spans(4)
    shares = plan(schedule=[{"until": "10%", "recipe": FP8}])
    with pytest.raises(
        RecipeError, match="has 10% of the run, whose length is not known: give the number of steps"
    ):
        shares.spans()
    mixed = plan(schedule=[{"until": "50%", "recipe": FP8}, {"start": 6, "recipe": BF16}])
    mixed.spans(12)
    with pytest.raises(
        RecipeError,
        match=r"begins after 6 steps, and the phase before it ends later, after 7 steps \(50% of 13\)",
    ):
        mixed.spans(13)
    with pytest.raises(RecipeError, match="step = -1 is negative"):
        recipe.at(-1)


def test_a_plan_is_not_taken_for_a_recipe():
    recipe = plan(layers=[{"blocks": "0", "recipe": FP8}], schedule=[{"until": 3, "recipe": BF16}])
    for ask in (recipe.operands, recipe.formats, recipe.kind):
        with pytest.raises(RecipeError, match=r"resolve it by recipe.at\(step, steps\).by_layer\(names\)"):
            ask(GemmRole.FPROP)
    with pytest.raises(RecipeError, match="has a schedule: choose the step"):
        recipe.by_layer(NAMES)
    assert recipe.own == plan()
    assert recipe.treatments() == (
        plan(),
        recipe.layers[0].recipe,
        plan(all={"hadamard": 16, "format": "bf16"}),
    )
    with pytest.raises(RecipeError, match="a layer's recipe has no layers"):
        LayerRule(recipe, ("a",))
    with pytest.raises(RecipeError, match="has no schedule of its own"):
        Phase(recipe, "x", until=3)


def test_a_recipe_answers_like_a_plan():
    recipe = load_recipe("mxfp4_h16")
    assert recipe.at(7, 10) is recipe
    assert recipe.by_layer(["a", "lm_head"]) == {"a": recipe, "lm_head": BF16_RECIPE}
    assert [(s.name, s.first, s.end, s.recipe) for s in recipe.spans(10)] == [("main", 0, 10, recipe)]
    assert recipe.treatments() == (recipe,)


def test_a_file_that_is_named_may_be_missing_or_name_itself(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[layers]]\nmatch = ["x"]\nrecipe = "none.toml"\n')
    with pytest.raises(FileFormatError, match=r"cannot read .*none.toml"):
        load_recipe(path)
    for key, selection in (("layers", 'match = ["x"]'), ("schedule", "until = 3")):
        path.write_text(f'[[{key}]]\n{selection}\nrecipe = "plan.toml"\n')
        with pytest.raises(RecipeError, match=f"has no {key} of its own"):
            load_recipe(path)


@pytest.mark.clause("recipe.digest", evidence="known answer")
def test_the_digest_of_a_plan_is_that_of_what_it_resolves_to():
    by_name = plan(layers=[{"blocks": "-2:", "recipe": "bf16"}], schedule=[{"until": 7, "recipe": "fp8"}])
    by_table = recipe_from_table(tomllib.loads(dumps(by_name)))
    assert by_name.digest == by_table.digest
    table = to_table(by_name)
    assert set(table) == {"fprop", "dgrad", "wgrad", "gemm", "fp8_scaling", "keep_bf16", "layers", "schedule"}
    assert [set(entry) for entry in table["layers"]] == [{"blocks", "recipe"}]
    assert table["layers"][0]["recipe"]["keep_bf16"] == []
    (phase,) = table["schedule"]
    assert set(phase) == {"name", "recipe", "until"}
    assert (phase["name"], phase["until"]) == ("fp8", "7")
    assert phase["recipe"]["layers"] == phase["recipe"]["schedule"] == []
    spelt = {"10%": ("10 %", "10.0%", "010%"), "7": (7, "007")}
    for text, ways in spelt.items():
        assert {plan(schedule=[{"until": way, "recipe": FP8}]).schedule[0].until for way in ways} == {text}
    others = [
        {"layers": [{"blocks": "-3:", "recipe": "bf16"}], "schedule": [{"until": 7, "recipe": "fp8"}]},
        {"layers": [{"blocks": "-2:", "recipe": "fp8"}], "schedule": [{"until": 7, "recipe": "fp8"}]},
        {"layers": [{"blocks": "-2:", "recipe": "bf16"}], "schedule": [{"until": 8, "recipe": "fp8"}]},
        {"layers": [{"blocks": "-2:", "recipe": "bf16"}]},
        {"schedule": [{"until": 7, "recipe": "fp8"}]},
        {},
    ]
    assert len({by_name.digest, *(plan(**keys).digest for keys in others)}) == 1 + len(others)
    assert type(plan(layers=[], schedule=[])) is Recipe
    assert isinstance(by_name, RecipePlan)


@pytest.mark.clause("recipe.digest", evidence="known answer")
def test_digests_of_shipped_recipes_are_what_they_were():
    assert {name: load_recipe(name).digest for name in DIGESTS} == DIGESTS
    assert Recipe().digest == "c947b97d49c3"


@pytest.mark.clause("recipe.layers", "recipe.schedule", "recipe.digest")
def test_a_resolved_plan_reads_back_as_itself():
    """Keys that a resolved recipe leaves out are at their default, whatever the file's own treatment has there."""
    own = {
        "all": {"format": "nvfp4", "arithmetic": "te"},
        "wgrad": {"hadamard": 2, "sign_vector": "+-", "gain": 1.5, "out": "bf16"},
        "dgrad": {"source": "fprop"},
    }
    for entries in (
        {"layers": [{"blocks": "-1", "recipe": BF16_TABLE}]},
        {"schedule": [{"start": 4, "recipe": BF16_TABLE}]},
        {
            "layers": [{"blocks": "0", "recipe": BF16_TABLE}],
            "schedule": [{"start": 4, "recipe": BF16_TABLE | {"layers": []}}],
        },
    ):
        recipe = recipe_from_table(own | entries)
        assert recipe_from_table(to_table(recipe)) == recipe
        assert recipe_from_table(tomllib.loads(dumps(recipe))).digest == recipe.digest
    part = {"wgrad": {"hadamard": 0}}
    with pytest.raises(RecipeError, match="sign_vector has 2 signs and hadamard = 0"):
        recipe_from_table(own | {"layers": [{"blocks": "-1", "recipe": part}]})
