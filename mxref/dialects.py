"""Dialects: named policies of production stacks, as starting points for the keys of a block format's operand.

Implements: dialect.ocp, dialect.amd, dialect.nvidia, dialect.tseng, dialect.te_mxfp8, dialect.te_nvfp4,
    dialect.torchao_nvfp4, dialect.modelopt_nvfp4, dialect.compressed_tensors_nvfp4, dialect.ggml_nvfp4
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mxref.errors import RecipeError
from mxref.formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from mxref.recipe import OperandSpec
from mxref.roles import GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from mxref.tomlio import nearest, shown


@dataclass(frozen=True)
class Dialect:
    """A named policy of some production stack: where bit equality with it is claimed, and on what evidence."""

    spec: OperandSpec
    domain: str
    evidence: str
    roles: tuple[GemmRole, ...] = field(default=tuple(GemmRole))
    """GEMMs in which the stack uses it."""


DIALECTS = {
    "ocp": Dialect(
        OperandSpec(),
        domain="all inputs; the cases that OCP MX v1.0 leaves open are decided by this specification",
        evidence="OCP Microscaling Formats v1.0, section 6.3",
    ),
    "amd": Dialect(
        OperandSpec(scale_rule=ScaleRule.EVEN, zero_scale=127),
        domain="finite blocks",
        evidence="kernel source of the ROCm Transformer Engine, read and not run; it leaves NaN and Inf unhandled",
    ),
    "nvidia": Dialect(
        OperandSpec(scale_rule=ScaleRule.RCEIL),
        domain="finite blocks with scale code 1 or more, amax not within 34 ulps above 6 * 2^e",
        evidence="torchao 0.18's RCEIL, by running it (it takes a float32 log2); NVIDIA's own kernels were not run",
    ),
    "tseng": Dialect(
        OperandSpec(rounding=Rounding.SR, prescale=True, hadamard=64, signs=SignPolicy.PER_STEP_LAYER),
        domain="statistics only: the random bits differ",
        evidence="arXiv 2502.20586",
        roles=(GemmRole.DGRAD, GemmRole.WGRAD),
    ),
    "te_mxfp8": Dialect(
        OperandSpec(MXFP8_E4M3, scale_rule=ScaleRule.RCEIL),
        domain="finite blocks, but for an amax one float32 above 448 * 2^-127",
        evidence="source of Transformer Engine 2.20, read; its product with 1/448, by computing it for every mantissa",
    ),
    "te_nvfp4": Dialect(
        OperandSpec(NVFP4, arithmetic=Arithmetic.TE),
        domain="finite tensors",
        evidence="source of Transformer Engine 2.14 to 2.20, read, and its Python reference at d0067d0d, by running it",
    ),
    "torchao_nvfp4": Dialect(
        OperandSpec(NVFP4, arithmetic=Arithmetic.TORCHAO),
        domain="finite tensors that are not all zero",
        evidence="torchao 0.18, by running it",
    ),
    "modelopt_nvfp4": Dialect(
        OperandSpec(NVFP4, arithmetic=Arithmetic.MODELOPT),
        domain="finite tensors that are not all zero, but for the signs of zeros",
        evidence="nvidia-modelopt 0.47, by running it",
    ),
    "compressed_tensors_nvfp4": Dialect(
        OperandSpec(NVFP4, arithmetic=Arithmetic.COMPRESSED_TENSORS),
        domain="finite float32 tensors, but for the signs of zeros",
        evidence="compressed-tensors 0.20, by running it",
    ),
    "ggml_nvfp4": Dialect(
        OperandSpec(NVFP4, arithmetic=Arithmetic.GGML),
        domain="finite blocks with an amax below 2^30, but for the signs of zeros",
        evidence="ggml at commit d99724f2, by compiling and running its function",
    ),
}
"""The named policies; `ocp` is the default everywhere."""


def dialect(name: str) -> Dialect:
    """Return a dialect by name; RecipeError names the nearest known one."""
    if not isinstance(name, str) or name not in DIALECTS:
        raise RecipeError(f"unknown dialect {shown(name)}{nearest(name, DIALECTS)}")
    return DIALECTS[name]


def dialects_of(made: BlockFormat) -> dict[str, OperandSpec]:
    """Return the dialects of a format by name, in that format: those of MXFP4 are for all scales of powers of two."""
    return {
        name: replace(each.spec, format=made, block=made.row) if each.spec.format is MXFP4 else each.spec
        for name, each in DIALECTS.items()
        if each.spec.format in (made, MXFP4 if made.scale.powers else made)
    }
