"""Which module makes which family of checks, so that a selection of checks does not make all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from mxref.capabilities import Capabilities
from mxref.conformance.checks import (
    added,
    decode,
    fused,
    gemm,
    hadamard,
    inputs,
    layout,
    mixed,
    prepared,
    protocol,
    random,
    repeated,
    sweep,
    vectors,
)
from mxref.conformance.model import Check, CheckResult, Level, Op, Plan, Subject
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.recipe import OperandSpec

_KEPT_PLANS = 8
"""Plans whose checks are cached, with the reference's answers."""


@dataclass(frozen=True)
class _Family:
    """The checks that one function makes."""

    make: Callable[..., Iterable[Check]]
    ops: frozenset[Op]
    clauses: tuple[str, ...]
    """Clauses, or beginnings of clauses."""
    drawn: bool = False
    """Whether they are drawn from what a backend declares; other checks are the same for every backend."""

    def asked(self, ops: Collection[str], clauses: Collection[str]) -> bool:
        """Return whether some of the checks may be of these operations and clauses; no clause stands for all."""
        named = not clauses or any(clause.startswith(self.clauses) for clause in clauses)
        return named and any(op.value in ops for op in self.ops)


_EVERY = frozenset(Op)
_QUANTIZE, _DECODE, _TRANSFORM, _GEMM = (
    frozenset([op]) for op in (Op.QUANTIZE, Op.DEQUANTIZE, Op.HADAMARD, Op.GEMM)
)
_PLACES = ("quantize.axis", "quantize.padding", "quantize.strides")

_FAMILIES = (
    _Family(protocol.checks, _EVERY, ("conformance.", "conventions.inputs")),
    _Family(inputs.checks, _QUANTIZE, ("conformance.protocol", "conventions.inputs", "scale.nonfinite")),
    _Family(decode.checks, _DECODE, ("dequantize.", "formats.", "packing.", *_PLACES)),
    _Family(sweep.checks, _QUANTIZE, ("scale.", "rounding.", "dialect.")),
    _Family(random.checks, _QUANTIZE, ("random.", "rounding.")),
    _Family(hadamard.checks, _QUANTIZE | _TRANSFORM, ("hadamard.", "conventions.inputs", "quantize.strides")),
    _Family(layout.checks, _QUANTIZE, ("packing.", "quantize.length", *_PLACES)),
    _Family(gemm.checks, _GEMM, ("gemm.",)),
    _Family(vectors.checks, _EVERY, ("",)),
    _Family(fused.checks, _QUANTIZE, ("conformance.dual",), drawn=True),
    _Family(prepared.checks, _GEMM, ("conformance.dual",)),
    _Family(added.checks, _GEMM, ("conformance.dual",)),
    _Family(repeated.checks, _EVERY, ("conformance.dual", "conformance.protocol")),
)
_COMBINATIONS = _Family(layout.combinations, _QUANTIZE, ("quantize.order",), drawn=True)
_MIXED = _Family(mixed.checks, _GEMM, ("gemm.",))


def made_for(
    ops: Collection[str],
    clauses: Collection[str],
    level: Level,
    seed: int,
    capabilities: Capabilities,
    specs: tuple[OperandSpec, ...],
    taken: Collection[BlockFormat],
) -> list[Check]:
    """Return the checks of the selected families, for the selected formats. Checks that are the same for all formats
    appear once. A selected family has all of its checks.
    """
    declared = [made for made in BLOCK_FORMATS.values() if made in capabilities.formats]
    first = declared[0] if declared else next(iter(BLOCK_FORMATS.values()))
    asked = [family for family in _FAMILIES if family.asked(ops, clauses)]
    found: list[Check] = []
    for made in BLOCK_FORMATS.values():
        if made not in taken and made is not first:
            continue
        plan = Plan.of(level, seed, capabilities, made)
        shared = replace(plan, declared=Capabilities())
        whole = [
            check for family in asked for check in _checks(family.make, plan if family.drawn else shared)
        ]
        if _COMBINATIONS.asked(ops, clauses):
            whole += _combinations(plan, specs)
        found += whole if made is first else [check for check in whole if check.formats]
    return [*found, *(_mixed(level, seed, frozenset(taken)) if _MIXED.asked(ops, clauses) else ())]


@lru_cache(maxsize=_KEPT_PLANS * len(_FAMILIES))
def _checks(make: Callable[[Plan], Iterable[Check]], plan: Plan) -> tuple[Check, ...]:
    return _titled(make, plan)


@lru_cache(maxsize=_KEPT_PLANS)
def _combinations(plan: Plan, specs: tuple[OperandSpec, ...]) -> tuple[Check, ...]:
    return _titled(partial(layout.combinations, specs=specs), plan)


@lru_cache(maxsize=_KEPT_PLANS)
def _mixed(level: Level, seed: int, taken: frozenset[BlockFormat]) -> tuple[Check, ...]:
    return tuple(mixed.checks(level, seed, taken))


def _titled(make: Callable[[Plan], Iterable[Check]], plan: Plan) -> tuple[Check, ...]:
    """Return checks whose titles name the format, unless it is that of a plain treatment."""
    if plan.format is OperandSpec().format:
        return tuple(make(plan))
    return tuple(_named(each, f", {plan.format}") if each.formats else each for each in make(plan))


def _named(check: Check, suffix: str) -> Check:
    """Return a check whose title, and that of its failures, ends with a suffix."""

    def run(subject: Subject) -> CheckResult:
        result = check.run(subject)
        failure, misuse = (
            each and replace(each, check=each.check + suffix) for each in (result.failure, result.misuse)
        )
        return replace(result, failure=failure, misuse=misuse)

    return replace(check, title=check.title + suffix, run=run)
