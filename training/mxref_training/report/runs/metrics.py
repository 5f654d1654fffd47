"""The numbers of telemetry that figures show."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxref_training.report.runs.read import Line


@dataclass(frozen=True)
class Metric:
    """A number of telemetry, and how it is drawn."""

    key: str
    title: str
    scale: float = 1.0
    """Factor of the number in figures."""
    colours: str = "viridis"
    signed: bool = False
    """Whether zero is the middle of the colours."""
    from_zero: bool = False


METRICS = (
    Metric("snr", "SNR, dB"),
    Metric("clipped", "Clipped, %", colours="YlOrRd", from_zero=True),
    Metric("zeroed", "Zeroed, %", colours="YlOrRd", from_zero=True),
    Metric("bias", "Bias, %", 100.0, "RdBu_r", signed=True),
    Metric("spread", "Spread of scales, binades", from_zero=True),
)
"""The numbers that figures show for each operand."""

COSINE = Metric("cosine", "Cosine of dW")


def value_of(line: Line, metric: Metric) -> float | None:
    """Return a number of a line as figures show it; the spread of scales is in powers of two."""
    if metric.key != "spread":
        value = line.get(metric.key)
        return None if value is None else value * metric.scale
    low, high = line["scale_min"], line["scale_max"]
    if low is None or high is None:
        return None
    # The scales of block formats are exponents; that of FP8 is the factor itself.
    return float(math.log2(high / low)) if line["format"] == "fp8" else float(high - low)
