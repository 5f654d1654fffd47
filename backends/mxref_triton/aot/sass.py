"""Counts in NVIDIA machine code (SASS), disassembled with the tools that Triton brings."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager

from mxref_triton.aot.counts import Counts, loop_of

_REGISTERS = 65536
_THREADS = 2048
_SHARED = 227 * 1024
"""Registers, threads and bytes of shared memory of a multiprocessor, on sm_90."""
_WARP = 32

_INSTRUCTION = re.compile(
    r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*(.*?);"
)
_LABEL = re.compile(r"(\.L\w+):")
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


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """Return the instructions of machine code, and what it uses.

    The disassembler takes longer than the compiler, most of it to start, so its text is kept in Triton's cache.
    It analyses no branches: that adds nothing to the instructions, and takes a third of its time.
    """
    kept = get_cache_manager(hashlib.sha256(triton.__version__.encode() + cubin).hexdigest())
    if (path := kept.get_file("sass")) is None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = _run("nvdisasm", "--print-code", "--no-dataflow", file.name)
            usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        path = kept.put("\0".join((text, usage)), "sass", binary=False)
    text, usage = Path(path).read_text().split("\0")
    return text, usage


def count(compiled: Any, warps: int) -> Counts:
    """Return the counts of a compiled kernel."""
    text, usage = _disassembled(compiled.asm["cubin"])
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if used is None:
        raise ValueError(f"cuobjdump does not say what is used: {usage[-200:]!r}")
    registers, stack, _, local = map(int, used.groups())
    lines = _lines(text)
    loop = loop_of(lines, branches=("BRA",))
    all_of = Counter(m for m, _ in lines if m)
    in_loop = Counter(m for m, _ in loop if m)
    shared = int(compiled.metadata.shared)
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


def _lines(text: str) -> list[tuple[str, str]]:
    out = []
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            out.append(("", label[1]))
        elif found := _INSTRUCTION.match(line):
            # Of the modifiers, only the width of a multiplication changes the unit's work.
            out.append((found[1] + (".WIDE" if ".WIDE" in found[2] else ""), found[3]))
    return out
