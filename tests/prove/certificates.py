"""What was proved: one line of JSON for each theorem, beside the other records.

A certificate is of one kernel as Triton compiles it today. It names the IR, the questions and the solver, so whoever
compiles the kernel anew can see, without a solver, whether it still speaks of that kernel and of these clauses.

It names the prover's code by what that code makes: `what_is_stale` translates the kernel and states the theorem with
the code as it is now, refusals included, and the questions have to be those that were answered. So a change of the
translator, of the clauses or of the steps counts exactly if it changes a question or refuses the kernel. What no
question shows is how it is put to the solver: `solver.ENCODING` counts that, and a test holds it to the source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from places import ROOT
from prove.columns import Columns, read_columns, together_of
from prove.counterexamples import Refuted, of_a_place, of_model, search
from prove.decoding import DecodingProof
from prove.dual import DualColumns, DualRows, read_dual
from prove.kernels import RULES, SIDE, TARGETS, Case, Compiled, Decoding, cases
from prove.layouts import Rows
from prove.questions import NotProved, Step
from prove.terms import var
from prove.theorems import Proof
from prove.transforms import TransformProof
from prove.ttir import UnknownOperation, digest_of, read
from rst_table import csv_table

RECORD = ROOT / "docs" / "records" / "proofs.jsonl"

ASSUMPTIONS = {
    "compilers": "Triton and LLVM make machine code that does what Triton's IR says",
    "floats": "the device's float32 operations are those of IEEE 754, to nearest even, subnormals kept",
    "ptx": "the instructions of inline assembly do what NVIDIA's documentation says",
    "launch": "the host launches enough programs, one row, with pointers to the whole arrays",
    "tools": "the translator and the solver are right",
}


@dataclass(frozen=True)
class Certificate:
    """A theorem that was proved."""

    case: str
    target: str
    kernel: str
    ir: str
    """SHA-256 of Triton's IR without source locations."""
    triton: str
    solver: str
    steps: dict[str, list[list[object]]]
    """By name: the digest of each question, and the seconds until it was answered."""
    seconds: float
    assumptions: list[str]
    """Keys of `ASSUMPTIONS`."""
    encoding: int = 1
    """How questions were put to the solver: `solver.ENCODING`."""


def read_certificates(path: Path = RECORD) -> dict[tuple[str, str], Certificate]:
    """Return the certificates by case and target."""
    if not path.exists():
        return {}
    found = [Certificate(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(c.case, c.target): c for c in found}


def write_certificates(found: dict[tuple[str, str], Certificate], path: Path = RECORD) -> None:
    """Write certificates in the order of the cases."""
    order = {name: place for place, name in enumerate(cases())}
    lines = [json.dumps(asdict(c)) for c in sorted(found.values(), key=lambda c: (c.target, order[c.case]))]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def proofs_of(compiled: Compiled) -> list[Proof | DecodingProof]:
    """Return the proofs of a compiled kernel, of each line that its threads take.

    Raises:
        NotProved: the code below Triton's IR may differ from it.
        UnknownOperation: the kernel has an operation that has no meaning here.
    """
    if compiled.faults:
        raise NotProved(f"below Triton's IR: {'; '.join(compiled.faults)}")
    case = cases()[compiled.case]
    if isinstance(case, Decoding):
        return [DecodingProof(case, read(compiled.ttir))]
    made = TransformProof if case.hadamard else Proof
    if case.axis == 1:
        return [made(case, Rows(case, read(compiled.ttir)))]
    if case.axis is None:
        by_row, by_column = read_dual(compiled.ttir, case, SIDE)
        columns = [DualColumns(case, by_column, which, SIDE) for which in range(together_of(case))]
        return [made(case, layout) for layout in (*columns, DualRows(case, by_row, columns[0]))]
    turned = read_columns(compiled.ttir, case, SIDE)
    return [made(case, Columns(case, turned, which, SIDE)) for which in range(together_of(case))]


def proof_of(compiled: Compiled) -> Any:
    """Return the only proof, or that of the first of two lines."""
    return proofs_of(compiled)[0]


def what_is_stale(certificate: Certificate, compiled: Compiled) -> str | None:
    """Return why a certificate is not of a kernel as it is now, or None."""
    if digest_of(compiled.ttir) != certificate.ir:
        return "the kernel's IR has changed"
    if certificate.encoding != encoding():
        return "questions are put to the solver in another way"
    asked = {digest for questions in certificate.steps.values() for digest, _ in questions}
    try:
        wanted = {step.digest for proof in proofs_of(compiled) for step in proof.steps()}
    except (NotProved, UnknownOperation) as err:
        return f"the kernel has no proof any more: {err}"
    return None if asked == wanted else "the clauses or the steps of the proof have changed"


def encoding() -> int:
    """Return `solver.ENCODING`, which is read from the source where no solver is installed."""
    text = (Path(__file__).parent / "solver.py").read_text(encoding="utf-8")
    found = re.search(r"^ENCODING = (\d+)$", text, re.M)
    assert found
    return int(found[1])


def decide(compiled: Compiled, known: dict[str, float], limit: float = 0.0) -> Iterator[tuple[Step, float]]:
    """Yield the steps of a kernel's proof with the seconds of each, as they are proved.

    Args:
        compiled: the kernel.
        known: seconds of the questions that were answered before, by digest.
        limit: seconds for one question, 0 for none.

    Raises:
        Refuted: a step does not hold.
        NotProved: there is no such proof, or no answer within the limit.
    """
    done = set()
    for proof in proofs_of(compiled):
        for step in _steps(proof, limit):
            if step.digest not in done:
                done.add(step.digest)
                yield step, _decided(proof, step, known, limit)


def _steps(proof: Proof | DecodingProof, limit: float) -> list[Step]:
    try:
        return proof.steps()
    except NotProved as err:
        example = search(proof, limit) if isinstance(proof, Proof) else None
        if example is None:
            raise
        raise Refuted(str(err), example) from err


def _decided(proof: Proof | DecodingProof, step: Step, known: dict[str, float], limit: float) -> float:
    """Return the seconds until a step was proved."""
    from prove.solver import ask

    digest = step.digest
    if digest not in known:
        answer = ask(step.goal, step.assumptions, limit)
        if answer.holds is None:
            raise NotProved(f"step {step.name} has no answer after {answer.seconds:.0f} s")
        if not answer.holds:
            if step.name == "places":
                raise NotProved(f"places does not hold, whatever the block: {_misplaced(proof, step, limit)}")
            what = f"{step.name} does not hold"
            if isinstance(proof, DecodingProof):
                raise Refuted(what, proof.example(answer.model))
            raise Refuted(what, of_model(proof, answer.model) or search(proof, limit))
        known[digest] = answer.seconds
    return known[digest]


def _misplaced(proof: Proof | DecodingProof, step: Step, limit: float) -> str:
    """Return a unit that is misplaced: of the first program, if there is one."""
    from prove.solver import ask

    first = (var("program_x", 31).equal(0), *step.assumptions)
    for assumptions in (first, step.assumptions):
        if (answer := ask(step.goal, assumptions, limit)).holds is False:
            return of_a_place(proof, answer.model)
    return "the solver gives no unit"


def certificate_of(compiled: Compiled, steps: Sequence[tuple[Step, float]]) -> Certificate:
    """Return the certificate of a kernel whose steps were all proved."""
    import triton

    from prove.solver import VERSION

    by_name: dict[str, list[list[object]]] = {}
    for step, seconds in steps:
        by_name.setdefault(step.name, []).append([step.digest, round(seconds, 2)])
    assumed = [key for key in ASSUMPTIONS if key != "ptx" or "elementwise_inline_asm" in compiled.ttir]
    return Certificate(
        compiled.case, compiled.target, compiled.kernel, digest_of(compiled.ttir), triton.__version__, VERSION,
        by_name, round(sum(seconds for _, seconds in steps), 2), assumed, encoding(),
    )  # fmt: skip


def parts(path: Path = RECORD) -> dict[str, str]:
    """Return the tables of docs/explanation/proofs.rst: the seconds of every theorem."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    others: dict[str, dict[str, str]] = {}
    for (name, target), certificate in read_certificates(path).items():
        case, seconds = cases()[name], f"{certificate.seconds:.1f}"
        if isinstance(case, Case) and case.is_plain:
            rows.setdefault((target, case.format, case.dtype), {})[case.rule] = seconds
        else:
            others.setdefault(name, {})[target] = seconds
    lines = [[*key, *(row.get(rule, "") for rule in RULES)] for key, row in rows.items()]
    more = [[f"`{name}`", *(row.get(target, "") for target in TARGETS)] for name, row in others.items()]
    return {
        "proofs.inc": csv_table(["target", "format", "input", *map(str.upper, RULES)], lines),
        "proofs_others.inc": csv_table(["theorem", *TARGETS], more),
    }
