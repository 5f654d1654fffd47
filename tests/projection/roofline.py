"""The time of a counted kernel, and its limit: memory, vector ALU or matrix cores."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mxref.errors import FileFormatError
from projection.assumptions import Assumptions, Machine
from projection.counted import MX64, TENSORS, KernelCounts

CODES = 17 / 32
"""Bytes of an element in MXFP4: half a byte and a thirty-second of its scale."""
CODES6 = 25 / 32
"""Bytes of an element in MXFP6, likewise."""
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
FOLD = "_fold"
"""The kernel of `ordered` GEMMs that writes an operand in E4M3."""

_MULTIPLY_SLOTS = 4
"""Issue slots of a 32-bit integer multiplication: a quarter of the rate, by the ISA's cycle counts."""
_WAVE = 64
_MATRIX = re.compile(r"v_mfma_(?:scale_)?f32_(\d+)x(\d+)x(\d+)_\w+")
_CYCLES = {
    "v_mfma_scale_f32_16x16x128_f8f6f4": 16,
    "v_mfma_f32_16x16x32_fp8_fp8": 16,
    "v_mfma_f32_16x16x16_f16": 16,
    "v_mfma_f32_32x32x16_f16": 32,
}
"""Cycles of a SIMD that a matrix instruction takes, by the ISA's passes of four; this backend gives f8f6f4 nothing but
FP4. FP8 reaches its peak with 128 elements along K only: one block at a time goes at BF16's."""


@dataclass(frozen=True)
class Time:
    """Seconds that each limit alone would take; the larger binds."""

    memory: float
    vector: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return max(self.memory, self.vector)

    @property
    def bound(self) -> str:
        """Which of the two binds."""
        return "memory" if self.memory >= self.vector else "vector"


@dataclass(frozen=True)
class Multiplication:
    """Seconds for 2^40 multiply-adds of a GEMM's inner loop; operands are taken to come from caches in time."""

    matrix: float
    vector: float

    @property
    def bound(self) -> str:
        """Which of the two binds."""
        return "matrix" if self.matrix >= self.vector else "vector"


def bytes_per_element(case: str, kernel: str = "") -> float:
    """Return the bytes that a case moves for each element of its input, read once and written once.

    Args:
        case: its name.
        kernel: which of its kernels, where it has several.

    Raises:
        FileFormatError: a case that is none of a quantizer, dequantizer or transform.
    """
    words = case.removeprefix("native.").split(".")
    kind = words[0]
    if kernel == FOLD:
        return CODES + 1
    default = "float32" if kind == "check" else "bfloat16"
    source = WIDTH[next((w for w in words if w in WIDTH), default)]
    if kind in ("row", "column"):
        written = source + 1 / 32 if "values" in words else CODES
        return source + written
    if kind == "dual":
        return source + 2 * CODES
    if kind == "train":
        return WIDTH[TENSORS[words[1]][0]] + CODES + (CODES6 if words[2] == MX64 else CODES)
    if kind == "hadamard":
        return source + WIDTH["float32"]
    if kind == "dequantize":
        return CODES + source
    if kind == "check":  # a float32, its shares of a factor and of a word of codes, and SR's random words
        return source + 1 / 2 + 1 / 2 + 2 * ("sr" in words)
    raise FileFormatError(f"case {case!r}: what it moves is not known; add it to projection.roofline")


def slots(record: KernelCounts, assumed: Assumptions) -> float:
    """Return issue slots of the vector ALU per element; a slower instruction takes several."""
    per_element: float = record["alu"] / record["elements_per_thread"]
    per_element += (_MULTIPLY_SLOTS - 1) * record["multiply32"] / record["elements_per_thread"]
    if any(m.startswith("v_cvt_scalef32") for m in record["notable"]):
        two = record["kernel"] == "quantize_both" and f".{MX64}" not in record["case"]
        orientations = 2 if two else 1
        per_element += (assumed.convert_slots.value - 1) * orientations / 2  # one converts two elements
    return per_element


def streaming(moved: float, operations: float, machine: Machine, assumed: Assumptions) -> Time:
    """Return the time to move bytes and to do vector operations, each of one lane, at once."""
    return Time(
        moved / (machine.memory.value * assumed.memory_share.value),
        operations / (machine.lane_operations * assumed.vector_share.value),
    )


def kernel_time(record: KernelCounts, elements: float, machine: Machine, assumed: Assumptions) -> Time:
    """Return the time of a counted kernel without a loop on a number of elements."""
    moved = elements * bytes_per_element(record["case"], record["kernel"])
    return streaming(moved, elements * slots(record, assumed), machine, assumed)


def multiplication(record: KernelCounts, machine: Machine) -> Multiplication:
    """Return what a GEMM's loop takes at the peaks; FileFormatError where it has no known matrix instruction."""
    shapes = [found for m in record["notable"] if (found := _MATRIX.fullmatch(m))]
    if len(shapes) != 1 or shapes[0][0] not in _CYCLES or not record["loop_matrix"]:
        raise FileFormatError(
            f"case {record['case']!r} has no matrix instruction whose rate is known: {record['notable']}"
        )
    instructions = (1 << 40) / (int(shapes[0][1]) * int(shapes[0][2]) * int(shapes[0][3]))
    others = instructions / record["loop_matrix"] * record["loop_alu"]
    return Multiplication(
        instructions * _CYCLES[shapes[0][0]] / machine.simd_cycles,
        others * _WAVE / machine.lane_operations,
    )
