"""Counts in NVIDIA machine code (SASS), disassembled with the tools that Triton brings."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import triton

from aot.counts import Code, Counts, loop_of
from aot.cubin import instructions

_REGISTERS = 65536
_THREADS = 2048
_SHARED = 227 * 1024
"""Registers, threads and bytes of shared memory of a multiprocessor, on sm_90."""
_WARP = 32

_INSTRUCTION = re.compile(
    r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*(.*?);"
)
_CONTROL = ("NOP", "BRA", "EXIT", "BSSY", "BSYNC", "WARPSYNC", "RET", "CALL")
_PIPES = {
    "fma": ("FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HMUL2", "HFMA2"),
    "alu": (
        "LOP3", "PLOP3", "SHF", "IADD3", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "IMNMX", "FMNMX", "PRMT", "SEL",
        "FSEL", "ISETP", "FSETP", "FSET", "LEA", "MOV", "BMSK", "SGXT", "IABS", "FLO", "P2R", "R2P",
    ),
    "shuffle": ("SHFL",),
    "shared": ("LDS", "STS", "LDSM", "STSM"),
    "convert": ("F2F", "F2I", "I2F", "I2FP", "F2FP", "MUFU", "POPC"),
}  # fmt: skip
_MATRIX = ("HGMMA", "QGMMA", "HMMA", "QMMA", "IGMMA")


def _run(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def _disassembled(cubins: Sequence[bytes]) -> list[list[tuple[str, str]]]:
    """Return the instructions of each, and the labels of their branches.

    The disassembler takes 0.2 s to start, so it is given the instructions of all as one program.
    """
    texts = [instructions(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(texts))
        file.flush()
        lines = lines_of(_run("nvdisasm", "--binary", "SM90", file.name))
    out: list[list[tuple[str, str]]] = []
    end = 0
    for text in texts:
        start, end = end, end + len(text)
        out.append(labelled([line for line in lines if start <= line[0] < end]))
    return out


def count(codes: Sequence[Code]) -> list[Counts]:
    """Return the counts of compiled kernels."""
    if not codes:
        return []
    cubins = [bytes(code.code) for code in codes if isinstance(code.code, bytes)]
    return [
        _count(cubin, lines, code.shared, code.warps)
        for code, cubin, lines in zip(codes, cubins, _disassembled(cubins), strict=True)
    ]


def _count(cubin: bytes, lines: list[tuple[str, str]], shared: int, warps: int) -> Counts:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if used is None:
        raise ValueError(f"cuobjdump does not say what is used: {usage[-200:]!r}")
    registers, stack, _, local = map(int, used.groups())
    loop = loop_of(lines, branches=("BRA",))
    all_of = Counter(m for m, _ in lines if m)
    in_loop = Counter(m for m, _ in loop if m)
    threads = warps * _WARP
    groups = min(_REGISTERS // (threads * (registers + 7 & ~7)), _THREADS // threads)
    if shared:
        groups = min(groups, _SHARED // shared)
    return Counts(
        registers={"registers": registers},
        shared=shared,
        spills=sum(n for m, n in all_of.items() if _base(m) in ("STL", "LDL")),
        scratch=stack + local,
        occupancy=groups * warps,
        alu=sum(n for m, n in all_of.items() if _base(m) not in _CONTROL),
        loop_alu=sum(n for m, n in in_loop.items() if _base(m) not in _CONTROL + _MATRIX),
        loop_matrix=sum(n for m, n in in_loop.items() if _base(m) in _MATRIX),
        chained=None,
        pipes={
            pipe: sum(n for m, n in all_of.items() if _base(m) in names) for pipe, names in _PIPES.items()
        },
        mnemonics=dict(sorted(all_of.items())),
        loop_mnemonics=dict(sorted(in_loop.items())),
        notable=sorted({_base(m) for m in all_of if _base(m) in _MATRIX}),
    )


def _base(mnemonic: str) -> str:
    return mnemonic.split(".", 1)[0]


def lines_of(text: str) -> list[tuple[int, str, str]]:
    """Return the address, mnemonic and operands of each instruction."""
    # Of the modifiers, only the width of a multiplication changes the unit's work.
    return [
        (int(found[1], 16), found[2] + (".WIDE" if ".WIDE" in found[3] else ""), found[4])
        for found in map(_INSTRUCTION.match, text.splitlines())
        if found
    ]


def labelled(lines: list[tuple[int, str, str]]) -> list[tuple[str, str]]:
    """Return the instructions without their addresses, and a label, its address, before each that is branched to."""
    targets = {
        word
        for _, mnemonic, operands in lines
        if mnemonic == "BRA"
        for word in operands.split()
        if word.startswith("0x")
    }
    out = []
    for address, mnemonic, operands in lines:
        if hex(address) in targets:
            out.append(("", hex(address)))
        out.append((mnemonic, operands))
    return out
