"""From a wrong answer to a finding: the check of a request, and its failure in words and bits, shrunk.

`quantize_check`, `controlled_check` and `product_check` turn a request into a check. A wrong block is shown with the
`mxref explain` command that prints the steps to the expected one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.blame import MAX_WORDS, blame, smallest_block, smallest_product
from mxref.conformance.checking import Check, Subject
from mxref.conformance.outcome import CheckResult, Failure
from mxref.conformance.requests.decoding import first_place, shown
from mxref.conformance.requests.multiplying import Product, decided
from mxref.conformance.requests.quantizing import (
    Blocks,
    Judge,
    Place,
    Request,
    all_of_it,
    plainest,
    unit_rows,
)
from mxref.formats import ElementFormat
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref.roles import OPERANDS
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding

_OPERAND_NAMES = {o.id: f"{role.value}.{o.tensor}" for role, operands in OPERANDS.items() for o in operands}

_DEFAULT = OperandSpec()
_MAX_SHRINK_BLOCKS = 64
_FEW_ROWS = 4


Blamed = Callable[[Subject, Blocks, Place], str]
"""Returns the clause that a wrong block of an answer breaks."""


def quantize_check(
    clause: str, title: str, request: Request, judge: Judge = all_of_it, blamed: Blamed | None = None
) -> Check:
    """Return the check that a backend answers a request as the reference does, by the judge.

    A wrong block breaks the clause of the check, unless `blamed` names another for the plainest one.
    """

    def run(subject: Subject) -> CheckResult:
        want = request.expected_blocks
        got = subject.once(request, lambda: request.answer(subject))
        wrong, compared = judge(got, want)
        if not wrong.any():
            return CheckResult(compared)
        place, count = plainest(wrong, want, request.format), int(wrong.sum())
        broken = blamed(subject, got, place) if blamed else clause
        return CheckResult(compared, shrunk_failure(subject, request, place, broken, count, judge))

    return Check(clause, title, request, run)


def controlled_check(clause: str, title: str, request: Request, controls: Sequence[Request]) -> Check:
    """Return a check that blames its clause only if the backend answers each control right.

    A control is a similar request that does not depend on the clause; an undeclared one is not asked. If a control is
    wrong too, the failure counts under `quantize.order`, which joins all clauses.
    """

    def blamed(subject: Subject, got: Blocks, place: Place) -> str:
        asked = [control for control in controls if control.declared(subject.capabilities)]
        return "quantize.order" if any(control.wrong(subject).any() for control in asked) else clause

    return quantize_check(clause, title, request, blamed=blamed)


def product_check(clause: str, title: str, product: Product) -> Check:
    """Return the check that a backend's GEMM gives the required result, or under `bounded` an allowed one."""

    def run(subject: Subject) -> CheckResult:
        asked = product.in_class_of(subject)
        wrong, got = asked.wrong(subject)
        blamed, wrong = decided(subject, clause, asked, wrong)
        if not wrong.any():
            return CheckResult(wrong.size)
        at = first_place(wrong)
        small, here = smallest_product(subject, asked, at, clause, blamed) if subject.shrink else (asked, at)
        if subject.shrink:
            _, got = small.wrong(subject)
        message = f"{int(wrong.sum())} of {wrong.size} results differ, the first at {at}"
        return CheckResult(wrong.size, product_failure(small, here, blamed, message, got))

    return Check(clause, title, product, run)


def product_failure(
    product: Product, at: tuple[int, ...], clause: str, message: str, answer: NDArray[Any]
) -> Failure:
    """Return a wrong result of an answer as a failure of a clause; the message is one line."""
    expected = shown(product.expected[at])
    if product.profile is GemmProfile.BOUNDED:
        total, tolerance = product.bound
        expected = f"{total[at]:.9g} within {tolerance[at]:.3g}"
    inputs = {
        name: tuple(_blocks(q, range(len(q.scales)) if len(q.scales) <= _FEW_ROWS else [at[i]]))
        for i, (name, q) in enumerate((("A", product.a), ("B", product.b)))
        if q.scales.size <= _MAX_SHRINK_BLOCKS
    }
    return Failure(clause, message, product.describe(), inputs, expected, shown(answer[at]))


def _blocks(q: MXArray, rows: Iterable[int]) -> Iterator[str]:
    for row in rows:
        for scale, codes in zip(q.scales[row], q.codes[row].reshape(len(q.scales[row]), -1), strict=True):
            yield f"{int(scale):02x}:{bytes(codes).hex()}"


def shrunk_failure(
    subject: Subject, request: Request, place: Place, clause: str, wrong: int, judge: Judge = all_of_it
) -> Failure:
    """Return a wrong block, one of `wrong` many, as a failure; it is shrunk if `subject.shrink` is true."""
    message = f"{wrong} of {request.expected_blocks.scales.size} blocks differ"
    if subject.shrink:
        whole = request
        at, request, place = smallest_block(subject, request, place, clause, judge)
        message += f"; shown is the one at {_where(whole, *at)}, shrunk"
    else:
        message += f", one of them at {_where(request, *place)}"
    answer = subject.once(request, lambda: request.answer(subject))
    return block_failure(request, place, clause, message, answer)


def block_failure(request: Request, place: Place, clause: str, message: str, answer: Blocks) -> Failure:
    """Return a wrong block of an answer as a failure of a clause; the message is one line."""
    row, block = place
    element = request.element
    want, got = _block(request.expected_blocks, row, block), _block(answer, row, block)
    flat = unit_rows(request, row, block).astype(np.float32).view(np.uint32).ravel()
    words = tuple(f"0x{int(w):08x}" for w in flat)
    return Failure(
        clause, message, request.describe(), {"x": words}, _tensor(request.expected_blocks) + _text(want, element),
        _tensor(answer) + _text(got, element), tuple(int(i) for i in np.flatnonzero(want[1] != got[1])),
        explain_command(request, row, block),
    )  # fmt: skip


def answer_failure(request: Request, answer: Blocks, check: str) -> Failure | None:
    """Return how an answer that somebody else got differs from the reference's; None where it does not."""
    wrong, _ = all_of_it(answer, request.expected_blocks)
    if not wrong.any():
        return None
    row, block = first_place(wrong)
    message = (
        f"{int(wrong.sum())} of {wrong.size} blocks differ; shown is the first, block {block} of row {row}"
    )
    clause = blame(request, answer, (row, block))
    return replace(block_failure(request, (row, block), clause, message, answer), check=check)


def explain_command(request: Request, row: int, block: int) -> str | None:
    """Return the `mxref explain` command that prints the steps to the expected block; None if no command can.

    `row` is the stored row. A tile's numbers do not fit in a command.
    """
    spec, plan = request.spec, request.plan
    if spec.block.is_tile:
        return None
    options = ["mxref", "explain", *_spec_options(spec)]
    if request.tensor_amax is not None:
        options += ["--amax", repr(request.tensor_amax)]
    if request.rng is not None and (spec.rounding is Rounding.SR or spec.signs is not SignPolicy.NONE):
        options += _stream_options(request.rng)
    before = 0
    if spec.rounding is Rounding.SR:  # the place decides the random bits: zeros fill what lies before it
        before = request.elements_before(row, block)
        if before + plan.unit > MAX_WORDS or before % plan.unit:
            return None
    bits = unit_rows(request, row, block).astype(np.float32).view(np.uint32).ravel()
    words = [f"0x{int(w):08x}" if w else "0" for w in bits]
    while len(words) > 1 and words[-1] == "0":
        words.pop()
    index = before // request.format.k + block % (plan.unit // request.format.k)
    return shlex.join([*options, "--block", str(index), *["0"] * before, *words])


def _spec_options(spec: OperandSpec) -> Iterator[str]:
    """Yield the options of `mxref explain` that give a treatment."""
    for name in (
        "format", "scale_rule", "rounding", "sr_bits", "hadamard", "signs", "zero_scale", "arithmetic", "four_over_six",
    ):  # fmt: skip
        value = getattr(spec, name)
        if value != getattr(_DEFAULT, name):
            yield from (f"--{name.replace('_', '-')}", str(getattr(value, "value", value)))
    if spec.prescale:
        yield "--prescale"


def _stream_options(stream: Stream) -> Iterator[str]:
    """Yield the options of `mxref explain` that give a random stream."""
    for name in ("seed", "step", "layer"):
        if getattr(stream, name):
            yield from (f"--{name}", str(getattr(stream, name)))
    if stream.operand:
        yield from ("--operand", _OPERAND_NAMES[stream.operand])


def _block(blocks: Blocks, row: int, block: int) -> tuple[int, NDArray[np.uint8]]:
    return int(blocks.scales[row, block]), blocks.codes[row, block]


def _text(block: tuple[int, NDArray[np.uint8]], element: ElementFormat) -> str:
    return f"scale {block[0]:02x}  codes {pack(block[1], element).tobytes().hex(' ')}"


def _tensor(blocks: Blocks) -> str:
    """Return the scale of the tensor, where there is one, as the beginning of the text of a block."""
    return "" if blocks.tensor is None else f"tensor {blocks.tensor:08x}  "


def _where(request: Request, row: int, block: int) -> str:
    """Return the place of a block in the array: its elements, in the array's own axes."""
    plan = request.plan
    index = [str(int(i)) for i in np.unravel_index(row, plan.rows_shape)] if plan.rows_shape else []
    k = request.format.k
    index.insert(plan.axis, f"{block * k}:{block * k + k}")
    return f"[{', '.join(index)}]"
