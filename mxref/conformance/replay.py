"""Operations that a training run or `check_quantizer` recorded: their file, and what comes of them a second time.

A file holds inputs and answers, no verdicts. A shadow of a training run asks an operation for its `failure`;
`mxref conform --replay` repeats it on a backend too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref._version import SPECIFICATION, __version__
from mxref.backend import Backend
from mxref.conformance import archive
from mxref.conformance.archive import plain_array, typed_array
from mxref.conformance.blame import blame
from mxref.conformance.checking import Check, Op, Subject
from mxref.conformance.finding import answer_failure, product_check, product_failure, quantize_check
from mxref.conformance.outcome import Failure, Judgement
from mxref.conformance.requests.decoding import first_place
from mxref.conformance.requests.multiplying import Product
from mxref.conformance.requests.quantizing import Blocks, Request
from mxref.conformance.suite import result_of
from mxref.discovery import get_backend
from mxref.formats import BLOCK_FORMATS, BlockShape
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import Rotation
from mxref.steps.random import Stream
from mxref.tomlio import build, to_table

FORMAT = "mxref.record.1"


@dataclass(frozen=True, eq=False)
class RecordedQuantization:
    """A quantization and the answer that it got."""

    where: Mapping[str, str]
    """Layer, role, tensor and step, as far as they are known."""
    request: Request
    codes: NDArray[np.uint8]
    """[rows, K * bits / 8], block axis last."""
    scales: NDArray[np.uint8]
    """[rows, K / k]."""
    tensor_scale: NDArray[np.float32] | None = None
    """float32 [1], where the format has a scale of the tensor."""

    @property
    def answer(self) -> Blocks:
        """The answer, block by block."""
        plan = replace(self.request.plan, tensor_scale=self.tensor_scale)
        return Blocks.of(plan.array(*(a.reshape(*plan.rows_shape, -1) for a in (self.codes, self.scales))))

    @property
    def compared(self) -> str:
        """What a comparison looks at."""
        return f"{self.request.expected_blocks.scales.size:,} blocks"

    @property
    def check(self) -> Check:
        """The check that a backend gives the reference's answer."""

        def blamed(subject: Subject, got: Blocks, place: tuple[int, int]) -> str:
            return blame(self.request, got, place)

        return quantize_check("quantize.order", where_text(self.where), self.request, blamed=blamed)

    @property
    def failure(self) -> Failure | None:
        """How the answer differs from the reference's; None where it does not."""
        return answer_failure(self.request, self.answer, where_text(self.where))


@dataclass(frozen=True, eq=False)
class RecordedProduct:
    """A scaled GEMM and the answer that it got."""

    where: Mapping[str, str]
    product: Product
    result: NDArray[Any]
    """[M, N], float32 or bfloat16."""

    @property
    def compared(self) -> str:
        """What a comparison looks at."""
        return f"{self.result.size:,} results"

    @property
    def check(self) -> Check:
        """The check that a backend gives an allowed answer."""
        return product_check(f"gemm.{self.product.profile.value}", where_text(self.where), self.product)

    @property
    def failure(self) -> Failure | None:
        """How the answer differs from the allowed ones; None where it does not."""
        wrong = self.product.misses(self.result)
        if not wrong.any():
            return None
        at = first_place(wrong)
        message = f"{int(wrong.sum())} of {wrong.size} results differ, the first at {at}"
        found = product_failure(self.product, at, self.check.clause, message, self.result)
        return replace(found, check=where_text(self.where))


Call = RecordedQuantization | RecordedProduct


@dataclass(frozen=True)
class Recording:
    """Recorded operations."""

    backend: str
    """Name of the backend that gave the answers."""
    calls: tuple[Call, ...]
    reason: str = ""
    """Why the file was written, in one line."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else a reader should know, such as the device."""


def where_text(where: Mapping[str, str]) -> str:
    """Return the place of a recorded operation as text, as in `step 3 counted from 0, layer q_proj, fprop x`.

    The step is that of the random streams, which `mxref explain --step` takes; the logs of a run count from 1.
    """
    parts = [f"step {where['step']} counted from 0"] if "step" in where else []
    parts += [f"layer {where['layer']}"] if "layer" in where else []
    parts += [" ".join(where[key] for key in ("role", "tensor") if key in where)]
    return ", ".join(filter(None, parts)) or "place unknown"


# ---- a second time ----


@dataclass(frozen=True)
class ReplayedCall:
    """The result of one recorded operation."""

    op: Op
    """`quantize` or `gemm`."""
    text: str
    """The operation and its place, and whether the recorded and the new answer are right."""
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
    recording: Recording
    calls: tuple[ReplayedCall, ...]

    @property
    def ok(self) -> bool:
        """Whether every recorded answer and every new one is right, and the backend was asked at least one."""
        asked = any(call.undeclared is None for call in self.calls)
        return asked and not any(call.recorded or call.answered for call in self.calls)

    def __str__(self) -> str:
        """Return the report as lines: an operation each, the first difference, and the total."""
        reason = self.recording.reason
        lines = [f"recorded by backend {self.recording.backend}" + (f": {reason}" if reason else "")]
        lines += [f"  {key}: {value}" for key, value in self.recording.facts.items()]
        failures = [call.answered or call.recorded for call in self.calls]
        first = next((i for i, failure in enumerate(failures) if failure), None)
        for i, call in enumerate(self.calls):
            lines += [call.text, str(failures[i])] if i == first else [call.text]
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
        file: what `mxref_torch.record`, a shadow or `check_quantizer` wrote.
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
    return ReplayReport(subject.backend.name, recording, tuple(calls))


def _replayed(subject: Subject, call: Call) -> ReplayedCall:
    check, recorded = call.check, call.failure
    undeclared = check.undeclared(subject.capabilities)
    answered = None if undeclared else result_of(check, subject).failure
    before, now = (f"differs under {each.clause}" if each else "is right" for each in (recorded, answered))
    if undeclared:
        now = f"does not declare {undeclared}"
    text = (
        f"{check.asked.op.value} of {check.title}: {call.compared}, the recorded answer {before}, "
        f"{subject.backend.name} {now}"
    )
    return ReplayedCall(check.asked.op, text, recorded, answered, undeclared)


# ---- the file ----


def save_recording(path: str | Path, recording: Recording) -> None:
    """Write a recording; the file appears only when all of it is on the disk.

    Raises:
        FileFormatError: a name that does not end in .npz, or a file that cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    calls = [_table(call, f"{i}.", arrays) for i, call in enumerate(recording.calls)]
    meta = {
        "format": FORMAT, "mxref": __version__, "specification": SPECIFICATION, "backend": recording.backend,
        "reason": recording.reason, "facts": dict(recording.facts), "calls": calls,
    }  # fmt: skip
    archive.save(path, meta, arrays)


def load_recording(path: str | Path) -> Recording:
    """Return the recording of `save_recording`.

    Raises:
        FileFormatError: the file is missing, damaged, holds something else, or was recorded under another version of
            the specification, whose right answers may be others.
    """
    way_out = "give a file that mxref_torch.record, a shadow or check_quantizer wrote with this version"
    with archive.opened(path, FORMAT, "a recording", way_out) as (meta, arrays):
        if (found := meta.get("specification", "unknown")) != SPECIFICATION:
            raise ValueError(f"its answers are to specification {found}, and this is {SPECIFICATION}")
        calls = tuple(_call(table, f"{i}.", arrays) for i, table in enumerate(meta["calls"]))
        return Recording(meta["backend"], calls, meta["reason"], meta["facts"])


def _table(call: Call, prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Return a call as a JSON table; its arrays go to `arrays`."""
    if isinstance(call, RecordedQuantization):
        request, stream = call.request, call.request.rng
        for name, array in (("x", request.array()), ("codes", call.codes), ("scales", call.scales)):
            arrays[prefix + name] = plain_array(array)
        if call.tensor_scale is not None:
            arrays[prefix + "tensor_scale"] = call.tensor_scale
        given = {} if request.amax is None else {"amax": request.amax}
        return {
            "op": "quantize", "where": dict(call.where), "spec": to_table(request.spec),
            "dtype": str(request.x.dtype), "axis": request.axis, "pad": request.pad,
            "stream": stream and [stream.seed, stream.step, stream.layer, stream.operand],
            "origin": request.origin, "global_shape": request.global_shape,
            **given,
        }  # fmt: skip
    product = call.product
    arrays[prefix + "result"] = plain_array(call.result)
    table = {
        "op": "gemm", "where": dict(call.where), "profile": product.profile.value, "out": product.out,
        "error_class": product.error_class,
    }  # fmt: skip
    for name, q in (("a", product.a), ("b", product.b)):
        arrays[f"{prefix}{name}_codes"], arrays[f"{prefix}{name}_scales"] = q.codes, q.scales
        if q.tensor_scale is not None:
            arrays[f"{prefix}{name}_tensor_scale"] = q.tensor_scale
        # Signs drawn on a device are unknown here, and do not change a product.
        rotation = q.rotation if isinstance(q.rotation, Rotation) else None
        table[name] = {
            "shape": q.shape, "block": str(q.block), "prescale": bool(q.prescale), "format": q.format.name,
            "rotation": rotation and [rotation.n, rotation.signs],
        }  # fmt: skip
    return table


def _call(table: Mapping[str, Any], prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Call:
    """Return the call of a table; an exception of any kind if its parts do not fit together."""
    where = {str(key): str(value) for key, value in table["where"].items()}
    if table["op"] == "quantize":
        stream = Stream(*table["stream"]) if table["stream"] else None
        origin, shape = (table[name] and tuple(table[name]) for name in ("origin", "global_shape"))
        x = typed_array(arrays[prefix + "x"], table["dtype"])
        spec = build(OperandSpec, table["spec"], "operand spec")
        request = Request(
            x, spec, table["axis"], stream, origin, shape, bool(table["pad"]), amax=table.get("amax")
        )
        tensor = arrays[prefix + "tensor_scale"] if request.format.tensor_scale else None
        found = RecordedQuantization(
            where, request, arrays[prefix + "codes"], arrays[prefix + "scales"], tensor
        )
        assert found.answer.codes.size >= 0
        return found
    operands = []
    for name in ("a", "b"):
        one = table[name]
        codes, scales = (arrays[f"{prefix}{name}_{part}"] for part in ("codes", "scales"))
        rotation = one["rotation"] and Rotation(*one["rotation"])
        made = BLOCK_FORMATS[one["format"]]
        tensor = arrays[f"{prefix}{name}_tensor_scale"] if made.tensor_scale else None
        operands.append(MXArray(
            codes, scales, tuple(one["shape"]), 1, BlockShape(one["block"]), one["prescale"], rotation,
            made, tensor,
        ))  # fmt: skip
    a, b = operands
    product = Product(a, b, GemmProfile(table["profile"]), table["out"], error_class=table["error_class"])
    result = typed_array(arrays[prefix + "result"], table["out"])
    if result.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"a product of shape {result.shape} from operands of {a.shape} and {b.shape}")
    return RecordedProduct(where, product, result)
