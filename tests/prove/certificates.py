"""What was proved: one line of JSON for each theorem, beside the other records.

A certificate is of one kernel as Triton compiles it today. It names the IR, the questions and the solver, so whoever
compiles the kernel anew can see, without a solver, whether it still speaks of that kernel and of these clauses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from mxref.formats import INPUT_DTYPES
from places import ROOT
from prove import clauses
from prove.clauses import INFINITY, MAGNITUDE
from prove.kernels import RULES, Case, Compiled, cases
from prove.terms import evaluate, extract
from prove.theorems import NotProved, Proof, Step
from prove.ttir import LANE, digest_of, read
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


def proof_of(compiled: Compiled) -> Proof:
    """Return the proof of a compiled kernel; NotProved if the code below Triton's IR may differ from it."""
    if compiled.faults:
        raise NotProved(f"below Triton's IR: {'; '.join(compiled.faults)}")
    return Proof(cases()[compiled.case], read(compiled.ttir))


def what_is_stale(certificate: Certificate, compiled: Compiled) -> str | None:
    """Return why a certificate is not of a kernel as it is now, or None."""
    if digest_of(compiled.ttir) != certificate.ir:
        return "the kernel's IR has changed"
    asked = {digest for questions in certificate.steps.values() for digest, _ in questions}
    wanted = {step.digest for step in proof_of(compiled).steps()}
    return None if asked == wanted else "the clauses or the steps of the proof have changed"


class Refuted(NotProved):
    """A step does not hold."""

    def __init__(self, step: str, case: Case, block: np.ndarray | None) -> None:
        self.block = block
        self.command = None if block is None else command_for(case, block)
        super().__init__(f"{step} does not hold: {self.command or 'no block was found that shows it'}")


def float32_of(case: Case, block: np.ndarray) -> np.ndarray:
    """Return the float32 numbers of a block of input bits."""
    if case.dtype == "float16":
        return block.astype(np.uint16).view(np.float16).astype(np.float32)
    return (block << (16 if case.dtype == "bfloat16" else 0)).astype(np.uint32).view(np.float32)


def command_for(case: Case, block: np.ndarray) -> str:
    """Return the command that explains what the specification gives for a block."""
    assert case.dtype in INPUT_DTYPES
    numbers = float32_of(case, block)
    used = max(np.flatnonzero(block), default=0) + 1
    zero = f" --zero-scale {case.zero_scale}" if case.zero_scale else ""
    words = " ".join(repr(float(x)) for x in numbers[:used])
    zero += "" if case.rounding == "rne" else f" --rounding {case.rounding}"
    return f"mxref explain --format {case.format} --scale-rule {case.rule}{zero} {words}"


def stored_by_kernel(
    proof: Proof, blocks: np.ndarray, stream: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes [n, words] and bytes [n] that the kernel's terms give for blocks of input bits [n, k].

    `stream` is the two words of the seed and the two of the stream; block n is unit n.
    """
    words, byte = proof.stored
    values = {x.value: blocks[:, j] for j, x in enumerate(proof.inputs)}
    program, lane = np.divmod(np.arange(len(blocks)), proof.kernel.units)
    values |= {"program_x": program, LANE: lane, "argument8": 0, "argument9": 0}
    values |= {f"argument{10 + i}": word for i, word in enumerate(stream)}
    *codes, scales = evaluate([*words, byte], values)
    shape = (len(blocks),)
    return np.stack([np.broadcast_to(c, shape) for c in codes], 1), np.broadcast_to(scales, shape)


def stored_by_clauses(proof: Proof, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as the clauses give it."""
    u = clauses.largest([y & MAGNITUDE for y in proof.ys])
    byte = clauses.scale_byte(u, proof.case.rule, proof.element, proof.case.zero_scale)
    codes = [clauses.element_code(y, byte, proof.element, proof.case.rounding) for y in proof.ys]
    stream = clauses.packed(codes)
    words = [extract(stream, 32 * w + 31, 32 * w) for w in range(proof.words_out)]
    values = {x.value: blocks[:, j] for j, x in enumerate(proof.inputs)}
    *out, scales = evaluate([*words, byte], values)
    return np.stack(out, 1), scales


def differing_block(proof: Proof, model: dict[str, int]) -> np.ndarray | None:
    """Return a block for which the kernel's terms and the clauses differ, built from a solver's model.

    A model has some elements and amax, which is put beside them; one element alone is tried at every place.
    """
    k, largest = proof.k, [model.get("amax_input", 0)]
    nan = model.get("amax", 0) & MAGNITUDE
    if nan > INFINITY:  # with its payload, which a maximum of integers keeps, or any
        largest = {
            "bfloat16": [nan >> 16, 0x7FC0],
            "float16": [0x7C00 | (nan >> 13 & 0x3FF), 0x7E00],
            "float32": [nan, 0x7FC00000],
        }[proof.case.dtype]
    given = {int(name[1:]): value for name, value in model.items() if re.fullmatch(r"x\d+", name)}
    blocks = []
    for amax, shift in product(largest, range(k)):
        block = np.zeros(k, dtype=np.uint64)
        block[(max(given, default=0) + 1 + shift) % k] = amax
        for j, value in given.items():
            block[(j + shift) % k] = value
        blocks.append(block)
    return first_difference(proof, np.array(blocks))


def _search(proof: Proof, limit: float) -> np.ndarray | None:
    """Return a block for which the kernel's terms and the clauses differ: one of some, or one that the solver finds."""
    from prove.solver import ask

    block = first_difference(proof, some_blocks(proof, 1024))
    deterministic = proof.case.rounding != "sr"
    for step in proof.whole_words() if block is None and deterministic else ():
        answer = ask(step.goal, step.assumptions, limit)
        if answer.holds is False and (block := differing_block(proof, answer.model)) is not None:
            break
    return block


def first_difference(proof: Proof, blocks: np.ndarray) -> np.ndarray | None:
    """Return the first of some blocks for which the kernel's terms and the clauses differ."""
    if proof.case.rounding == "sr":  # a block alone shows nothing
        return None
    (words, scales), (right_words, right_scales) = (
        stored_by_kernel(proof, blocks),
        stored_by_clauses(proof, blocks),
    )
    differs = (words != right_words).any(1) | (scales != right_scales)
    return blocks[differs][0] if differs.any() else None


def some_blocks(proof: Proof, count: int, seed: int = 0) -> np.ndarray:
    """Return blocks of input bits: near the grid under a random scale, any bits, and a few special ones."""
    random = np.random.default_rng(seed)
    width = proof.inputs[0].width
    blocks = random.integers(0, 1 << width, (count, proof.k), dtype=np.uint64)
    fields = {"bfloat16": (7, 255), "float16": (10, 31), "float32": (23, 255)}[proof.case.dtype]
    # Exponents near one of the block, and few mantissa bits: ties, saturation and underflow.
    near = blocks[: count // 2]
    base = random.integers(0, fields[1], (len(near), 1))
    exponents = np.clip(base - random.integers(0, 12, near.shape), 0, fields[1] - 1).astype(np.uint64)
    mantissas = near & np.uint64((1 << fields[0]) - 1) & ~np.uint64((1 << fields[0] - 3) - 1)
    mantissas ^= random.integers(0, 20, near.shape, dtype=np.uint64) // np.uint64(19)
    near[:] = (
        (near >> np.uint64(width - 1) << np.uint64(width - 1)) | exponents << np.uint64(fields[0]) | mantissas
    )
    blocks[-1], blocks[-2] = 0, 1 << (width - 1)
    blocks[-3, 1:] = 0
    special = (fields[1] << fields[0]) + np.arange(3)
    blocks[-6:-3, 5] = special
    return blocks


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
    from prove.solver import ask

    proof = proof_of(compiled)
    try:
        steps = proof.steps()
    except NotProved as err:
        block = _search(proof, limit)
        if block is None:
            raise
        raise Refuted(str(err), proof.case, block) from err
    for step in steps:
        digest = step.digest
        if digest not in known:
            answer = ask(step.goal, step.assumptions, limit)
            if answer.holds is None:
                raise NotProved(f"step {step.name} has no answer after {answer.seconds:.0f} s")
            if not answer.holds:
                if step.name == "places":
                    raise NotProved(
                        "places does not hold: a word or the byte lies elsewhere, whatever the block"
                    )
                block = differing_block(proof, answer.model)
                raise Refuted(step.name, proof.case, _search(proof, limit) if block is None else block)
            known[digest] = answer.seconds
        yield step, known[digest]


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
        by_name, round(sum(seconds for _, seconds in steps), 2), assumed,
    )  # fmt: skip


def parts(path: Path = RECORD) -> dict[str, str]:
    """Return the table of docs/explanation/proofs.rst: the seconds of every theorem."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for (name, target), certificate in read_certificates(path).items():
        case = cases()[name]
        if not (case.zero_scale or case.masked or case.rounding != "rne"):
            row = rows.setdefault((target, case.format, case.dtype), {})
            row[case.rule] = f"{certificate.seconds:.1f}"
    lines = [[*key, *(row.get(rule, "") for rule in RULES)] for key, row in rows.items()]
    return {"proofs.inc": csv_table(["target", "format", "input", *map(str.upper, RULES)], lines)}
