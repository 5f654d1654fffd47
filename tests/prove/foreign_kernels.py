"""Kernels of other projects: where they are found, how they are called, and what Triton makes of them without a GPU.

torchao is an installed package. Of other projects a folder with their sources is given; nothing of them is kept here.
`python -m prove.foreign_kernels FOLDER SUBJECT...` is the process that compiles: torch has to describe the machine
before torchao is imported. It writes a line of JSON for each subject.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from places import TESTS
from prove.foreign import Domain, Layout, Place, TileProof
from prove.kernels import FLOAT_FLAGS
from prove.terms import Term, concat, const, extract, var, widen
from prove.tiles import read_tile
from prove.ttir import LANE

_FLOAT8 = {"mxfp8_e4m3": "*fp8e4nv", "mxfp8_e5m2": "*fp8e5", "mxfp4": "*u8"}
_DTYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


class NotFound(Exception):
    """The package is not installed, or the folder lacks the file."""


@dataclass(frozen=True)
class Project:
    """Whose kernels they are."""

    name: str
    package: str | None = None
    """The distribution that has them."""
    path: str = ""
    """The module, or how the path of its file ends."""


PROJECTS = {
    "torchao": Project("torchao", "torchao", "torchao.prototype.mx_formats.kernels"),
    "triton_kernels": Project("triton_kernels", path="mxfp_details/_downcast_to_mxfp.py"),
    "aiter": Project("aiter", path="_triton_kernels/quant/quant.py"),
}


@dataclass(frozen=True)
class Subject:
    """One kernel, as its host code calls it, and the treatment that it is compared with."""

    name: str
    project: str
    kernel: str
    target: str
    format: str
    rule: str
    dtype: str
    constants: dict[str, object]
    tile: tuple[int, int]
    """Units of a program, and elements of a unit in it."""
    kind: str
    """Key of `_LAYOUTS`."""
    warps: int = 4
    among: tuple[int, ...] = ()


def _bits(count: int) -> int:
    return count.bit_length() - 1


def _number(name: str, multiple: int = 1) -> Term:
    """Return an int32 argument that is not negative, and a multiple of a power of two."""
    return concat(const(0, 1), var(name, 31 - _bits(multiple)), const(0, _bits(multiple)))


def _wide(term: Term) -> Term:
    return widen(term, 64)


_ONE = const(1, 64)


def _torchao_rows(subject: Subject) -> tuple[dict[str, Term], Layout]:
    units, length = subject.tile
    columns, rows = _number("n_cols", 32), _number("n_rows")
    # A program is one of those that the host starts: its first row and column have 31 bits.
    programs = {"program_x": _program("program_x", units), "program_y": _program("program_y", length)}
    unit = _wide(programs["program_x"]) * units + _wide(var(LANE, _bits(units)))
    layout = Layout(
        unit,
        _wide(programs["program_y"]) * length,
        _wide(rows),
        _wide(columns),
        length,
        Place("x_ptr", _wide(columns), _ONE),
        Place("output_ptr", _wide(columns), _ONE),
        Place("scale_ptr", _wide(extract(columns, 31, 5)), _ONE),
    )
    return {"n_cols": columns, "n_rows": rows, **programs}, layout


def _torchao_columns(subject: Subject) -> tuple[dict[str, Term], Layout]:
    units, length = subject.tile
    columns, rows = _number("n_cols", units), _number("n_rows", length)
    programs = {"program_x": _program("program_x", length), "program_y": _program("program_y", units)}
    unit = _wide(programs["program_y"]) * units + _wide(var(LANE, _bits(units)))
    first = _wide(programs["program_x"]) * length
    layout = Layout(
        unit,
        first,
        _wide(columns),
        _wide(rows),
        length,
        Place("x_ptr", _ONE, _wide(columns)),
        Place("output_col_major_ptr", _wide(rows), _ONE),
        Place("col_scale_ptr", _wide(extract(rows, 31, 5)), _ONE),
        (unit.below(_wide(columns)), first.below(_wide(rows))),
    )
    return {"n_cols": columns, "n_rows": rows, **programs}, layout


def _triton_kernels(subject: Subject) -> tuple[dict[str, Term], Layout]:
    units, length = subject.tile
    given = {"outer_dim": _number("outer_dim"), "quant_dim": _number("quant_dim", 32)}
    strides = [f"stride_{name}_outer" for name in ("src", "mxt", "mx_scale")]
    given |= {name: _number(name) for name in strides}
    given |= {name: _number(name) for name in ("program_x", "program_y")}
    unit = _wide(given["program_x"]) * units + _wide(var(LANE, _bits(units)))
    pointers = ("src_ptr", "mx_tensor_ptr", "mx_scale_ptr")
    places = [Place(pointer, _wide(given[s]), _ONE) for pointer, s in zip(pointers, strides, strict=True)]
    first = _wide(given["program_y"]) * length
    return given, Layout(unit, first, _wide(given["outer_dim"]), _wide(given["quant_dim"]), length, *places)


def _aiter(subject: Subject) -> tuple[dict[str, Term], Layout]:
    units, length = subject.tile
    rows, columns = _number("M", units), _number("N", 4 * length)
    strides = {name: _number(name) for name in ("stride_x_m_in", "stride_x_fp4_m_in", "stride_bs_n_in")}
    given = {"M": rows, "N": columns, **strides, "program_x": _program("program_x", units)}
    given |= {"program_y": _program("program_y", 4 * length), "turn": _program("turn", length)}
    unit = _wide(given["program_x"]) * units + _wide(var(LANE, _bits(units)))
    first = _wide(given["turn"]) * length
    turns = _wide(given["program_y"]) * 4
    layout = Layout(
        unit, first, _wide(rows), _wide(columns), length,
        Place("x_ptr", _wide(strides["stride_x_m_in"]), _ONE),
        Place("x_fp4_ptr", _wide(strides["stride_x_fp4_m_in"]), _ONE),
        Place("bs_ptr", _ONE, _wide(strides["stride_bs_n_in"])),
        (unit.below(_wide(rows)), first.below(_wide(columns))),
        (turns, turns + 4),
    )  # fmt: skip
    return given, layout


def _program(name: str, multiple: int) -> Term:
    return concat(const(0, 1 + _bits(multiple)), var(name, 31 - _bits(multiple)))


_LAYOUTS = {
    "torchao rows": _torchao_rows,
    "torchao columns": _torchao_columns,
    "triton_kernels": _triton_kernels,
    "aiter": _aiter,
}


def proof_of(subject: Subject, ttir: str, domain: Domain) -> TileProof:
    """Return the proof of a compiled kernel."""
    given, layout = _LAYOUTS[subject.kind](subject)
    kernel = read_tile(ttir, subject.tile[0], subject.among, given, wraps=subject.target.startswith("gfx"))
    return TileProof(kernel, layout, subject.format, subject.rule, subject.dtype, domain)


def subjects() -> dict[str, Subject]:
    """Return every subject by name."""
    out = []
    for rule in ("floor", "rceil"):
        # Two of the six tiles from which the host takes the fastest. In square ones rows look like columns.
        for rows, columns in ((128, 256), (256, 128)):
            sides = {"ROW_TILE_SIZE": rows, "COL_TILE_SIZE": columns, "SCALING_MODE": rule}
            name = f"torchao.{{}}.{rule}.{rows}x{columns}"
            out.append(
                Subject(
                    name.format("rows"), "torchao", "to_mxfp8_dim0_kernel", "sm_100", "mxfp8_e4m3", rule, "bfloat16",
                    {**sides, "SCALE_BLOCK_SIZE": 32}, (rows, columns), "torchao rows",
                )
            )  # fmt: skip
            out.append(
                Subject(
                    name.format("columns"), "torchao", "to_mxfp8_dim1_kernel", "sm_100", "mxfp8_e4m3", rule, "bfloat16",
                    {**sides, "INNER_BLOCK_SIZE": 32}, (columns, rows), "torchao columns",
                    among=(rows * columns // 32,),
                )
            )  # fmt: skip
    pairs = [("mxfp4", dtype) for dtype in _DTYPES] + [(f"mxfp8_{e}", "bfloat16") for e in ("e4m3", "e5m2")]
    for target in ("sm_90", "gfx950"):
        for made, dtype in pairs:
            constants: dict[str, object] = {
                "stride_mxt_quant": 1, "stride_mx_scale_quant": 1, "stride_src_quant": 1,
                "BLOCK_SIZE_OUT_DIM": 32, "BLOCK_SIZE_QUANT_DIM": 128, "DEQUANT_SCALE_ROUNDING_MODE": 0,
            }  # fmt: skip
            out.append(
                Subject(
                    f"triton_kernels.{made}.{dtype}.{target}", "triton_kernels", "_downcast_to_mxfp", target, made,
                    "rceil", dtype, constants, (32, 128), "triton_kernels", warps=4 if dtype == "float32" else 8,
                )
            )  # fmt: skip
    for dtype in _DTYPES:
        constants = {
            "stride_x_n_in": 1, "stride_x_fp4_n_in": 1, "stride_bs_m_in": 1, "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128,
            "NUM_ITER": 4, "NUM_STAGES": 2, "MXFP4_QUANT_BLOCK_SIZE": 32, "EVEN_M_N": True, "SCALING_MODE": 0,
        }  # fmt: skip
        out.append(
            Subject(
                f"aiter.mxfp4.{dtype}", "aiter", "_dynamic_mxfp4_quant_kernel", "gfx950", "mxfp4", "even", dtype,
                constants, (32, 128), "aiter",
            )
        )  # fmt: skip
    return {subject.name: subject for subject in out}


# Compiling


@dataclass(frozen=True)
class Compiled:
    """What was made of a subject's kernel."""

    name: str
    version: str
    source: str
    """SHA-256 of the file in which the kernel is."""
    ttir: str = ""
    faults: list[str] = field(default_factory=list)
    """What the code below Triton's IR may do otherwise than its operations say."""
    division: bool = False
    """Whether quotients are those of div.full.f32."""
    whole: bool = False
    """Whether AMD's machine code converts floats to whole numbers, all by v_cvt_i32_f32."""


def compile_subjects(names: Sequence[str], folder: Path | None = None) -> Iterator[Compiled]:
    """Yield the kernels of subjects, compiled in another process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", "-m", "prove.foreign_kernels", str(folder or ""), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith('{"name"'):  # compilers and packages print too
                yield Compiled(**json.loads(line))
    if worker.returncode:
        raise RuntimeError(f"compiling kernels of others ended with code {worker.returncode}")


def where(project: Project, folder: Path | None) -> tuple[str, Path | None]:
    """Return the version of a project's kernels, and their file if they are in a folder."""
    if project.package is not None:
        try:
            return version(project.package), None
        except PackageNotFoundError as err:
            raise NotFound(f"{project.package} is not installed") from err
    name = project.path.rsplit("/", 1)[-1]
    found = [p for p in sorted(folder.rglob(name)) if p.as_posix().endswith(project.path)] if folder else []
    if len(found) != 1:
        given = f"{folder} has {len(found)} files" if folder else "give the folder of a checkout: FOREIGN=..."
        raise NotFound(f"{project.name}: .../{project.path} is not found; {given}")
    return "", found[0]


def faults_below(llvm: str, machine: str, target: str) -> list[str]:
    """Return what the compiler was allowed to change of the float operations, or changed; the kernels fuse none."""
    out = [f"LLVM IR has the flag {flag}" for flag in sorted(set(FLOAT_FLAGS.findall(llvm)))]
    if target.startswith("gfx"):
        if '"denormal-fp-math-f32"="ieee"' not in llvm:
            out.append("LLVM IR does not ask for subnormals")
        fused = re.findall(
            r"\bv_(?:pk_)?(?:fma|mad|fmac|mac|fmaak|fmamk)(?:_mix|_mixlo|_mixhi)?_f\d+", machine
        )
        # A quotient is made with five fused operations.
        if len(fused) != 5 * machine.count("v_div_fixup_f32"):
            out.append(f"{len(fused)} fused operations, not those of quotients")
        return out
    out += [
        f"PTX has {name}" for name in sorted(set(re.findall(r"\S+\.(?:ftz|approx)\S*|\bfma\.\S+", machine)))
    ]
    # A sum of a product may become one operation, where both are written without a rounding.
    products = set(re.findall(r"\bmul\.f32(?:x2)?\s+(%\w+),", machine))
    sums = re.findall(r"\b(?:add|sub)\.f32(?:x2)?\s+%\w+, (%\w+), ([%\w]+);", machine)
    if any(set(pair) & products for pair in sums):
        out.append("PTX may be contracted")
    return out


def loaded(project: Project, file: Path | None) -> Any:
    """Return the module that has a project's kernels."""
    if file is None:
        return importlib.import_module(project.path)
    spec = importlib.util.spec_from_file_location(f"foreign_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def describe(target: Any) -> None:
    """Make torch and Triton describe a machine of NVIDIA with a GPU."""
    import torch
    import torch.utils._triton
    import triton

    from aot.absent import Machine, become

    machine = Machine("sm_100", target, (10, 0), None, "", 32, 148)
    become(machine)
    torch.version.cuda = "12.9"
    torch.cuda.is_available = lambda: True
    torch.utils._triton.has_triton = lambda: True
    assert triton.runtime.driver.active is not None


def _main(folder: str, names: Sequence[str]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    targets = {
        "sm_90": GPUTarget("cuda", 90, 32),
        "sm_100": GPUTarget("cuda", 100, 32),
        "gfx950": GPUTarget("hip", "gfx950", 64),
    }
    describe(targets["sm_100"])
    for name in names:
        subject = subjects()[name]
        project = PROJECTS[subject.project]
        found, file = where(project, Path(folder) if folder else None)
        module = loaded(project, file)
        digest = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        function = getattr(module, subject.kernel)
        while not isinstance(function, JITFunction):
            function = function.fn
        arguments = function.arg_names
        signature = dict.fromkeys(arguments, "i32") | dict.fromkeys(subject.constants, "constexpr")
        pointers = [a for a in arguments if a.endswith("_ptr")]
        for pointer in pointers:
            if "scale" in pointer or pointer == "bs_ptr":
                signature[pointer] = "*u8"
            elif pointer in ("x_ptr", "src_ptr"):
                signature[pointer] = _DTYPES[subject.dtype]
            else:
                signature[pointer] = _FLOAT8[subject.format]
        aligned = {(arguments.index(pointer),): [["tt.divisibility", 16]] for pointer in pointers}
        made = compile(
            ASTSource(function, signature, subject.constants, aligned),
            target=targets[subject.target],
            options={"num_warps": subject.warps},
        )
        machine = made.asm["amdgcn" if subject.target.startswith("gfx") else "ptx"]
        compiled = Compiled(
            name, found, digest, made.asm["ttir"], faults_below(made.asm["llir"], machine, subject.target),
            "div.full.f32" in machine, set(re.findall(r"v_cvt_[iu]\d+_f32", machine)) == {"v_cvt_i32_f32"},
        )  # fmt: skip
        print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
