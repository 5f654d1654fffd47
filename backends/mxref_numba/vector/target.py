"""What vector kernels are compiled for: the vector width, the CPU, and instructions that LLVM IR cannot express.

`VectorNative` is a kernel that each target has its own of.

The source of a kernel is the same for every target. Numba translates it to LLVM, as for any function, and keeps the
module in a code library. A code library made here knows its target: emitters read it from the module, and LLVM compiles
the module for the target's CPU. So kernels for AVX2 contain no other instructions, even on a machine that has more.
"""

# Numba's compiler and kernels have no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from mxref_numba.kernels import Native, bytes_at, kernel
from mxref_numba.lanes import I64, Avx2, Avx512, Instructions
from mxref_numba.path import KernelPath


@dataclass(frozen=True, eq=False)
class Target:
    """A set of vector instructions; what is kept for it is found by its identity."""

    path: str
    """The path whose kernels are compiled for it."""
    bits: int
    """Width of a vector."""
    instructions: Instructions
    """The instructions in which targets differ."""
    cpu: str | None = None
    """LLVM's name of the CPU; None is the CPU that Numba compiles for."""
    features: str = ""
    """Features that the CPU has beyond those of its name, in LLVM's notation: `+a,+b`."""

    @cached_property
    def name(self) -> str:
        """Return a name for kernels: the path and the features."""
        return f"{self.path}{self.features.replace('+', '_').replace(',', '')}"

    @property
    def lanes(self) -> int:
        """Return how many float32 a vector has."""
        return self.bits // 32

    @property
    def step(self) -> int:
        """Return how many elements an inner loop takes at once: eight vectors, whose four-bit codes fill one vector."""
        return 8 * self.lanes

    def codegen(self) -> Any:
        """Return the Numba code generator of the target's CPU."""
        return (
            cpu_target.target_context.codegen() if self.cpu is None else _codegen_of(self.cpu, self.features)
        )


AVX_VNNI = "+avxvnni"
"""VPDPBUSD of 256 bits, which newer CPUs without AVX-512 have."""


def _if_found(feature: str) -> str:
    """Return the feature if Numba's target CPU has it, else an empty text."""
    return feature if feature in cpu_target.target_context.codegen().magic_tuple()[2].split(",") else ""


TARGETS: dict[str, Target] = {
    KernelPath.AVX512: Target(KernelPath.AVX512, 512, Avx512()),
    KernelPath.AVX2: Target(KernelPath.AVX2, 256, Avx2(), "x86-64-v3", _if_found(AVX_VNNI)),
}
"""The target of each path that has vector kernels."""


@cache
def _codegen_of(cpu: str, features: str) -> Any:
    class Codegen(JITCPUCodegen):
        def _get_host_cpu_name(self):
            return cpu

        def _get_host_cpu_features(self):
            return features  # and those of the CPU by name

    return Codegen(f"mxref.{cpu}")


class _Library(JITCodeLibrary):
    """A code library whose modules have the attribute `mxref_target`."""

    def __init__(self, target: Target, name: str) -> None:
        super().__init__(target.codegen(), name)
        self._target = target
        self.enable_object_caching()

    def create_ir_module(self, name):
        module = super().create_ir_module(name)
        module.mxref_target = self._target
        return module


def compiler_for(target: Target, name: str) -> type[Any]:
    """Return the Numba compiler of a kernel of that name, for a target."""

    class TargetCompiler(Compiler):
        def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals_):
            own = _Library(target, name)
            super().__init__(typingctx, targetctx, own, args, return_type, flags, locals_)

    return TargetCompiler


def target_of(builder: Any) -> Target:
    """Return the target of the kernel that a builder builds.

    Raises:
        TypeError: the kernel has none: only a `VectorNative` on a target, and what is inlined in it, may use vectors.
    """
    target = getattr(builder.module, "mxref_target", None)
    if target is None:
        raise TypeError(
            f"{builder.module.name} uses vectors, but was compiled without a target: see VectorNative.on"
        )
    return target  # type: ignore[no-any-return]


def lanes_of(builder: Any) -> int:
    """Return how many float32 a vector of the kernel has that a builder builds."""
    return target_of(builder).lanes


def _step(typingctx):
    """Return how many elements a step of the kernel has, which is known when it is compiled."""

    def generate(context, builder, *_):
        return I64(target_of(builder).step)

    return types.int64(), generate


step_length: Any = intrinsic(_step)


class VectorNative(Native):
    """A `Native` that may use vectors: each target has its own.

    Numba compiles a kernel again into every kernel that calls it. A `Native` that is called by its address, with
    `call`, is compiled once.
    """

    def __init__(self, function: Callable[..., None], target: Target | None = None) -> None:
        """Wrap a function; without a target it is compiled as Numba compiles anything, and may not use vectors."""
        super().__init__(function)
        self._target = target
        self._on: dict[str, VectorNative] = {}

    def on(self, target: Target) -> VectorNative:
        """Return the kernel for a target."""
        found = self._on.get(target.name)
        return found or self._on.setdefault(target.name, VectorNative(self._function, target))

    def dispatcher(self) -> Any:
        """Return a new Numba dispatcher of the kernel, which has compiled nothing yet."""
        if self._target is None:
            return super().dispatcher()
        f, target = self._function, self._target
        # A name of its own: names of machine code and of files in the cache are made of it.
        own = FunctionType(
            f.__code__, f.__globals__, f"{f.__name__}_{target.name}", f.__defaults__, f.__closure__
        )
        own.__qualname__, own.__module__ = f"{f.__qualname__}_{target.name}", f.__module__
        compiler = compiler_for(target, own.__name__)
        return kernel(no_cfunc_wrapper=False, pipeline_class=compiler, codegen=target.codegen())(own)


@kernel(inline="always")
def copy_bytes(source, target, count):
    """Copy memory from address to address."""
    data, out = carray(bytes_at(source), (count,)), carray(bytes_at(target), (count,))
    for i in range(np.uint64(count)):
        out[i] = data[i]
