"""The quantized weights of a checkpoint: which tensors belong together, by which convention, and in which format.

Conventions: compressed-tensors, modelopt and Quark name a weight's scale `weight_scale`, gpt-oss has `_blocks` and
`_scales`, torchao `_qdata`, mxref `codes` and `scales`; blocks of GGUF hold codes and scales together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BLOCK_FORMATS, E8M0, MXFP4, MXFP4_E1M2, NVFP4, UE4M3, BlockFormat
from mxref.identify.stored import Checkpoint, StoredTensor
from mxref.layouts.foreign import LAYOUTS, Layout
from mxref.layouts.packed import unpack

Bytes = NDArray[np.uint8]
_TALLEST = 256
"""Rows that every layout's tiles fill."""
_MOST_BLOCKS = 1 << 20
_UNSIGNED = tuple(
    one.name for one in LAYOUTS.values() if one.part == "scales" and one.name not in ("exponents", "bias_125")
)
"""Layouts of scales that are no signed numbers; bias_125 has the sizes of `rows`."""


@dataclass(frozen=True)
class _Names:
    """How a convention names the tensors of a weight, behind a common beginning."""

    codes: str
    scales: str
    tensor: str
    """The tensor's scale, where the format has one."""
    inverse: bool
    """Whether it is g, by which values are divided, instead of t."""
    conventions: str


_NAMES = (
    _Names("_packed", "_scale", "_global_scale", True, "compressed-tensors"),
    _Names("_blocks", "_scales", "", False, "gpt-oss"),
    _Names(".blocks", ".scales", "", False, "gpt-oss"),
    _Names("_qdata", "_scale", "_per_tensor_scale", False, "torchao"),
    _Names("codes", "scales", "tensor_scale", False, "mxref"),
    _Names("", "_scale", "_scale_2", False, "quark, modelopt or compressed-tensors"),
)
_METHODS = {
    "quark": "quark",
    "modelopt": "modelopt",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "gpt-oss",
}
"""Conventions by `quant_method`."""
_CODES = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2", "I8": "INT8", "GGUF_MXFP4": "E2M1", "GGUF_NVFP4": "E2M1"}
"""Types of codes that say the element."""
_SCALES = {"F8_E8M0": E8M0, "I8": E8M0, "F8_E4M3": UE4M3}
"""Types of scales that say the scale format; a U8 does not."""
_STATED = {
    "nvfp4": "nvfp4", "fp6_e3m2": "mxfp6_e3m2", "fp6_e2m3": "mxfp6_e2m3", "mxfp8": "mxfp8_e4m3", "mxint8": "mxint8",
    "mxfp4": "mxfp4", '"dtype": "fp4"': "mxfp4",
}  # fmt: skip
"""Words of a quantization_config, and the format that each says."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight of a checkpoint."""

    name: str
    convention: str
    codes: StoredTensor
    scales: StoredTensor | None
    """None in GGUF, whose blocks begin with their scales."""
    tensor: StoredTensor | None
    inverse: bool
    """Whether the tensor's scale is named as one by which values are divided."""

    @property
    def pattern(self) -> str:
        """The name with `*` in place of the numbers of layers and experts."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", self.name)


def weights(checkpoint: Checkpoint) -> list[Weight]:
    """Return the quantized weights, in the order of the files."""
    tensors = checkpoint.tensors
    method = _METHODS.get(
        str(checkpoint.config.get("quant_method", checkpoint.config.get("quant_algo"))).lower()
    )
    if "quant_algo" in checkpoint.config:
        method = method or "modelopt"
    found: list[Weight] = []
    for name, codes in tensors.items():
        if codes.dtype.startswith(("GGUF_MX", "GGUF_NV")):
            scale = tensors.get(f"{name.removesuffix('.weight')}.scale")
            found.append(Weight(name, "gguf", codes, None, scale, False))
            continue
        if codes.dtype not in ("U8", "I8", "F8_E4M3", "F8_E5M2", "F4") or len(codes.shape) < 2:
            continue
        for names in _NAMES:
            base = name.removesuffix(names.codes)
            scales = tensors.get(base + names.scales)
            if name.endswith(names.codes) and scales is not None and scales is not codes:
                tensor = tensors.get(base + names.tensor) if names.tensor else None
                convention = names.conventions
                if names.codes in ("", "_packed"):
                    convention = method or ("modelopt" if tensor and not names.codes else convention)
                found.append(
                    Weight(base.rstrip(".") or name, convention, codes, scales, tensor, names.inverse)
                )
                break
    return found


@dataclass(frozen=True)
class Reading:
    """One way to read a weight: its format, its code layout, and its shape [rows, length]."""

    weight: Weight
    made: BlockFormat
    packing: str
    """The layout of the codes, `packed`, `unpacked` or `halves`."""
    rows: int
    length: int

    @property
    def columns(self) -> int:
        """Blocks in a row."""
        return self.length // self.made.k

    @property
    def read(self) -> int:
        """The first rows, of which samples are taken; tiles of every layout fill them."""
        return min(self.rows, max(_MOST_BLOCKS // self.columns // _TALLEST, 1) * _TALLEST)

    @cached_property
    def stored(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The stored codes, row by row, and the stored scales, of any shape: mapped."""
        codes = _bytes(self.weight.codes.array())
        if self.weight.scales is None:
            size, each = (17, 1) if self.made is MXFP4 else (36, 4)
            groups = codes.reshape(self.rows, -1, size)[: self.read]
            return groups[..., each:], groups[..., :each]
        return codes.reshape(self.rows, -1), _bytes(self.weight.scales.array())

    def codes(self, rows: NDArray[np.int64]) -> Bytes:
        """Return packed codes of some rows as mxref stores them."""
        stored = np.ascontiguousarray(self.stored[0][rows]).reshape(len(rows), -1)
        return LAYOUTS[self.packing].read(stored, len(rows), self.length, self.made)

    @cached_property
    def scale_layouts(self) -> dict[str, Bytes]:
        """The scale bytes [rows that are read, columns] under each layout of their size."""
        scales = self.stored[1]
        if self.weight.scales is None:
            return {"rows": scales.reshape(self.read, self.columns)}
        found = {}
        for one in self._of_size(self.weight.scales):
            if one.name == "rows.T":
                part = scales.reshape(self.columns, self.rows)[:, : self.read]
            else:
                height, width = _padded(one, self.read, self.columns)
                part = scales.reshape(-1)[: height * width]
            found[one.name] = one.read(np.ascontiguousarray(part), self.read, self.length, self.made)
        return found

    def _of_size(self, scales: StoredTensor) -> list[Layout]:
        """Return the layouts that scales of this type and shape can have."""
        names = ("exponents",) if scales.dtype == "I8" else _UNSIGNED
        size, last = math.prod(scales.shape), scales.shape[-1]
        lasts = {"rows": self.columns, "exponents": self.columns, "rows.T": self.rows}
        return [
            LAYOUTS[name]
            for name in names
            if size == math.prod(_padded(LAYOUTS[name], self.rows, self.columns))
            and (len(scales.shape) == 1 or last == lasts.get(name, last))
        ]

    @property
    def fits(self) -> bool:
        """Whether the scales have the size of any layout."""
        return self.weight.scales is None or bool(self._of_size(self.weight.scales))

    @property
    def exact(self) -> bool:
        """Whether there is a scale for each block, and none of padding."""
        return self.weight.scales is None or math.prod(self.weight.scales.shape) == self.rows * self.columns

    @cached_property
    def code_layouts(self) -> tuple[str, ...]:
        """The layouts that the number of stored codes fits, that of the convention first."""
        if self.weight.scales is None:
            return (self.packing,)
        names = [one.name for one in LAYOUTS.values() if one.part == "codes" and not one.transposed]
        bits, width = self.made.element.bits, self.made.code_bytes(self.length)
        if bits != 4:
            names = [name for name in names if name not in ("high_first", "halves")]
        if self.rows % 16 or width % 16:
            names.remove("weights_16x16")
        alike = [name for name in names if (name == "unpacked") == (self.packing == "unpacked")]
        return (self.packing, *(name for name in alike if name != self.packing))


def _padded(layout: Layout, rows: int, columns: int) -> tuple[int, int]:
    height, width = (-(-n // m) * m for n, m in zip((rows, columns), layout.multiple, strict=True))
    return height, width


def readings(weight: Weight, checkpoint: Checkpoint) -> list[Reading]:
    """Return the ways to read a weight that its types and sizes allow; what the files state excludes others."""
    found = list(_readings(weight))
    found = [one for one in found if one.exact] or found
    stated = str(checkpoint.meta.get("block_format", MXFP4.name if checkpoint.meta else ""))
    said = json.dumps(checkpoint.config).lower()
    names = {stated} if stated else {name for word, name in _STATED.items() if word in said}
    # No library stores the uniform grid; only mxref's own files say that they do.
    return [one for one in found if one.made.name in names] or [o for o in found if o.made is not MXFP4_E1M2]


def _readings(weight: Weight) -> Iterator[Reading]:
    codes, scales = weight.codes, weight.scales
    if scales is None:
        made = MXFP4 if codes.dtype == "GGUF_MXFP4" else NVFP4
        yield Reading(weight, made, "halves", math.prod(codes.shape[:-1]), codes.shape[-1])
        return
    if scales.dtype not in ("U8", *_SCALES) or len(scales.shape) == 0:
        return
    shape = codes.shape
    if len(shape) > 2 and shape[:-1] == scales.shape:  # [..., C, bytes of a block]
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if codes.dtype == "F4":  # whose shape counts elements
        shape = (*shape[:-1], shape[-1] // 2)
    rows, width = math.prod(shape[:-1]), shape[-1]
    if not rows * width:
        return
    for made in BLOCK_FORMATS.values():
        bits = made.element.bits
        if made.element.name != _CODES.get(codes.dtype, made.element.name):
            continue
        if (codes.dtype == "F4" and bits != 4) or made.scale != _SCALES.get(scales.dtype, made.scale):
            continue
        for packing, length in (("packed", width * 8 // bits), ("unpacked", width)):
            if (packing == "unpacked" and bits == 8) or length % made.k or width * 8 % bits:
                continue
            one = Reading(weight, made, packing, rows, length)
            if one.fits and (packing == "packed" or not (one.stored[0][:64] >> bits).any()):
                yield one


def _bytes(array: NDArray[Any]) -> Bytes:
    return array if array.dtype == np.uint8 else array.view(np.uint8)


@dataclass(frozen=True)
class Sample:
    """Blocks of a weight: of every kind of layout the same places."""

    reading: Reading
    magnitudes: Bytes
    """Codes of magnitudes without their sign, [n, elements]; a block of a tile has the elements of all its rows."""
    negative_zeros: int
    zeros: int
    scales: dict[str, Bytes]
    """The scale byte of each block, [n], by layout."""
    tile: bool


def sample(reading: Reading, blocks: int) -> Sample:
    """Return about so many blocks of rows that lie evenly in the weight."""
    made = reading.made
    layouts = reading.scale_layouts
    natural = next(iter(layouts.values()))
    tile = _is_tiled(natural, made.k)
    group = made.k if tile else 1
    count = max(1, min(reading.read // group, -(-blocks // reading.columns)))
    starts = np.unique(np.linspace(0, reading.read // group - 1, count).astype(np.int64)) * group
    rows = (starts[:, None] + np.arange(group)).reshape(-1)
    codes = unpack(reading.codes(rows), made.element).reshape(len(starts), group, reading.columns, made.k)
    by_block = codes.swapaxes(1, 2).reshape(-1, group * made.k)
    magnitudes = _magnitudes(by_block, made)
    zero = magnitudes == 0
    taken = slice(0, blocks)
    return Sample(
        reading, magnitudes[taken], int((zero & (by_block == made.element.sign))[taken].sum()),
        int(zero[taken].sum()), {name: read[starts].reshape(-1)[taken] for name, read in layouts.items()}, tile,
    )  # fmt: skip


def _magnitudes(codes: Bytes, made: BlockFormat) -> Bytes:
    """Return the codes of magnitudes; of two's complement the lowest code counts as the largest magnitude."""
    element = made.element
    if element.negatives.value == "twos_complement":
        return np.minimum(np.where(codes & element.sign, -codes, codes), element.max_code).astype(np.uint8)
    return codes & np.uint8(element.sign - 1)


def _is_tiled(scales: Bytes, k: int) -> bool:
    """Return whether every aligned group of k rows has equal scales, while neighbouring groups have others."""
    whole = scales[: len(scales) // k * k][: 64 * k]
    if len(whole) < 2 * k:
        return False
    groups = whole.reshape(-1, k, whole.shape[1])
    if not (groups == groups[:, :1]).all():
        return False
    return bool((groups[1:, 0] != groups[:-1, 0]).mean() > 0.05)
