"""The GEMM's vector code, compiled for x86 CPUs that this machine need not be: its instructions."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("numba")

from numba.core.caching import NullCache

from mxref_numba.gemm.packed_panels import tiling_of
from mxref_numba.gemm.packed_tiles import _multiply_groups
from mxref_numba.kernels import KERNELS
from mxref_numba.lanes import Avx2, Avx512
from mxref_numba.path import KernelPath, available
from mxref_numba.vector.target import Target

pytestmark = pytest.mark.skipif(len(available()) == 1, reason="Numba compiles for another kind of CPU here")

TARGETS = {
    "avx512": Target(KernelPath.AVX512, 512, Avx512(), "icelake-server"),
    "avx2": Target(KernelPath.AVX2, 256, Avx2(), "x86-64-v3"),
    "avx2-vnni": Target(KernelPath.AVX2, 256, Avx2(), "x86-64-v3", "+avxvnni"),
}


def assembly(target: Target) -> str:
    """Return the code of the kernel that multiplies, compiled for a target."""
    made = _multiply_groups.on(target).dispatcher()
    made._cache = NullCache()
    KERNELS.remove(made)  # it is none of the package's
    made.compile(_multiply_groups.types)
    (overload,) = made.overloads.values()
    text: str = overload.library.get_asm_str()
    return text


def loops(code: str) -> list[Counter[str]]:
    """Return, for each loop of straight code, in order, how often it has each instruction."""
    lines = [re.split("#", line)[0].strip() for line in code.splitlines()]
    found, place = [], {}
    for i, line in enumerate(lines):
        if match := re.fullmatch(r"(\.LBB\w+):", line):
            place[match[1]] = i
        elif (match := re.match(r"j\w+\s+(\.LBB\w+)$", line)) and match[1] in place:
            body = [one.removeprefix("{vex}").strip() for one in lines[place[match[1]] + 1 : i + 1]]
            if not any(re.fullmatch(r"\.LBB\w+:", one) for one in body):
                found.append(Counter(one.split()[0] for one in body if one and one[0] != "."))
    return found


COUNTS = {
    "avx512": {"vpdpbusd": 96, "vfmadd231ps": 12, "vcvtdq2ps": 12, "vpbroadcastd": 54},
    "avx2": {"vpmaddubsw": 64, "vpmaddwd": 8, "vpaddw": 56, "vfmadd231ps": 8, "vcvtdq2ps": 8, "vpbroadcastd": 36},
    "avx2-vnni": {"vpdpbusd": 96, "vfmadd231ps": 12, "vcvtdq2ps": 12, "vpbroadcastd": 54},
}  # fmt: skip
"""What a block of a tile takes in the loop for scales that float32 holds."""
MOST = {"avx512": 225, "avx2": 245, "avx2-vnni": 255}
"""Instructions of that loop in all; more would be vectors that go to the stack and back."""


@pytest.mark.parametrize("name", TARGETS)
def test_instructions_of_a_block(name: str) -> None:
    target = TARGETS[name]
    tiling = tiling_of(target)
    (found,) = (loop for loop in loops(assembly(target)) if loop["vfmadd231ps"])
    assert {one: found[one] for one in COUNTS[name]} == COUNTS[name]
    assert found.total() <= MOST[name]
    per_instruction = {"vpmaddubsw": 32, "vpdpbusd": 4 * tiling.lanes}
    made = sum(found[one] * count for one, count in per_instruction.items())
    assert made == tiling.rows * tiling.columns * 32
