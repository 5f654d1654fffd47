"""Vector kernels of the Numba backend compiled ahead of time for another CPU, to read and count their instructions.

    PYTHONPATH=tests python -m cross_compiled

prints a table of all kernels and targets.
"""

# Numba's compiler has no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import llvmlite.binding as llvm
from numba.core import types
from numba.core.codegen import AOTCodeLibrary, CPUCodegen
from numba.core.compiler import DEFAULT_FLAGS, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from mxref_numba.vector import columns, dequantize, encode, staging, turn
from mxref_numba.vector.target import NEON, TARGETS, Target, VectorNative

AARCH64 = "aarch64-unknown-linux-gnu", "neoverse-n1"
X86_64 = "x86_64-unknown-linux-gnu"
CPUS = {"avx512": (X86_64, "icelake-server"), "avx2": (X86_64, "x86-64-v3"), "neon": AARCH64}
"""LLVM's triple and CPU of each target."""


def _turned(address, step, target, pitch):
    turn._turn_float32(address, step, target, pitch, 0)


KERNELS = {
    "encode_rows": encode.encode_rows,
    "encode_byte_rows": encode.encode_byte_rows,
    "dequantize": dequantize._dequantize_share,
    "stage_row": staging.stage_row,
    "turn": VectorNative(_turned),
    "encode_columns": columns.encode_columns,
}
"""What a path's time goes into; `turn` is the square of float32 that `fill_panel` repeats."""


class _Codegen(CPUCodegen):
    """A code generator for any CPU that LLVM knows, which runs nothing."""

    _library_class = AOTCodeLibrary

    def __init__(self, triple: str, cpu: str) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self._triple, self._cpu = triple, cpu
        super().__init__(f"cross.{cpu}")

    def _init(self, llvm_module):
        target = llvm.Target.from_triple(self._triple)
        self._tm = target.create_target_machine(cpu=self._cpu, opt=3, reloc="pic")
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level, self._tm_features = False, 0, ""

    def _create_empty_module(self, name):
        module = super()._create_empty_module(name)
        module.triple = self._triple
        return module

    def _customize_tm_features(self):
        return ""

    def _add_module(self, module):
        pass


class _Library(AOTCodeLibrary):
    """A library for a target, to which modules of this machine are moved with it."""

    def __init__(self, target: Target, codegen: _Codegen) -> None:
        super().__init__(codegen, target.path)
        self._target = target

    def create_ir_module(self, name):
        module = super().create_ir_module(name)
        module.mxref_target = self._target
        return module

    def add_linking_library(self, library):
        library._ensure_finalized()
        if library is not rtsys.library:  # memory of Numba's, which these kernels do not use
            self._linking_libraries.append(_Moved(library, self._codegen))


class _Moved:
    def __init__(self, library: Any, codegen: Any) -> None:
        self._library, self._codegen, self._reload_init = library, codegen, library._reload_init

    def _get_module_for_linking(self):
        text = str(self._library._get_module_for_linking())
        text = re.sub(
            r'target datalayout = ".*"', f'target datalayout = "{self._codegen._data_layout}"', text
        )
        return llvm.parse_assembly(
            re.sub(r'target triple = ".*"', f'target triple = "{self._codegen._triple}"', text)
        )


def assembly(kernel: VectorNative, target: Target) -> str:
    """Return the assembly code of a kernel for a target, on the CPU of `CPUS`."""
    library = _Library(target, _Codegen(*CPUS[target.path]))
    flags = DEFAULT_FLAGS.copy()
    flags.no_compile, flags.nrt, flags.error_model, flags.no_cpython_wrapper = True, True, "numpy", True
    compile_extra(
        cpu_target.typing_context, cpu_target.target_context, kernel._function, kernel._types, types.void, flags,
        {}, library=library,
    )  # fmt: skip
    with global_compiler_lock:
        library._ensure_finalized()
    return library.get_asm_str()


def instructions(code: str) -> Counter[str]:
    """Return how often each instruction stands in assembly code."""
    lines = (line.strip() for line in code.splitlines() if line.startswith("\t"))
    return Counter(line.split()[0] for line in lines if line and line[0] not in ".#/")


def main() -> None:
    """Print how many instructions each kernel has on each target, and how many of them use vectors."""
    for name, kernel in KERNELS.items():
        for target in (*TARGETS.values(), NEON):
            code = assembly(kernel, target)
            used = re.compile(r"%[xyz]mm|\b[vq]\d+\b")
            vectors = sum(bool(used.search(line)) for line in code.splitlines() if line.startswith("\t"))
            print(
                f"{name:18s} {target.path:7s} {sum(instructions(code).values()):6d}, with vectors {vectors:6d}"
            )


if __name__ == "__main__":
    main()
