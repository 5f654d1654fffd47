"""The parts of a conformance run: the clauses in order, checks and their failures, and the backend under test.

The order of `CLAUSES` decides which broken clause a report names first: causes stand before effects.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.capabilities import Capabilities, declared_words
from mxref.conformance.watch import Watched
from mxref.formats import INPUT_DTYPES, BlockFormat, ElementFormat
from mxref.recipe import OperandSpec
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

CLAUSES = (
    "packing.nibbles", "packing.sixes", "packing.bytes", "packing.scales",
    "formats.element", "formats.e2m1", "formats.fp6", "formats.fp8", "formats.e8m0",
    "conformance.capabilities", "conformance.arrays", "conventions.inputs", "conformance.protocol",
    "scale.amax", "scale.block.row", "scale.nonfinite", "scale.zero", "scale.clamp",
    *(f"scale.rule.{rule.value}" for rule in ScaleRule), "scale.rule.threshold", "scale.block.tile",
    "random.philox", "random.elements", "random.counter", "random.stream", "random.index",
    "rounding.sign", "rounding.scaled", "rounding.saturate",
    *(f"rounding.{rounding.value}" for rounding in Rounding), "rounding.prescale", "rounding.native_sr",
    "hadamard.size", "hadamard.factor", "hadamard.signs", "hadamard.order", "hadamard.float32",
    "hadamard.nonfinite", "hadamard.policy", "linear.rotation",
    "quantize.strides", "quantize.axis", "quantize.length", "quantize.padding",
    "dequantize.value", "dequantize.overflow", "dequantize.nan",
    "gemm.output", "gemm.operands", "gemm.block_dot", "gemm.nan", "gemm.special", "gemm.prescale",
    "gemm.exact", "gemm.ordered", "gemm.bounded",
    "conformance.unsupported", "conformance.dual",
    "dialect.ocp", "dialect.amd", "dialect.nvidia", "dialect.tseng", "quantize.order",
)  # fmt: skip
"""The clauses that a backend can break, causes first: the first one that fails is most likely to be at fault."""


Needs = tuple[tuple[str, Any], ...]
"""Capabilities, as field and value."""
NOT_ASKED = "not asked any more"
"""Why a check was skipped after too many that ended their process or took too long."""
_FEW, _PER_LINE = 8, 6
"""Numbers that are shown by their places, and words in a line."""


def cast(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return values rounded to an input type; values out of its range become Inf or zero."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def block_format(spec: OperandSpec) -> BlockFormat:
    """Return the block format of a treatment that has one."""
    assert isinstance(spec.format, BlockFormat)
    return spec.format


def element_clause(element: ElementFormat) -> str:
    """Return the clause of an element's codes: its own, if there is one."""
    own = f"formats.{element.name.lower()}"
    if own in CLAUSES:
        return own
    return {6: "formats.fp6", 8: "formats.fp8"}.get(element.bits, "formats.element")


def storage_clause(element: ElementFormat) -> str:
    """Return the clause of the order of an element's codes in bytes."""
    return {4: "packing.nibbles", 6: "packing.sixes", 8: "packing.bytes"}[element.bits]


@dataclass(frozen=True)
class Plan:
    """What to check: the level, the seed, and the plainest treatment and input type that a backend declares."""

    level: Level
    seed: int
    base: OperandSpec
    dtype: str
    declared: Capabilities
    """The declared capabilities, from which combinations are drawn."""
    specs: tuple[OperandSpec, ...] = ()
    """Treatments that combinations are drawn from; empty for all that are declared."""

    @property
    def format(self) -> BlockFormat:
        """The block format under test."""
        return block_format(self.base)

    @property
    def element(self) -> ElementFormat:
        """The element format of the block format."""
        return self.format.element

    @property
    def full(self) -> bool:
        """Whether to check every combination."""
        return self.level is Level.FULL

    @property
    def long(self) -> int:
        """The length of a long axis, a multiple of 256: above 16,384, and at the level full above 65,535."""
        return 65_792 if self.full else 16_640

    def cast(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return drawn values in the input type."""
        return cast(x, self.dtype)

    @classmethod
    def of(cls, level: Level, seed: int, capabilities: Capabilities, made: BlockFormat) -> Plan:
        """Return the plan for a backend and a block format."""

        def plainest(declared: frozenset[Any], order: Iterable[Any]) -> Any:
            return next((choice for choice in order if choice in declared), next(iter(order)))

        rule = plainest(capabilities.scale_rules, (*ScaleRule, *capabilities.scale_rules))
        rounding = plainest(capabilities.roundings, tuple(Rounding))
        dtype = plainest(capabilities.in_dtypes, INPUT_DTYPES)
        base = OperandSpec(format=made, scale_rule=rule, rounding=rounding)
        return cls(level, seed, base, dtype, capabilities)


class Level(StrEnum):
    """How much is checked: both cover every clause and capability, `full` every exponent and combination."""

    QUICK = "quick"
    FULL = "full"


class Op(StrEnum):
    """An operation of the backend protocol."""

    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    HADAMARD = "hadamard"
    GEMM = "gemm"


@dataclass(frozen=True)
class Failure:
    """A request that a backend answers wrong, shrunk to the smallest one that is still wrong."""

    clause: str
    message: str
    """What is wrong, in one line."""
    request: dict[str, str] = field(default_factory=dict)
    """The request in words; that of the check if it is left out."""
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Input bits as hex words, by operand."""
    expected: str = ""
    got: str = ""
    differing: tuple[int, ...] = ()
    """Positions of the elements that differ."""
    command: str | None = None
    """A command that prints the steps to the expected answer."""
    array: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    """The shrunk input of a quantization, block axis last."""
    file_command: str | None = None
    """The same command for tiles, which need a file; FILE stands for the place of `array`."""
    lost: bool = False
    """Whether the backend ended the process of the check, or took too long."""
    check: str = ""
    """The title of the check."""

    def __str__(self) -> str:
        """Return lines: clause and check, what differs, the request, inputs, both answers, the command."""
        lines = [f"{self.clause}: {self.check}", f"  {self.message}"]
        if self.request:
            lines.append("  asked     " + ", ".join(f"{k} {v}" for k, v in self.request.items()))
        for name, words in self.inputs.items():
            lines += [f"  {name if i == 0 else '':<9} {row}" for i, row in enumerate(_rows(words))]
        if self.expected:
            lines += [f"  expected  {self.expected}", f"  got       {self.got}"]
        if self.differing:
            lines.append(f"  differing {', '.join(map(str, self.differing))}")
        if self.command:
            lines.append(f"  explain   {self.command}")
        return "\n".join(lines)


def _rows(words: tuple[str, ...]) -> list[str]:
    """Return input words as lines; where most are zero, only the others, with their places and values."""
    live = [i for i, word in enumerate(words) if word.startswith("0x") and int(word, 16)]
    if not words or not words[0].startswith("0x") or len(live) > _FEW:
        return [" ".join(words[i : i + _PER_LINE]) for i in range(0, len(words), _PER_LINE)]
    values = (struct.unpack(">f", bytes.fromhex(words[i].removeprefix("0x")))[0] for i in live)
    rows = [f"[{i}] = {words[i]} = {value:.9g}" for i, value in zip(live, values, strict=True)]
    return [*rows, f"the other {len(words) - len(live)} are 0"] if len(live) < len(words) else rows


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: how many blocks, values or results were compared, and what was wrong."""

    compared: int
    failure: Failure | None = None
    misuse: Failure | None = None
    """A wrong use of memory by the call, whatever its answer was."""
    unasked: str | None = None
    """Why the backend was not asked, None where it was."""
    calls: int = 0
    """Calls of the backend that were answered."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What was wrong: the answer, the use of memory, or both."""
        return tuple(failure for failure in (self.failure, self.misuse) if failure)


@dataclass(frozen=True, eq=False)
class Check:
    """One question to a backend, about one clause."""

    clause: str
    title: str
    op: Op
    needs: Needs
    """Capabilities that must be declared."""
    run: Callable[[Subject], CheckResult]
    spec: OperandSpec | None = None
    """The treatment of a quantization; None for other operations."""
    describe: Callable[[], dict[str, str]] = dict
    """The request in words, for a failure that is an exception."""
    raised: str = ""
    """The clause that an exception breaks, if it is not `clause`."""

    @cached_property
    def formats(self) -> tuple[BlockFormat, ...]:
        """The block formats that it uses; empty if it is the same for all of them."""
        found = [value for name, value in self.needs if name == "formats"]
        found += [f for name, value in self.needs if name == "gemms" for f in value[1:]]
        return tuple(dict.fromkeys(found))

    @classmethod
    def that(
        cls,
        clause: str,
        title: str,
        op: Op,
        needs: Needs,
        problem: Callable[[Subject], tuple[int, str]],
        spec: OperandSpec | None = None,
        describe: Callable[[], dict[str, str]] = dict,
    ) -> Check:
        """Return a check by a function that returns how many results it compared, and what is wrong, or nothing."""

        def run(subject: Subject) -> CheckResult:
            compared, message = problem(subject)
            return CheckResult(compared, Failure(clause, message) if message else None)

        return cls(clause, title, op, needs, run, spec, describe)

    def undeclared(self, capabilities: Capabilities) -> str | None:
        """Return the undeclared capability that the check needs, as `field: value`; None if all are declared."""
        for name, value in self.needs:
            if not declares(capabilities, name, value):
                if isinstance(value, bool):
                    return name if value else f"{name}, its own instead"
                return f"{name}: {declared_words(value)}"
        return None


def declares(capabilities: Capabilities, name: str, value: Any) -> bool:
    """Return whether a capability covers a value: a member of a set, at most a limit, or equal to a flag."""
    declared = getattr(capabilities, name)
    if isinstance(declared, frozenset):
        return value in declared or capabilities.takes_threshold(value)
    if isinstance(declared, bool):
        return bool(declared == value)
    return bool(value <= declared) if isinstance(declared, int) else bool(declared == value)


class Subject:
    """The backend under test, its calls watched, with NumPy arrays in and out."""

    def __init__(self, backend: Backend, shrink: bool = True) -> None:
        self.watched = Watched(backend)
        self.backend = typing.cast(Backend, self.watched)
        self.capabilities = backend.capabilities
        self.shrink = shrink
        self._last: tuple[object, Any] | None = None

    def give(self, array: NDArray[Any]) -> Any:
        """Return an array as the backend's own kind."""
        return self.backend.from_numpy(array)

    def take(self, array: Any) -> NDArray[Any]:
        """Return one of the backend's arrays in NumPy."""
        return np.asarray(self.backend.to_numpy(array))

    def once(self, key: object, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`; the last result is reused for the same key."""
        if self._last is None or self._last[0] is not key:
            self._last = key, compute()
        return self._last[1]


def by_rank(clauses: Iterable[str]) -> list[str]:
    """Return clauses in the order of `CLAUSES`; those not in it come last, by name."""
    rank = {clause: i for i, clause in enumerate(CLAUSES)}
    return sorted(clauses, key=lambda c: (rank.get(c, len(rank)), c))
