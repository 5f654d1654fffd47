"""The clauses that a backend can break, in the order in which a report names them.

A new clause gets its place here: causes stand before effects, so that the first clause that fails is most likely to be
at fault. The order of the others stays.
"""

from __future__ import annotations

from collections.abc import Iterable

from mxref.formats import ElementFormat
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

CLAUSES = (
    "packing.nibbles", "packing.sixes", "packing.bytes", "packing.scales",
    "formats.element", "formats.e2m1", "formats.fp6", "formats.fp8", "formats.int8", "formats.e8m0", "formats.scale",
    "conformance.capabilities", "conformance.arrays", "conventions.inputs", "conformance.protocol",
    "scale.tensor", "scale.tensor.amax", "scale.amax", "scale.block.row", "scale.nonfinite", "scale.zero",
    "scale.clamp", "scale.underflow",
    *(f"scale.rule.{rule.value}" for rule in ScaleRule), "scale.rule.threshold", "scale.arithmetic",
    "scale.four_over_six", "scale.block.tile",
    "random.philox", "random.elements", "random.counter", "random.stream", "random.index",
    "rounding.sign", "rounding.scaled", "rounding.saturate", "rounding.quotient",
    *(f"rounding.{rounding.value}" for rounding in Rounding), "rounding.prescale", "rounding.native_sr",
    "hadamard.size", "hadamard.factor", "hadamard.signs", "hadamard.order", "hadamard.float32",
    "hadamard.nonfinite", "hadamard.policy", "linear.rotation",
    "quantize.strides", "quantize.axis", "quantize.length", "quantize.padding",
    "dequantize.value", "dequantize.overflow", "dequantize.nan",
    "gemm.output", "gemm.operands", "gemm.block_dot", "gemm.nan", "gemm.special", "gemm.prescale", "gemm.tensor_scale",
    "gemm.exact", "gemm.ordered", "gemm.bounded",
    "conformance.unsupported", "conformance.dual",
    "dialect.ocp", "dialect.amd", "dialect.nvidia", "dialect.tseng", "dialect.te_mxfp8",
    "dialect.te_nvfp4", "dialect.torchao_nvfp4", "dialect.modelopt_nvfp4", "dialect.compressed_tensors_nvfp4",
    "dialect.ggml_nvfp4", "quantize.order",
)  # fmt: skip
"""The clauses that a backend can break, causes first: the first one that fails is most likely to be at fault."""


def by_rank(clauses: Iterable[str]) -> list[str]:
    """Return clauses in the order of `CLAUSES`; those not in it come last, by name."""
    rank = {clause: i for i, clause in enumerate(CLAUSES)}
    return sorted(clauses, key=lambda c: (rank.get(c, len(rank)), c))


def element_clause(element: ElementFormat) -> str:
    """Return the clause of an element's codes: its own, if there is one."""
    own = f"formats.{element.name.lower()}"
    if own in CLAUSES:
        return own
    return {6: "formats.fp6", 8: "formats.fp8"}.get(element.bits, "formats.element")


def storage_clause(element: ElementFormat) -> str:
    """Return the clause of the order of an element's codes in bytes."""
    return {4: "packing.nibbles", 6: "packing.sixes", 8: "packing.bytes"}[element.bits]
