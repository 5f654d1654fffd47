"""Operators that make MXFP4: along one axis of a matrix, or along both in one read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mxref.backend import Backend
from mxref.formats import MXFP4
from mxref.mxarray import MXArray
from mxref.philox import Stream
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.rounding import Rounding
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.operators.registry import backend_of, fake, operator, parse_spec


@operator
def quantize(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    spec: str,
    axis: int,
    stream: Sequence[int],
    tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in MXFP4 as packed codes and scale codes, block axis last.

    Args:
        x: float32, bfloat16 or float16 [M, N], any strides.
        place: from `step_place`, on the CPU.
        backend: key from `register_backend`.
        spec: treatment, from `spec_text`.
        axis: the block axis, 0 or 1.
        stream: from `stream_words`.
        tokens: whether axis 0 is tokens, as in activations and gradients: SR then counts from their place
            in the step, and blocks along them are filled up with zeros. A weight has neither.

    Returns:
        uint8 [rows, K / 2] and uint8 [rows, K / 32], K the padded length of the block axis.

    Raises:
        MxrefError: as `mxref.Backend.quantize`.
    """
    impl, treatment = backend_of(backend), parse_spec(spec)
    step, first, total = place.tolist()
    lies = _lies(treatment, first, total, x.shape[1]) if tokens else {}
    q = impl.quantize(
        to_backend(x, impl),
        treatment,
        axis=axis,
        placement=Placement(_stream(stream, step), **lies),
        pad=tokens and axis == 0,
    )
    return _tensors(q, impl)


@fake(quantize)
def _(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    spec: str,
    axis: int,
    stream: Sequence[int],
    tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, spec, axis)


@operator
def quantize_dual(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    row_spec: str,
    column_spec: str,
    row_stream: Sequence[int],
    column_stream: Sequence[int],
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
        tokens: as in `quantize`.

    Returns:
        uint8 [M, N / 2] and [M, N / 32], then uint8 [N, M / 2] and [N, M / 32], M and N padded where they are halved.

    Raises:
        MxrefError: as `mxref.Backend.quantize_dual`.
    """
    impl, specs = backend_of(backend), (parse_spec(row_spec), parse_spec(column_spec))
    step, first, total = place.tolist()
    array, pads = to_backend(x, impl), (False, tokens)
    by_row, by_column = (_lies(s, first, total, x.shape[1]) if tokens else {} for s in specs)
    row, column = (Placement(_stream(words, step), **by_column) for words in (row_stream, column_stream))
    if by_row and not by_column:
        # The place that the rows need may cut a block along the tokens, which only SR there would refuse.
        pair = (
            impl.quantize(array, specs[0], axis=1, placement=Placement(row.stream, **by_row)),
            impl.quantize(array, specs[1], axis=0, placement=column, pad=pads[1]),
        )
    else:
        pair = impl.quantize_dual(array, specs, placements=(row, column), pads=pads)
    return (*_tensors(pair[0], impl), *_tensors(pair[1], impl))


@fake(quantize_dual)
def _(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    row_spec: str,
    column_spec: str,
    row_stream: Sequence[int],
    column_stream: Sequence[int],
    tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (*_empty(x, row_spec, 1), *_empty(x, column_spec, 0))


def _lies(spec: OperandSpec, first: int, total: int, width: int) -> dict[str, Any]:
    """Return `origin` and `global_shape` of an operand of tokens, or nothing.

    Only SR depends on the place; anything else may be split into micro-batches of any length.
    """
    if spec.rounding is not Rounding.SR:
        return {}
    return {"origin": (first, 0), "global_shape": None if total < 0 else (total, width)}


def _stream(words: Sequence[int], step: int) -> Stream:
    low, high, layer, operand = words
    return Stream(low | high << 32, step, layer, operand)


def _tensors(q: MXArray, impl: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    return from_backend(q.codes, impl), from_backend(q.scales, impl)


def _empty(x: torch.Tensor, spec: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale codes of the right shapes, without values."""
    unit = math.lcm(MXFP4.k, parse_spec(spec).hadamard or 1)
    rows = x.shape[1 - axis]
    length = -(-x.shape[axis] // unit) * unit
    return (
        x.new_empty((rows, length // 2), dtype=torch.uint8),
        x.new_empty((rows, length // MXFP4.k), dtype=torch.uint8),
    )
