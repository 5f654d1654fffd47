"""The GEMM's emitters compiled ahead of time for any CPU, without Numba, and the instructions of their loops."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import binding, ir

from mxref_numba.gemm import packing, tile
from mxref_numba.gemm.packing import Tiling
from mxref_numba.vector.lanes import F32, I64

X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"
_I1 = ir.IntType(1)
EMITTERS = {
    "pack_left": (packing.pack_left, [I64] * 7),
    "pack_right": (packing.pack_right, [I64] * 9),
    "multiply": (tile.multiply, [I64, I64, I64, _I1, F32, I64, I64, I64, I64, _I1]),
}
"""With the types of their arguments after the builder."""


@dataclass(frozen=True)
class Processor:
    """What code is compiled for."""

    triple: str
    cpu: str
    features: str
    tiling: Tiling


PROCESSORS = {
    "avx512": Processor(X86, "icelake-server", "", packing.AVX512),
    "avx2": Processor(X86, "x86-64-v3", "", packing.AVX2),
    "avx2-vnni": Processor(X86, "x86-64-v3", "+avxvnni", packing.AVX2_VNNI),
    "neon": Processor(ARM, "generic", "", packing.NEON),
    "neon-sdot": Processor(ARM, "generic", "+dotprod", packing.NEON_DOTS),
}


class Program:
    """An LLVM module with the emitters as functions, for one processor."""

    def __init__(self, processor: Processor) -> None:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        found = binding.Target.from_triple(processor.triple)
        self.machine = found.create_target_machine(
            cpu=processor.cpu, features=processor.features, opt=3, reloc="static", codemodel="small"
        )
        self.module = ir.Module(processor.cpu)
        self.module.triple = processor.triple
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
    lines = [re.split("#|//", line)[0].strip() for line in assembly.splitlines()]
    lines = lines[lines.index(f"{function}:") :]
    lines = lines[: next(i for i, line in enumerate(lines) if line.startswith(".size"))]
    found, place = [], {}
    for i, line in enumerate(lines):
        if match := re.fullmatch(r"(\.LBB\w+):", line):
            place[match[1]] = i
        elif (match := re.match(r"(?:j\w+|b\.\w+|cbn?z\s+\w+,)\s+(\.LBB\w+)$", line)) and match[1] in place:
            body = [one.removeprefix("{vex}").strip() for one in lines[place[match[1]] + 1 : i + 1]]
            if not any(re.fullmatch(r"\.LBB\w+:", one) for one in body):
                found.append(Counter(one.split()[0] for one in body if one and one[0] not in ".#"))
    return found
