"""Operations that a training run recorded, with their answers, in the file that `mxref conform --replay` reads.

The file is a NumPy archive: the arrays, and one JSON text with everything else. It holds no pickled objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref._version import __version__
from mxref.conformance.outcome import check_writable, write
from mxref.conformance.requests.multiplying import Product
from mxref.conformance.requests.quantizing import Blocks, Request
from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS, BlockShape
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import Rotation
from mxref.steps.random import Stream
from mxref.tomlio import build, to_table

FORMAT = "mxref.record.1"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, eq=False)
class RecordedQuantization:
    """A quantization and the answer that it got."""

    where: Mapping[str, str]
    """Layer, role, tensor and step, as far as they are known."""
    request: Request
    codes: NDArray[np.uint8]
    """[rows, K * bits / 8], block axis last."""
    scales: NDArray[np.uint8]
    """[rows, K / k]."""

    @property
    def answer(self) -> Blocks:
        """The answer, block by block."""
        plan = self.request.plan
        return Blocks.of(plan.array(*(a.reshape(*plan.rows_shape, -1) for a in (self.codes, self.scales))))


@dataclass(frozen=True, eq=False)
class RecordedProduct:
    """A scaled GEMM and the answer that it got."""

    where: Mapping[str, str]
    product: Product
    result: NDArray[Any]
    """[M, N], float32 or bfloat16."""


Call = RecordedQuantization | RecordedProduct


@dataclass(frozen=True)
class Recording:
    """Recorded operations."""

    backend: str
    """Name of the backend that gave the answers."""
    calls: tuple[Call, ...]
    reason: str = ""
    """Why the file was written, in one line."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else a reader should know, such as the device."""


def where_text(where: Mapping[str, str]) -> str:
    """Return the place of a recorded operation as text, as in `step 3 counted from 0, layer q_proj, fprop x`.

    The step is that of the random streams, which `mxref explain --step` takes; the logs of a run count from 1.
    """
    parts = [f"step {where['step']} counted from 0"] if "step" in where else []
    parts += [f"layer {where['layer']}"] if "layer" in where else []
    parts += [" ".join(where[key] for key in ("role", "tensor") if key in where)]
    return ", ".join(filter(None, parts)) or "place unknown"


def check_name(path: str | Path) -> Path:
    """Return the path of a recording; FileFormatError unless it ends in .npz and its folder can be written."""
    path = Path(path)
    if path.suffix != ".npz":
        raise FileFormatError(f"cannot write a recording to {path}: its name must end in .npz")
    check_writable(path)
    return path


def save_recording(path: str | Path, recording: Recording) -> None:
    """Write a recording; the file appears only when all of it is on the disk.

    Raises:
        FileFormatError: a name that does not end in .npz, or a file that cannot be written.
    """
    path = check_name(path)
    arrays: dict[str, NDArray[Any]] = {}
    calls = [_table(call, f"{i}.", arrays) for i, call in enumerate(recording.calls)]
    meta = {
        "format": FORMAT, "mxref": __version__, "backend": recording.backend, "reason": recording.reason,
        "facts": dict(recording.facts), "calls": calls,
    }  # fmt: skip
    data = BytesIO()
    np.savez_compressed(data, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
    write(path, data.getvalue())


def load_recording(path: str | Path) -> Recording:
    """Return the recording of `save_recording`.

    Raises:
        FileFormatError: the file is missing, damaged, or holds something else.
    """
    try:
        # NumPy does not close a file that is not an archive.
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            if meta["format"] != FORMAT:
                raise FileFormatError(f"its format is {meta['format']}, this version of mxref reads {FORMAT}")
            calls = tuple(_call(table, f"{i}.", file) for i, table in enumerate(meta["calls"]))
            recording = Recording(meta["backend"], calls, meta["reason"], meta["facts"])
        for call in calls:
            _require_whole(call)
    except Exception as err:  # a damaged file fails in many ways: zip, JSON, shapes, values
        text = err.strerror if isinstance(err, OSError) and err.strerror else " ".join(str(err).split())
        raise FileFormatError(
            f"cannot read a recording from {path}: {text or type(err).__name__}; "
            "give a file that mxref_torch.record or a shadow wrote"
        ) from err
    return recording


def _require_whole(call: Call) -> None:
    """Raise an error unless the parts of a call fit together."""
    if isinstance(call, RecordedQuantization):
        assert call.answer.codes.size >= 0
        return
    a, b = call.product.a, call.product.b
    if call.result.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"a product of shape {call.result.shape} from operands of {a.shape} and {b.shape}")


def _table(call: Call, prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Return a call as a JSON table; its arrays go to `arrays`."""
    if isinstance(call, RecordedQuantization):
        request = call.request
        for name, array in (("x", request.array()), ("codes", call.codes), ("scales", call.scales)):
            arrays[prefix + name] = _plain(array)
        stream = request.rng
        return {
            "op": "quantize", "where": dict(call.where), "spec": to_table(request.spec),
            "dtype": str(request.x.dtype), "axis": request.axis, "pad": request.pad,
            "stream": stream and [stream.seed, stream.step, stream.layer, stream.operand],
            "origin": request.origin, "global_shape": request.global_shape,
        }  # fmt: skip
    product = call.product
    for name, q in (("a", product.a), ("b", product.b)):
        arrays[f"{prefix}{name}_codes"], arrays[f"{prefix}{name}_scales"] = q.codes, q.scales
    arrays[prefix + "result"] = _plain(call.result)
    return {
        "op": "gemm", "where": dict(call.where), "profile": product.profile.value, "out": product.out,
        "error_class": product.error_class, "a": _operand_table(product.a), "b": _operand_table(product.b),
    }  # fmt: skip


def _operand_table(q: MXArray) -> dict[str, Any]:
    # Signs drawn on a device are unknown here, and do not change a product.
    rotation = q.rotation if isinstance(q.rotation, Rotation) else None
    return {
        "shape": q.shape, "block": q.block.value, "prescale": bool(q.prescale), "format": q.format.name,
        "rotation": rotation and [rotation.n, rotation.signs],
    }  # fmt: skip


def _call(table: Mapping[str, Any], prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Call:
    where = {str(key): str(value) for key, value in table["where"].items()}
    if table["op"] == "quantize":
        stream = Stream(*table["stream"]) if table["stream"] else None
        origin, shape = (_integers(table[name]) for name in ("origin", "global_shape"))
        x = _typed(arrays[prefix + "x"], table["dtype"])
        spec = build(OperandSpec, table["spec"], "operand spec")
        request = Request(x, spec, table["axis"], stream, origin, shape, bool(table["pad"]))
        return RecordedQuantization(where, request, arrays[prefix + "codes"], arrays[prefix + "scales"])
    a, b = _operands(table, prefix, arrays)
    product = Product(a, b, GemmProfile(table["profile"]), table["out"], error_class=table["error_class"])
    return RecordedProduct(where, product, _typed(arrays[prefix + "result"], table["out"]))


def _operands(table: Mapping[str, Any], prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Iterator[MXArray]:
    for name in ("a", "b"):
        one = table[name]
        codes, scales = (arrays[f"{prefix}{name}_{part}"] for part in ("codes", "scales"))
        rotation = one["rotation"] and Rotation(*one["rotation"])
        yield MXArray(
            codes, scales, tuple(one["shape"]), 1, BlockShape(one["block"]), one["prescale"], rotation,
            BLOCK_FORMATS[one["format"]],
        )  # fmt: skip


def _integers(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in a type that NumPy's files support: bfloat16 as 16-bit words."""
    return np.ascontiguousarray(array.view(np.uint16) if array.dtype == _BFLOAT16 else array)


def _typed(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return array.view(_BFLOAT16)
    if str(array.dtype) != dtype:
        raise ValueError(f"an array of {array.dtype} where {dtype} is said")
    return array
