"""The families of the sweeps: the formats of a record, the backends that support them, and the stored codes."""

from __future__ import annotations

import os

import numpy as np

import mxref
import oracle
from every_path import EveryPath
from exhaustive.sweep import Codes
from mxref.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, BlockFormat

FAMILIES: dict[str, tuple[BlockFormat, ...]] = {"mxfp4": (MXFP4,), "mxfp8": (MXFP8_E4M3, MXFP8_E5M2)}
"""The formats whose sweeps go into one record."""

NUMBA = EveryPath() if os.environ.get("PYTEST_VERSION") else mxref.get_backend("numba")
"""All paths of the Numba backend in a test, whose slices are short; the one that runs, in a complete sweep."""


def element_of(block_format: BlockFormat) -> oracle.Element:
    """The oracle's own description of a format's element."""
    return oracle.ELEMENTS[block_format.element.name]


def subjects(*formats: BlockFormat) -> tuple[str, ...]:
    """The implementations that take all these formats, by name: the reference, and the Numba backend if it does."""
    return ("reference", "numba") if set(formats) <= NUMBA.capabilities.formats else ("reference",)


def prefix(*formats: BlockFormat) -> str:
    """Return the start of a domain's text: its formats, empty for MXFP4."""
    titles = [block_format.title for block_format in formats]
    return "" if set(formats) == {MXFP4} else f"{' times '.join(titles)}, "


def packed(codes: Codes, block_format: BlockFormat) -> Codes:
    """Codes [..., K] as they are stored: two of 4 bits per byte or one of 8, packed here and not by what is tested."""
    if element_of(block_format).bits == 8:
        return codes
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def unpacked(stored: Codes, block_format: BlockFormat) -> Codes:
    """The codes [..., K] of stored bytes."""
    if element_of(block_format).bits == 8:
        return stored
    pairs = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], -1)
    return pairs.reshape(*stored.shape[:-1], -1)
