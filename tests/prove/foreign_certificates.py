"""What was proved of kernels of others, and where they differ: a line of JSON for each kernel in docs/records.

For each kernel sets of blocks are tried from the largest on. The first that is proved is that of the theorem; for each
one before it the solver has a block that shows a difference, of which the smallest is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mxref.explain.link import explorer_link
from mxref.formats import BLOCK_FORMATS
from mxref.recipe import OperandSpec
from mxref.steps.scale import ScaleRule
from places import ROOT
from prove import clauses
from prove.certificates import encoding
from prove.clauses import MAGNITUDE
from prove.foreign import ALL, Domain, TileProof
from prove.foreign_kernels import (
    PROJECTS,
    Compiled,
    NotFound,
    Subject,
    compile_subjects,
    proof_of,
    subjects,
    where,
)
from prove.questions import NotProved, Step
from prove.terms import Term, const, widen
from prove.ttir import UnknownOperation, digest_of
from rst_table import csv_table

RECORD = ROOT / "docs" / "records" / "foreign.jsonl"

ASSUMPTIONS = {
    "compilers": "Triton and LLVM make machine code that does what Triton's IR says",
    "floats": "the device's float32 operations are those of IEEE 754, to nearest even, subnormals kept",
    "ptx": "the instructions of inline assembly do what NVIDIA's documentation says",
    "division": "div.full.f32 gives the nearest float32, of which NVIDIA promises two units in the last place",
    "float8": "the conversion to a float of 8 bits rounds to nearest even and saturates, as cvt.rn.satfinite does",
    "powers": "log2 and exp2 of the device are exact where the result, or the number, is a power of two",
    "whole": "a float32 becomes an unsigned byte by v_cvt_i32_f32 and its low bits, negative numbers too",
    "shifts": "a shift by 32 or more gives 0 on NVIDIA, and on AMD is one by the lowest five bits",
    "launch": "the host launches the programs of the whole matrix, of less than 2^31 blocks, as the record has them",
    "tools": "the translator and the solver are right",
}


def _has_scale(subject: Subject) -> Domain:
    element = BLOCK_FORMATS[subject.format].element

    def holds(u: Term) -> Term:
        return u.equal(0) | ~clauses.scale_byte(u, subject.rule, element).equal(0)

    return Domain("scale byte of 1 or more, or all zeros", holds)


def _near(subject: Subject) -> Domain:
    def each(y: Term, byte: Term) -> Term:
        e, m = clauses.exponent(y), widen(clauses.mantissa(y), 64)
        normal = ~e.equal(0) & widen(byte, 16).upto(widen(e, 16) + 32)
        # A subnormal number is m 2^-149, and the bound 2^(byte - 159).
        large = byte.upto(10) | (byte.below(34) & (const(1, 64) << widen(byte - 10, 64)).upto(m))
        return normal | m.equal(0) & e.equal(0) | e.equal(0) & large

    return Domain("elements 0, or of 2^-32 times the scale or more", each=each)


def _not_above_quarter(subject: Subject) -> Domain:
    def each(y: Term, byte: Term) -> Term:
        quarter = (clauses.exponent(y) + 2).equal(byte) & const(3, 8).upto(byte)
        m = clauses.mantissa(y)
        normal = quarter & ~m.equal(0) & m.upto(3)
        return ~normal & ~(byte.equal(2) & (y & MAGNITUDE).equal(0x00400001))

    return Domain("no element above a quarter of the scale by less than 2^-21 of it", each=each)


def _below_top(subject: Subject) -> Domain:
    return Domain("amax below 1.75 * 2^127", lambda u: u.below(0x7F600000))


def domains(subject: Subject) -> list[Domain]:
    """Return the sets of blocks that are tried, the largest first."""
    made = [_below_top] if subject.project == "aiter" else [_has_scale]
    if (subject.format, subject.dtype) == ("mxfp4", "float32") and subject.project != "aiter":
        made.append(_not_above_quarter)
    if subject.project == "triton_kernels" and subject.target == "gfx950":
        made.append(_near)
    out = [ALL]
    for each in made:
        out.append(each(subject) if out[-1] is ALL else out[-1].within(each(subject)))
    return out


@dataclass(frozen=True)
class Difference:
    """A block that a kernel stores otherwise than the clauses."""

    among: str
    """The set of which it is the smallest."""
    numbers: list[str]
    """Float32 bits of its numbers, without the zeros behind."""
    kernel: str
    """Scale byte and first codes that the kernel stores."""
    clauses: str
    command: str
    link: str
    """What follows the address of the explorer page."""


@dataclass(frozen=True)
class ForeignCertificate:
    """What is known of one kernel."""

    name: str
    version: str
    source: str
    """SHA-256 of the file that has the kernel."""
    kernel: str
    target: str
    format: str
    rule: str
    dtype: str
    ir: str
    triton: str
    solver: str
    proved: str
    """The set of blocks for which the kernel is proved; empty if there is none."""
    steps: dict[str, int] = field(default_factory=dict)
    """How many questions of each kind were answered."""
    questions: str = ""
    """SHA-256 of the digests of all questions."""
    seconds: float = 0.0
    assumptions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    encoding: int = 1
    """How questions were put to the solver: `solver.ENCODING`."""


def read_foreign(path: Path = RECORD) -> dict[str, ForeignCertificate]:
    """Return the certificates by the subject's name."""
    if not path.exists():
        return {}
    out = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        data["differences"] = [Difference(**each) for each in data["differences"]]
        out[data["name"]] = ForeignCertificate(**data)
    return out


def write_foreign(found: dict[str, ForeignCertificate], path: Path = RECORD) -> None:
    """Write certificates in the order of the subjects."""
    lines = [json.dumps(asdict(found[name])) + "\n" for name in subjects() if name in found]
    path.write_text("".join(lines), encoding="utf-8")


def digest_of_questions(steps: Sequence[Step]) -> str:
    """Return what identifies all questions of a proof."""
    return hashlib.sha256("".join(sorted(step.digest for step in steps)).encode()).hexdigest()


def what_is_stale(certificate: ForeignCertificate, compiled: Compiled) -> str | None:
    """Return why a certificate is not of a kernel as it is now, or None."""
    if digest_of(compiled.ttir) != certificate.ir:
        return "the kernel's IR has changed"
    if compiled.faults:
        return f"below Triton's IR: {'; '.join(compiled.faults)}"
    if certificate.encoding != encoding():
        return "questions are put to the solver in another way"
    subject = subjects()[certificate.name]
    for domain in domains(subject):
        if domain.told == certificate.proved:
            proof = proof_of(subject, compiled.ttir, domain)
            if digest_of_questions(proof.steps()) != certificate.questions:
                return "the questions have changed"
            if _assumed(compiled, proof) != certificate.assumptions:
                return "what is assumed has changed"
            return None
    return "the set of blocks has changed"


def refuting(proof: TileProof, limit: float = 0.0) -> tuple[Step, dict[str, int]] | float:
    """Ask every question of a proof; return the first that does not hold and its model, or else the seconds.

    Raises:
        NotProved: a question has no answer within the limit, or is not about the contents of a block.
    """
    from prove.solver import ask

    seconds, asked = 0.0, set()
    for step in proof.questions():
        if step in asked:
            continue
        asked.add(step)
        answer = ask(step.goal, step.assumptions, limit)
        seconds += answer.seconds
        if answer.holds is None:
            raise NotProved(f"step {step.name} has no answer after {answer.seconds:.0f} s")
        if not answer.holds:
            if step.name not in ("byte", "codes"):
                raise NotProved(f"{step.name} does not hold: {answer.model}")
            return step, answer.model
    return seconds


def smallest(proof: TileProof, step: Step, model: dict[str, int], limit: float = 0.0) -> np.ndarray | None:
    """Return a block that shows that a step does not hold, of the smallest amax for which there is one."""
    from prove.solver import ask

    low, given = 0, step.assumptions
    for _ in range(_TRIES):
        while low < model["amax"]:
            middle = (low + model["amax"]) // 2
            answer = ask(step.goal, (*given, proof.amax.upto(middle)), limit)
            if answer.holds is None:
                break
            if answer.holds:
                low = middle + 1
            else:
                model = answer.model
        block = _shown(proof, model)
        if block is not None:
            return block
        # What has no meaning differs for the solver, and may be the same in NumPy: a larger amax is tried.
        low = model["amax"] + 1
        given = (*step.assumptions, const(model["amax"], 32).below(proof.amax))
        answer = ask(step.goal, given, limit)
        if answer.holds is not False:
            break
        model = answer.model
    return None


_TRIES = 4


def _shown(proof: TileProof, model: dict[str, int]) -> np.ndarray | None:
    """Return a block made of a model's numbers that the kernel stores otherwise than the clauses."""
    given = [model[f"x{i}"] for i in range(2) if f"x{i}" in model]
    amax = model["amax_input"] & ((1 << proof.width - 1) - 1)
    for numbers in ([amax], *([x, amax] for x in given), [*given, amax]):
        block = np.zeros((1, proof.k), dtype=np.uint64)
        block[0, : len(numbers)] = numbers
        if proof.differing(block)[0]:
            return block[0]
    return None


def nonfinite(proof: TileProof) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a block of 1 and a NaN, and one of 1 and an infinity."""
    one, infinity, nan = {
        "bfloat16": (0x3F80, 0x7F80, 0x7FC0), "float16": (0x3C00, 0x7C00, 0x7E00),
        "float32": (0x3F800000, 0x7F800000, 0x7FC00000),
    }[proof.dtype]  # fmt: skip
    for told, number in (("NaN", nan), ("infinity", infinity)):
        block = np.zeros(proof.k, dtype=np.uint64)
        block[:2] = one, number
        yield told, block


def difference(proof: TileProof, subject: Subject, among: str, block: np.ndarray) -> Difference:
    """Return what a kernel and the clauses store for a block, with the command that explains it."""
    numbers = _float32(subject.dtype, block)
    used = max(np.flatnonzero(block), default=0) + 1
    words = [f"0x{int(w):08x}" for w in numbers[:used].view(np.uint32)]
    spec = OperandSpec(BLOCK_FORMATS[subject.format], ScaleRule(subject.rule))
    link = explorer_link(numbers, spec, page="explorer").partition("#")[2]
    return Difference(
        among, words, _told(*proof.stored_by_kernel(block[None])), _told(*proof.stored_by_clauses(block[None])),
        f"mxref explain --format {subject.format} --scale-rule {subject.rule} {' '.join(words)}", link,
    )  # fmt: skip


def _told(codes: np.ndarray, scales: np.ndarray) -> str:
    return f"{scales[0]:02X}: {' '.join(f'{c:02X}' for c in codes[0, :4])}"


def _float32(dtype: str, block: np.ndarray) -> np.ndarray:
    if dtype == "float16":
        return block.astype(np.uint16).view(np.float16).astype(np.float32)
    return (block << (16 if dtype == "bfloat16" else 0)).astype(np.uint32).view(np.float32)


def certify(compiled: Compiled, limit: float = 0.0) -> ForeignCertificate:
    """Return what is proved of a kernel, and the blocks that show where it differs.

    Raises:
        NotProved: nothing is proved; UnknownOperation: the kernel has no meaning here.
    """
    import triton

    from prove.solver import VERSION

    if compiled.faults:
        raise NotProved(f"below Triton's IR: {'; '.join(compiled.faults)}")
    subject = subjects()[compiled.name]
    differences: list[Difference] = []
    for domain in domains(subject):
        proof = proof_of(subject, compiled.ttir, domain)
        found = refuting(proof, limit)
        if isinstance(found, float):
            break
        block = smallest(proof, *found, limit)
        if block is None:
            raise NotProved(f"{found[0].name} does not hold, and no block was found that shows it")
        shown = difference(proof, subject, domain.told, block)
        if shown.numbers not in [d.numbers for d in differences]:
            differences.append(shown)
    else:
        raise NotProved(f"refuted: {differences[-1].command}")
    if _is_whole(compiled, proof) and not compiled.whole:
        raise NotProved("the machine code has other conversions to whole numbers than v_cvt_i32_f32")
    differences += [
        difference(proof, subject, f"(1 and {told})", block)
        for told, block in nonfinite(proof)
        if proof.differing(block[None])[0]
    ]
    steps = proof.steps()
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.name] = counts.get(step.name, 0) + 1
    return ForeignCertificate(
        compiled.name, compiled.version, compiled.source, subject.kernel, subject.target, subject.format,
        subject.rule, subject.dtype, digest_of(compiled.ttir), triton.__version__, VERSION, domain.told, counts,
        digest_of_questions(steps), round(found, 2), _assumed(compiled, proof), differences,
        encoding(),
    )  # fmt: skip


def _is_whole(compiled: Compiled, proof: TileProof) -> bool:
    """Return whether the kernel turns floats to unsigned numbers on AMD."""
    target = subjects()[compiled.name].target
    return target.startswith("gfx") and "arith.fptoui" in proof.kernel.operations


def _assumed(compiled: Compiled, proof: TileProof) -> list[str]:
    used = {
        "ptx": "elementwise_inline_asm" in compiled.ttir,
        "division": compiled.division,
        "float8": "tt.fp_to_fp" in proof.kernel.operations,
        "powers": bool(proof.kernel.operations & {"math.log2", "math.exp2"}),
        "whole": _is_whole(compiled, proof),
        "shifts": "shift by a variable" in proof.kernel.operations,
    }
    return [key for key in ASSUMPTIONS if used.get(key, True)]


def prove_foreign(
    names: Sequence[str], folder: Path | None, limit: float, again: bool
) -> Iterator[tuple[bool, str]]:
    """Yield for each subject whether it is proved or was skipped, and a line about it; write certificates."""
    certificates = read_foreign()
    there = []
    for name in names:
        try:
            where(PROJECTS[subjects()[name].project], folder)
            there.append(name)
        except NotFound as err:
            yield True, f"· {name}: {err}"
    for compiled in compile_subjects(there, folder) if there else ():
        old = certificates.get(compiled.name)
        try:
            if old is not None and not again and what_is_stale(old, compiled) is None:
                yield True, f"· {compiled.name}: certificate is valid"
                continue
            made = certify(compiled, limit)
        except (NotProved, UnknownOperation) as err:
            certificates.pop(compiled.name, None)
            yield False, f"✗ {compiled.name}: {err}"
            continue
        certificates[made.name] = made
        write_foreign(certificates)
        yield True, f"✓ {made.name}: {made.proved}; {sum(made.steps.values())} questions, {made.seconds} s"
        for each in made.differences:
            yield True, f"    {each.among}: stores {each.kernel}, clauses {each.clauses}\n    {each.command}"
    if there:
        write_foreign(certificates)


def parts(path: Path = RECORD) -> dict[str, str]:
    """Return the tables of docs/explanation/proofs.rst on kernels of others; tiles that say the same are one row."""
    proved: dict[tuple[str, ...], float] = {}
    shown: dict[tuple[str, ...], None] = {}
    for c in read_foreign(path).values():
        name = c.name.removesuffix(f".{c.target}")
        name = re.sub(r"\.\d+x\d+$", "", name)
        key = (name, c.target, c.proved)
        proved[key] = max(c.seconds, proved.get(key, 0.0))
        for d in c.differences:
            link = f"`{' '.join(d.numbers)} <../explorer/index.html#{d.link}>`__"
            shown[name, c.target, d.among, link, f"``{d.kernel}``", f"``{d.clauses}``"] = None
    return {
        "foreign_proved.inc": csv_table(
            ["kernel", "target", "equal for", "seconds"], [[*key, f"{s:.1f}"] for key, s in proved.items()]
        ),
        "foreign_differences.inc": csv_table(
            ["kernel", "target", "smallest of", "block", "kernel stores", "clauses"], map(list, shown)
        ),
    }
