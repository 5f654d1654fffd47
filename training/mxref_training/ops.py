"""The operations of a backend as torch operators, so that `torch.compile` sees no graph break.

Operators take tensors, integers and strings alone: a backend travels by its name in a table, the
treatment of an operand as compact JSON. GEMMs are counted here, where they run, and not where they are
asked for: a compiled graph that drops or replaces one cannot hide it from the census.
"""

from __future__ import annotations

import itertools
import json
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch

from mxref.backend import Backend
from mxref.errors import BackendError, ShapeError
from mxref.formats import MXFP4, OperandFormat
from mxref.linear import GemmRole
from mxref.mxarray import MXArray
from mxref.philox import Stream
from mxref.recipe import GemmProfile, OperandSpec
from mxref.rounding import Rounding
from mxref.tomlio import build, nearest, to_table
from mxref_training.bridge import from_backend, to_backend

Census = Counter[tuple[GemmRole, OperandFormat]]
"""How often each GEMM ran, by role and by the format of its operands."""

_backends: dict[str, Backend] = {}
_tallies: weakref.WeakValueDictionary[int, Census] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register_backend(backend: Backend) -> str:
    """Return the key by which operators find the backend: its name, numbered if another one has it."""
    for number in itertools.count(1):
        key = backend.name if number == 1 else f"{backend.name}#{number}"
        if _backends.setdefault(key, backend) is backend:
            return key
    raise AssertionError("unreachable: the count does not end")


def register_census(census: Census) -> int:
    """Return the handle under which GEMM operators count into `census`, for as long as it lives."""
    handle = next(_handles)
    _tallies[handle] = census
    return handle


def spec_text(spec: OperandSpec) -> str:
    """Return a spec as the compact JSON that operators take."""
    return json.dumps(to_table(spec), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=256)
def parse_spec(text: str) -> OperandSpec:
    """Return the spec of `spec_text`; RecipeError on a key or value that does not exist."""
    return build(OperandSpec, json.loads(text), "operand spec")


def stream_words(seed: int, layer: int, operand: int) -> list[int]:
    """Return a random stream without its step; the seed is split in two because operators take signed ones."""
    return [seed & 0xFFFFFFFF, seed >> 32, layer, operand]


def step_place(step: int, token_origin: int = 0, global_tokens: int | None = None) -> torch.Tensor:
    """Return where a micro-batch lies in training as int64 [3]: step, first token, tokens of the step or -1.

    It travels as a tensor because `torch.compile` would compile anew for every step given as an integer.
    """
    return torch.tensor([step, token_origin, -1 if global_tokens is None else global_tokens])


def _backend(key: str) -> Backend:
    if key not in _backends:
        raise BackendError(
            f"backend {key!r} is not registered{nearest(key, _backends)}; see register_backend"
        )
    return _backends[key]


def _count(tally: int, role: str, format: str) -> None:
    if (census := _tallies.get(tally)) is not None:
        census[GemmRole(role), OperandFormat(format)] += 1


@torch.library.custom_op("mxref::quantize", mutates_args=())
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
    impl, treatment = _backend(backend), parse_spec(spec)
    step, first, total = place.tolist()
    low, high, layer, operand = stream
    origin = global_shape = None
    # Only SR depends on the place; anything else may be split into micro-batches of any length.
    if tokens and treatment.rounding is Rounding.SR:
        origin = (first, 0)
        global_shape = None if total < 0 else (total, x.shape[1])
    q = impl.quantize(
        to_backend(x, impl),
        treatment,
        axis=axis,
        rng=Stream(low | high << 32, step, layer, operand),
        origin=origin,
        global_shape=global_shape,
        pad=tokens and axis == 0,
    )
    return from_backend(q.codes, impl), from_backend(q.scales, impl)


@quantize.register_fake
def _(
    x: torch.Tensor,
    place: torch.Tensor,
    backend: str,
    spec: str,
    axis: int,
    stream: Sequence[int],
    tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    unit = math.lcm(MXFP4.k, parse_spec(spec).hadamard or 1)
    rows = x.shape[1 - axis]
    length = -(-x.shape[axis] // unit) * unit
    return (
        x.new_empty((rows, length // 2), dtype=torch.uint8),
        x.new_empty((rows, length // MXFP4.k), dtype=torch.uint8),
    )


@torch.library.custom_op("mxref::scaled_gemm", mutates_args=())
def scaled_gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    out_dtype: str,
    role: str,
    tally: int = 0,
) -> torch.Tensor:
    """Return A B^T of two operands quantized along the contraction axis, and count it.

    Args:
        a_codes: uint8 [M, K / 2].
        a_scales: uint8 [M, K / 32].
        b_codes: uint8 [N, K / 2].
        b_scales: uint8 [N, K / 32].
        backend: key from `register_backend`.
        a_spec: treatment that made A, from `spec_text`.
        b_spec: treatment that made B.
        length: contraction length before padding, at most K.
        profile: the GEMM profile.
        out_dtype: `float32` or `bfloat16`.
        role: the linear layer's GEMM that this is.
        tally: handle from `register_census`; 0 counts nowhere.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ShapeError: operands that do not fit together.
        UnsupportedError: a profile or type that the backend does not declare.
    """
    impl = _backend(backend)
    specs = parse_spec(a_spec), parse_spec(b_spec)
    if (specs[0].hadamard, specs[0].signs) != (specs[1].hadamard, specs[1].signs):
        raise ShapeError("scaled_gemm: operands carry different Hadamard transforms; both need the same one")
    # The random signs need not travel: one spec and one stream per GEMM role gave both operands the same.
    a, b = (
        MXArray(
            to_backend(codes, impl),
            to_backend(scales, impl),
            (codes.shape[0], length),
            1,
            spec.block,
            spec.prescale,
        )
        for codes, scales, spec in ((a_codes, a_scales, specs[0]), (b_codes, b_scales, specs[1]))
    )
    out = impl.scaled_gemm(a, b, profile=GemmProfile(profile), out_dtype=out_dtype)
    _count(tally, role, OperandFormat.MXFP4)
    return from_backend(out, impl)


@scaled_gemm.register_fake
def _(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    backend: str,
    a_spec: str,
    b_spec: str,
    length: int,
    profile: str,
    out_dtype: str,
    role: str,
    tally: int = 0,
) -> torch.Tensor:
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[0]), dtype=getattr(torch, out_dtype))


@lru_cache(maxsize=4)
def _values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of the 256 codes of an FP8 type, float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _decode(q: torch.Tensor) -> torch.Tensor:
    """Return FP8 as float32 by a table: several times faster than torch's own cast of E4M3 on a CPU."""
    codes = q.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return _values(q.dtype).index_select(0, codes).view(q.shape)


@torch.library.custom_op("mxref::dense_gemm", mutates_args=())
def dense_gemm(a: torch.Tensor, b: torch.Tensor, role: str, tally: int = 0) -> torch.Tensor:
    """Return A B^T of two BF16 or two FP8 operands, accumulated in float32, and count it.

    FP8 operands are decoded and multiplied without rounding: their values have at most 4 significant
    bits, which every matrix unit multiplies exactly.

    Args:
        a: [M, K], bfloat16, float8_e4m3fn or float8_e5m2.
        b: [N, K], likewise.
        role: the linear layer's GEMM that this is.
        tally: handle from `register_census`; 0 counts nowhere.

    Returns:
        [M, N]: bfloat16 (rounded once) from BF16 operands, float32 from FP8.
    """
    if a.dtype is torch.bfloat16:
        out = a @ b.T
        _count(tally, role, OperandFormat.BF16)
        return out
    if a.device.type == "cpu":
        # Torch's CPU has no BF16 product with float32 output, and its _scaled_mm is twice as slow as this.
        out = _decode(a) @ _decode(b).T
    else:
        out = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16).T, out_dtype=torch.float32)
    _count(tally, role, OperandFormat.FP8)
    return out


@dense_gemm.register_fake
def _(a: torch.Tensor, b: torch.Tensor, role: str, tally: int = 0) -> torch.Tensor:
    dtype = torch.bfloat16 if a.dtype is torch.bfloat16 else torch.float32
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
