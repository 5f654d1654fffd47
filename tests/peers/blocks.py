"""The other block formats of other implementations: 100,000 blocks of each kind of numbers, beside mxref's treatment.

`python -m peers.blocks` runs what is installed and writes docs/records/block_peers_DATE.json. With --microxcaling
CHECKOUT and --transformer-engine CHECKOUT it runs what is not on PyPI for a CPU too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench.records import RECORDS, newest, read
from mxref import OperandSpec, dequantize, quantize
from mxref.formats import BLOCK_FORMATS, E2M1, INT8, BlockFormat
from mxref.layouts.packed import unpack
from mxref.steps.scale import EXPONENT_RULES
from peers.measure import environment, release
from peers.nvfp4 import KINDS, numbers
from peers.render import StaleNoteError
from rst_table import csv_table

BLOCKS = 100_000
ROWS = 800  # whole tiles
PART = "block_peers.inc"


@dataclass(frozen=True)
class Stored:
    """What an implementation makes of an array [R, K]: bytes, or values where it stores none."""

    scales: np.ndarray | None
    """Scale codes, uint8 [R, K / k]."""
    codes: np.ndarray | None
    """Element codes, uint8 [R, K]."""
    tensor: float | None = None
    """The scale of the tensor."""
    values: np.ndarray | None = None
    """float32 [R, K]."""


@dataclass(frozen=True)
class Case:
    """One way of an implementation to quantize, and the treatment of mxref that is beside it."""

    peer: str
    setting: str
    run: Callable[[np.ndarray], Stored]
    """Of float32 [R, K]."""
    spec: OperandSpec
    bfloat16: bool = False
    """It takes the numbers as bfloat16."""

    @property
    def name(self) -> str:
        """Whose, of which format and how."""
        return f"{self.peer}: {', '.join(filter(None, (str(self.spec.format), self.setting)))}"


def tensor(x: np.ndarray, bfloat16: bool) -> Any:
    """Return an array as a tensor, in bfloat16 if asked."""
    import torch

    return torch.from_numpy(x.copy()).to(torch.bfloat16 if bfloat16 else torch.float32)


# ---- the implementations ----


def gfloat(x: np.ndarray, made: BlockFormat) -> Stored:
    """Scale and scaled elements as `quantize_block` has them; its loop over elements is its vectorized functions."""
    import gfloat.formats

    name = {"MXINT8": "mxint8"}.get(made.title, made.name if made.element is not E2M1 else "mxfp4_e2m1")
    format = getattr(gfloat.formats, f"format_info_{name}")
    blocks = x.astype(np.float64).reshape(-1, made.k)
    scales = np.array([gfloat.compute_scale_amax(format.etype.emax, block) for block in blocks])
    encode = [
        gfloat.encode_ndarray(etype, gfloat.round_ndarray(etype, values, gfloat.RoundMode.TiesToEven, True))
        for etype, values in ((format.stype, scales), (format.etype, blocks / scales[:, None]))
    ]
    rows = len(x)
    return Stored(*(np.asarray(each).astype(np.uint8).reshape(rows, -1) for each in encode))


def torchao(x: np.ndarray, made: BlockFormat, rule: str) -> Stored:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    kinds = {
        "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E2M3": "fp6_e2m3", "E3M2": "fp6_e3m2",
    }  # fmt: skip
    scales, codes = to_mx(tensor(x, False), kinds[made.element.name], 32, ScaleCalculationMode[rule])
    return Stored(scales.view(torch.uint8).numpy().reshape(len(x), -1), codes.view(torch.uint8).numpy())


def compressed_tensors(x: np.ndarray, made: BlockFormat, bfloat16: bool) -> Stored:
    import torch
    from compressed_tensors.compressors.mxfp6.base import MXFP6PackedCompressor
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    bits = made.element.bits
    compressor = {6: MXFP6PackedCompressor, 8: MXFP8QuantizationCompressor}[bits]
    scheme, weight = preset_name_to_scheme(f"MXFP{bits}A16", ["Linear"]), tensor(x, bfloat16)
    scale, _ = calculate_qparams(*torch.aminmax(weight.reshape(len(x), -1, 32), dim=-1), scheme.weights)
    state = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    codes = state["weight_packed" if bits == 6 else "weight"].view(torch.uint8).numpy()
    return Stored(state["weight_scale"].numpy(), unpack(codes, made.element))


def modelopt(x: np.ndarray, made: BlockFormat, bfloat16: bool) -> Stored:
    import torch
    from modelopt.torch.quantization import qtensor

    weight = tensor(x, bfloat16)
    if made.tensor_scale:
        q, scales, t = qtensor.NVFP4QTensor.quantize(weight, 16)
        codes = unpack(q._quantized_data.numpy(), E2M1)
        return Stored(scales.view(torch.uint8).numpy().reshape(len(x), -1), codes, t.item())
    if made.element is E2M1:
        q, scales = qtensor.MXFP4QTensor.quantize(weight, 32)
        return Stored(scales.numpy().reshape(len(x), -1), unpack(q._quantized_data.numpy(), E2M1))
    q, scales = qtensor.MXFP8QTensor.quantize(weight)
    return Stored(scales.numpy().reshape(len(x), -1), q._quantized_data.view(torch.uint8).numpy())


def microxcaling(x: np.ndarray, made: BlockFormat, rounding: str, bfloat16: bool) -> Stored:
    """Values alone: it returns what the numbers become, in the type of the input."""
    import torch
    from mx.mx_ops import _quantize_mx

    element = made.element
    name = "int8" if element is INT8 else f"fp{element.bits}_{element.name.lower()}"
    values = _quantize_mx(tensor(x, bfloat16), 8, name, axes=[-1], block_size=32, round=rounding)
    return Stored(None, None, values=values.to(torch.float32).numpy())


def transformer_engine(
    x: np.ndarray, made: BlockFormat, bfloat16: bool, transform: bool, **chosen: Any
) -> Stored:
    """The reference in Python, along the last axis; with `transform` along the first one of the transposed numbers."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    weight = tensor(x, bfloat16)
    if not made.tensor_scale:
        packed, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
            weight, None, 32, 1, pow_2_scales=True, eps=0.0
        )
        exponents = np.frexp(scales.numpy())[1] - 1
        return Stored((exponents + 127).astype(np.uint8), unpack(packed.numpy(), E2M1))
    quantizer = NVFP4QuantizerRef("e2m1", columnwise=transform, with_rht=transform, **chosen)
    row, row_scales, column, column_scales, amax_row, amax_column = quantizer._quantize(
        weight.t().contiguous() if transform else weight
    )
    packed, scales, amax = (column, column_scales, amax_column) if transform else (row, row_scales, amax_row)
    top = 6 * quantizer.nvfp4_e4m3_max
    t = 1 / min(np.float32(top) / np.float32(amax.item()), np.finfo(np.float32).max)
    import torch

    return Stored(scales.view(torch.uint8).numpy(), unpack(packed.numpy(), E2M1), float(np.float32(t)))


def cases(installed: bool = True, mxc: bool = False, te: bool = False) -> Iterator[Case]:
    """Return what is run: of installed packages, of microxcaling and of Transformer Engine."""
    floats = [BLOCK_FORMATS[f"mxfp{name}"] for name in ("8_e4m3", "8_e5m2", "6_e2m3", "6_e3m2")]
    fp4, int8, nvfp4 = (BLOCK_FORMATS[name] for name in ("mxfp4", "mxint8", "nvfp4"))
    e4m3, e2m3 = floats[0], floats[2]
    types = {"float32": False, "bfloat16": True}
    if installed:
        for made in (fp4, *floats, int8):
            yield Case("gfloat", "float64", partial(gfloat, made=made), OperandSpec(made))
        for made in floats:
            for rule in EXPONENT_RULES:
                run = partial(torchao, made=made, rule=rule.name)
                yield Case("torchao", rule.name, run, OperandSpec(made, scale_rule=rule))
        for name, narrow in types.items():
            for made, rule in ((e4m3, ">=1.75"), (e2m3, "even")):
                run = partial(compressed_tensors, made=made, bfloat16=narrow)
                yield Case("compressed-tensors", name, run, OperandSpec(made, scale_rule=rule), narrow)
        for name, narrow in types.items():
            for spec in (
                OperandSpec(fp4, scale_rule="rceil"), OperandSpec(e4m3, scale_rule="rceil"),
                OperandSpec(nvfp4, arithmetic="modelopt"),
            ):  # fmt: skip
                run = partial(modelopt, made=spec.format, bfloat16=narrow)
                yield Case("nvidia-modelopt", name, run, spec, narrow)
    if mxc:
        for made in (fp4, *floats, int8):
            for rounding, ours in (("nearest", "rna"), ("even", "rne")):
                for name, narrow in types.items():
                    run = partial(microxcaling, made=made, rounding=rounding, bfloat16=narrow)
                    setting = f"`{rounding}`, {name}"
                    yield Case("microxcaling", setting, run, OperandSpec(made, rounding=ours), narrow)
    if te:
        yield from _transformer_engine_cases(fp4, nvfp4, types)


def _transformer_engine_cases(
    fp4: BlockFormat, nvfp4: BlockFormat, types: Mapping[str, bool]
) -> Iterator[Case]:
    signs = "+++-+------+-+--"
    plain: dict[str, Any] = {"made": nvfp4, "transform": False}
    for name, narrow in types.items():
        run = partial(transformer_engine, bfloat16=narrow, **plain)
        yield Case("transformer-engine", name, run, OperandSpec(nvfp4, arithmetic="te"), narrow)
        run = partial(transformer_engine, bfloat16=narrow, quant_tile_shape=(16, 16), **plain)
        tile = OperandSpec(nvfp4, arithmetic="te", block="16x16")
        yield Case("transformer-engine", f"16x16, {name}", run, tile, narrow)
    run = partial(transformer_engine, made=nvfp4, transform=True, bfloat16=False)
    spec = OperandSpec(nvfp4, arithmetic="te", hadamard=16, sign_vector=signs)
    yield Case("transformer-engine", "RHT, float32", run, spec)
    for mode, ours in (("MAE", "absolute"), ("MSE", "squared")):
        chosen = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": mode}
        run = partial(transformer_engine, bfloat16=False, **plain, **chosen)
        yield Case(
            "transformer-engine", f"4over6 {mode}, float32", run, OperandSpec(nvfp4, four_over_six=ours)
        )
    run = partial(transformer_engine, made=fp4, transform=False, bfloat16=False)
    yield Case("transformer-engine", "`pow_2_scales`, float32", run, OperandSpec(fp4, scale_rule="rceil"))


def package(name: str, folder: Path) -> None:
    """Let modules of a folder be imported as those of a package, whose own code does not run."""
    made = types.ModuleType(name)
    made.__path__ = [str(folder)]  # type: ignore[attr-defined]
    sys.modules[name] = made


def from_transformer_engine(checkout: Path) -> None:
    """Let the reference of a checkout be imported alone: the package around it needs a GPU's libraries."""
    for inner in ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.tensor"):
        name = f"transformer_engine{inner}"
        package(name, checkout / name.replace(".", "/"))

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    bases = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    vars(bases).update(Quantizer=Quantizer, QuantizedTensorStorage=type("QuantizedTensorStorage", (), {}))
    utils = types.ModuleType("transformer_engine.pytorch.tensor.utils")
    utils.is_custom = None  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (bases, utils)})


# ---- the record ----


def differing(x: np.ndarray, case: Case) -> dict[str, int]:
    """Return how many scale codes differ from mxref, how many elements, and how many of these by more than a zero."""
    stored = case.run(x)
    spec, element = case.spec, case.spec.format.element  # type: ignore[attr-defined]
    q = quantize(x.astype(ml_dtypes.bfloat16) if case.bfloat16 else x, spec)
    if stored.values is not None:
        return {"values": int((stored.values != dequantize(q)).sum())}
    assert stored.scales is not None
    assert stored.codes is not None
    ours = unpack(q.codes, element)
    sign = 0 if element is INT8 else 1 << element.bits - 1
    zeros = (stored.codes & ~np.uint8(sign) == 0) & (ours & ~np.uint8(sign) == 0)
    differ = stored.codes != ours
    found = {
        "bytes": int((stored.scales != q.scales).sum()),
        "codes": int(differ.sum()),
        "values": int((differ & ~zeros).sum()),
    }
    if q.tensor_scale is not None:
        found["tensor"] = int(q.tensor_scale[0] != np.float32(stored.tensor))
    return found


def measured(case: Case, rows: int = ROWS) -> dict[str, dict[str, int]]:
    """Return the differences of one case under every kind of numbers."""
    size = (rows, BLOCKS // ROWS * case.spec.format.k)  # type: ignore[attr-defined]
    return {kind: differing(numbers(kind, size), case) for kind in KINDS.values()}


def commit(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Run every implementation and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microxcaling", type=Path, help="a checkout of microsoft/microxcaling")
    parser.add_argument("--transformer-engine", type=Path, help="a checkout of NVIDIA/TransformerEngine")
    asked = parser.parse_args()
    versions = {}
    if asked.microxcaling:
        package("mx", asked.microxcaling / "mx")
        versions["microxcaling"] = commit(asked.microxcaling)
    if asked.transformer_engine:
        from_transformer_engine(asked.transformer_engine)
        versions["transformer-engine"] = commit(asked.transformer_engine)
    found = []
    for case in cases(mxc=bool(asked.microxcaling), te=bool(asked.transformer_engine)):
        version = versions.get(case.peer) or release(case.peer)
        found.append(
            {
                "peer": case.peer,
                "version": version,
                "format": str(case.spec.format),
                "setting": case.setting,
                "treatment": {key: str(value) for key, value in case.spec.stated.items()},
                "differs": measured(case),
            }
        )
        print(case.name, flush=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "environment": environment(),
        "blocks": BLOCKS,
        "cases": found,
    }
    path = RECORDS / f"block_peers_{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)


# ---- the tables ----

NOTES = (
    ("gfloat", "mxint8", "",
     "A number that rounds to -2 gets code 80, which INT8 has; in mxref and microxcaling the least is -127/64."),
    ("nvidia-modelopt", "mxfp4", "",
     "Ties go toward zero, and +0 is code 8 as -0 is."),
    ("microxcaling", "", "bfloat16",
     "A log2 in bfloat16 gives another exponent below powers of two, of amax and of elements."),
    ("transformer-engine", "", "RHT",
     "The transform is a product of matrices, whose sums have another order."),
    ("transformer-engine", "", "4over6",
     "In blocks under scale code 0 elements become 6 by an inverse that is the largest float32, and 0 in mxref. "
     "Errors are those of float32, and decide otherwise in 3 of 700,000 blocks."),
)  # fmt: skip
"""Of which implementation, format and setting, all if empty, and why they differ from mxref."""


def note_of(case: Mapping[str, Any]) -> int:
    """Return the number of the note on a case of the record, 0 if there is none."""
    for number, (peer, made, setting, _) in enumerate(NOTES, 1):
        if peer == case["peer"] and made in ("", case["format"]) and setting in case["setting"]:
            return number
    return 0


def total(case: Mapping[str, Any], key: str) -> int:
    """Return how many of all kinds of numbers differ."""
    return sum(found.get(key, 0) for found in case["differs"].values())


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the tables of the newest record by the name under which the page includes them."""
    return {PART: render(read(newest("block_peers", records)))}


def render(record: Mapping[str, Any]) -> str:
    """Return the tables as reStructuredText; StaleNoteError if a difference has no note, or a note no difference."""
    same: dict[tuple[str, str, str], list[str]] = {}
    rows, used = [], set()
    for case in record["cases"]:
        whose = f"{case['peer']} {case['version']}"
        treatment = (
            ", ".join(f"`{key} = {value}`" for key, value in case["treatment"].items()) or "the default"
        )
        if not any(total(case, key) for key in ("bytes", "values", "tensor")):
            same.setdefault((whose, case["setting"], treatment), []).append(case["format"])
            continue
        if not (number := note_of(case)):
            raise StaleNoteError(
                f"{case['peer']}, {case['format']}, {case['setting']}: no note says why it differs"
            )
        used.add(number)
        k = BLOCK_FORMATS[case["format"]].k
        shares = [_share(case, key, record["blocks"] * per) for key, per in (("bytes", 1), ("values", k))]
        rows.append([whose, f"{case['format']}, {case['setting']}", treatment, *shares, f"[{number}]"])
    if unused := {*range(1, len(NOTES) + 1)} - used:
        raise StaleNoteError(f"notes without a difference: {unused}")
    equal = [
        [whose, ", ".join(made), setting, treatment] for (whose, setting, treatment), made in same.items()
    ]
    notes = "\n".join(f"| [{number}] **{note[0]}.** {note[3]}" for number, note in enumerate(NOTES, 1))
    return "\n".join(
        [
            f"Measured on {record['date']}, {record['environment']['machine']}; each stored "
            f"{record['blocks']:,} blocks of every kind of numbers above.\n",
            "These store the bytes of mxref, and its codes but for signs of zeros; of microxcaling, which stores "
            "none, the values are compared:\n",
            csv_table(["implementation", "formats", "setting", "mxref"], equal),
            "These differ in this share of all bytes and, signs of zeros aside, of all elements:\n",
            csv_table(["implementation", "setting", "mxref", "bytes", "elements", "why"], rows),
            f"{notes}\n",
        ]
    )


def _share(case: Mapping[str, Any], key: str, count: int) -> str:
    if not any(key in found for found in case["differs"].values()):
        return "none stored"
    share = total(case, key) / (count * len(KINDS))
    return "0" if not share else f"{share:.2%}" if share >= 0.0001 else "< 0.01%"


if __name__ == "__main__":
    main()
