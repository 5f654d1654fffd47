"""Repeats recorded operations on a backend and on the reference, and compares both with the record.

A shadow of a training run uses `recorded_failure` alone, the command `mxref conform --replay` everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mxref.backend import Backend
from mxref.conformance.blame import blame, cause
from mxref.conformance.checking import Subject
from mxref.conformance.finding import block_failure, product_check, quantize_check
from mxref.conformance.outcome import Failure, Judgement
from mxref.conformance.recorded import Call, RecordedProduct, RecordedQuantization, load_recording, where_text
from mxref.conformance.requests.decoding import first_place, shown
from mxref.conformance.requests.quantizing import all_of_it
from mxref.conformance.suite import result_of
from mxref.discovery import get_backend


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

    def verdict(self, backend: str) -> str:
        """Return as part of a sentence whether the recorded answer and that of a backend are right."""
        before, now = (
            f"differs under {failure.clause}" if failure else "is right"
            for failure in (self.recorded, self.answered)
        )
        if self.undeclared:
            now = f"does not declare {self.undeclared}"
        what = "blocks" if self.op == "quantize" else "results"
        return f"{self.compared:,} {what}, the recorded answer {before}, {backend} {now}"


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
        """Return the report as lines: an operation each, the first difference, and the total."""
        lines = [f"recorded by backend {self.recorded_by}" + (f": {self.reason}" if self.reason else "")]
        lines += [f"  {key}: {value}" for key, value in self.facts.items()]
        failures = [call.answered or call.recorded for call in self.calls]
        first = next((i for i, failure in enumerate(failures) if failure), None)
        for i, call in enumerate(self.calls):
            lines.append(f"{call.op} of {call.where}: {call.verdict(self.backend)}")
            lines += [str(failures[i])] if i == first else []
        undeclared = sum(call.undeclared is not None for call in self.calls)
        total = f"{len(self.calls)} operations, {sum(map(bool, failures))} with a difference"
        if undeclared:
            total += f"; {undeclared} not compared with {self.backend}, which does not declare them"
        if undeclared == len(self.calls):
            total += ": replay with another backend"
        return "\n".join([*lines, total])


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
        calls.append(_replayed(subject, call))
        if calls[-1].answered:
            subject.shrink = False  # one small example is enough
    return ReplayReport(
        subject.backend.name, recording.backend, recording.reason, recording.facts, tuple(calls)
    )


def _replayed(subject: Subject, call: Call) -> ReplayedCall:
    where, recorded = where_text(call.where), recorded_failure(call)
    if isinstance(call, RecordedQuantization):
        request, compared = call.request, call.request.expected_blocks.scales.size
        check = quantize_check(
            "quantize.order",
            where,
            request,
            blamed=lambda asked, got, place: cause(asked, request, got, place),
        )
    else:
        check, compared = product_check(_product_clause(call), where, call.product), call.result.size
    undeclared = check.undeclared(subject.capabilities)
    answered = None if undeclared else result_of(check, subject).failure
    return ReplayedCall(where, check.asked.op.value, compared, recorded, answered, undeclared)


def recorded_failure(call: Call) -> Failure | None:
    """Return how the recorded answer of an operation differs from the reference's; None where it does not."""
    if isinstance(call, RecordedQuantization):
        request = call.request
        wrong, _ = all_of_it(call.answer, request.expected_blocks)
        if not wrong.any():
            return None
        row, block = first_place(wrong)
        clause = blame(request, call.answer, row, block) or "quantize.order"
        message = f"{int(wrong.sum())} of {wrong.size} blocks differ; shown is the first, block {block} of row {row}"
        failure = block_failure(request, (row, block), clause, message, call.answer)
    else:
        product = call.product
        wrong = product.misses(call.result)
        if not wrong.any():
            return None
        at = first_place(wrong)
        message = f"{int(wrong.sum())} of {wrong.size} results differ, the first at {at}"
        want, got = shown(product.expected[at]), shown(call.result[at])
        failure = Failure(_product_clause(call), message, product.describe(), {}, want, got)
    return replace(failure, check=where_text(call.where))


def _product_clause(call: RecordedProduct) -> str:
    return f"gemm.{call.product.profile.value}"
