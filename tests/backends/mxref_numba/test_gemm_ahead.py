"""The GEMM's vector code, compiled ahead of time for CPUs that this machine need not be.

Instructions are counted for x86 and for Arm. With qemu-aarch64 and the binutils for Arm the code for Arm runs too:
Debian has them in qemu-user-static and binutils-aarch64-linux-gnu.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from ahead import PROCESSORS, Program, loops
from llvmlite import ir
from numba_checks import REFERENCE, bits, operand

from mxref_numba.gemm.packing import Tiling
from mxref_numba.vector.lanes import F32, I64

EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
BINUTILS = [shutil.which(f"aarch64-linux-gnu-{tool}") for tool in ("as", "ld")]
COUNTS = {
    "avx512": {"vpdpbusd": 96, "vfmadd231ps": 12, "vcvtdq2ps": 12, "vpbroadcastd": 54},
    "avx2": {"vpmaddubsw": 64, "vpmaddwd": 8, "vpaddw": 56, "vfmadd231ps": 8, "vcvtdq2ps": 8, "vpbroadcastd": 36},
    "avx2-vnni": {"vpdpbusd": 96, "vfmadd231ps": 12, "vcvtdq2ps": 12, "vpbroadcastd": 54},
    "neon": {"smull": 16, "smlal": 112, "saddlp": 16, "addp": 8, "fmla": 8, "scvtf": 8, "ld1r": 36},
    "neon-sdot": {"sdot": 96, "fmla": 12, "scvtf": 12, "ld1r": 36},
}  # fmt: skip
"""What a block of a tile takes in the loop for scales that float32 holds."""
MOST = {"avx512": 225, "avx2": 245, "avx2-vnni": 255, "neon": 290, "neon-sdot": 250}
"""Instructions of that loop in all; more would be vectors that go to the stack and back."""
WIDE_REGISTERS = re.compile(r"zmm|[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b")


@pytest.mark.parametrize("name", PROCESSORS)
def test_instructions_of_a_block(name: str) -> None:
    tiling, assembly = PROCESSORS[name].tiling, Program(PROCESSORS[name]).assembly()
    found = loops(assembly, "multiply")[0]
    assert {one: found[one] for one in COUNTS[name]} == COUNTS[name]
    assert found.total() <= MOST[name]
    products = tiling.rows * tiling.columns * 32
    per_instruction = {"smlal": 8, "sdot": 16, "vpmaddubsw": 32, "vpdpbusd": 4 * tiling.lanes}
    made = sum(found[one] * count for one, count in (per_instruction | {"smull": 8}).items())
    assert made == products
    assert bool(WIDE_REGISTERS.search(assembly)) == (name == "avx512")


class Arena:
    """The memory of a program: named pieces, one after the other, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self.size = 0

    def add(self, name: str, size: int) -> int:
        self.places[name] = self.size, size
        self.size += -(-size // 64) * 64
        return self.places[name][0]


START = """
        .text
        .macro  system number, first
        mov     x0, \\first
        adrp    x1, arena
        add     x1, x1, :lo12:arena
        ldr     x2, ={size}
        mov     x8, \\number
        svc     0
        .endm
        .globl  _start
_start: system  63, 0                   // read
        bl      body
        system  64, 1                   // write
        system  94, 0                   // exit
"""


def _program(name: str, m: int, n: int, blocks: int, folder: Path) -> tuple[Path, Arena]:
    """Link a program that reads its arena, packs both operands, multiplies them and writes the arena."""
    processor = PROCESSORS[name]
    t, program, arena = processor.tiling, Program(processor), Arena()
    down, across = -(-m // t.rows), -(-n // t.columns)
    for operand_name, rows, panels, record, height in (
        ("a", m, down, t.left_record, t.rows),
        ("b", n, across, t.right_record, t.columns),
    ):
        arena.add(f"{operand_name} codes", rows * blocks * 16)
        arena.add(f"{operand_name} scales", rows * blocks)
        arena.add(f"{operand_name} records", panels * blocks * record)
        arena.add(f"{operand_name} found", 3 * panels * height)
    outs = {"exact": (1, 0, 4), "any": (0, 0, 4), "narrow": (0, 1, 2)}
    for out, (_, _, item) in outs.items():
        arena.add(out, down * t.rows * across * t.columns * item)
    memory = ir.GlobalVariable(program.module, ir.ArrayType(ir.IntType(8), arena.size), "arena")
    memory.initializer = ir.Constant(memory.value_type, None)
    memory.align = 64

    def body(builder: ir.IRBuilder, _: Any) -> None:
        base = builder.ptrtoint(memory, I64)

        def at(piece: str, offset: int = 0) -> Any:
            return builder.add(base, I64(arena.places[piece][0] + offset))

        def call(function: str, *arguments: Any) -> None:
            builder.call(
                program.functions[function], [I64(a) if isinstance(a, int) else a for a in arguments]
            )

        for r in range(down * t.rows):
            row = min(r, m - 1)
            call(
                "pack_left", at("a codes", row * blocks * 16), at("a scales", row * blocks), blocks,
                at("a records", r // t.rows * blocks * t.left_record), r % t.rows, at("a found", r), down * t.rows,
            )  # fmt: skip
        for r in range(0, across * t.columns, t.lanes):
            row = min(r, n - 1)
            call(
                "pack_right", at("b codes", row * blocks * 16), blocks * 16, at("b scales", row * blocks), blocks,
                n - 1 - row, blocks,
                at("b records", r // t.columns * blocks * t.right_record + r % t.columns * 4),
                at("b found", r), across * t.columns,
            )  # fmt: skip
        for out, (fits, narrow, item) in outs.items():
            pitch = across * t.columns * item
            for i, j in np.ndindex(down, across):
                call(
                    "multiply", at("a records", i * blocks * t.left_record),
                    at("b records", j * blocks * t.right_record), blocks, ir.IntType(1)(fits), F32(1.0),
                    at(out, i * t.rows * pitch + j * t.columns * item), pitch, t.rows, t.columns, ir.IntType(1)(narrow),
                )  # fmt: skip

    program.define("body", [], body)
    (folder / "gemm.s").write_text(program.assembly() + START.format(size=arena.size))
    assembler, linker = map(str, BINUTILS)
    for command in (
        [assembler, "-march=armv8.2-a+dotprod", "-o", "gemm.o", "gemm.s"],
        [linker, "-static", "-o", "gemm", "gemm.o"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "gemm", arena


def _result(image: bytes, arena: Arena, out: str, t: Tiling, m: int, n: int) -> Any:
    place, size = arena.places[out]
    kind, width = ("<u2" if out == "narrow" else "<u4"), -(-n // t.columns) * t.columns
    return np.frombuffer(image[place : place + size], kind).reshape(-1, width)[:m, :n]


@pytest.mark.skipif(
    not (EMULATOR and all(BINUTILS)), reason="needs qemu-aarch64 and aarch64-linux-gnu-as and -ld"
)
@pytest.mark.parametrize("name", ["neon", "neon-sdot"])
def test_arm_gives_the_bits_of_the_reference(name: str, tmp_path: Path) -> None:
    tiling = PROCESSORS[name].tiling
    m, n, blocks = 2 * tiling.rows + 1, tiling.columns + 3, 5
    program, arena = _program(name, m, n, blocks, tmp_path)
    for scales, moderate in (((100, 150), True), ((0, 254), False), ((0, 3), False)):
        a, b = operand(m, 32 * blocks, *scales, seed=1), operand(n, 32 * blocks, *scales, seed=2)
        image = bytearray(arena.size)
        for piece, array in (
            ("a codes", a.codes),
            ("a scales", a.scales),
            ("b codes", b.codes),
            ("b scales", b.scales),
        ):
            place, size = arena.places[piece]
            image[place : place + size] = array.tobytes()
        (tmp_path / "in").write_bytes(image)
        with open(tmp_path / "in", "rb") as given:
            done = subprocess.run([str(EMULATOR), str(program)], stdin=given, capture_output=True, timeout=60)
        assert (done.returncode, len(done.stdout)) == (0, arena.size)
        for out, dtype in (("any", "float32"), ("narrow", "bfloat16"), *([("exact", "float32")] * moderate)):
            want = bits(REFERENCE.scaled_gemm(a, b, out_dtype=dtype))
            np.testing.assert_array_equal(_result(done.stdout, arena, out, tiling, m, n), want)
