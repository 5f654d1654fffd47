"""Other packages that quantize to MXFP4 on a CPU: each at a size that it can finish, with what it leaves out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from bench.operations import PLAIN, REFERENCE, inputs
from bench.timing import in_turns
from mxref import Backend
from mxref.formats import E2M1
from mxref.layouts.packed import pack

Matrix = NDArray[Any]
Stored = tuple[Matrix, Matrix]


@dataclass(frozen=True)
class Peer:
    """One way to quantize a float32 matrix in blocks of 32 with FLOOR and RNE."""

    name: str
    distribution: str
    share: int
    """It gets 1 / share of the rows and columns: slow ones get a smaller matrix."""
    make: Callable[[], Callable[[Matrix], Any]]
    """Prepare it, which is not timed: compile, say."""
    stored: Callable[[Any], Stored] | None
    """Codes and scale bytes out of its result; None if it makes no MXFP4."""
    note: str = ""


def _torchao() -> Callable[[Matrix], Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    return lambda t: to_mx(t, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)


def _eager() -> Callable[[Matrix], Any]:
    run = _torchao()
    return lambda x: run(torch.from_numpy(x))


def _compiled() -> Callable[[Matrix], Any]:
    torch._dynamo.reset()
    run = torch.compile(_torchao(), fullgraph=True)
    return lambda x: run(torch.from_numpy(x))


def _compiled_with_type() -> Callable[[Matrix], Any]:
    from torch._inductor.codegen import cpp

    cpp.DTYPE_TO_CPP[torch.float8_e8m0fnu] = "uint8_t"
    return _compiled()


def _torchao_stored(result: Any) -> Stored:
    scales, codes = result
    return codes.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()


def _gfloat() -> Callable[[Matrix], Any]:
    from gfloat import RoundMode, compute_scale_amax, encode_ndarray, round_ndarray
    from gfloat.formats import format_info_ocp_e2m1 as e2m1

    def run(x: Matrix) -> Stored:
        blocks = x.reshape(-1, 32)
        scales = np.array([compute_scale_amax(e2m1.emax, block) for block in blocks])
        values = round_ndarray(e2m1, blocks / scales[:, None], RoundMode.TiesToEven, sat=True)
        return encode_ndarray(e2m1, values).reshape(x.shape), scales

    return run


def _gfloat_stored(result: Any) -> Stored:
    codes, scales = result
    bytes_ = (np.log2(scales) + 127).astype(np.uint8)
    return pack(codes, E2M1), bytes_.reshape(len(codes), -1)


PEERS = (
    Peer("torchao eager", "torchao", 2, _eager, _torchao_stored),
    Peer("torchao torch.compile", "torchao", 2, _compiled, _torchao_stored),
    Peer(
        "torchao torch.compile, mended", "torchao", 2, _compiled_with_type, _torchao_stored,
        "with float8_e8m0fnu entered as uint8_t in the compiler's table of C++ types",
    ),
    Peer(
        "gfloat", "gfloat", 8, _gfloat, _gfloat_stored,
        "scales block by block in Python, codes not packed; written for clarity",
    ),
    Peer(
        "ml_dtypes cast", "ml_dtypes", 2, lambda: lambda x: x.astype(ml_dtypes.float4_e2m1fn), None,
        "elements only: no shared scale, no packing, one byte per element",
    ),
)  # fmt: skip


def measure(backend: Backend, size: int, seconds: float, threads: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each peer: nanoseconds per element, next to the backend's in the same turns."""
    for peer in PEERS:
        x = inputs(max(size // peer.share, 256))["float32"]
        row: dict[str, Any] = {
            "operation": "quantize float32", "backend": peer.name, "size": len(x), "threads": threads,
            "version": version(peer.distribution), "note": peer.note,
        }  # fmt: skip
        try:
            run = peer.make()
            same = _same_bits(peer, run, x)
        except (RuntimeError, AssertionError, TypeError) as err:
            yield row | {"failed": _first_line(err)}
            continue
        theirs, ours = in_turns(seconds, lambda run=run, x=x: run(x), lambda x=x: backend.quantize(x, PLAIN))
        yield row | {
            **asdict(theirs), "same_bits": same, "gb_per_s": x.nbytes / theirs.min_ms / 1e6,
            "ns_per_element": 1e6 * theirs.min_ms / x.size,
            "mxref_ns_per_element": 1e6 * ours.min_ms / x.size,
            "ratio": theirs.min_ms / ours.min_ms,
        }  # fmt: skip


def _same_bits(peer: Peer, run: Callable[[Matrix], Any], x: Matrix) -> bool | None:
    """Return whether a peer stores the reference's bits, or None if it stores no MXFP4."""
    logging.disable(logging.CRITICAL)  # a compiler that fails logs its whole state before it raises
    try:
        result = run(x)
    finally:
        logging.disable(logging.NOTSET)
    if peer.stored is None:
        return None
    codes, scales = peer.stored(result)
    expected = REFERENCE.quantize(x[:64], PLAIN)
    return np.array_equal(codes[:64], expected.codes) and np.array_equal(scales[:64], expected.scales)


def _first_line(err: Exception) -> str:
    return f"{type(err).__name__}: {str(err).strip().splitlines()[0]}"
