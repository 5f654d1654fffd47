"""Published results of MXFP4 training, as data with sources; no computation uses them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published number and what of ours it is compared with."""

    key: str
    """Name of the computed quantity, see `compare.quantities`."""
    what: str
    value: float
    bound: str
    """`=`, or `>` where the source gives a lower bound."""
    source: str


CARDS = 8
"""Of the node whose samples/s were published."""

_V51, _V60 = "MLPerf Training v5.1 logs, llama31_8b", "MLPerf Training v6.0 logs, llama31_8b"
_TSENG = "arXiv 2502.20586, an estimate"

PUBLISHED = (
    Published("fp8 samples/s", "FP8, samples/s of 8 cards", 29.90, "=", _V51),
    Published("h16 samples/s", "MXFP4 + H16, samples/s of 8 cards", 35.67, "=", _V60),
    Published(
        "h16 over fp8", "step throughput, MXFP4 + H16 over FP8", 1.193, "=", "the same logs, 35.67 / 29.90"
    ),
    Published("h16 over fp8", "step throughput, MXFP4 + H16 over FP8", 1.20, "=", "arXiv 2605.09825"),
    Published("h16 over h32", "quantization kernel, H16 over H32", 1.08, "=", "arXiv 2605.09825"),
    Published("backward over fp8", "backward of the layers, MXFP4 over FP8", 1.3, ">", _TSENG),
    Published("backward over bf16", "backward of the layers, MXFP4 over BF16", 1.7, ">", _TSENG),
)
