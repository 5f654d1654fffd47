"""The GEMM's vector code, compiled ahead of time for x86 CPUs that this machine need not be: its instructions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("numba")

from llvmlite import binding, ir

from mxref_numba.gemm import packed_panels, packed_tiles
from mxref_numba.gemm.packed_panels import Tiling
from mxref_numba.vector.lanes import F32, I64

TRIPLE = "x86_64-linux-gnu"
_I1 = ir.IntType(1)
EMITTERS = {
    "pack_left": (packed_panels.pack_left, [I64] * 7),
    "pack_right": (packed_panels.pack_right, [I64] * 9),
    "multiply": (packed_tiles.multiply, [I64, I64, I64, _I1, F32, I64, I64, I64, I64, _I1]),
}
"""With the types of their arguments after the builder."""


@dataclass(frozen=True)
class Processor:
    """What code is compiled for."""

    cpu: str
    features: str
    tiling: Tiling


PROCESSORS = {
    "avx512": Processor("icelake-server", "", packed_panels.AVX512),
    "avx2": Processor("x86-64-v3", "", packed_panels.AVX2),
    "avx2-vnni": Processor("x86-64-v3", "+avxvnni", packed_panels.AVX2_VNNI),
}


class Program:
    """An LLVM module with the emitters as functions, for one processor."""

    def __init__(self, processor: Processor) -> None:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        found = binding.Target.from_triple(TRIPLE)
        self.machine = found.create_target_machine(
            cpu=processor.cpu, features=processor.features, opt=3, reloc="static", codemodel="small"
        )
        self.module = ir.Module(processor.cpu)
        self.module.triple = TRIPLE
        self.module.data_layout = str(self.machine.target_data)
        self.functions = {
            name: self.define(name, types, partial(emit, processor.tiling))
            for name, (emit, types) in EMITTERS.items()
        }

    def define(self, name: str, types: list[Any], emit: Any) -> Any:
        """Add a function, whose body `emit` gives from a builder and the arguments."""
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), name)
        builder = ir.IRBuilder(function.append_basic_block())
        emit(builder, function.args)
        builder.ret_void()
        return function

    def optimized(self) -> Any:
        """Return the module as LLVM's third level leaves it."""
        made = binding.parse_assembly(str(self.module))
        made.verify()
        passes = binding.create_pass_builder(
            self.machine, binding.create_pipeline_tuning_options(speed_level=3)
        )
        passes.getModulePassManager().run(made, passes)
        return made

    def assembly(self) -> str:
        """Return the machine code as text."""
        return str(self.machine.emit_assembly(self.optimized()))


def loops(assembly: str, function: str) -> list[Counter[str]]:
    """Return, for each loop of straight code in a function, in order, how often it has each instruction."""
    lines = [re.split("#", line)[0].strip() for line in assembly.splitlines()]
    lines = lines[lines.index(f"{function}:") :]
    lines = lines[: next(i for i, line in enumerate(lines) if line.startswith(".size"))]
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
WIDE_REGISTERS = re.compile(r"zmm|[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b")


@pytest.mark.parametrize("name", PROCESSORS)
def test_instructions_of_a_block(name: str) -> None:
    tiling, assembly = PROCESSORS[name].tiling, Program(PROCESSORS[name]).assembly()
    found = loops(assembly, "multiply")[0]
    assert {one: found[one] for one in COUNTS[name]} == COUNTS[name]
    assert found.total() <= MOST[name]
    products = tiling.rows * tiling.columns * 32
    per_instruction = {"vpmaddubsw": 32, "vpdpbusd": 4 * tiling.lanes}
    made = sum(found[one] * count for one, count in per_instruction.items())
    assert made == products
    assert bool(WIDE_REGISTERS.search(assembly)) == (name == "avx512")
