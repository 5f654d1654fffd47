"""Operands that two training or inference stacks gave to their GEMMs: their file, and the first bytes that differ.

A recorder, such as `mxref_torch.record_operands`, writes one file for each stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance import archive
from mxref.conformance.archive import plain_array, typed_array
from mxref.conformance.dump import treatment_of
from mxref.conformance.outcome import Judgement, printable_lines
from mxref.conformance.requests.decoding import first_place
from mxref.conformance.requests.quantizing import Blocks
from mxref.errors import ShapeError
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray

FORMAT = "mxref.operands.1"
_SHOWN = 20


@dataclass(frozen=True, eq=False)
class StackOperand:
    """An operand of a GEMM of a layer, as a stack gave it to the GEMM."""

    layer: str
    gemm: str
    """`fprop`, `dgrad` or `wgrad`."""
    tensor: str
    """`x`, `w` or `dy`."""
    call: int
    """How often the layer had read this operand before."""
    source: NDArray[Any] | None
    """The matrix before quantization: float32, bfloat16 or float16; None where the stack no longer has it."""
    array: MXArray | None
    """The quantized matrix; None for an operand that is multiplied as its source is."""
    treatment: str = ""
    """What the stack itself says of the quantization."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What two stacks have in common."""
        return self.layer, self.gemm, self.tensor, self.call

    @property
    def title(self) -> str:
        """The operand as text."""
        call = f", call {self.call}" if self.call else ""
        return f"layer {self.layer}, {self.gemm} {self.tensor}{call}"

    @property
    def kind(self) -> str:
        """The format as text."""
        if self.array is not None:
            return self.array.format.title
        assert self.source is not None
        return str(self.source.dtype)


@dataclass(frozen=True)
class Stack:
    """What one stack gave to its GEMMs, in the order of their execution."""

    name: str
    operands: tuple[StackOperand, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else a reader should know, such as versions and the device."""


@dataclass(frozen=True)
class Pair:
    """The same operand in two stacks, and how it differs."""

    a: StackOperand
    b: StackOperand
    blocks: int
    """Blocks that were compared; rows of an operand without blocks."""
    wrong: int
    """How many of them differ."""
    first: str = ""
    """The first difference as lines."""
    sources_differ: bool = False
    """Whether the numbers before quantization differ already."""

    @property
    def ok(self) -> bool:
        """Whether nothing differs, the numbers before quantization included."""
        return not self.first

    @property
    def extent(self) -> str:
        """How much differs, as text."""
        if self.a.kind != self.b.kind:
            return f"{self.a.kind} and {self.b.kind}"
        return f"{self.wrong:,} of {self.blocks:,} {'blocks' if self.a.array else 'rows'}"


@dataclass(frozen=True)
class StackComparison(Judgement):
    """How the operands of two stacks differ."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    """The operands that both have, in the order of the first."""
    alone: tuple[tuple[StackOperand, ...], tuple[StackOperand, ...]]
    """Operands that only one has, of GEMMs that both have."""
    gemms: tuple[tuple[str, ...], tuple[str, ...]]
    """GEMMs that only one has: one recorded no backward pass, or cannot."""

    @property
    def ok(self) -> bool:
        """Whether both have the same operands of the GEMMs that both have, and every byte of them is equal."""
        return all(pair.ok for pair in self.pairs) and not any(self.alone)

    def __str__(self) -> str:
        """Return the first difference and the list of all as lines."""
        wrong = [pair for pair in self.pairs if not pair.ok]
        lines = [f"{side}: {name}" for side, name in zip("ab", self.names, strict=True)]
        if wrong:
            lines += [f"first difference: {wrong[0].a.title}", wrong[0].first]
        else:
            lines += [f"equal: {len(self.pairs)} operands"]
        for side, alone, gemms in zip("ab", self.alone, self.gemms, strict=True):
            if alone:
                lines += [f"only {side} has {len(alone)} more operands, the first of {alone[0].title}"]
            if gemms:
                lines += [f"only {side} recorded {' and '.join(gemms)}, which has no counterpart"]
        if wrong:
            lines += [f"{len(wrong)} of {len(self.pairs)} operands differ:"]
            lines += [
                f"  {pair.a.title}: {pair.extent}"
                + (", the numbers before quantization differ too" if pair.sources_differ else "")
                for pair in wrong[:_SHOWN]
            ]
            if len(wrong) > _SHOWN:
                lines += [f"  ... and {len(wrong) - _SHOWN} more"]
        return printable_lines("\n".join(lines))


def compare_stacks(a: Stack, b: Stack) -> StackComparison:
    """Compare the operands of two stacks, byte by byte.

    Raises:
        ShapeError: no operand is in both, or one that is in both has two shapes.
    """
    others = {operand.key: operand for operand in b.operands}
    common = [operand for operand in a.operands if operand.key in others]
    if not common:
        titles = [stack.operands[0].title if stack.operands else "nothing" for stack in (a, b)]
        raise ShapeError(
            f"the files have no operand in common: a begins with {titles[0]}, b with {titles[1]}; record models whose "
            "layers have the same names"
        )
    pairs: list[Pair] = []
    for one in common:
        # To find the treatments takes long, and only the first difference is shown.
        asked = all(pair.ok for pair in pairs)
        pairs.append(_pair(one, others[one.key], asked))
    both = {operand.key for operand in common}
    gemms = [{operand.gemm for operand in stack.operands} for stack in (a, b)]
    shared = gemms[0] & gemms[1]
    alone = [tuple(o for o in stack.operands if o.gemm in shared and o.key not in both) for stack in (a, b)]
    own = [tuple(sorted(each - shared)) for each in gemms]
    return StackComparison((_named(a), _named(b)), tuple(pairs), (alone[0], alone[1]), (own[0], own[1]))


def _named(stack: Stack) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in stack.facts.items())
    return f"{stack.name}, {len(stack.operands)} operands" + (f" ({facts})" if facts else "")


def _pair(a: StackOperand, b: StackOperand, asked: bool) -> Pair:
    shapes = [operand.array.shape if operand.array else _source(operand).shape for operand in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            f"{a.title} has the shape {shapes[0]} in a and {shapes[1]} in b: record the same model with the same batch"
        )
    sources = _source_difference(a, b)
    if a.kind != b.kind or a.array is None or b.array is None or a.array.axis != b.array.axis:
        if a.array is None and b.array is None and a.kind == b.kind:
            return _plain_pair(a, b, sources)
        count = 1 if a.array is None else int(np.asarray(a.array.scales).size)
        return Pair(a, b, count, count, f"  a is {a.kind}, b is {b.kind}" + sources, bool(sources))
    got, want = Blocks.of(a.array), Blocks.of(b.array)
    wrong = (got.codes != want.codes).any(axis=-1) | (got.scales != want.scales)
    tensor = got.tensor != want.tensor
    lines = [sources.lstrip("\n")] if sources else []
    if wrong.any():
        row, block = first_place(wrong)
        lines += [f"  block {block} of row {row}:"]
        lines += [
            f"    {side}  {_block(found, row, block, a.array)}" for side, found in (("a", got), ("b", want))
        ]
    if tensor:
        scales = [float(np.asarray(o.array.tensor_scale)[0]) for o in (a, b) if o.array]
        lines += [f"  the scale of the tensor is {scales[0]:.9g} in a and {scales[1]:.9g} in b"]
    if lines and asked:
        lines += _treatments(a, b, bool(sources))
    return Pair(a, b, wrong.size, int(wrong.sum()), "\n".join(lines), bool(sources))


def _plain_pair(a: StackOperand, b: StackOperand, sources: str) -> Pair:
    rows = len(_source(a))
    wrong = int((_bits(_source(a)) != _bits(_source(b))).any(axis=-1).sum())
    return Pair(a, b, rows, wrong, sources.lstrip("\n"), bool(sources))


def _source(operand: StackOperand) -> NDArray[Any]:
    assert operand.source is not None
    return operand.source


def _bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x.astype(np.float32)).view(np.uint32)


def _source_difference(a: StackOperand, b: StackOperand) -> str:
    """Return how the numbers before quantization differ; nothing if they are equal, or one stack has none."""
    if a.source is None or b.source is None:
        return ""
    wrong = _bits(a.source) != _bits(b.source)
    if not wrong.any():
        return ""
    at = first_place(wrong)
    values = [float(operand[at]) for operand in (a.source, b.source)]
    return (
        f"\n  the numbers before quantization differ, {int(wrong.sum()):,} of {wrong.size:,}; the first at "
        f"{list(at)}: {values[0]!r} in a, {values[1]!r} in b"
    )


def _block(found: Blocks, row: int, block: int, q: MXArray) -> str:
    packed = pack(found.codes[row, block], q.format.element)
    return f"scale {found.scales[row, block]:02x}  codes {packed.tobytes().hex(' ')}"


def _treatments(a: StackOperand, b: StackOperand, sources_differ: bool) -> list[str]:
    """Return which treatment gives the bytes of each stack; one without numbers is asked about those of the other."""
    if not sources_differ and (a.source is not None or b.source is not None):
        lines = [
            "  the numbers before quantization are equal" if a.source is not None and b.source is not None
            else f"  only {'a' if b.source is None else 'b'} has the numbers before quantization"
        ]  # fmt: skip
    else:
        lines = []
    for side, operand, other in (("a", a, b), ("b", b, a)):
        x = operand.source if operand.source is not None or sources_differ else other.source
        if x is not None and operand.array is not None:
            found = treatment_of(x, operand.array)
            own = f"; the stack names {operand.treatment}" if operand.treatment else ""
            lines += [
                f"  {side}: {f'all bytes are those of {found}' if found else 'no known treatment'}{own}"
            ]
    return lines


# ---- the file ----


def save_stack(path: str | Path, stack: Stack) -> None:
    """Write the operands of a stack; the file appears only when all of it is on the disk.

    Raises:
        FileFormatError: a name that does not end in .npz, or a file that cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    tables = []
    for i, operand in enumerate(stack.operands):
        table: dict[str, Any] = dict(zip(("layer", "gemm", "tensor", "call"), operand.key, strict=True))
        if operand.source is not None:
            arrays[f"{i}.source"], table["dtype"] = plain_array(operand.source), str(operand.source.dtype)
        if operand.array is not None:
            arrays |= {f"{i}.{name}": array for name, array in operand.array.arrays().items()}
            table["array"], table["treatment"] = operand.array.facts(), operand.treatment
        tables.append(table)
    meta = {"format": FORMAT, "name": stack.name, "facts": dict(stack.facts), "operands": tables}
    archive.save(path, meta, arrays)


def load_stack(path: str | Path) -> Stack:
    """Return what `save_stack` wrote.

    Raises:
        FileFormatError: the file is missing, damaged, or holds something else.
    """
    way_out = "two files are those of mxref_torch.record_operands, and x, codes and scales are three"
    with archive.opened(path, FORMAT, "operands", way_out) as (meta, arrays):
        operands = tuple(_operand(table, f"{i}.", arrays) for i, table in enumerate(meta["operands"]))
        return Stack(meta["name"], operands, meta["facts"])


def _operand(table: Mapping[str, Any], prefix: str, arrays: Mapping[str, NDArray[Any]]) -> StackOperand:
    """Return the operand of a table; an exception of any kind if its parts do not fit together."""
    source = typed_array(arrays[prefix + "source"], table["dtype"]) if "dtype" in table else None
    held = None
    if "array" in table:
        names = ("codes", "scales", "tensor_scale")
        held = MXArray.of_file(table["array"], {n: arrays[prefix + n] for n in names if prefix + n in arrays})
    if source is None and held is None:
        raise ValueError(f"{table['layer']} has neither bytes nor numbers")
    treatment = str(table.get("treatment", ""))
    return StackOperand(
        str(table["layer"]), table["gemm"], table["tensor"], int(table["call"]), source, held, treatment
    )
