"""The answer of `mxref identify`: for each group of weights the format, the layouts, and the scale rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mxref.dialects import DIALECTS, dialects_of
from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.identify.evidence import (
    BY_ERROR,
    Evidence,
    Measured,
    RuleFound,
    count,
    element_by_codes,
    layout_by_codes,
    verdict,
)
from mxref.identify.stored import Checkpoint, read_checkpoint
from mxref.identify.weights import Reading, Sample, Weight, readings, sample, weights
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix

BLOCKS = 16384
"""Blocks of a group that are read by default."""
_TENSORS = 4


@dataclass(frozen=True)
class TensorScaleFact:
    """The scale of a tensor above those of its blocks."""

    name: str
    value: float
    inverse_by_name: bool
    """Whether values are divided by it, as its name says: g; else multiplied: t."""
    inverse_by_size: bool | None
    """The same by its size, which makes the weights' largest magnitude plausible one way only; None cannot tell."""


@dataclass(frozen=True)
class Group:
    """Weights that are called alike, but for the numbers of layers and experts."""

    name: str
    weights: tuple[str, ...]
    shape: tuple[int, int]
    """Rows and length of the first, leading axes counted as rows."""
    convention: str
    formats: tuple[BlockFormat, ...]
    """The formats that types, sizes, configuration and codes leave; one, where they decide."""
    format_by: str
    """What decided."""
    packing: str
    packings_that_fit: tuple[str, ...]
    scale_layout: str | None
    """The layout under which scales and codes go together; None if several fit and the codes cannot tell."""
    scale_layouts_that_fit: tuple[str, ...]
    scale_layout_lead: float
    """By how many standard deviations the codes prefer it."""
    tile: bool
    """Whether a scale is shared by a square tile."""
    tensor_scale: TensorScaleFact | None
    evidence: Evidence | None
    verdict: RuleFound

    @property
    def dialects(self) -> tuple[str, ...]:
        """The dialects of the format that have the rule that was found."""
        return dialects_with(self.verdict.rule, self.formats[0]) if self.verdict.rule else ()


def dialects_with(rule: str, made: BlockFormat) -> tuple[str, ...]:
    """Return the dialects of a format that have a rule, in DIALECTS' order."""
    return tuple(
        name for name, spec in dialects_of(made).items() if rule_of(spec) == rule and not spec.prescale
    )


def rule_of(spec: OperandSpec) -> str:
    """Return the rule of a treatment as a verdict names it."""
    return BY_ERROR if spec.four_over_six is not FourOverSix.OFF else str(spec.scale_rule)


@dataclass(frozen=True)
class Identified:
    """What was found in the files."""

    groups: tuple[Group, ...]
    readings: dict[str, Reading]
    """How each weight is read, by its name."""
    together: dict[str, RuleFound]
    """The rule of all groups of a format together, by the format's name, where there are several."""

    def rule(self, group: Group) -> str | None:
        """Return the rule of a group; of an undecided one that of all groups of its format, which includes it."""
        of_all = self.together.get(group.formats[0].name)
        return group.verdict.rule or (of_all.rule if of_all else None)


def identify(paths: tuple[Path, ...], blocks: int = BLOCKS) -> Identified:
    """Return what the weights of files were quantized with; headers are read, and a sample of blocks.

    Raises:
        FileFormatError: a file that cannot be read, or no quantized weight in any.
    """
    checkpoint = read_checkpoint(paths)
    found = weights(checkpoint)
    read = {weight.name: readings(weight, checkpoint) for weight in found}
    found = [weight for weight in found if read[weight.name]]
    if not found:
        kinds = sorted({one.dtype for one in checkpoint.tensors.values()})
        raise FileFormatError(
            f"{paths[0]}: no weight in a block format among {len(checkpoint.tensors)} tensors of the types "
            f"{', '.join(kinds) or 'none'}; codes and scales are found by names such as weight_packed and weight_scale"
        )
    groups: list[Group] = []
    chosen: dict[str, Reading] = {}
    of_format: dict[str, list[tuple[Group, list[Measured]]]] = {}
    alike: dict[tuple[str, ...], list[Weight]] = {}
    for weight in found:
        ways = [f"{one.made} {one.packing}" for one in read[weight.name]]
        alike.setdefault((weight.pattern, *ways), []).append(weight)
    for members in alike.values():
        group, picked, parts = _group(members, read, checkpoint, blocks)
        groups.append(group)
        chosen |= picked
        if parts:
            of_format.setdefault(group.formats[0].name, []).append((group, parts))
    together = {name: _together(several) for name, several in of_format.items() if len(several) > 1}
    return Identified(tuple(groups), chosen, together)


def _together(several: list[tuple[Group, list[Measured]]]) -> RuleFound:
    """Return the rule of groups of a format, if it is possible in each of them."""
    found = verdict([part for _, parts in several for part in parts])
    against = [group.name for group, _ in several if found.rule and found.rule not in group.verdict.possible]
    if not against:
        return found
    reason = f"{found.rule} fits all of them best, and {against[0]} excludes it: groups have different rules"
    return replace(found, rule=None, reason=reason)


def _group(
    members: list[Weight], read: dict[str, list[Reading]], checkpoint: Checkpoint, blocks: int
) -> tuple[Group, dict[str, Reading], list[Measured]]:
    at = np.unique(np.linspace(0, len(members) - 1, _TENSORS).round().astype(int))
    some = [members[i] for i in at]
    each = -(-blocks // len(some))
    made, by = _format(some[0], read[some[0].name], checkpoint, each)
    chosen = {weight.name: next(one for one in read[weight.name] if one.made in made) for weight in members}
    first = chosen[some[0].name]
    samples = [sample(chosen[weight.name], each) for weight in some]
    layouts = [_layout(one) for one in samples]
    layout, ahead = layouts[0]
    fits_ = tuple(first.scale_layouts)
    natural = fits_[0]
    names = [name or next(iter(one.scales)) for (name, _), one in zip(layouts, samples, strict=True)]
    parts = [Measured(one, name) for one, name in zip(samples, names, strict=True)] if len(made) == 1 else []
    if parts:
        evidence, found = count(samples, names), verdict(parts)
        if checkpoint.meta.get("prescale"):
            reason = "the elements carry a prescale, which moves the octave of every rule"
            found, parts = replace(found, rule=None, possible=(), reason=reason), []
    else:
        reason = "the format is not known: " + ", ".join(one.title for one in made)
        evidence, found = None, RuleFound(None, 0.0, None, (), reason)
    return Group(
        some[0].pattern, tuple(weight.name for weight in members), (first.rows, first.length), some[0].convention,
        made, by, first.packing, first.code_layouts, layout or (natural if len(fits_) == 1 else None), fits_, ahead,
        all(one.tile for one in samples), _tensor_scale(some[0]), evidence, found,
    ), chosen, parts  # fmt: skip


def _layout(one: Sample) -> tuple[str | None, float]:
    return layout_by_codes(one) if len(one.scales) > 1 else (next(iter(one.scales)), 0.0)


def _format(
    weight: Weight, read: list[Reading], checkpoint: Checkpoint, blocks: int
) -> tuple[tuple[BlockFormat, ...], str]:
    """Return the formats that remain, and what decided."""
    formats = tuple(dict.fromkeys(one.made for one in read))
    if len(formats) == 1:
        sure = "types, sizes and configuration" if checkpoint.config or checkpoint.meta else "types and sizes"
        return formats, sure
    shapes = {(one.packing, one.length, one.made.scale, one.made.k) for one in read}
    if len(shapes) > 1:
        return formats, "types and sizes"
    best, ahead = element_by_codes({one.made.name: sample(one, blocks) for one in read})
    if best is None:
        return formats, "types and sizes"
    return (BLOCK_FORMATS[best],), f"codes, {ahead:.0f} standard deviations ahead"


def _tensor_scale(weight: Weight) -> TensorScaleFact | None:
    """Return the scale of a tensor, whose largest weight is 2688 t or 2688 / g: below 672 one way only."""
    if weight.tensor is None:
        return None
    value = float(np.asarray(weight.tensor.array()).reshape(-1)[0])
    by_size = None if 0.25 <= value <= 4 else value > 4
    return TensorScaleFact(weight.tensor.name, value, weight.inverse, by_size)


def unexpected(identified: Identified, rule: str) -> list[Group]:
    """Return the groups of which codes do not show a rule, or that of a dialect."""
    wanted = rule_of(DIALECTS[rule].spec) if rule in DIALECTS else rule
    return [group for group in identified.groups if identified.rule(group) != wanted]
