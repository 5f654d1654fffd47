"""NVFP4 of other implementations: 100,000 blocks of each kind of numbers, beside the dialect that has their bits.

`python -m peers.nvfp4` runs what is installed and writes docs/records/nvfp4_peers_DATE.json. With --ggml CHECKOUT it
compiles ggml's function too, from a checkout of its sources.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import RECORDS, newest, read
from mxref import NVFP4, OperandSpec, quantize
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from peers.measure import environment, release
from rst_table import csv_table

SHAPE = (1000, 1600)
PART = "nvfp4_peers.inc"
KINDS = {
    "N(0, 1)": "normal",
    "N(0, 1) in bfloat16": "bf16",
    "rows of unlike size": "rows",
    "Student's t, 2 degrees": "tails",
    "N(0, 1) times 1e-12": "small",
    "rows from 2^-20 to 2^11": "wide",
    "eighths from -6 to 6, and -0": "grid",
}

Stored = tuple[np.ndarray, np.ndarray, float]  # scale bytes [R, C], codes [R, K], and the tensor's scale


def numbers(kind: str, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """Return float32 numbers of a kind; under `grid` most quotients are at ties."""
    rng = np.random.default_rng(7)
    if kind == "grid":
        x = rng.integers(-48, 49, shape).astype(np.float32) / np.float32(8)
        return np.where(rng.random(shape) < 0.05, np.float32(-0.0), x)
    x = rng.standard_t(2, shape) if kind == "tails" else rng.standard_normal(shape)
    rows = (shape[0], 1)
    factor = {
        "rows": np.exp(2 * rng.standard_normal(rows)), "small": 1e-12, "wide": np.exp2(rng.integers(-20, 12, rows)),
    }.get(kind, 1.0)  # fmt: skip
    x = (x * factor).astype(np.float32)
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if kind == "bf16" else x


# ---- the implementations ----


def torchao(x: np.ndarray) -> Stored:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    tensor = torch.from_numpy(x)
    t = per_tensor_amax_to_scale(tensor.abs().max())
    scales, codes = nvfp4_quantize(tensor, 16, t)
    return scales.view(torch.uint8).numpy().reshape(len(x), -1), unpack(codes.numpy(), E2M1), t.item()


def compressed_tensors(x: np.ndarray) -> Stored:
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, weight = preset_name_to_scheme("NVFP4", ["Linear"]), torch.from_numpy(x)
    g = generate_gparam(*torch.aminmax(weight))
    ends = torch.aminmax(weight.reshape(len(x), -1, 16), dim=-1)
    scale, _ = calculate_qparams(*ends, scheme.weights, global_scale=g)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": g}
    state = NVFP4PackedCompressor.compress(state, scheme)
    codes = unpack(state["weight_packed"].numpy(), E2M1)
    return state["weight_scale"].view(torch.uint8).numpy(), codes, (1 / g).item()


def modelopt(x: np.ndarray) -> Stored:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    q, scales, t = NVFP4QTensor.quantize(torch.from_numpy(x.copy()), 16)
    codes = unpack(q._quantized_data.numpy(), E2M1)
    return scales.view(torch.uint8).numpy().reshape(len(x), -1), codes, t.item()


_C = """#include <stdint.h>
#include <string.h>
#include <math.h>
#include <assert.h>
#define GGML_RESTRICT restrict
#define QK_NVFP4 64
#define QK_NVFP4_SUB 16
typedef struct { uint8_t d[4]; uint8_t qs[32]; } block_nvfp4;
static const int8_t kvalues_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
"""
"""What ggml's functions need of its headers."""
_FUNCTIONS = {
    "src/ggml-impl.h": ("ggml_ue4m3_to_fp32", "ggml_fp32_to_ue4m3"),
    "src/ggml-quants.c": ("best_index_mxfp4", "quantize_row_nvfp4_ref"),
}


def ggml(checkout: Path) -> Callable[[np.ndarray], Stored]:
    """Return ggml's own quantization, compiled from a checkout."""
    source = _C
    for file, names in _FUNCTIONS.items():
        text = (checkout / file).read_text(encoding="utf-8")
        for name in names:
            (found,) = re.findall(rf"^[a-z][^\n;]*\b{name}\([^;]*?\) \{{\n.*?^\}}\n", text, re.M | re.S)
            source += found
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ggml.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-lm"]
        subprocess.run(command, input=source, text=True, check=True)
        call = ctypes.CDLL(str(library)).quantize_row_nvfp4_ref

    def run(x: np.ndarray) -> Stored:
        blocks = np.zeros((x.size // 64, 36), np.uint8)
        x = np.ascontiguousarray(x)
        call(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(blocks.ctypes.data), ctypes.c_int64(x.size))
        halves = blocks[:, 4:].reshape(-1, 4, 8)
        codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
        return blocks[:, :4].reshape(len(x), -1), codes.reshape(x.shape), 1.0

    return run


INSTALLED: dict[str, Callable[[np.ndarray], Stored]] = {
    "torchao": torchao,
    "compressed-tensors": compressed_tensors,
    "nvidia-modelopt": modelopt,
}
DIALECTS = {
    "torchao": "torchao_nvfp4", "compressed-tensors": "compressed_tensors_nvfp4", "nvidia-modelopt": "modelopt_nvfp4",
    "ggml": "ggml_nvfp4",
}  # fmt: skip
"""The dialect of each implementation."""


# ---- the record ----


def differing(x: np.ndarray, stored: Stored, treatment: str | OperandSpec) -> dict[str, int]:
    """Return how many bytes differ from mxref, how many codes, and how many of these by more than a zero's sign."""
    scales, codes, t = stored
    q = quantize(x, treatment)
    ours = unpack(q.codes, E2M1)
    zeros = (codes & 7 == 0) & (ours & 7 == 0)
    return {
        "tensor": int(q.tensor_scale[0] != np.float32(t)),
        "bytes": int((scales != q.scales).sum()),
        "codes": int((codes != ours).sum()),
        "values": int(((codes != ours) & ~zeros).sum()),
    }


def measured(run: Callable[[np.ndarray], Stored], dialect: str) -> dict[str, Any]:
    """Return the differences of one implementation under every kind of numbers."""
    found = {}
    for kind in KINDS.values():
        x = numbers(kind)
        stored = run(x)
        found[kind] = {
            "dialect": differing(x, stored, dialect),
            "specification": differing(x, stored, OperandSpec(NVFP4)),
        }
    return found


def main() -> None:
    """Run every implementation and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ggml", type=Path, help="a checkout of ggml, whose function is compiled")
    asked = parser.parse_args()
    runs = {name: (run, release(name)) for name, run in INSTALLED.items()}
    if asked.ggml:
        commit = subprocess.run(
            ["git", "-C", str(asked.ggml), "rev-parse", "--short=8", "HEAD"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        runs["ggml"] = (ggml(asked.ggml), commit.stdout.strip())
    record = {
        "date": datetime.date.today().isoformat(),
        "environment": environment(),
        "blocks": SHAPE[0] * SHAPE[1] // NVFP4.k,
        "peers": {
            name: {"version": version, "dialect": DIALECTS[name], "differs": measured(run, DIALECTS[name])}
            for name, (run, version) in runs.items()
        },
    }
    path = RECORDS / f"nvfp4_peers_{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)


# ---- the table ----


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the table of the newest record by the name under which the page includes it."""
    return {PART: render(read(newest("nvfp4_peers", records)))}


def render(record: Mapping[str, Any]) -> str:
    """Return the table as reStructuredText: differences from dialects in words, from the specification in numbers."""
    peers, blocks = record["peers"], record["blocks"]
    versions = ", ".join(f"{name} {peer['version']}" for name, peer in peers.items())
    apart = [
        f"{name}, {title}: {each['dialect']}"
        for name, peer in peers.items()
        for title, kind in KINDS.items()
        if any((each := peer["differs"][kind])["dialect"][key] for key in ("tensor", "bytes", "values"))
    ]
    same = "Under its own dialect, every implementation stores the bytes of mxref, and its codes but for signs of zeros"
    lines = [
        f"Measured on {record['date']}, {record['environment']['machine']}: {versions}. ",
        f"Each stored {blocks:,} blocks of every kind.\n",
        f"{same}.\n" if not apart else f"{same}, except: {'; '.join(apart)}.\n",
        "From the specification's real quotient they differ in this share of the bytes and, signs of zeros aside, "
        "of the codes:\n",
    ]
    rows = [
        [title.replace("2^-20", "2\\ :sup:`−20`").replace("2^11", "2\\ :sup:`11`"),
         *(_share(peer["differs"][kind]["specification"], blocks) for peer in peers.values())]
        for title, kind in KINDS.items()
    ]  # fmt: skip
    head = ["numbers", *(f"`{peer['dialect']}`" for peer in peers.values())]
    return "\n".join([*lines, csv_table(head, rows)])


def _share(found: Mapping[str, int], blocks: int) -> str:
    """Return the shares of bytes and codes that differ."""
    shares = (found["bytes"] / blocks, found["values"] / (blocks * NVFP4.k))
    return ", ".join(
        "0" if not share else f"{share:.2%}" if share >= 0.0001 else "< 0.01%" for share in shares
    )


if __name__ == "__main__":
    main()
