"""Writes small checkpoints by hand: safetensors of any type, and GGUF."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

GGUF = {"F32": 0, "F16": 1, "MXFP4": 39, "NVFP4": 40}


def safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> Path:
    """Write tensors of a type as safetensors names it; the bytes are those of the array."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def gguf(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Write tensors: the type, the shape in elements and the bytes of each; with keys of each kind before them."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
    ]
    head, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), GGUF[kind], len(data)
        )
        data += raw + bytes(-len(raw) % 64)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)) + b"".join(keys) + head
    path.write_bytes(head + bytes(-len(head) % 64) + data)
    return path


def gguf_blocks(codes: np.ndarray, scales: np.ndarray, k: int) -> bytes:
    """Return GGUF's blocks of MXFP4 or NVFP4 from codes [rows, K], one in a byte, and scales [rows, K / k]."""
    halves = codes.reshape(len(codes), -1, k)
    nibbles = halves[..., : k // 2] | halves[..., k // 2 :] << 4
    each = 1 if k == 32 else 4
    parts = (scales.reshape(-1, each), nibbles.reshape(-1, each * k // 2))
    return np.concatenate(parts, axis=1).astype(np.uint8).tobytes()
