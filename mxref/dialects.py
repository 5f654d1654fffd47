"""Dialects: named policies of production stacks, as starting points for the keys of a block format's operand.

Implements: dialect.ocp, dialect.amd, dialect.nvidia, dialect.tseng
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mxref.errors import RecipeError
from mxref.recipe import OperandSpec
from mxref.roles import GemmRole
from mxref.steps.hadamard import SignPolicy
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
}
"""The named policies; `ocp` is the default everywhere."""


def dialect(name: str) -> Dialect:
    """Return a dialect by name; RecipeError names the nearest known one."""
    if not isinstance(name, str) or name not in DIALECTS:
        raise RecipeError(f"unknown dialect {shown(name)}{nearest(name, DIALECTS)}")
    return DIALECTS[name]
