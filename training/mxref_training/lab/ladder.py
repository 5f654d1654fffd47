"""A ladder: arms that each lay an overlay over one base recipe, trained under equal conditions.

A ladder is a TOML file, in which a new arm takes a few lines. This module reads the file, resolves every arm to a full
recipe, and refuses arms that cannot be compared. It trains nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.errors import FileFormatError
from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref.tomlio import build, merge, nearest, read_toml, shown, to_table
from mxref_training.config import TrainConfig
from mxref_training.config_files import config_from_table, parse_override, require_known
from mxref_training.errors import ConfigError
from mxref_training.treatment import describe

# A table whose keys are checked when it is laid over another one. `build` only knows plain `dict`.
if TYPE_CHECKING:
    Table = dict[str, Any]
else:
    Table = dict

SHIPPED = Path(__file__).parents[1] / "ladders"
MAX_NAME = 100
"""Characters of an arm's name, which becomes the name of a directory."""
MAX_SEEDS = 1000
"""Repetitions of an arm."""
SEED = ".seed"
"""Between the name of an arm and the number of a repetition, in the name of a run."""
DNC = "DNC"
"""How a paper's table says that an arm does not converge."""

_SHARED = frozenset({"data", "parallel", "model.vocab"} | {f"run.{key}" for key in (
    "steps", "batch", "seq_len", "eval_every", "eval_tokens", "seed", "data_seed", "device"
)})  # fmt: skip
"""Sections and keys that an arm cannot set for itself."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)(?:\s*[-–]\s*(\d+(?:\.\d+)?))?\s*%")


@dataclass(frozen=True)
class Claim:
    """What a paper reports for an arm: an overhead in tokens, or that it does not converge."""

    overhead: str
    """`"8-9 %"`, `"8 %"` or `"DNC"`."""
    source: str
    """The citation, as text."""

    def __post_init__(self) -> None:
        low, high = self.range or (0.0, 0.0)
        if self.range is None and self.overhead != DNC:
            raise ConfigError(
                f"paper.overhead = {shown(self.overhead)} is neither a percentage like '8-9 %' nor 'DNC'"
            )
        if low > high:
            raise ConfigError(f"paper.overhead = {shown(self.overhead)} begins above its end")

    @property
    def range(self) -> tuple[float, float] | None:
        """The reported overhead, lowest and highest, in percent; None for DNC."""
        found = _PERCENT.fullmatch(self.overhead)
        return (float(found[1]), float(found[2] or found[1])) if found else None


@dataclass(frozen=True)
class Arm:
    """One treatment: an overlay on the ladder's base recipe."""

    name: str
    """Names its directory: lower-case letters, digits, `-` and `_`."""
    label: str
    stage: str = ""
    """The GEMMs that it treats; the table's rows are grouped by it."""
    recipe: Table = field(default_factory=dict)
    train: Table = field(default_factory=dict)
    """Keys of the configuration that it trains with in place of the ladder's, as in `optim.lr`."""
    seeds: int = 1
    """Repetitions, each at other seeds, where the call asks for no number. The reference needs as many as any other."""
    seed_offset: int = 0
    """Added to both seeds: a repetition of the reference arm that shows the noise. It runs once."""
    paper: Claim | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ConfigError(f"arm {self.name!r}: seeds = {self.seeds} is outside 1 .. {MAX_SEEDS}")
        for section, keys in self.train.items():
            for key in keys if isinstance(keys, dict) else ():
                if section in _SHARED or f"{section}.{key}" in _SHARED:
                    raise ConfigError(
                        f"arm {self.name!r}: train.{section}.{key} is shared by all arms, which are compared at equal "
                        "seeds, data and tokens: set it under [train]"
                    )

    def config(self, shared: TrainConfig) -> TrainConfig:
        """Return the arm's configuration: its own keys laid over those that all arms share."""
        if not self.train:
            return shared
        return config_from_table(merge(to_table(shared), self.train), f"arm {self.name!r}: train")


class Says(StrEnum):
    """What a source says about a contrast."""

    LOWER = "lower"
    """The arm's loss is lower than that of the arm it is held against."""
    HIGHER = "higher"
    EQUAL = "equal"
    """The difference of the losses is too small to be measured."""
    DIVERGES = "diverges"
    """The arm diverges."""


@dataclass(frozen=True)
class Prediction:
    """What a source says about a contrast, before it is measured."""

    says: Says
    source: str
    """The citation, as text."""


@dataclass(frozen=True)
class Contrast:
    """Two arms that are compared at equal seeds to answer one question; declared before they run."""

    name: str
    arm: str
    """Name of the arm."""
    against: str
    """Name of the arm that it is held against."""
    question: str
    """The question that the difference answers, in plain words."""
    prediction: tuple[Prediction, ...] = ()


@dataclass(frozen=True)
class LossTarget:
    """The validation loss at which tokens are counted, and the arms that the others are compared with."""

    reference: str = "fp8"
    """Name of the reference arm, which has 0 % overhead."""
    fraction: float = 0.7
    """The target is the reference's own validation loss at this fraction of its tokens."""
    loss: float | None = None
    """A fixed target in nats per token, in place of the fraction."""
    high_precision: str = "bf16"
    """Name of a second arm to which the gap in loss is measured; empty for none."""


@dataclass(frozen=True)
class LastCheckpoints:
    """The table `[last]`: what is done with the last checkpoint of each run."""

    recipes: tuple[str, ...] = ()
    """Names of shipped recipes, or files: the checkpoint is evaluated with their Fprop on its own validation text."""
    val: tuple[str, ...] = ()
    """JSONL on which it is evaluated too, by the field `source` of its documents."""
    probe: bool = False
    """At the end, compare the GEMMs of all recipes on the reference's last checkpoint, as `mxref probe` does."""
    keep: tuple[str, ...] | None = None
    """Names of the arms whose checkpoints stay when they are finished; without it, those of all arms."""


@dataclass(frozen=True)
class Branch:
    """The table `[branch]`: every recipe goes on from checkpoints of one run, on the same batches, for some updates."""

    trunk: str = ""
    """Name of the arm that is trained up to the moments; empty: the reference."""
    moments: tuple[str, ...] = ("25%", "50%", "75%")
    """Steps, or shares of the steps of the run as in `25%`, at which all recipes branch off."""
    updates: int = 200
    """Optimizer steps that each branch takes."""
    eval_every: int = 0
    """Steps between evaluations of a branch; `updates` and the moments are multiples. 0: a quarter of `updates`."""
    seeds: int = 1
    """Trunks, each at other seeds."""
    anneal: bool = False
    """Lower the learning rate of every branch to 0, in a straight line over its updates."""

    def __post_init__(self) -> None:
        for name, least in (("updates", 1), ("eval_every", 0), ("seeds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"branch.{name} = {getattr(self, name)} is below {least}")
        if self.updates % self.interval:
            raise ConfigError(
                f"branch.updates = {self.updates} is not a multiple of branch.eval_every = {self.eval_every}, so the "
                "end of a branch would not be evaluated"
            )
        if not self.moments:
            raise ConfigError("branch.moments is empty: give steps or shares, as in 25%")

    @property
    def interval(self) -> int:
        """Steps between evaluations: without `eval_every` a quarter of the updates, or all where that is not whole."""
        return self.eval_every or (self.updates // 4 if self.updates % 4 == 0 else self.updates)


@dataclass(frozen=True)
class TrainOverlay:
    """A training preset and what the ladder changes in it, table by table."""

    preset: str
    model: Table = field(default_factory=dict)
    data: Table = field(default_factory=dict)
    optim: Table = field(default_factory=dict)
    run: Table = field(default_factory=dict)

    def overlay(self) -> dict[str, Any]:
        """Return the changes as one table."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preset"}


@dataclass(frozen=True)
class Ladder:
    """A comparison: the arms, what they share, and the target."""

    title: str
    train: TrainOverlay
    arm: tuple[Arm, ...]
    """In the order in which they run."""
    description: str = ""
    recipe: Table = field(default_factory=dict)
    """The base recipe's table."""
    target: LossTarget = LossTarget()
    contrast: tuple[Contrast, ...] = ()
    """One family: their p-values are corrected together for the number of them."""
    exploratory: tuple[Contrast, ...] = ()
    """Contrasts that were declared after runs had been seen; they stand outside the family, and no verdict is given."""
    branch: Branch = field(default_factory=Branch)
    """The branch design."""
    last: LastCheckpoints = LastCheckpoints()
    """What is done with the last checkpoint of each run."""

    def __post_init__(self) -> None:
        contrasts = (*self.contrast, *self.exploratory)
        _check_names("arm", [arm.name for arm in self.arm])
        _check_names("contrast", [contrast.name for contrast in contrasts])
        reference = self._compared("target.reference", self.target.reference)
        if self.target.high_precision:
            self.named(self.target.high_precision, "target.high_precision")
        if self.branch.trunk:
            self._compared("branch.trunk", self.branch.trunk)
        if not 0 < self.target.fraction < 1:
            raise ConfigError(f"target.fraction = {self.target.fraction} is outside 0 .. 1")
        for contrast in contrasts:
            for key in ("arm", "against"):
                self._compared(f"contrast {contrast.name!r}: {key}", getattr(contrast, key))
            if contrast.arm == contrast.against:
                raise ConfigError(f"contrast {contrast.name!r} compares {contrast.arm!r} with itself")
        kept = [reference.name] if self.last.keep is None else self.last.keep
        for name in kept:
            self.named(name)
        if self.last.probe and reference.name not in kept:
            raise ConfigError(
                f"last.probe reads the checkpoint of {reference.name}, which last.keep deletes: name it there"
            )
        for arm in self.arm:
            alike = self.resolve(arm) == self.resolve(reference) and arm.train == reference.train
            if arm.seeds > reference.seeds:
                raise ConfigError(
                    f"arm {arm.name!r} has seeds = {arm.seeds}, and the reference arm {reference.name!r} only "
                    f"{reference.seeds}: each repetition is compared with the reference's, so give it as many"
                )
            if arm.seed_offset and arm.seeds > 1:
                raise ConfigError(
                    f"arm {arm.name!r} has a seed_offset and so runs once; leave seeds = {arm.seeds} out"
                )
            if arm.seed_offset and not alike:
                raise ConfigError(
                    f"arm {arm.name!r} has seed_offset = {arm.seed_offset} and another recipe or other keys of "
                    f"train than {reference.name!r}: arms are compared at equal seeds, so only a repetition of "
                    "the reference may have an offset"
                )

    def _compared(self, key: str, name: str) -> Arm:
        """Return the arm that a key of the file names, which others are compared with at equal seeds."""
        arm = self.named(name, key)
        if arm.seed_offset:
            raise ConfigError(
                f"{key} = {name!r} has a seed_offset, and arms are compared at equal seeds; name an arm without one"
            )
        return arm

    @property
    def reference(self) -> Arm:
        """The reference arm, which has 0 % overhead."""
        return self.named(self.target.reference)

    @property
    def trunk(self) -> Arm:
        """The arm from whose checkpoints the others branch off."""
        return self.named(self.branch.trunk or self.target.reference)

    def named(self, name: str, key: str = "") -> Arm:
        """Return an arm by its name; ConfigError names the nearest one, and the `key` of the file that is wrong."""
        if found := next((arm for arm in self.arm if arm.name == name), None):
            return found
        said = f"{key} = {shown(name)} is no arm of the ladder" if key else f"no arm is named {shown(name)}"
        raise ConfigError(f"{said}{nearest(name, [arm.name for arm in self.arm])}")

    def repetitions(self, arm: Arm, seeds: int | None = None) -> int:
        """Return how often an arm runs: once with a seed offset, else `seeds`, or the arm's own number if None."""
        return 1 if arm.seed_offset else arm.seeds if seeds is None else seeds

    def resolve(self, arm: Arm) -> Recipe:
        """Return the arm's full recipe: its overlay on the ladder's base."""
        return self._recipes[arm.name]

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        return {
            arm.name: recipe_from_table(merge(self.recipe, arm.recipe), where=f"arm {arm.name!r}: recipe")
            for arm in self.arm
        }

    def treatment(self, arm: Arm) -> list[tuple[str, str]]:
        """Return what the arm does differently in a few words: for each GEMM, and its own keys of the training."""
        keys = [
            f"{section}.{key} = {value}" for section, own in arm.train.items() for key, value in own.items()
        ]
        return describe(self.resolve(arm)) + ([("Training", ", ".join(keys))] if keys else [])

    def names(self, words: Sequence[str]) -> list[str]:
        """Return the names of the arms that words select: those that are named, or all, without those named `-NAME`.

        A word may name a single run too, as in `NAME.seed2`. ConfigError if no arm has a name, or the reference is to
        be left out.
        """
        left_out = {self.named(word[1:]).name for word in words if word.startswith("-")}
        if self.reference.name in left_out:
            raise ConfigError(f"{self.reference.name} is the reference of the ladder, and cannot be left out")
        named = [word.partition(SEED)[0] for word in words if not word.startswith("-")]
        return [arm.name for arm in self.select(named or None) if arm.name not in left_out]

    def select(self, names: list[str] | None) -> tuple[Arm, ...]:
        """Return the arms of these names in the ladder's order, and the reference; None is all of them."""
        if names is None:
            return self.arm
        wanted = {self.named(name).name for name in names} | {self.reference.name}
        return tuple(arm for arm in self.arm if arm.name in wanted)


def _check_names(kind: str, names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            raise ConfigError(
                f"{kind} name {shown(name)} is not made of lower-case letters, digits, '-' and '_' alone, "
                f"{MAX_NAME} at most"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"two {kind}s are named {name!r}; results are kept by name, so give each {kind} its own"
            )


@dataclass(frozen=True)
class Extension:
    """The keys by which a ladder's file extends another ladder."""

    extends: str
    """Name of a shipped ladder, or path of a file."""
    arms: tuple[str, ...] = ()
    """Names of the arms that are taken; empty takes all."""
    seeds: int | None = None
    """Repetitions of every arm that is taken; None leaves each its own."""


def extended(table: Mapping[str, Any], base: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the table of a ladder that extends another one, `base`; `where` is its file in error messages.

    It is the base with its arms chosen and the file's other keys laid over it. Own arms and contrasts follow those that
    are taken. A contrast is taken if both of its arms are. An exploratory one belongs to the base's runs, and is not
    taken.

    Raises:
        ConfigError: an arm that the base does not have, or a base that extends a third ladder.
        RecipeError: a key of another type.
    """
    of_it = [f.name for f in fields(Extension)]
    keys = build(Extension, {key: table[key] for key in of_it if key in table}, where)
    if "extends" in base:
        raise ConfigError(f"{where}: {keys.extends} extends another ladder itself; extend that one")
    arms = {arm.get("name"): arm for arm in base.get("arm", ())}
    for name in keys.arms:
        if name not in arms:
            raise ConfigError(
                f"{where}: arms: {shown(name)} is no arm of {keys.extends}{nearest(name, arms)}"
            )
    taken = [arm for name, arm in arms.items() if name in keys.arms or not keys.arms]
    if keys.seeds is not None:
        taken = [arm if arm.get("seed_offset") else {**arm, "seeds": keys.seeds} for arm in taken]
    names = {arm["name"] for arm in taken}
    contrasts = [c for c in base.get("contrast", ()) if {c.get("arm"), c.get("against")} <= names]
    own = {key: value for key, value in table.items() if key not in (*of_it, "arm", "contrast")}
    shared = {key: value for key, value in base.items() if key != "exploratory"}
    return merge(shared, own) | {
        "arm": [*taken, *table.get("arm", ())],
        "contrast": [*contrasts, *table.get("contrast", ())],
    }


def shipped() -> list[str]:
    """Return the names of the ladders that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_ladder(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Ladder:
    """Return the ladder of a TOML file, or a shipped one by its name, after resolving every arm once.

    The overrides are `section.key=value` of the ladder's own tables, as in `branch.updates=100`.

    Raises:
        FileFormatError: no such file or name, or no valid TOML.
        RecipeError: an unknown key (the nearest is named) or a wrong value, in the file or in an arm's recipe.
        ConfigError: arms that cannot be compared, a target that names no arm, or an unknown key or a wrong type in
            `train`.
    """
    path = _file(path_or_name)
    table = read_toml(path)
    if "extends" in table:
        table = extended(table, read_toml(_file(str(table["extends"]), path.parent)), path.name)
    for override in overrides:
        table = merge(table, parse_override(override, Ladder))
    ladder = build(Ladder, table, path.name)
    require_known(ladder.train.overlay(), TrainConfig, f"{path.name}: train")
    for arm in ladder.arm:
        require_known(arm.train, TrainConfig, f"{path.name}: arm {arm.name!r}: train")
    return ladder


def _file(path_or_name: str | Path, folder: Path = Path()) -> Path:
    """Return the file of a ladder: a shipped one by its name, or a path from a folder."""
    name = str(path_or_name)
    if name in shipped():
        return SHIPPED / f"{name}.toml"
    path = folder / name
    if not path.suffix and not os.path.exists(path):  # `Path.exists` raises on a path that is too long
        raise FileFormatError(
            f"no ladder is named {shown(name)}{nearest(name, shipped())}; or give a path to a .toml file"
        )
    return path
