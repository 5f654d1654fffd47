"""An answer of `mxref identify` as lines of text, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mxref.formats import BlockFormat
from mxref.identify.against import Origin
from mxref.identify.answer import Group, Identified, dialects_with
from mxref.identify.evidence import RuleFound

FORMAT = "mxref.identify.1"
CONFIDENCE = "99 %"
_RULES = {
    "nearest": "NEAREST, amax / 6",
    "by_error": "chosen by the smaller error, as under four over six",
}
_LABEL = 10


def lines(found: Identified, origins: list[Origin]) -> Iterator[str]:
    """Yield the lines of an answer; what a group has in common with the one before is said once."""
    by_weight = {origin.weight: origin for origin in origins}
    before: list[str] = []
    for group in found.groups:
        many = f"{len(group.weights)} weights" if len(group.weights) > 1 else "1 weight"
        yield f"{group.name}  ({many}, {group.shape[0]} x {group.shape[1]})"
        stored = list(_stored(group))
        yield from stored if stored != before else ["  format, codes and scales: as above"]
        before = stored
        yield from _answer(group)
        if origin := by_weight.get(group.weights[0]):
            yield from _labelled("original", _origin(origin))
        yield ""
    for name, verdict in found.together.items():
        of_format = [group for group in found.groups if group.formats[0].name == name]
        yield f"{of_format[0].formats[0].title}, all {len(of_format)} groups together"
        yield from _labelled("rule", _rule(verdict, of_format[0].formats[0]))


def _labelled(label: str, texts: list[str]) -> Iterator[str]:
    for i, text in enumerate(texts):
        yield f"  {label if i == 0 else '':{_LABEL}}{text}"


def _stored(group: Group) -> Iterator[str]:
    titles = " or ".join(made.title for made in group.formats)
    yield from _labelled("format", [f"{titles}, by {group.format_by}; named as by {group.convention}"])
    yield from _labelled("codes", [_codes(group)])
    yield from _labelled("scales", _scales(group))


def _answer(group: Group) -> Iterator[str]:
    if group.tensor_scale:
        yield from _labelled("tensor", [_tensor(group)])
    yield from _labelled("rule", _rule(group.verdict, group.formats[0]))
    if group.evidence:
        yield from _labelled("evidence", _evidence(group))


def _codes(group: Group) -> str:
    others = [name for name in group.packings_that_fit if name != group.packing]
    first = {
        "packed": "the first element in the low bits",
        "halves": "byte j of a block holds j and j + k / 2",
    }
    text = f"{group.packing}, {first.get(group.packing, 'a byte for each')}"
    return text + (f"; the size fits {', '.join(others)} too, and codes do not tell" if others else "")


def _scales(group: Group) -> list[str]:
    fit = group.scale_layouts_that_fit
    tile = [f"a scale is shared by tiles of {group.formats[0].tile}"] if group.tile else []
    if len(fit) == 1:
        return [f"{fit[0]}, the only layout of this size", *tile]
    if group.scale_layout is None:
        return [
            f"undecided: the size fits {', '.join(fit)}, and the codes do not tell; read as {fit[0]}",
            *tile,
        ]
    others = ", ".join(name for name in fit if name != group.scale_layout)
    return [
        f"{group.scale_layout}; the size fits {others} too, but so placed they do not go with the codes",
        *tile,
    ]


def _tensor(group: Group) -> str:
    fact = group.tensor_scale
    assert fact
    ways = {
        True: "values are divided by it (g)",
        False: "values are multiplied by it (t)",
        None: "its direction is open",
    }
    text = f"{fact.value:.6g}: by its name {ways[fact.inverse_by_name]}"
    if fact.inverse_by_size is None:
        return f"{text}; its size does not tell"
    if fact.inverse_by_size == fact.inverse_by_name:
        return f"{text}, and its size agrees"
    return f"{text}, but by its size {ways[fact.inverse_by_size]}: one of both is wrong"


def _rule(verdict: RuleFound, made: BlockFormat) -> list[str]:
    if verdict.rule is None:
        remain = f"; possible: {', '.join(verdict.possible)}" if verdict.possible else ""
        return [f"undecided: {verdict.reason}{remain}"]
    name = _RULES.get(verdict.rule, verdict.rule.upper())
    known = dialects_with(verdict.rule, made)
    dialects = f"; dialects with it: {', '.join(known)}" if known else ""
    return [f"{name}, said with {CONFIDENCE}{dialects}", verdict.reason]


def _evidence(group: Group) -> list[str]:
    e = group.evidence
    assert e
    top = sorted(e.largest.items(), key=lambda item: -item[1])[:6]
    shares = ", ".join(f"{value:g} in {share:.2%}" for value, share in sorted(top))
    of_zero = ", ".join(f"{byte:02X} x {n}" for byte, n in e.zero_block_bytes.items())
    bytes_ = ", ".join(f"{byte}: {n}" for byte, n in e.scale_bytes.items())
    minus = "no zeros" if e.minus_zeros is None else f"{e.minus_zeros:.1%} of zeros have a minus sign"
    return [
        f"{e.blocks:,} blocks; the largest magnitude over X is {shares}",
        f"the largest code occurs more than once in {e.shared:.1%}; {minus}",
        f"zero blocks: {e.zero_blocks}{f' (scale {of_zero})' if of_zero else ''}; NaN blocks: {e.nan_blocks}; "
        f"scale bytes {bytes_}",
    ]


def _origin(origin: Origin) -> list[str]:
    along = " along the first axis" if origin.transposed else ""
    of = f"all {origin.blocks:,} compared blocks of {origin.weight}"
    if origin.dialects:
        but = " but for the signs of zeros" if origin.but_for_zero_signs else ""
        return [f"{of} are those of {' and of '.join(origin.dialects)}{along}{but}"]
    if origin.treatment:
        return [f"{of} are those of {origin.treatment}{along}"]
    d = origin.difference
    assert d
    place = f"row {d.row}, block {d.block}: "
    return [
        f"no treatment gives its bytes; the nearest dialect, {d.dialect}, differs in {d.differing:,} of "
        f"{origin.blocks:,} blocks",
        f"{place}expected {d.expected}",
        f"{'':{len(place)}}stored   {d.stored}",
        f"explorer {d.link}",
    ]


def plain(found: Identified, origins: list[Origin]) -> dict[str, Any]:
    """Return an answer as JSON values."""
    by_weight = {origin.weight: asdict(origin) for origin in origins}
    groups = []
    for group in found.groups:
        table = {name: getattr(group, name) for name in (
            "name", "weights", "shape", "convention", "format_by", "packing", "packings_that_fit", "scale_layout",
            "scale_layouts_that_fit", "scale_layout_lead", "tile",
        )}  # fmt: skip
        table["formats"] = [made.name for made in group.formats]
        table["tensor_scale"] = group.tensor_scale and asdict(group.tensor_scale)
        table["rule"] = group.verdict.rule
        table["confidence"] = 0.99 if group.verdict.rule else None
        table["verdict"] = asdict(group.verdict)
        table["dialects"] = group.dialects
        table["evidence"] = group.evidence and asdict(group.evidence)
        table["original"] = by_weight.get(group.weights[0])
        groups.append(table)
    together = {name: asdict(verdict) for name, verdict in found.together.items()}
    return {"format": FORMAT, "groups": groups, "together": together}
