"""Compiles the kernels of the row quantizer without a GPU, and reads what Triton and LLVM made of them.

`python -m prove.kernels TARGET CASE...` is the process that does so: torch must describe the machine before the backend
is imported. It writes a line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod

from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.recipe import OperandSpec
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from places import TESTS

TARGETS = {"gfx950": "ahead of time", "sm_90": ""}
"""Name of a target, and what torch.version.hip is there."""
SIDE = 16384
"""Rows and columns of the matrices for which kernels are compiled."""
RULES = ("floor", "ceil", "rceil", "even")
FORMATS = ("mxfp4", "mxfp4_e1m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2")


@dataclass(frozen=True)
class Case:
    """A treatment and a type of input, for which the row kernel is compiled."""

    format: str
    rule: str
    dtype: str
    zero_scale: int = 0
    rounding: str = "rne"
    masked: bool = False
    """Whether the last program has fewer units than the others."""
    sr_bits: int = 16
    """R, under SR."""
    prescale: bool = False
    hadamard: int = 0
    """Size of the transform."""
    axis: int | None = 1
    """The block axis of a matrix: 0 for columns, None for both at once."""

    @property
    def name(self) -> str:
        """The case's name, of its fields."""
        zero = f".zero{self.zero_scale}" if self.zero_scale else ""
        zero += "" if self.rounding == "rne" else f".{self.rounding}"
        zero += f"{self.sr_bits}" if self.sr_bits != 16 else ""
        zero += ".prescale" if self.prescale else ""
        zero += f".h{self.hadamard}" if self.hadamard else ""
        zero += {0: ".columns", 1: "", None: ".dual"}[self.axis]
        return f"{self.format}.{self.rule}.{self.dtype}{zero}{'.masked' if self.masked else ''}"

    @property
    def is_plain(self) -> bool:
        """Whether it is of full programs of rows under RNE, and nothing else is done."""
        return self == Case(self.format, self.rule, self.dtype)

    @property
    def block(self) -> BlockFormat:
        """The block format."""
        return BLOCK_FORMATS[self.format]

    @property
    def random_bits(self) -> int:
        """R, or 0 without SR."""
        return self.sr_bits if self.rounding == "sr" else 0

    @property
    def spec(self) -> OperandSpec:
        """The treatment as a recipe has it."""
        return OperandSpec(
            self.block, ScaleRule(self.rule), Rounding(self.rounding), self.sr_bits,
            zero_scale=self.zero_scale, prescale=self.prescale, hadamard=self.hadamard,
        )  # fmt: skip

    @property
    def options(self) -> list[str]:
        """The treatment as options of `mxref explain`."""
        told = {"format": self.format, "scale-rule": self.rule}
        told |= {"zero-scale": str(self.zero_scale)} if self.zero_scale else {}
        told |= {} if self.rounding == "rne" else {"rounding": self.rounding}
        told |= {"hadamard": str(self.hadamard)} if self.hadamard else {}
        told |= {"sr-bits": str(self.sr_bits)} if self.sr_bits != 16 else {}
        out = [word for name, value in told.items() for word in (f"--{name}", value)]
        return out + ["--prescale"] * self.prescale


@dataclass(frozen=True)
class Decoding:
    """A format and a type of values, for which the kernel that dequantizes is compiled."""

    format: str
    dtype: str

    @property
    def name(self) -> str:
        """The case's name, of its fields."""
        return f"dequantize.{self.format}.{self.dtype}"

    @property
    def block(self) -> BlockFormat:
        """The block format."""
        return BLOCK_FORMATS[self.format]

    @property
    def value_bits(self) -> int:
        """Bits of a value."""
        return 32 if self.dtype == "float32" else 16


def cases() -> dict[str, Case | Decoding]:
    """Return every case by name."""
    decoding = [Decoding(made, dtype) for made in (*FORMATS, "nvfp4") for dtype in ("float32", "bfloat16")]
    return {case.name: case for case in (*_quantizers(), *decoding)}


def undecided(case: Case | Decoding, target: str) -> str | None:
    """Return why a kernel has no theorem for a target, or None."""
    if isinstance(case, Decoding) or case.axis == 1 or target != "sm_90":
        return None
    if case.axis is None and case.block.element.bits == 6:
        return "both orientations are two kernels there"
    packed = (
        case.format == "mxfp4" and case.dtype == "bfloat16" and case.rounding == "rne" and not case.hadamard
    )
    return "two lines meet in packed arithmetic" if packed else None


def theorems() -> list[tuple[str, str]]:
    """Return every case that has a theorem, by name, with its target."""
    return [
        (name, target) for target in TARGETS for name, case in cases().items() if not undecided(case, target)
    ]


def _quantizers() -> list[Case]:
    out = [Case(made, rule, "bfloat16") for made in FORMATS for rule in RULES]
    out += [Case("mxfp4", rule, dtype) for rule in RULES for dtype in ("float16", "float32")]
    out += [Case("mxfp4", "even", "bfloat16", 127), Case("mxfp4", "even", "bfloat16", masked=True)]
    out += [
        Case("mxfp4", rule, "bfloat16", rounding=how)
        for rule in ("floor", "even")
        for how in ("rna", "rtz", "sr")
    ]
    eight = ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2")
    out += [Case(made, "floor", "bfloat16", rounding="sr") for made in eight]
    out += [Case("mxfp4", "floor", "bfloat16", rounding="sr", sr_bits=bits) for bits in (1, 8, 20, 22)]
    out += [Case("mxfp8_e4m3", "floor", "bfloat16", rounding="sr", sr_bits=20)]
    out += [Case("mxint8", rule, "bfloat16") for rule in RULES]
    out += [Case("mxint8", "floor", "bfloat16", rounding=how) for how in ("rna", "rtz", "sr")]
    out += [Case(made, "floor", "bfloat16", prescale=True) for made in FORMATS]
    out += [Case("mxfp4", "floor", "bfloat16", rounding="sr", prescale=True)]
    out += [Case("mxfp4", "even", "bfloat16", hadamard=n) for n in (2, 4, 8, 16, 32)]
    out += [Case(made, "even", "bfloat16", hadamard=16) for made in FORMATS[1:]]
    out += [Case("mxfp4", "floor", "bfloat16", rounding="sr", hadamard=16)]
    out += [Case(made, "even", "bfloat16", axis=0) for made in (*FORMATS, "mxint8")]
    out += [Case("mxfp4", rule, "bfloat16", axis=0) for rule in RULES[:3]]
    out += [Case("mxfp4", "even", "float32", axis=0), Case("mxfp4", "even", "bfloat16", hadamard=16, axis=0)]
    out += [Case(made, "even", "bfloat16", axis=None) for made in FORMATS]
    return [*out, Case("mxfp4", "floor", "bfloat16", rounding="sr", axis=0)]


QUICK = (
    "mxfp4.even.bfloat16", "mxfp4.floor.bfloat16", "mxfp4.rceil.float32", "mxfp6_e2m3.even.bfloat16",
    "mxfp4.floor.bfloat16.rna", "mxfp4.floor.bfloat16.sr", "mxfp8_e4m3.floor.bfloat16.sr",
    "mxint8.floor.bfloat16", "mxfp4.floor.bfloat16.prescale", "mxfp4.floor.bfloat16.sr20",
    "mxfp4.even.bfloat16.columns", "mxfp4.even.float32.columns", "mxfp6_e2m3.even.bfloat16.columns",
    "mxfp4.even.bfloat16.dual", "mxfp4.even.bfloat16.h16", "mxfp4.even.bfloat16.h32", "dequantize.mxfp4.float32",
    "dequantize.mxfp8_e4m3.float32", "dequantize.mxfp6_e3m2.bfloat16", "dequantize.nvfp4.float32",
)  # fmt: skip
"""Cases of `make test`; the rest are of `make test-studies`."""


@dataclass(frozen=True)
class Compiled:
    """What was made of the kernel of a case."""

    case: str
    target: str
    kernel: str
    ttir: str
    faults: list[str]
    """What the code below Triton's IR may do otherwise than its operations say; empty if nothing was found."""


def compile_cases(target: str, names: Sequence[str]) -> Iterator[Compiled]:
    """Yield the kernels of cases for a target, compiled in another process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", "-m", "prove.kernels", target, *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):  # compilers print too
                yield Compiled(**json.loads(line))
    if worker.returncode:
        raise RuntimeError(f"compiling for {target} ended with code {worker.returncode}")


_FLAGS = "fast|nnan|ninf|nsz|arcp|contract|afn|reassoc"
FLOAT_FLAGS = re.compile(rf"\b(?:{_FLAGS})\b(?= (?:float|<|half|bfloat|double|{_FLAGS}))")


def faults_below(llvm: str, machine: str, target: str, products: int) -> list[str]:
    """Return what the compiler was allowed to change of the float operations, or changed.

    Args:
        llvm: the optimized LLVM IR.
        machine: assembly of gfx950, or PTX.
        target: name of the target.
        products: fused operations that a thread does by Triton's IR.
    """
    out = [f"LLVM IR has the flag {flag}" for flag in sorted(set(FLOAT_FLAGS.findall(llvm)))]
    out += [
        f"LLVM IR has {name}"
        for name in sorted(set(re.findall(r"unsafe-fp-math\"=\"true|llvm\.fmuladd", llvm)))
    ]
    if target == "gfx950":
        if '"denormal-fp-math-f32"="ieee"' not in llvm:
            out.append("LLVM IR does not ask for subnormals")
        for name, mode in (("round_mode_32", 0), ("denorm_mode_32", 3)):
            if re.findall(rf"\.amdhsa_float_{name} (\d)", machine) != [str(mode)]:
                out.append(f"the kernel's mode {name} is not {mode}")
        fused = re.findall(
            r"\b(v_(?:pk_)?(?:fma|mad|fmac|mac|fmaak|fmamk)(?:_mix|_mixlo|_mixhi)?_f\d+)", machine
        )
        found = sum(2 if name.startswith("v_pk") else 1 for name in fused)
    else:
        out += [f"PTX has {name}" for name in sorted(set(re.findall(r"\S+\.(?:ftz|approx|sat)\S*", machine)))]
        plain = re.findall(r"\b(?:add|sub|mul|fma)\.(?:f32|f16|bf16)\S*", machine)
        out += [f"PTX may be contracted: {name}" for name in sorted(set(plain))]
        found = len(re.findall(r"\bfma\.rn\.f32", machine))
    if found != products:
        out.append(f"{found} fused operations, Triton's IR has {products}")
    return out


def fused_operations(ttir: str) -> int:
    """Return how many numbers the fused operations of Triton's IR give."""
    shapes = re.findall(r"= math\.fma .* : tensor<([\dx]+)xf32>", ttir)
    return sum(prod(map(int, shape.split("x"))) for shape in shapes)


def _main(target: str, names: Sequence[str]) -> None:
    import torch

    torch.version.hip = TARGETS[target] or None
    from aot import absent

    machine = absent.MACHINES[target]
    absent.become(machine)
    from aot.table import CompiledCase, operand
    from mxref.placement import Placement
    from mxref.steps.random import Stream
    from mxref_triton.backend import TritonBackend

    for name in names:
        case = cases()[name]

        def run(backend: TritonBackend, case: Case | Decoding = case) -> object:
            if isinstance(case, Decoding):
                return backend.dequantize(operand(SIDE, SIDE, made=case.block), case.dtype)
            side = SIDE + 32 * case.masked
            x = torch.empty((side + case.masked, side), dtype=getattr(torch, case.dtype), device="cuda")
            if case.axis is None:
                return backend.quantize_dual(
                    x, (case.spec, case.spec), placements=(Placement(Stream(1)),) * 2
                )
            return backend.quantize(x, case.spec, axis=case.axis, placement=Placement(Stream(1)))

        with absent.launches() as seen:
            CompiledCase(name, run, SIDE * SIDE).launch()
        (launch,) = seen
        asm, metadata = launch.compiled.asm, launch.compiled.metadata
        products = fused_operations(asm["ttir"]) // (metadata.num_warps * machine.warp)
        text = asm["amdgcn" if target == "gfx950" else "ptx"]
        faults = faults_below(asm["llir"], text, target, products)
        print(json.dumps(asdict(Compiled(name, target, launch.kernel, asm["ttir"], faults))), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
