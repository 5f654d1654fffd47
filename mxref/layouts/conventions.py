"""How libraries store a weight in a checkpoint: the names of its tensors and the shape of its codes.

A layout is named by one of `CONVENTIONS`, or by one or two names of `mxref.layouts.foreign`, as `nvidia_128x4` or
`high_first,rows.T`; `mxref` is its own.

Sources: transformers 0189b1d0 and gpt-oss for `gpt-oss`; amd-quark 0.13; compressed-tensors 0.20.0; ggml d99724f2 and
gguf 0.19.0, `block_mxfp4`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mxref.errors import RecipeError, ShapeError
from mxref.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, BlockFormat
from mxref.layouts.foreign import LAYOUTS, Bytes, Layout, layouts_of
from mxref.tomlio import suggestion

OWN = "mxref"
"""The name of mxref's own layout."""


@dataclass(frozen=True)
class WeightStorage:
    """How a library stores a weight [..., N, K]: the names of its tensors, and the shape of the codes."""

    name: str
    title: str
    endings: Mapping[BlockFormat, tuple[tuple[str, str], ...]]
    """What follows a layer's name, for codes and scales; the first is written, and any is read."""
    by_block: bool = False
    """Whether codes are stored by block, [..., N, K / k, bytes], instead of by row."""
    joined: bool = False
    """Whether one tensor holds the blocks, each as its scale and then its codes."""
    codes: str = "packed"
    """The layout of the codes. Scales lie in rows."""
    nan: bool = True
    """Whether its readers take the scale byte 255 as NaN."""

    def by_row(self, what: str, stored: list[Bytes], made: BlockFormat) -> list[Bytes]:
        """Return codes by row, and scales, from the tensors; ShapeError, about `what`, if they have no such blocks."""
        size = made.code_bytes(made.k)
        if self.joined:
            (records,) = stored
            if records.ndim < 2 or records.shape[-1] % (1 + size):
                raise ShapeError(
                    f"{what} has shape {records.shape}, and a row of blocks has a multiple of {1 + size} bytes, a "
                    f"scale byte and {size} bytes of codes for each; reshape it to [rows, blocks * {1 + size}]"
                )
            blocks = records.reshape(*records.shape[:-1], records.shape[-1] // (1 + size), 1 + size)
            stored = [np.ascontiguousarray(blocks[..., 1:]), blocks[..., 0].copy()]
        elif not self.by_block:
            return stored
        elif stored[0].ndim < 3 or stored[0].shape[-1] != size:
            raise ShapeError(
                f"{what} has shape {stored[0].shape}, and blocks of {made.k} elements are [..., N, K / {made.k}, "
                f"{size}]; codes by row are of another layout, as {OWN} or quark"
            )
        codes, scales = stored
        return [codes.reshape(*codes.shape[:-2], math.prod(codes.shape[-2:])), scales]

    def tensors(self, key: str, codes: Bytes, scales: Bytes, made: BlockFormat) -> dict[str, Bytes]:
        """Return the tensors of a layer by name, from codes by row and scales."""
        blocks = codes.reshape(*scales.shape, made.code_bytes(made.k))
        if self.joined:
            records = np.concatenate([scales[..., None], blocks], axis=-1)
            return {key: records.reshape(*scales.shape[:-1], math.prod(records.shape[-2:]))}
        first, second = self.endings[made][0]
        return {key + first: blocks if self.by_block else codes, key + second: scales}


CONVENTIONS = {
    one.name: one
    for one in (
        WeightStorage(
            "gpt-oss",
            "NAME_blocks [..., N, K / 32, 16], NAME_scales [..., N, K / 32]",
            {MXFP4: (("_blocks", "_scales"), (".blocks", ".scales"))},
            by_block=True,
            nan=False,
        ),
        WeightStorage(
            "quark",
            "NAME.weight [N, K / 2], NAME.weight_scale [N, K / 32]; MXFP6 too",
            dict.fromkeys((MXFP4, MXFP6_E2M3, MXFP6_E3M2), ((".weight", ".weight_scale"),)),
        ),
        WeightStorage(
            "compressed-tensors",
            "NAME.weight_packed [N, K / 2], NAME.weight_scale [N, K / 32]; NAME.weight [N, K] in MXFP8",
            {MXFP4: ((".weight_packed", ".weight_scale"),), MXFP8_E4M3: ((".weight", ".weight_scale"),)},
        ),
        WeightStorage(
            "ggml",
            "NAME [N, K / 32 * 17]: records of a scale byte and 16 bytes of codes, as the package gguf reads MXFP4",
            {MXFP4: (("", ""),)},
            joined=True,
            codes="halves",
            nan=False,
        ),
    )
}
"""The conventions by name."""


def named(name: str) -> tuple[WeightStorage | None, tuple[Layout, Layout]]:
    """Return the convention, if the name is one, and the layouts of codes and scales.

    Raises:
        RecipeError: an unknown name, or two layouts of one part.
    """
    if name in CONVENTIONS:
        convention = CONVENTIONS[name]
        return convention, (LAYOUTS[convention.codes], LAYOUTS["rows"])
    parts = () if name == OWN else tuple(name.split(","))
    for part in parts:
        if part not in LAYOUTS:
            known = (OWN, *CONVENTIONS, *LAYOUTS)
            raise RecipeError(
                f"unknown layout {part!r}{suggestion(part, known)}; known: {', '.join(known)}; "
                "a comma joins one of codes and one of scales"
            )
    return None, layouts_of(parts)
