"""All assumptions: the peaks of the hardware and the shares of them that are reached, with sources and bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum


class Level(StrEnum):
    """Which end of an assumption is taken."""

    LOW = "low"
    """The slow end."""
    NOMINAL = "nominal"
    HIGH = "high"
    """The fast end."""


@dataclass(frozen=True)
class Peak:
    """A number of the hardware, as its vendor or others publish it."""

    value: float
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class Machine:
    """An MI355X, and the node of eight."""

    compute_units: Peak = Peak(256, "", "CDNA4 whitepaper; 8 dies of 32", "high")
    clock: Peak = Peak(
        2.4e9, "Hz", "MI355X data sheet, peak engine clock", "high; sustained clocks are lower"
    )
    simds: Peak = Peak(4, "per CU", "CDNA ISA: four SIMDs of 16 lanes, a wave of 64 takes 4 cycles", "high")
    lanes: Peak = Peak(16, "per SIMD", "as simds; 157 TFLOP/s of float32 are 256 lanes x 2 packed", "high")
    fp4: Peak = Peak(16384, "FLOP/clock/CU", "16x16x128 in 16 cycles: 10.1 PFLOP/s dense", "high")
    fp6: Peak = Peak(16384, "FLOP/clock/CU", "6-bit operands take the cycles of 4-bit ones", "high")
    fp8: Peak = Peak(8192, "FLOP/clock/CU", "ISSCC 2026 and ISA text: 5.0 PFLOP/s dense", "high")
    bf16: Peak = Peak(4096, "FLOP/clock/CU", "MI355X data sheet: 2.5 PFLOP/s dense", "high")
    memory: Peak = Peak(8e12, "B/s", "MI355X data sheet, HBM3E", "high")
    links: Peak = Peak(7 * 76.8e9, "B/s", "7 Infinity Fabric links of 153.6 GB/s, both directions", "medium")
    network: Peak = Peak(50e9, "B/s", "a port of 400 Gb/s for each card of a node", "medium")

    def matrix_flops(self, format: str) -> float:
        """Return FLOP/s of `fp4`, `fp6`, `fp8` or `bf16` at the peak clock."""
        per_clock: Peak = getattr(self, format)
        return per_clock.value * self.compute_units.value * self.clock.value

    @property
    def simd_cycles(self) -> float:
        """Cycles per second of all SIMDs together."""
        return self.compute_units.value * self.simds.value * self.clock.value

    @property
    def lane_operations(self) -> float:
        """Vector operations per second, each of one lane."""
        return self.simd_cycles * self.lanes.value


@dataclass(frozen=True)
class Assumption:
    """A number that is not known, with its bounds; low is the slow end."""

    low: float
    nominal: float
    high: float
    source: str
    level: Level = Level.NOMINAL

    @property
    def value(self) -> float:
        """The number at its level."""
        return {Level.LOW: self.low, Level.NOMINAL: self.nominal, Level.HIGH: self.high}[self.level]


@dataclass(frozen=True)
class Assumptions:
    """What is assumed; `*_share` are fractions of a peak of `Machine`.

    A nominal value is what was measured on a gfx950 and published, at training shapes where there is a choice, or
    else this project's own measurement on an H200, whose transfer is the assumption.
    """

    memory_share: Assumption = Assumption(
        0.55, 0.725, 0.87,
        "gfx950: 4.4 TB/s bf16 to MX (pytorch/ao 4290), 5.80 TB/s addition (tilelang 2248); H200: 4.17 of 4.8 TB/s, "
        "a copy, measured here",
    )  # fmt: skip
    vector_share: Assumption = Assumption(
        0.50, 0.72, 0.85,
        "H200, measured here: dual quantization with H16 of 16384 x 16384 in 280 us, 202 us at one issue per cycle "
        "of the instructions counted for it, and in 340 us, 244 us, before packed arithmetic; bounds assumed",
    )  # fmt: skip
    convert_slots: Assumption = Assumption(
        4, 1, 1, "issue slots of v_cvt_scalef32_pk_fp4; undocumented, assumed full rate, or a quarter of it"
    )
    fp4_share: Assumption = Assumption(
        0.317, 0.464, 0.532,
        "MI355X: AITER 4.67 PFLOP/s over the four forward shapes of Llama 8B and 32768 tokens, FlyDSL 5.36 at one of "
        "them (Primus-Turbo 514); AITER 3.20 at an attention shape of gpt-oss (Primus-Turbo 487)",
    )  # fmt: skip
    fp6_share: Assumption = Assumption(
        0.211, 0.464, 0.532,
        "none was found for MXFP6: that of FP4; low as if its operands' bytes, 1.5 times as many, bound the product",
    )  # fmt: skip
    fp8_share: Assumption = Assumption(
        0.357, 0.466, 0.78,
        "MI355X, of MXFP8, as none was found of tensor scales: 1.80 PFLOP/s in the mean (Primus-Turbo 274), 2.35 at "
        "8192 cubed (ROCm TransformerEngine 682); H200: 1.55 of 1.98 PFLOP/s with tensor scales, measured here",
    )  # fmt: skip
    bf16_share: Assumption = Assumption(
        0.463, 0.578, 0.80,
        "MI355X: 1.16 PFLOP/s grouped (Primus-Turbo 252), 1.455 at 131072 x 7168 x 2048 (aiter 2559); "
        "H200: 795 of 990 TFLOP/s, measured here",
    )  # fmt: skip
    attention_forward_share: Assumption = Assumption(
        0.369, 0.508, 0.526,
        "MI355X, causal, 8192, 64 over 8 heads of 128, of the BF16 peak: 928 TFLOP/s (FlyDSL 225), 1278 and 1324 "
        "(aiter 3390)",
    )  # fmt: skip
    attention_backward_share: Assumption = Assumption(
        0.22, 0.303, 0.418,
        "MI355X, causal, 8192, of the BF16 peak: 763 TFLOP/s with float32 atomics, 1052 without (aiter 815, its "
        "FLOPs halved for the mask); low as much lower as forward's",
    )  # fmt: skip
    link_share: Assumption = Assumption(
        0.5,
        0.75,
        0.85,
        "48 of 64 GB/s per link and direction after protocol (rccl 1210, gfx94), for the network too; bounds assumed",
    )
    hidden_share: Assumption = Assumption(
        0.5, 0.8, 1.0, "share of communication behind computation: assumed, no measurement"
    )
    gradient_bytes: Assumption = Assumption(
        4, 4, 2, "per parameter that is reduced: float32 here, BF16 by choice"
    )
    parameter_bytes: Assumption = Assumption(
        4, 4, 2, "per parameter that is gathered: float32 here, BF16 by choice"
    )
    residual_bytes: Assumption = Assumption(4, 4, 2, "residual stream: float32 in this model, BF16 in others")
    logit_bytes: Assumption = Assumption(
        32,
        6,
        6,
        "per logit of the cross-entropy: 32 with an operation at a time in float32, 6 fused from BF16",
    )
    shared_inputs: Assumption = Assumption(
        0,
        0,
        1,
        "whether q, k, v and gate, up share one quantized input: not in this layer, yes in fused ones",
    )

    def at(self, level: Level) -> Assumptions:
        """Return all assumptions at a level."""
        return replace(self, **{f.name: replace(getattr(self, f.name), level=level) for f in fields(self)})

    def varied(self, name: str, level: Level) -> Assumptions:
        """Return these assumptions with one of them at another level."""
        changed: Assumption = replace(getattr(self, name), level=level)
        return replace(self, **{name: changed})
