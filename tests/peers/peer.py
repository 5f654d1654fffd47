"""The common interface of the peers, so that one loop runs all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref import ScaleRule

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class Quantizer:
    """One way of a peer to quantize whole blocks."""

    rule: ScaleRule
    """The scale rule that it means to implement."""
    run: Callable[[Values], tuple[Bytes, Bytes]]
    """Scale bytes [N] and element codes [N, 32], in element order, of float32 blocks [N, 32]."""
    bfloat16: bool = False
    """It takes the blocks as bfloat16."""
    refuses: tuple[type[Exception], ...] = ()
    """What it raises for a block that it does not take."""


@dataclass(frozen=True)
class Decoder:
    """One way of a peer to decode a block."""

    dtype: str
    """The type of its result, a name that `mxref.dequantize` takes."""
    run: Callable[[Bytes], NDArray[Any]]
    """Values of code 7 (6.0) at scale bytes [N]."""


@dataclass(frozen=True)
class Peer:
    """All that is asked of one peer; names are those of columns and rows."""

    distribution: str
    """Its name on PyPI."""
    quantizers: dict[str, Quantizer] = field(default_factory=dict)
    elements: dict[str, Callable[[Values], Bytes]] = field(default_factory=dict)
    """Element codes [N] of values [N] at scale 1."""
    casts: dict[str, Callable[[Values], Bytes]] = field(default_factory=dict)
    """E8M0 bytes [N] of values [N]."""
    decoders: dict[str, Decoder] = field(default_factory=dict)


def beside_4(run: Callable[[Values], tuple[Bytes, Bytes]]) -> Callable[[Values], Bytes]:
    """Return how a quantizer rounds an element at scale 1: in a block whose other nonzero element is 4."""

    def codes(values: Values) -> Bytes:
        blocks = np.zeros((len(values), 32), np.float32)
        blocks[:, 0], blocks[:, 1] = 4, values
        scales, elements = run(blocks)
        assert (scales == 127).all()
        return elements[:, 1]

    return codes
