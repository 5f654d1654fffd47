"""Counts in the text of AMD machine code (`amdgcn`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from aot.counts import Code, Counts, loop_of

_WAVES_PER_SIMD = 8
_SIMDS = 4
_LDS = 160 * 1024
"""Bytes of LDS of a compute unit, on gfx950."""

_INSTRUCTION = re.compile(r"\s*([a-z]\w+)(?:\s+(.*?))?\s*(?:;.*)?$")
_LABEL = re.compile(r"(\.?L\w+):")
_NOT_COUNTED = ("v_mfma", "v_nop", "v_accvgpr")
_NOTABLE = ("v_mfma", "v_cvt_scalef32", "v_prng", "scratch_")


def lines_of(text: str) -> list[tuple[str, str]]:
    """Return instructions and labels in order: (mnemonic, operands), or ("", label)."""
    out = []
    for line in text.split(".Lfunc_end", 1)[0].splitlines():
        if label := _LABEL.match(line):
            out.append(("", label[1]))
        elif found := _INSTRUCTION.match(line):
            out.append((found[1], found[2] or ""))
    return out


def is_valu(mnemonic: str) -> bool:
    """Return whether an instruction occupies the vector ALU."""
    return mnemonic.startswith("v_") and not mnemonic.startswith(_NOT_COUNTED)


def is_chained(operands: str) -> bool:
    """Return whether a matrix instruction adds to something other than 0, its fourth operand."""
    # A comma inside brackets belongs to a modifier, which follows the fourth.
    return operands.split(",")[3].split()[0] != "0"


def count(codes: Sequence[Code]) -> list[Counts]:
    """Return the counts of compiled kernels."""
    return [_count(str(code.code), code.shared, code.warps) for code in codes]


def _count(text: str, lds: int, warps: int) -> Counts:
    lines = lines_of(text)
    loop = loop_of(lines, branches=("s_cbranch", "s_branch"))
    all_of = Counter(m for m, _ in lines if m)
    in_loop = Counter(m for m, _ in loop if m)
    registers_allow = _number(text, r"; Occupancy: (\d+)")
    groups = _LDS // lds if lds else _WAVES_PER_SIMD * _SIMDS
    return Counts(
        registers={
            "vgpr": _number(text, r"; NumVgprs: (\d+)"),
            "agpr": _number(text, r"; NumAgprs: (\d+)"),
            "sgpr": _number(text, r"; TotalNumSgprs: (\d+)"),
        },
        shared=lds,
        spills=_number(text, r"\.vgpr_spill_count:\s*(\d+)") + _number(text, r"\.sgpr_spill_count:\s*(\d+)"),
        scratch=_number(text, r"; ScratchSize: (\d+)"),
        occupancy=min(registers_allow, max(1, groups * warps // _SIMDS)),
        alu=sum(n for m, n in all_of.items() if is_valu(m)),
        loop_alu=sum(n for m, n in in_loop.items() if is_valu(m)),
        loop_matrix=sum(n for m, n in in_loop.items() if m.startswith("v_mfma")),
        chained=sum(m.startswith("v_mfma") and is_chained(operands) for m, operands in lines),
        pipes={
            "multiply32": sum(
                n
                for m, n in all_of.items()
                if m.startswith(("v_mul_lo_u", "v_mul_hi_", "v_mad_u64", "v_mad_i64"))
            ),
            "lds": sum(n for m, n in all_of.items() if m.startswith("ds_")),
        },
        mnemonics=dict(sorted(all_of.items())),
        loop_mnemonics=dict(sorted(in_loop.items())),
        notable=sorted({m for m in all_of if m.startswith(_NOTABLE)}),
    )


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the machine code does not say {pattern!r}: its format changed with this Triton")
    return int(found[1])
