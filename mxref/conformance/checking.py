"""What a conformance run is made of: a check, the plan that checks are made for, and the backend under test.

A check asks one question about one clause. Families of checks are in `checks`, the questions in `requests`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.capabilities import Capabilities, declared_words
from mxref.conformance.outcome import CheckResult, Failure, Level
from mxref.conformance.watch import Watched
from mxref.formats import INPUT_DTYPES, BlockFormat, ElementFormat
from mxref.recipe import OperandSpec
from mxref.steps.rounding import Rounding
from mxref.steps.scale import rules_of

Needs = tuple[tuple[str, Any], ...]
"""Capabilities, as field and value."""


def cast(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return values rounded to an input type; values out of its range become Inf or zero."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def block_format(spec: OperandSpec) -> BlockFormat:
    """Return the block format of a treatment that has one."""
    assert isinstance(spec.format, BlockFormat)
    return spec.format


def unit_amax(made: BlockFormat) -> float | None:
    """Return the largest magnitude of a tensor whose scale is 1; None for a format without a scale of the tensor."""
    return made.element.max_value * made.scale.max_value if made.tensor_scale else None


@dataclass(frozen=True)
class Plan:
    """What to check: the level, the seed, and the plainest treatment and input type that a backend declares."""

    level: Level
    seed: int
    base: OperandSpec
    dtype: str
    declared: Capabilities
    """The declared capabilities, from which combinations are drawn."""

    @property
    def format(self) -> BlockFormat:
        """The block format under test."""
        return block_format(self.base)

    @property
    def element(self) -> ElementFormat:
        """The element format of the block format."""
        return self.format.element

    @property
    def amax(self) -> float | None:
        """The tensor's largest magnitude under which its scale is 1; None where the format has no such scale."""
        return unit_amax(self.format)

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

        thresholds = (rule for rule in capabilities.scale_rules if rule.is_threshold and made.scale.powers)
        rule = plainest(capabilities.scale_rules, (*rules_of(made.scale), *thresholds))
        rounding = plainest(capabilities.roundings, tuple(Rounding))
        dtype = plainest(capabilities.in_dtypes, INPUT_DTYPES)
        base = OperandSpec(format=made, scale_rule=rule, rounding=rounding)
        return cls(level, seed, base, dtype, capabilities)


class Op(StrEnum):
    """An operation of the backend protocol."""

    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    HADAMARD = "hadamard"
    GEMM = "gemm"


class Question(Protocol):
    """What a check asks: a request of `requests`, or `Asked`."""

    @property
    def op(self) -> Op:
        """The operation."""

    @property
    def needs(self) -> Needs:
        """The capabilities that must be declared."""

    def describe(self) -> Mapping[str, str]:
        """Return the question in words."""


@dataclass(frozen=True)
class Asked:
    """A question that is more, or less, than one request."""

    op: Op
    needs: Needs = ()
    words: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> Mapping[str, str]:
        """Return the question in words."""
        return self.words


@dataclass(frozen=True, eq=False)
class Check:
    """One question to a backend, about one clause."""

    clause: str
    title: str
    asked: Question
    run: Callable[[Subject], CheckResult]
    raised: str = ""
    """The clause that an exception breaks, if it is not `clause`."""

    @classmethod
    def that(
        cls, clause: str, title: str, asked: Question, problem: Callable[[Subject], tuple[int, str]]
    ) -> Check:
        """Return a check by a function that returns how many results it compared, and what is wrong, or nothing."""

        def run(subject: Subject) -> CheckResult:
            compared, message = problem(subject)
            return CheckResult(compared, Failure(clause, message) if message else None)

        return cls(clause, title, asked, run)

    @classmethod
    def refused(
        cls,
        clause: str,
        title: str,
        asked: Question,
        call: Callable[[Subject], Any],
        error: type[Exception],
        accepted: str,
    ) -> Check:
        """Return a check that a call raises an error; `accepted` says what is wrong if it does not."""

        def problem(subject: Subject) -> tuple[int, str]:
            try:
                call(subject)
            except error:
                return 1, ""
            return 1, f"{accepted}: {error.__name__} expected"

        return cls.that(clause, title, asked, problem)

    @cached_property
    def needs(self) -> Needs:
        """Capabilities that must be declared."""
        return self.asked.needs

    @cached_property
    def formats(self) -> tuple[BlockFormat, ...]:
        """The block formats that it uses; empty if it is the same for all of them."""
        found = [value for name, value in self.needs if name == "formats"]
        found += [f for name, value in self.needs if name == "gemms" for f in value[1:]]
        return tuple(dict.fromkeys(found))

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
    if isinstance(declared, int) and not isinstance(declared, bool):
        return bool(value <= declared)
    return bool(declared == value)


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
