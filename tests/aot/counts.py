"""What is counted in machine code, the same for every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """Machine code of a compiled kernel, and what its launch takes."""

    code: bytes | str
    """A cubin, or assembly."""
    shared: int
    """Bytes of LDS or shared memory of a program."""
    warps: int
    """Of a program."""


@dataclass(frozen=True)
class Counts:
    """Counts of one compiled kernel. Instructions are those of one wave or warp, each once, taken or not."""

    registers: dict[str, int]
    """By kind: vgpr, agpr and sgpr, or registers."""
    shared: int
    """Bytes of LDS or shared memory of a program."""
    spills: int
    """Registers spilled; on NVIDIA, instructions that spill."""
    scratch: int
    """Bytes of private memory per thread."""
    occupancy: int
    """Waves per SIMD, or warps per SM, that registers and shared memory allow."""
    alu: int
    """Vector ALU instructions; on NVIDIA, all that are issued but control flow."""
    loop_alu: int
    """Those in the longest innermost loop; 0 where there is no loop."""
    loop_matrix: int
    """Matrix instructions in that loop."""
    chained: int | None
    """Matrix instructions whose addend is not the constant 0; None where that is not counted."""
    pipes: dict[str, int]
    """Instructions by the unit that they occupy."""
    mnemonics: dict[str, int]
    """Every mnemonic and how often it occurs."""
    loop_mnemonics: dict[str, int]
    """The same of that loop."""
    notable: list[str]
    """Mnemonics that say which hardware feature is used."""


def loop_of(lines: Sequence[tuple[str, str]], branches: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the instructions of the longest innermost loop, none if there is no loop.

    A loop is what lies between a label and a later branch to it, and an innermost one has no other inside.

    Args:
        lines: (mnemonic, operands), or ("", label).
        branches: how the mnemonics of branches begin; the label is in their operands.
    """
    at = {label: i for i, (mnemonic, label) in enumerate(lines) if not mnemonic}
    spans = []
    for i, (mnemonic, operands) in enumerate(lines):
        if mnemonic.startswith(branches):
            spans += [
                (at[word], i)
                for word in operands.replace("`(", " ").replace(")", " ").split()
                if at.get(word, i) < i
            ]
    # Two branches to one label are one loop, which ends with the later.
    ends: dict[int, int] = {}
    for start, end in spans:
        ends[start] = max(end, ends.get(start, end))
    inner = [
        (start, end)
        for start, end in ends.items()
        if not any(start < other and last <= end for other, last in ends.items())
    ]
    if not inner:
        return []
    start, end = max(inner, key=lambda span: span[1] - span[0])
    return list(lines[start : end + 1])
