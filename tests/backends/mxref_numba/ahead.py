"""Kernels' inner loops compiled ahead of time for another CPU, and the instructions of their loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from mxref_numba.vector.lanes import I64


def target_machine(triple: str, cpu: str, features: str = "") -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="static", codemodel="small")


def compiled(machine: Any, functions: dict[str, tuple[Callable[..., None], list[Any]]]) -> Any:
    """Compile emitters, each with the types of its arguments after the builder, to a module of that machine."""
    module = ir.Module("ahead")
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    for name, (emit, types) in functions.items():
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
        builder = ir.IRBuilder(function.append_basic_block())
        emit(builder, *function.args)
        builder.ret_void()
    made = binding.parse_assembly(str(module))
    made.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(made, builder)
    return made


def integers(count: int) -> list[Any]:
    return [I64] * count


def loops(assembly: str) -> list[Counter[str]]:
    """Return, for each innermost loop of straight code, how often each instruction is in it, in order."""
    found, place = [], {}
    lines = [line.split("#")[0].split("//")[0].strip() for line in assembly.splitlines()]
    for i, line in enumerate(lines):
        if match := re.fullmatch(r"(\.LBB\w+):", line):
            place[match[1]] = i
        elif (match := re.match(r"(j\w+|b\.\w+|cbn?z\s+\w+,)\s+(\.LBB\w+)$", line)) and match[2] in place:
            body = lines[place[match[2]] + 1 : i + 1]
            if not any(re.fullmatch(r"\.LBB\w+:", one) for one in body):
                found.append(Counter(one.split()[0] for one in body if one and not one.startswith(".")))
    return found
