"""What shows that a kernel is not its clauses: a block, the unit in which it lies, and its random stream.

A counterexample is found by what a solver's model says, by random blocks and streams, and by a look at each branch of
the kernel that depends on the unit or the stream. It counts only if the kernel's terms, evaluated, differ from the
reference. So a fault is shown by the command that explains the block: the specification's codes stand there.

A fault of a place is no matter of what a block holds. It is shown by the number of a unit, and by where the kernel
reads or writes for it and where it has to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mxref import quantize
from mxref.placement import Placement
from mxref.roles import OPERANDS
from mxref.steps.random import Stream, philox4x32
from prove import clauses
from prove.clauses import INFINITY, MAGNITUDE
from prove.decoding import CodeExample, DecodingProof
from prove.kernels import Case
from prove.layouts import Access
from prove.questions import NotProved
from prove.terms import Term, const, evaluate, in_order, var, variables
from prove.theorems import Proof
from prove.transforms import TransformProof

_OPERANDS = [f"{role.value}.{o.tensor}" for role, operands in OPERANDS.items() for o in operands]
NO_STREAM = Stream(0)
_TRUTHS = ("eq", "ult", "ule", "slt", "sle", "and", "or", "xor")
_FEW = 2048
"""Programs among which a unit is looked for."""
_SHORT = 1 << 20
"""Units of an array that a command writes to a file."""


@dataclass(frozen=True)
class Counterexample:
    """A block for which a kernel and the specification differ."""

    case: Case
    block: np.ndarray
    """Its bits, of the input's type."""
    unit: int = 0
    """The unit of the kernel in which the block lies, where another would not show the fault."""
    stream: Stream = NO_STREAM

    @property
    def command(self) -> str:
        """The command that explains what the specification gives for the block."""
        case, numbers = self.case, float32_of(self.case, self.block)
        used = max(np.flatnonzero(self.block), default=0) + 1
        words = [_number(x) for x in numbers[:used]]
        options = case.options
        if case.random_bits:
            stream = self.stream
            told = {"seed": stream.seed, "step": stream.step, "layer": stream.layer}
            options += [word for name, value in told.items() if value for word in (f"--{name}", str(value))]
            options += ["--operand", _OPERANDS[stream.operand]] if stream.operand else []
        if not case.random_bits or not self.unit or self.unit >= _SHORT:
            return " ".join(["mxref explain", *options, *words])
        listed = ", ".join(f"float('{word}')" for word in words)
        made = f"x = numpy.zeros(({self.unit + 1}, {case.block.k}), 'f4'); x[-1, :{used}] = {listed}"
        write = f"python -c \"import numpy; {made}; numpy.save('block.npy', x)\""
        return f"{write} && mxref explain --file block.npy --block {self.unit} {' '.join(options)}"

    @property
    def place(self) -> str:
        """Where the block has to lie, empty if anywhere."""
        return f", in unit {self.unit}" if self.unit else ""


class Refuted(NotProved):
    """A step does not hold."""

    def __init__(self, what: str, example: Counterexample | CodeExample | None) -> None:
        self.example = example
        self.command = example.command if example else None
        shown = f"{example.command or ''}{example.place}" if example else "no block was found that shows it"
        super().__init__(f"{what}; {shown}")


def _number(x: np.float32) -> str:
    bits = int(np.float32(x).view(np.uint32))
    return f"0x{bits:08x}" if np.isnan(x) and bits != 0x7FC00000 else repr(float(x))


def float32_of(case: Case, block: np.ndarray) -> np.ndarray:
    """Return the float32 numbers of a block of input bits."""
    if case.dtype == "float16":
        return block.astype(np.uint16).view(np.float16).astype(np.float32)
    return (block << (16 if case.dtype == "bfloat16" else 0)).astype(np.uint32).view(np.float32)


def stored_by_kernel(
    proof: Proof, blocks: np.ndarray, units: np.ndarray | None = None, stream: Stream = NO_STREAM
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes [n, words] and bytes [n] that the kernel's terms give for blocks of input bits [n, k].

    The blocks lie in the units 0, 1, .. or in the given ones.
    """
    words, byte = proof.stored
    values: dict[str, Any] = {f"argument{i}": 0 for i in range(len(proof.layout.kernel.widths))}
    values |= {x.value: blocks[:, j] for j, x in enumerate(proof.inputs)}
    values |= proof.layout.values(np.arange(len(blocks)) if units is None else units)
    low, high = (1 << 32) - 1, 32
    key = (stream.seed & low, stream.seed >> high, stream.word & low, stream.word >> high)
    values |= {f"argument{proof.layout.key + i}": word for i, word in enumerate(key)}
    *codes, scales = evaluate([*words, byte], values)
    shape = (len(blocks),)
    return np.stack([np.broadcast_to(c, shape) for c in codes], 1), np.broadcast_to(scales, shape)


def stored_by_reference(
    case: Case, blocks: np.ndarray, units: np.ndarray | None = None, stream: Stream = NO_STREAM
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as the reference gives it."""
    if units is not None and case.random_bits:  # a block has the random integers of its place
        parts = [_stored(case, blocks[i : i + 1], int(unit), stream) for i, unit in enumerate(units)]
        return np.concatenate([codes for codes, _ in parts]), np.concatenate([scales for _, scales in parts])
    return _stored(case, blocks, 0, stream)


def _stored(case: Case, blocks: np.ndarray, first: int, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    x = float32_of(case, blocks)
    place = Placement(stream, origin=(first, 0), global_shape=(first + len(x), x.shape[1]))
    q = quantize(x, case.spec, placement=place)
    return np.asarray(q.codes).view("<u4").astype(np.uint64), np.asarray(q.scales)[:, 0]


def first_difference(
    proof: Proof, blocks: np.ndarray, units: np.ndarray | None = None, stream: Stream = NO_STREAM
) -> Counterexample | None:
    """Return the first of some blocks for which the kernel's terms and the reference differ."""
    words, scales = stored_by_kernel(proof, blocks, units, stream)
    right_words, right_scales = stored_by_reference(proof.case, blocks, units, stream)
    differs = np.flatnonzero((words != right_words).any(1) | (scales != right_scales))
    if not len(differs):
        return None
    at = differs[0]
    unit = int(at if units is None else units[at])
    if unit and (plain := first_difference(proof, blocks[at : at + 1], np.array([0]), stream)):
        return plain
    return Counterexample(proof.case, blocks[at], unit, stream)


def of_model(proof: Proof, model: dict[str, int]) -> Counterexample | None:
    """Return a counterexample built from a solver's model.

    A model has some elements and amax, which is put beside them; one element alone is tried at every place. Under SR
    it has the random words of a call, and a seed is looked for that has such integers.
    """
    k, largest = proof.k, [model.get("amax_input", 0)]
    nan = model.get("amax", 0) & MAGNITUDE
    if nan > INFINITY:  # with its payload, which a maximum of integers keeps, or any
        dtype = "float32" if isinstance(proof, TransformProof) else proof.case.dtype
        largest = {
            "bfloat16": [nan >> 16, 0x7FC0],
            "float16": [0x7C00 | (nan >> 13 & 0x3FF), 0x7E00],
            "float32": [nan, 0x7FC00000],
        }[dtype]
    given = {int(name[1:]): value for name, value in model.items() if re.fullmatch(r"x\d+", name)}
    blocks = []
    for amax, shift in product(largest, range(k)):
        block = np.zeros(k, dtype=np.uint64)
        block[(max(given, default=0) + 1 + shift) % k] = amax
        for j, value in given.items():
            block[(j + shift) % k] = value
        blocks.append(block)
    unit, stream = _place_of(proof, model)
    if isinstance(proof, TransformProof):
        blocks = list(proof.blocks_for(np.array(blocks)))
    found = first_difference(proof, np.array(blocks), np.full(len(blocks), unit), stream)
    if found is None and any(name.startswith("word") for name in model):
        found = _with_seed(proof, blocks[: proof.k], model)
    return found


def _with_seed(proof: Proof, blocks: list[np.ndarray], model: dict[str, int]) -> Counterexample | None:
    """Return a counterexample of some blocks, or of any, under a seed with a random integer of a model's words."""
    bits = proof.case.random_bits
    per_call = 8 if bits <= 16 else 4
    known = {int(name[4:]) % 4: value for name, value in model.items() if re.fullmatch(r"word\d+", name)}
    words = [const(known.get(i, 0), 32) for i in range(4)]
    used = [
        j
        for j in range(per_call)
        if variables(clauses.random_integer(_WORDS, j, bits))[0].value[4:] in {str(i) for i in known}
    ]
    wanted = {j: int(evaluate([clauses.random_integer(words, j, bits)], {})[0]) for j in used}
    tried = np.concatenate([blocks, some_blocks(proof, 64)])
    for start in range(0, 1 << 23, 1 << 16):
        seeds = np.arange(start, start + (1 << 16))
        for call in range(proof.k // per_call):
            drawn = _words_of_call(call, seeds)
            for place, integer in wanted.items():
                (found,) = evaluate([clauses.random_integer(_WORDS, place, bits)], drawn)
                for seed in seeds[found == integer][:2]:
                    units = np.zeros(len(tried), dtype=np.int64)
                    if example := first_difference(proof, tried, units, Stream(int(seed))):
                        return example
    return None


_WORDS = [var(f"word{i}", 32) for i in range(4)]


def _words_of_call(call: int, seeds: np.ndarray) -> dict[str, np.ndarray]:
    """Return the words of a call in the streams of small seeds, by the names of `_WORDS`."""
    counter = np.array([call, 0, 0, 0], dtype=np.uint32)
    words = philox4x32(np.broadcast_to(counter, (len(seeds), 4)), (seeds.astype(np.uint64), 0))  # type: ignore[arg-type]
    return {f"word{i}": words[:, i] for i in range(4)}


def search(proof: Proof, limit: float) -> Counterexample | None:
    """Return a counterexample to the whole of a proof: one of some, one behind a branch, or one of the solver's."""
    from prove.solver import ask

    try:
        blocks = some_blocks(proof, 1024)
        random = np.random.default_rng(1)
        streams = [NO_STREAM]
        if proof.case.random_bits:
            streams += [Stream(int(random.integers(1 << 62)), i, 2 * i + 1, i) for i in range(1, 5)]
        tried = [blocks]
        if isinstance(proof, TransformProof):
            tried += [cancelling_blocks(proof, 4096), blocks_at_turns(proof)]
        for stream, some in product(streams, tried):
            if found := first_difference(proof, some, None, stream):
                return found
        if found := _behind_a_branch(proof, blocks[-96:]):
            return found
        for step in proof.whole_words() if not proof.case.random_bits else ():
            answer = ask(step.goal, step.assumptions, limit)
            if answer.holds is False and (found := of_model(proof, answer.model)) is not None:
                return found
    except NotProved:  # the words have no places in a unit
        return None
    return None


def _behind_a_branch(proof: Proof, blocks: np.ndarray) -> Counterexample | None:
    """Return a counterexample for a unit or a stream that a condition in the kernel sets apart."""
    from prove.solver import ask

    words, byte = proof.stored
    key = proof.layout.key
    low = var(f"argument{key + 2}", 32)
    usual = [var("program_x", 31).below(_FEW), (low & 0xFF).upto(5)]
    apart = {f"argument{key + i}" for i in range(4)} | set(proof.layout.values(np.arange(1)))
    for condition in _conditions([*words, byte], apart):
        for wanted in (condition, ~condition):
            answer = ask(~wanted, usual, 20.0)
            if answer.holds is not False:
                continue
            unit, stream = _place_of(proof, answer.model)
            some = blocks.copy()
            for j, x in enumerate(proof.inputs):
                if x.value in answer.model:
                    some[:, j] = answer.model[x.value]
            if found := first_difference(proof, some, np.full(len(some), unit), stream):
                return found
    return None


def _place_of(proof: Proof, model: dict[str, int]) -> tuple[int, Stream]:
    """Return the unit and the stream of a solver's model."""
    key = proof.layout.key
    seed, word = (
        model.get(f"argument{i}", 0) | model.get(f"argument{i + 1}", 0) << 32 for i in (key, key + 2)
    )
    return proof.layout.unit_of(model), Stream(seed, word >> 32, word >> 8 & 0xFFFFFF, min(word & 0xFF, 5))


def _conditions(roots: list[Term], apart: set[str]) -> Iterator[Term]:
    """Yield the truths that depend on the unit or the stream, but not on random words."""
    random = {t for t in in_order(roots) if t.op == "mul" and t.args[1].constant in clauses.PHILOX}
    after: set[Term] = set()
    for term in in_order(roots):
        if term in random or any(arg in after for arg in term.args):
            after.add(term)
        elif term.width == 1 and term.op in _TRUTHS and apart & {v.value for v in variables(term)}:
            yield term


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


def cancelling_blocks(proof: Proof, count: int) -> np.ndarray:
    """Return blocks whose sums lose what is small beside what cancels, so that the order of sums shows."""
    random = np.random.default_rng(2)
    numbers = np.array([0, 1, 3, 2.0**20, 2.0**26]) * 2.0 ** random.integers(-60, 60, (count, 1))
    signs = random.choice([-1.0, 1.0], (count, proof.k))
    chosen = np.take_along_axis(numbers, random.integers(0, 5, (count, proof.k)), 1)
    x = (signs * chosen).astype(np.float32).view(np.uint32).astype(np.uint64)
    return x >> np.uint64(32 - proof.inputs[0].width)


def blocks_at_turns(proof: TransformProof) -> np.ndarray:
    """Return blocks of bfloat16 whose amax after the transform is at a turn of a scale rule, or beside it.

    The bits of the sum are those of three elements.
    """
    turns = np.array([0, 0x400000, 0x600000, 0x700000, 0x780000, 0x7E0000, 0x7F0000]) + (127 << 23)
    around = (turns[:, None] + np.arange(-2, 3)).ravel().astype(np.uint32).view(np.float32)
    sums = (around * np.sqrt(proof.n)).astype(np.float32).view(np.uint32)
    sums = (sums[:, None] + np.arange(-3, 4)).ravel().astype(np.uint32)
    rest, pieces = sums.view(np.float32), []
    for _ in range(3):
        piece = (rest.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        pieces.append(piece.view(np.uint32).astype(np.uint64) >> np.uint64(16))
        rest = rest - piece
    blocks = np.zeros((len(sums), proof.k), dtype=np.uint64)
    blocks[:, :3] = np.stack(pieces, 1) if proof.n > 2 else 0
    return blocks


def of_a_place(proof: Proof | DecodingProof, model: dict[str, int]) -> str:
    """Return where a kernel reads or writes in a unit of a solver's model, and where it has to."""
    layout, head = proof.layout, proof.layout.told(model)
    values = {v.value: 0 for access in layout.accesses for v in variables(*_told(access))} | model
    for argument, width in enumerate(layout.kernel.widths):
        if width == 64:  # the arrays begin at 0
            values[f"argument{argument}"] = 0
    for access in layout.accesses:
        found, right, mask, exists = (int(x) for x in evaluate(_told(access), values))
        if found != right:
            return f"{head}: {access.name} is at byte {_signed(found)}, its place is byte {_signed(right)}"
        if mask != exists:
            return f"{head}, which does {'' if exists else 'not '}exist: {access.name} is {'' if mask else 'not '}moved"
    return head


def _told(access: Access) -> list[Term]:
    return [access.found, access.right, access.mask, access.exists]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
