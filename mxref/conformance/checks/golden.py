"""The golden vectors as checks: a record counts for the most specific of its clauses.

The vectors are files of `spec/vectors`; here is only how one becomes a check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np

from mxref.conformance.blame import blame
from mxref.conformance.checking import Asked, Check, Needs, Op, Plan, Subject
from mxref.conformance.clauses import by_rank
from mxref.conformance.finding import quantize_check
from mxref.conformance.outcome import CheckResult, Failure
from mxref.conformance.requests.multiplying import Product
from mxref.conformance.requests.quantizing import Blocks, Place, Request
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.plan import dtype_name
from mxref.recipe import GemmProfile
from mxref.vectors import BACKEND_OPS, DEFAULT, Record, RecordOp, load_vectors
from mxref.vectors.data import parse_words, record_format, record_operand, record_stream, record_tensor
from mxref.vectors.run import run_record

_GENERATED = ("x_seed", "operand_seed")
_FILED_TWICE = {"quantize.place.sr.whole": "random.index"}
"""Vectors asked under a second clause too: it has no other check of rows that are padded to Hadamard groups."""


def checks(plan: Plan) -> Iterator[Check]:
    """Yield a check per golden vector of a backend's operation; the large ones, made from seeds, under `full` only."""
    for record in _records()[plan.format]:
        if record.op in BACKEND_OPS and (plan.full or not any(key in record.inputs for key in _GENERATED)):
            yield _check(record, _clause(record))
            if record.id in _FILED_TWICE:
                yield _check(record, _FILED_TWICE[record.id])


@cache
def _records() -> dict[BlockFormat, list[Record]]:
    """Return the golden vectors of each format; the files are read once."""
    found: dict[BlockFormat, list[Record]] = {made: [] for made in BLOCK_FORMATS.values()}
    for record in load_vectors():
        found[_format(record)].append(record)
    return found


def _format(record: Record) -> BlockFormat:
    """Return the format that a record counts for: of a product of two, the one that is not the default."""
    both = [record_format(record, key) for key in ("format", "a_format", "b_format")]
    return next((made for made in both if made.name != DEFAULT), both[0])


def _check(record: Record, clause: str) -> Check:
    title = f"vector {record.id}"
    made = cache(lambda: _request(record))

    def run(subject: Subject) -> CheckResult:
        mismatch = run_record(record, subject.backend)
        count = max(len(text) for text in record.expected.values())
        if mismatch is None:
            return CheckResult(count)
        request = made()
        if request is not None:
            check = quantize_check(clause, title, request, blamed=partial(_blamed, record, request))
            found = check.run(subject)
            if found.failure:
                return replace(found, compared=count)
        failure = Failure(clause, str(mismatch), expected=mismatch.want, got=mismatch.got)
        return CheckResult(count, failure)

    return Check(clause, title, _asked(record), run)


def _clause(record: Record) -> str:
    """Return the most specific of a record's clauses, under which its failure is counted."""
    if record.op is RecordOp.DEQUANTIZE:
        return by_rank(record.clauses)[-1]
    preferred = {
        RecordOp.HADAMARD: ("hadamard.nonfinite", "hadamard.order"),
        RecordOp.SCALED_GEMM: ("gemm.nan", f"gemm.{record.inputs.get('profile')}"),
    }.get(record.op, ())
    return next((clause for clause in preferred if clause in record.clauses), record.clauses[0])


def _blamed(record: Record, request: Request, subject: Subject, got: Blocks, place: Place) -> str:
    """Return the clause of a quantization's failure: that of the wrong bit, unless another clause is the cause."""
    decided, first = blame(request, got, place), record.clauses[0]
    if first.startswith(("quantize.", "dialect.")):
        return first
    if record.inputs.get("hadamard"):  # a transform changes the input of every later step
        joined = (c for c in record.clauses if c.startswith("hadamard.") and c != "hadamard.size")
        return "quantize.order" if "quantize.order" in record.clauses else next(joined, first)
    if decided.startswith("scale.") and "scale.block.tile" in record.clauses:
        return "scale.block.tile"
    exact = decided.startswith(
        ("scale.", "rounding.sign", "rounding.saturate", "rounding.scaled", "rounding.quotient")
    )
    return decided if exact or decided in record.clauses else first


def _request(record: Record) -> Request | None:
    """Return the quantization that a record asks for, None where no request can say it."""
    if record.op is not RecordOp.QUANTIZE or "error" in record.expected:
        return None
    i = record.inputs
    origin, shape = i.get("origin"), i.get("global_shape")
    amax = parse_words(i["tensor_amax"], 1, record.id).view(np.float32)[0] if "tensor_amax" in i else None
    return Request(
        record_tensor(record), record.spec, i.get("axis", -1), record_stream(record),
        tuple(origin) if origin else None, tuple(shape) if shape else None, i.get("pad", False),
        amax=None if amax is None else float(amax),
    )  # fmt: skip


def _asked(record: Record) -> Asked:
    """Return a golden vector as the question of a check."""
    i = record.inputs
    needs: Needs
    match record.op:
        case RecordOp.SCALE | RecordOp.QUANTIZE:
            x = record_tensor(record) if record.op is RecordOp.QUANTIZE else np.zeros(1, np.float32)
            op, needs = Op.QUANTIZE, Request(x, record.spec).needs
        case RecordOp.DEQUANTIZE:
            op, needs = Op.DEQUANTIZE, (("formats", record_format(record)), ("dequantize_dtypes", i["out"]))
        case RecordOp.HADAMARD:
            op = Op.HADAMARD
            needs = ("in_dtypes", dtype_name(record_tensor(record))), ("hadamard_sizes", i["n"])
        case _:
            a, b = (record_operand(record, name) for name in "ab")
            op, needs = Op.GEMM, Product(a, b, GemmProfile(i["profile"]), i["out"]).needs
    texts = {key: str(value) for key, value in i.items()}
    return Asked(
        op, needs, {key: text if len(text) < 300 else f"{text[:300]}..." for key, text in texts.items()}
    )
