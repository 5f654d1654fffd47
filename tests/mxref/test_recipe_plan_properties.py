"""Plans of arbitrary layers and phases: TOML round trips, and resolution equals a naive model of the specification."""

import tomllib
from fnmatch import fnmatchcase
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxref.errors import RecipeError
from mxref.recipe_files import recipe_from_table
from mxref.tomlio import dumps

FORMATS = st.sampled_from(["bf16", "fp8", "mxfp4", "mxfp8_e4m3"])
TREATMENTS = st.one_of(
    st.sampled_from(["bf16", "fp8", "mxfp4_h16"]),
    st.builds(
        lambda name, gemm: {"all": {"format": name}, "gemm": gemm},
        FORMATS,
        st.sampled_from(["exact", "ordered"]),
    ),
)
NAMES = [*(f"h.{i}.{part}" for i in (0, 1, 2, 4, 10) for part in ("up", "down")), "lm_head"]
GLOBS = st.sampled_from(["*", "h.*", "*.up", "*.down", "h.1*", "h.[24].up", "lm_head", "none.*"])
BLOCKS = st.builds(
    lambda first, colon, end: f"{first}{colon}{end}" if colon else (first or "0"),
    st.sampled_from(["", *map(str, range(-6, 7))]),
    st.sampled_from(["", ":"]),
    st.sampled_from(["", *map(str, range(-6, 7))]),
)
RULES = st.lists(
    st.fixed_dictionaries(
        {"recipe": TREATMENTS}, optional={"match": st.lists(GLOBS, min_size=1, max_size=3), "blocks": BLOCKS}
    ).filter(lambda rule: len(rule) > 1),
    max_size=3,
)
POSITIONS = st.one_of(
    st.integers(0, 40),
    st.integers(0, 100).map(lambda p: f"{p}%"),
    st.integers(0, 1000).map(lambda p: f"{p / 10}%"),
)
PHASES = st.lists(
    st.fixed_dictionaries({"recipe": TREATMENTS}, optional={"start": POSITIONS, "until": POSITIONS}),
    max_size=3,
)
FILES = st.builds(
    lambda own, kept, layers, schedule: {
        "all": {"format": own}, "keep_bf16": kept, "layers": layers, "schedule": schedule
    },
    FORMATS,
    st.lists(GLOBS, max_size=1),
    RULES,
    PHASES,
)  # fmt: skip


def plan_of(table):
    try:
        return recipe_from_table(table)
    except RecipeError:
        return None


@settings(max_examples=60, deadline=None)
@given(FILES)
def test_a_plan_is_the_same_after_a_round_trip(table):
    plan = plan_of(table)
    if plan is not None:
        again = recipe_from_table(tomllib.loads(dumps(plan)))
        assert again == plan
        assert again.digest == plan.digest
        assert type(again) is type(plan)


def treatment(rule, table):
    """The recipe of a rule or phase, made as a file of its own."""
    given = rule["recipe"]
    if isinstance(given, str):
        given = {"bf16": {"all": {"format": "bf16"}}, "fp8": {"all": {"format": "fp8"}},
                 "mxfp4_h16": {"dialect": "amd", "all": {"hadamard": 16}}}[given]  # fmt: skip
    else:
        given = {"all": {**table["all"], **given["all"]}, "gemm": given["gemm"]}
    return recipe_from_table({**given, "keep_bf16": []})


def selected(rule, kept):
    """The layers of a rule, by the words of the specification; None where it is refused."""
    chosen = []
    for glob in rule.get("match", ["*"]):
        found = [name for name in NAMES if fnmatchcase(name, glob)]
        if not set(found) - kept:
            return None
        chosen += found
    if "blocks" in rule:
        blocks = [0, 1, 2, 4, 10]
        first, colon, end = rule["blocks"].partition(":")
        bounds = [int(b) for b in (first, end) if b]
        if any(abs(b) > len(blocks) for b in bounds):
            return None
        if colon:
            blocks = blocks[slice(*(int(b) if b else None for b in (first, end)))]
        else:
            blocks = blocks[int(first) : (int(first) + 1) or None]
        chosen = [name for name in chosen if name != "lm_head" and int(name.split(".")[1]) in blocks]
        if not chosen:
            return None
    return set(chosen) - kept


@settings(max_examples=150, deadline=None)
@given(FILES)
@pytest.mark.clause("recipe.layers")
def test_layers_resolve_as_the_specification_says(table):
    table = {**table, "schedule": []}
    plan = recipe_from_table(table)
    kept = {name for name in NAMES if any(fnmatchcase(name, glob) for glob in table["keep_bf16"])}
    owner = {}
    for i, rule in enumerate(table["layers"]):
        found = selected(rule, kept)
        if found is None:
            owner = None
            break
        owner |= dict.fromkeys(found, i)
    if owner is None or set(owner.values()) != set(range(len(table["layers"]))):
        with pytest.raises(RecipeError, match="layers"):
            plan.by_layer(NAMES)
        return
    for name, found in plan.by_layer(NAMES).items():
        if name in kept:
            expected = recipe_from_table({"all": {"format": "bf16"}, "keep_bf16": []})
        elif name in owner:
            expected = treatment(table["layers"][owner[name]], table)
        else:
            expected = recipe_from_table({"all": table["all"], "keep_bf16": []})
        assert (found.fprop, found.dgrad, found.wgrad, found.gemm) == (
            expected.fprop, expected.dgrad, expected.wgrad, expected.gemm
        )  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(FILES, st.integers(1, 40))
@pytest.mark.clause("recipe.schedule")
def test_phases_resolve_as_the_specification_says(table, steps):
    """A naive model asks of each step and each phase whether the step lies in it."""
    table = {**table, "layers": []}

    def share(position):
        text = str(position)
        return Fraction(text[:-1]) * steps / 100 if text.endswith("%") else Fraction(text)

    phases, at, fits = [], Fraction(0), True
    for i, entry in enumerate(table["schedule"]):
        last = i == len(table["schedule"]) - 1
        fits &= "until" in entry or last
        fits &= i > 0 or "start" in entry or "until" in entry
        start = share(entry["start"]) if "start" in entry else at
        until = share(entry["until"]) if "until" in entry else Fraction(steps)
        inside = [s for s in range(max(steps, 50)) if start <= s < until]
        before = [s for begin, end, _ in phases for s in range(50) if begin <= s < end]
        fits &= (
            bool(inside)
            and inside[-1] < steps
            and -(-until // 1) <= steps
            and inside[0] > max(before, default=-1)
        )
        phases.append((start, until, entry))
        at = until
    plan = plan_of(table)
    if not fits:
        if plan is not None:
            with pytest.raises(RecipeError, match="schedule"):
                plan.spans(steps)
        return
    assert plan is not None
    for step in range(steps):
        inside = [entry for start, until, entry in phases if start <= step < until]
        found = plan.at(step, steps)
        expected = treatment(inside[0], table) if inside else recipe_from_table({"all": table["all"]})
        assert (found.fprop, found.dgrad, found.wgrad, found.gemm) == (
            expected.fprop, expected.dgrad, expected.wgrad, expected.gemm
        )  # fmt: skip
        if not inside or isinstance(inside[0]["recipe"], dict):
            assert found.keep_bf16 == tuple(table["keep_bf16"])
