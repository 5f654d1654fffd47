"""Operators that make operands of block formats: along one axis of a matrix, or along both in one read."""

from __future__ import annotations

import math

import torch

from mxref.backend import Backend
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.operators.registry import backend_of, block_format, draws, fake, operator, parse_spec, placed
from mxref_torch.operators.watch import Quantized, watchers


@operator
def quantize(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    spec: str,
    axis: int,
    stream: torch.Tensor,
    region: torch.Tensor,
    tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in the block format of a spec as packed codes and scale codes, block axis last.

    Args:
        x: float32, bfloat16 or float16 [M, N], any strides.
        place: from `step_place`, on the CPU.
        backend: key from `register_backend`.
        spec: treatment, from `spec_text`.
        axis: the block axis, 0 or 1.
        stream: from `stream_words`.
        region: where `x` lies in the layer's whole tensor, from `region_words`.
        tokens: whether axis 0 is tokens, as in activations and gradients. `place` then says where they lie, and
            blocks along them are filled up with zeros.

    Returns:
        uint8 [rows, K * bits / 8] and uint8 [rows, K / k], K the padded length of the block axis.

    Raises:
        MxrefError: as `mxref.Backend.quantize`.
    """
    impl, treatment = backend_of(backend), parse_spec(spec)
    placement, pad = _placement(x, place, treatment, stream, region, tokens), tokens and axis == 0
    if axis == 0:
        x = _whole_blocks(x, treatment, placement, tokens)
    q = impl.quantize(to_backend(x, impl), treatment, axis=axis, placement=placement, pad=pad)
    for watcher in watchers:
        watcher.quantized(Quantized(impl, x, treatment, axis, placement, pad, q))
    return _tensors(q, impl)


@fake(quantize)
def _(
    x: torch.Tensor, place: torch.Tensor, backend: str, spec: str, axis: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, spec, axis)


@operator
def quantize_dual(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    row_spec: str,
    column_spec: str,
    row_stream: torch.Tensor,
    column_stream: torch.Tensor,
    region: torch.Tensor,
    tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `quantize` returns along axis 1 and then along axis 0, from one read where the backend has it.

    Args:
        x: float32, bfloat16 or float16 [M, N], any strides.
        place: from `step_place`, on the CPU.
        backend: key from `register_backend`.
        row_spec: treatment along axis 1, from `spec_text`.
        column_spec: treatment along axis 0.
        row_stream: random stream along axis 1, from `stream_words`.
        column_stream: random stream along axis 0.
        region: as in `quantize`.
        tokens: as in `quantize`.

    Returns:
        Codes and scale codes along axis 1, uint8 with M rows, then those along axis 0, with N rows; each as
        `quantize` returns them.

    Raises:
        MxrefError: as `mxref.Backend.quantize_dual`.
    """
    impl, specs = backend_of(backend), (parse_spec(row_spec), parse_spec(column_spec))
    row, column = (
        _placement(x, place, treatment, stream, region, tokens)
        for treatment, stream in zip(specs, (row_stream, column_stream), strict=True)
    )
    filled = _whole_blocks(x, specs[1], column, tokens)
    by_row, by_column = impl.quantize_dual(
        to_backend(filled, impl), specs, placements=(row, column), pads=(False, tokens)
    )
    for watcher in watchers:
        watcher.quantized(Quantized(impl, filled, specs[0], 1, row, False, by_row))
        watcher.quantized(Quantized(impl, filled, specs[1], 0, column, tokens, by_column))
    codes, scales = _tensors(by_row, impl)
    return (codes[: x.shape[0]], scales[: x.shape[0]], *_tensors(by_column, impl))


@fake(quantize_dual)
def _(
    x: torch.Tensor, place: torch.Tensor, backend: str, row_spec: str, column_spec: str, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (*_empty(x, row_spec, 1), *_empty(x, column_spec, 0))


def _placement(
    x: torch.Tensor,
    place: torch.Tensor,
    spec: OperandSpec,
    stream: torch.Tensor,
    region: torch.Tensor,
    tokens: bool,
) -> Placement:
    """Return the random stream of an operand and, under SR, where it lies in the global tensor.

    Only SR depends on the place; anything else may be split into parts of any length. Where nothing is drawn,
    the stream names the operand alone.
    """
    low, high, layer, operand = stream.tolist()
    if not draws(spec):
        return Placement(Stream(0, 0, 0, operand))
    step, first, total = place.tolist()
    source = Stream(low | high << 32, step, layer, operand)
    if spec.rounding is not Rounding.SR:
        return placed(source) if spec.signs is not SignPolicy.FIXED else Placement(source)
    row, column, rows, columns = region.tolist()
    if tokens:
        row, rows = first, total
    if rows < 0 and columns < 0:
        return placed(source, (row, column))
    own = (rows if rows >= 0 else x.shape[0], columns if columns >= 0 else x.shape[1])
    return placed(source, (row, column), own)


def _whole_blocks(x: torch.Tensor, spec: OperandSpec, placement: Placement, tokens: bool) -> torch.Tensor:
    """Return a matrix whose tokens, along axis 0, fill whole blocks: with zeros, where others may follow in the step.

    A backend itself fills up the end of a step alone.
    """
    if not tokens or placement.global_shape is None or placement.origin is None:
        return x
    format = block_format(spec)
    missing = -x.shape[0] % math.lcm(format.k, spec.hadamard or 1)
    if not missing or placement.origin[0] + x.shape[0] >= placement.global_shape[0]:
        return x
    return torch.nn.functional.pad(x.detach(), (0, 0, 0, missing))


def _tensors(q: MXArray, impl: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    return from_backend(q.codes, impl), from_backend(q.scales, impl)


def _empty(x: torch.Tensor, spec: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale codes of the right shapes, without values."""
    treatment = parse_spec(spec)
    format = block_format(treatment)
    unit = math.lcm(format.k, treatment.hadamard or 1)
    rows = x.shape[1 - axis]
    length = -(-x.shape[axis] // unit) * unit
    return (
        x.new_empty((rows, format.code_bytes(length)), dtype=torch.uint8),
        x.new_empty((rows, length // format.k), dtype=torch.uint8),
    )
