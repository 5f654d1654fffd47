"""Shrinks a failing quantization to the smallest block that still fails, and makes the command that explains it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.model import Failure, Subject
from mxref.conformance.requests.quantization import Blocks, Judge, Request, all_of_it, tile_rows, unit_rows
from mxref.conformance.shrink.own import Own, own_block
from mxref.formats import BlockShape, ElementFormat
from mxref.layouts.packed import pack
from mxref.recipe import UNTURNED, OperandSpec
from mxref.roles import OPERANDS
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

OPERAND_NAMES = {o.id: f"{role.value}.{o.tensor}" for role, operands in OPERANDS.items() for o in operands}

_DEFAULT = OperandSpec()
_MAX_TRIES = 300
_MAX_WORDS = 512
"""Longest input that is shown as words: a unit of H256, and as much before it."""


def shrink_quantize(
    subject: Subject,
    request: Request,
    row: int,
    block: int,
    clause: str,
    check: str,
    wrong: int,
    judge: Judge = all_of_it,
) -> Failure:
    """Return the failure at a block of a request, shrunk if the subject says so.

    Args:
        subject: the backend.
        request: what it answers wrongly.
        row: stored row of a wrong block.
        block: number of the wrong block in its row.
        clause: clause of the check.
        check: its name.
        wrong: how many blocks were wrong.
        judge: of the check.
    """
    total = request.expected_blocks.scales.size
    if subject.shrink:
        own, (row, block) = own_block(subject, request, (row, block), clause, judge)
    at = _where(request, row, block)
    if subject.shrink:
        request, row, block = _smallest(own, request, row, block)
    message = (
        f"{wrong} of {total} blocks differ; shown is the one at {at}, shrunk"
        if subject.shrink
        else (f"{wrong} of {total} blocks differ, one of them at {at}")
    )
    answer = subject.once(request, lambda: Blocks.of(request.answer(subject)))
    return block_failure(request, (row, block), clause, check, message, answer)


def block_failure(
    request: Request, place: tuple[int, int], clause: str, check: str, message: str, answer: Blocks
) -> Failure:
    """Return the failure that a wrong block of an answer is.

    Args:
        request: what was asked.
        place: stored row and number of the block.
        clause: that it breaks.
        check: name of the check.
        message: what is wrong, in one line.
        answer: the wrong answer.
    """
    row, block = place
    element = request.element
    want, got = _block(request.expected_blocks, row, block), _block(answer, row, block)
    array = unit_rows(request, row, block)
    flat = array.astype(np.float32).view(np.uint32).ravel()
    tile = request.spec.block is BlockShape.TILE
    command = explain_command(request, row, block, "FILE" if tile else None)
    words = tuple(f"0x{int(w):08x}" for w in flat)
    return Failure(
        clause, check, message, request.describe(), {"x": words}, _text(want, element),
        _text(got, element), tuple(int(i) for i in np.flatnonzero(want[1] != got[1])),
        None if tile else command, array, command,
    )  # fmt: skip


def explain_command(request: Request, row: int, block: int, file: str | None = None) -> str | None:
    """Return the `mxref explain` command that prints how the expected block comes about, None where none can.

    Args:
        request: the quantization.
        row: stored row of the block.
        block: number of the block in its row.
        file: where the block's rows are saved, needed for tiles.
    """
    spec, plan = request.spec, request.plan
    options = ["mxref", "explain", *spec_options(spec)]
    if request.rng is not None and (spec.rounding is Rounding.SR or spec.signs is not SignPolicy.NONE):
        options += stream_options(request.rng)
    unit_blocks = plan.unit // request.format.k
    inside = block % unit_blocks
    if spec.block is BlockShape.TILE:
        rows = tile_rows(request, row)
        in_place = (int(plan.global_rows()[rows.start]), plan.first, plan.global_length) == (0, 0, plan.unit)
        if file is None or (spec.rounding is Rounding.SR and not in_place):
            return None
        index = (row - rows.start) * unit_blocks + inside
        return shlex.join([*options, "--file", file, "--block", str(index)])
    before = 0
    if (
        spec.rounding is Rounding.SR
    ):  # the block's place decides its random bits: zeros fill what lies before it
        start = int(plan.global_rows()[row]) * plan.global_length + plan.first
        before = start + block // unit_blocks * plan.unit
        if before + plan.unit > _MAX_WORDS or before % plan.unit:
            return None
    bits = unit_rows(request, row, block).astype(np.float32).view(np.uint32).ravel()
    words = [f"0x{int(w):08x}" if w else "0" for w in bits]
    while len(words) > 1 and words[-1] == "0":
        words.pop()
    index = before // request.format.k + inside
    return shlex.join([*options, "--block", str(index), *["0"] * before, *words])


def spec_options(spec: OperandSpec) -> Iterator[str]:
    """Yield the options of `mxref explain` that give a treatment."""
    for name in ("format", "scale_rule", "rounding", "sr_bits", "hadamard", "signs", "zero_scale"):
        value = getattr(spec, name)
        if value != getattr(_DEFAULT, name):
            yield from (f"--{name.replace('_', '-')}", str(getattr(value, "value", value)))
    if spec.prescale:
        yield "--prescale"
    if spec.block is BlockShape.TILE:
        yield "--tile"


def stream_options(stream: Stream) -> Iterator[str]:
    """Yield the options of `mxref explain` that give a random stream."""
    for name in ("seed", "step", "layer"):
        if getattr(stream, name):
            yield from (f"--{name}", str(getattr(stream, name)))
    if stream.operand:
        yield from ("--operand", OPERAND_NAMES[stream.operand])


def _smallest(own: Own, request: Request, row: int, block: int) -> tuple[Request, int, int]:
    """Return the simplest request found whose answer at the block is still wrong, for the same reason."""
    for candidate, place in _plain_forms(request, row, block):
        if own.shown(candidate, place):
            request, (row, block) = candidate, place
            break
    for changes in _SIMPLER:
        candidate = replace(request, spec=replace(request.spec, **changes))
        if candidate.spec != request.spec and own.shown(candidate, (row, block)):
            request = candidate
    for candidate, place in _plain_forms(request, row, block):  # without a transform, one block is a unit
        if candidate.x.size < request.x.size and own.shown(candidate, place):
            request, (row, block) = candidate, place
            break
    return _fewest_elements(own, request, row, block), row, block


def _plain_forms(request: Request, row: int, block: int) -> Iterator[tuple[Request, tuple[int, int]]]:
    """Yield the block as a request of its own: at the origin, or where its random bits are the same."""
    plan = request.plan
    x = np.ascontiguousarray(unit_rows(request, row, block))
    height, inside = (row - tile_rows(request, row)[0]), block % (plan.unit // request.format.k)
    yield Request(x, request.spec, rng=request.rng), (height, inside)
    if request.spec.rounding is Rounding.SR and request.spec.block is BlockShape.ROW:
        start = int(plan.global_rows()[row]) * plan.global_length + plan.first
        before = start + block // (plan.unit // request.format.k) * plan.unit
        if before + plan.unit <= _MAX_WORDS and before % plan.unit == 0:
            padded = np.concatenate([np.zeros((1, before), x.dtype), x], axis=1)
            yield Request(padded, request.spec, rng=request.rng), (0, before // request.format.k + inside)


_SIMPLER: tuple[dict[str, Any], ...] = (
    UNTURNED, {"signs": SignPolicy.NONE, "sign_vector": None}, {"rounding": Rounding.RNE, "sr_bits": 16},
    {"sr_bits": 16}, {"prescale": False}, {"block": BlockShape.ROW}, {"zero_scale": 0},
    {"scale_rule": ScaleRule.FLOOR},
)  # fmt: skip
"""Treatments with one choice less; each is tried on top of those that were taken."""


def _fewest_elements(own: Own, request: Request, row: int, block: int) -> Request:
    """Return the request with as many elements as possible made zero, runs of them first."""
    left = np.flatnonzero(request.x.astype(np.float32).view(np.uint32))
    run, tries = len(left), 0
    while run and tries < _MAX_TRIES:
        start = 0
        while start < len(left) and tries < _MAX_TRIES:
            x = request.x.copy()
            x.reshape(-1)[left[start : start + run]] = 0
            candidate = replace(request, x=x)
            tries += 1
            if own.shown(candidate, (row, block)):
                request, left = candidate, np.delete(left, slice(start, start + run))
            else:
                start += run
        run //= 2
    return request


def _block(blocks: Blocks, row: int, block: int) -> tuple[int, NDArray[np.uint8]]:
    return int(blocks.scales[row, block]), blocks.codes[row, block]


def _text(block: tuple[int, NDArray[np.uint8]], element: ElementFormat) -> str:
    return f"scale {block[0]:02x}  codes {pack(block[1], element).tobytes().hex(' ')}"


def _where(request: Request, row: int, block: int) -> str:
    """Return the place of a block in the array: its elements, in the array's own axes."""
    plan = request.plan
    index = [str(int(i)) for i in np.unravel_index(row, plan.rows_shape)] if plan.rows_shape else []
    k = request.format.k
    index.insert(plan.axis, f"{block * k}:{block * k + k}")
    return f"[{', '.join(index)}]"
