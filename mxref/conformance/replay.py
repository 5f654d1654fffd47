"""Repeats recorded operations on a backend and on the reference, and compares both with the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mxref.backend import Backend
from mxref.conformance.blame import blame, cause
from mxref.conformance.differential import product_check, quantize_check
from mxref.conformance.finding import block_failure
from mxref.conformance.model import Failure, Subject
from mxref.conformance.outcome import Judgement, failure_text
from mxref.conformance.recorded import (
    Call,
    RecordedProduct,
    RecordedQuantization,
    load_recording,
    where_text,
)
from mxref.conformance.requests.decoding import shown
from mxref.conformance.requests.encoding import all_of_it
from mxref.discovery import get_backend
from mxref.errors import MxrefError


@dataclass(frozen=True)
class ReplayedCall:
    """The result of one recorded operation."""

    where: str
    """Step, layer, role and tensor."""
    op: str
    """`quantize` or `gemm`."""
    compared: int
    """Blocks, or elements of a product."""
    recorded: Failure | None = None
    """How the recorded answer differs from the reference's; None where it does not."""
    answered: Failure | None = None
    """How the backend's answer differs now, shrunk; None where it does not."""
    undeclared: str | None = None
    """The capability that the backend does not declare; it was then not asked."""


@dataclass(frozen=True)
class ReplayReport(Judgement):
    """The results of a recording."""

    backend: str
    """The backend that was asked now."""
    recorded_by: str
    """The backend that gave the recorded answers."""
    reason: str
    """Why the file was written."""
    facts: Mapping[str, str]
    calls: tuple[ReplayedCall, ...]

    @property
    def ok(self) -> bool:
        """Whether every recorded answer and every new one is right, and the backend was asked at least one."""
        asked = any(call.undeclared is None for call in self.calls)
        return asked and not any(call.recorded or call.answered for call in self.calls)

    def __str__(self) -> str:
        """Return the report as lines."""
        lines = [f"recorded by backend {self.recorded_by}" + (f": {self.reason}" if self.reason else "")]
        lines += [f"  {key}: {value}" for key, value in self.facts.items()]
        shown_one = False
        for call in self.calls:
            failure = call.answered or call.recorded
            lines.append(f"{call.op} of {call.where}: {self._verdict(call)}")
            if failure and not shown_one:
                lines.append(failure_text(failure))
                shown_one = True
        lines.append(self._total())
        return "\n".join(lines)

    def _verdict(self, call: ReplayedCall) -> str:
        unit = "blocks" if call.op == "quantize" else "results"
        record = "differs" if call.recorded else "is right"
        if call.undeclared:
            return f"the recorded answer {record}; {self.backend} does not declare {call.undeclared}"
        if call.answered and call.recorded:
            return f"still differs under {call.answered.clause}"
        if call.answered:
            return f"the recorded answer is right, {self.backend} differs under {call.answered.clause}"
        if call.recorded:
            return f"the recorded answer differs under {call.recorded.clause}, {self.backend} is right now"
        return f"equal in {call.compared:,} {unit}"

    def _total(self) -> str:
        count, wrong = len(self.calls), sum(bool(call.recorded or call.answered) for call in self.calls)
        undeclared = sum(call.undeclared is not None for call in self.calls)
        text = f"{count} operations, {wrong} with a difference"
        if undeclared and undeclared == count:
            return (
                f"{text} in the recorded answers; nothing was compared with {self.backend}, which declares none of "
                "them: replay with another backend"
            )
        return (
            f"{text}; {undeclared} not compared with {self.backend}, which does not declare them"
            if undeclared
            else text
        )


def replay(file: str | Path, backend: Backend | str, *, shrink: bool = True) -> ReplayReport:
    """Do the operations of a recording again and compare every bit; products under `bounded` with their tolerance.

    Args:
        file: what `mxref_torch.record` or a shadow wrote.
        backend: the backend to ask now, in this process.
        shrink: whether the first difference is shrunk to the smallest block or product that still differs.

    Raises:
        FileFormatError: a file that is missing or damaged.
        BackendError: there is no such backend.
    """
    recording = load_recording(file)
    subject = Subject(get_backend(backend) if isinstance(backend, str) else backend, shrink)
    calls = []
    for call in recording.calls:
        subject.watched.start()
        calls.append(_replayed(subject, call))
        if calls[-1].answered:
            subject.shrink = False  # one small example is enough
    return ReplayReport(
        subject.backend.name, recording.backend, recording.reason, recording.facts, tuple(calls)
    )


def _replayed(subject: Subject, call: Call) -> ReplayedCall:
    where, recorded = where_text(call.where), recorded_failure(call)
    if isinstance(call, RecordedQuantization):
        op, request = "quantize", call.request
        compared = request.expected_blocks.scales.size
        check = quantize_check(
            "quantize.order", where, request,
            blamed=lambda subject, got, place: cause(subject, request, got, place),
        )  # fmt: skip
    else:
        op, compared = "gemm", call.result.size
        check = product_check(_product_clause(call), where, call.product)
    if undeclared := check.undeclared(subject.capabilities):
        return ReplayedCall(where, op, compared, recorded, undeclared=undeclared)
    try:
        answered = check.run(subject).failure
    except Exception as err:  # any exception of the backend is its answer
        kind = "" if isinstance(err, MxrefError) else f"{type(err).__name__}: "
        message = f"raised {kind}{' '.join(str(err).split()) or 'no message'}"
        answered = Failure(check.clause, where, message)
    return ReplayedCall(where, op, compared, recorded, answered)


def recorded_failure(call: Call) -> Failure | None:
    """Return how the recorded answer of an operation differs from the reference's; None where it does not."""
    where = where_text(call.where)
    if isinstance(call, RecordedQuantization):
        request = call.request
        wrong, _ = all_of_it(call.answer, request.expected_blocks)
        if not wrong.any():
            return None
        row, block = (int(i) for i in np.argwhere(wrong)[0])
        clause = blame(request, call.answer, row, block) or "quantize.order"
        message = f"{int(wrong.sum())} of {wrong.size} blocks differ; shown is the first, block {block} of row {row}"
        return block_failure(request, (row, block), clause, where, message, call.answer)
    product = call.product
    wrong = product.misses(call.result)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    message = f"{int(wrong.sum())} of {wrong.size} results differ, the first at {at}"
    both = shown(product.expected[at]), shown(call.result[at])
    return Failure(_product_clause(call), where, message, product.describe(), {}, *both)


def _product_clause(call: RecordedProduct) -> str:
    return f"gemm.{call.product.profile.value}"
