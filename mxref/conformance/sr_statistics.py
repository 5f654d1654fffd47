"""Statistics of stochastic rounding: what is wrong with a rounding, told from many copies of one row.

They need no reference bits, so they judge a rounding through the operators that training uses, and one whose random
bits are the hardware's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import block_format
from mxref.quantization import quantize
from mxref.recipe import UNTURNED, OperandSpec
from mxref.steps.hadamard import draw_rotation, hadamard
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import scale_value

_COPIES = 4096
"""Copies of one block that are rounded. The spread is then known to about 2 %."""
_FEW_COPIES = 128
"""Copies that are rounded under each of many streams."""
_STREAM_BITS = {
    "step": (*range(8), 10, 12, 16, 20, 24, 31), "layer": (0, 1, 2, 4, 8, 16, 23), "seed": (0, 1, 8, 31, 32, 63),
}  # fmt: skip
"""Bits of a stream's fields that are flipped one by one."""
_SIGMAS = 7
"""Limit of correlations, in standard errors; independent draws stay below it."""

Rounder = Callable[
    [NDArray[np.float32], OperandSpec, Stream, int], tuple[NDArray[np.uint8], NDArray[np.uint8]]
]
"""
Rounds tokens [M, N] under a treatment and a stream, from the token of a number on, as that part of all of them.
Returns the codes, one per byte, and the scale codes, block axis last.
"""


def stochastic_problem(
    rounded: Rounder, spec: OperandSpec, axis: int, stream: Stream, *, native: bool = False
) -> str:
    """Return what is wrong with a stochastic rounding as the rest of a sentence, or an empty string.

    Args:
        rounded: the rounding.
        spec: the treatment, of a block format and with SR.
        axis: the block axis, 0 or 1.
        stream: one random stream of the operand; others are derived of it.
        native: whether the random bits are the hardware's own, and differ from call to call.
    """
    length = 2 * math.lcm(block_format(spec).k, spec.hadamard or 1)
    row = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    copies = np.tile(row, (_COPIES, 1))  # [copies, K]
    x = copies if axis == 1 else copies.T
    codes, scales = rounded(x, spec, stream, 0)  # [copies, K], [copies, K / k]
    expected = _Expected.of(row, scales[0], spec, stream)
    problem = expected.problem(codes)
    if problem:
        return problem

    # Signs that change with the step would change the codes even under an SR that does not.
    if (unturned := replace(spec, **UNTURNED)) != spec:
        spec = unturned
        codes, scales = rounded(x, spec, stream, 0)
        expected = _Expected.of(row, scales[0], spec, stream)
    few = x[:_FEW_COPIES] if axis == 1 else x[:, :_FEW_COPIES]
    own = rounded(few, spec, stream, 0)[0]
    for name, other in _other_streams(stream):
        found = rounded(few, spec, other, 0)[0]
        if np.array_equal(found, own):
            return f"draws the same bits for another {name}"
        both = (expected.draws(own) * expected.draws(found)).mean()
        if abs(both) > _SIGMAS / np.sqrt(own[:, expected.fair].size):
            return f"draws bits for another {name} that are not independent (correlation {both:.2f})"
    first = x.shape[0] // 2
    part, _ = rounded(x, spec, stream, first)
    whole = codes[first:] if axis == 1 else codes[:, first:]
    if not native and not np.array_equal(part, whole):
        return "draws other bits for a micro-batch than for the same tokens of the whole batch"
    return ""


def _other_streams(stream: Stream) -> Iterator[tuple[str, Stream]]:
    """Yield streams that differ in one bit of the seed, the step or the layer, or in the operand."""
    for name, bits in _STREAM_BITS.items():
        for bit in bits:
            yield name, replace(stream, **{name: getattr(stream, name) ^ 1 << bit})
    for operand in range(6):
        if operand != stream.operand:
            yield "operand", replace(stream, operand=operand)


@dataclass(frozen=True)
class _Expected:
    """The possible results of stochastic rounding for a row: [K] each."""

    magnitudes: NDArray[np.float64]
    """By code."""
    lower: NDArray[np.float64]
    """The grid point below each element."""
    gap: NDArray[np.float64]
    """The distance to the next one."""
    probability: NDArray[np.float64]
    """That the element is rounded up."""
    step: float
    """Of probabilities."""

    @classmethod
    def of(
        cls, row: NDArray[np.float32], scales: NDArray[np.uint8], spec: OperandSpec, stream: Stream
    ) -> _Expected:
        """Return the possible results for a row [K] under its scale codes [K / k]."""
        format = block_format(spec)
        if spec.hadamard:
            row = hadamard(row, draw_rotation(spec.hadamard, spec.signs, stream, spec.sign_vector))
        divisor = np.repeat(scale_value(scales, format.scale), format.k)
        if format.tensor_scale:  # of the copies, so that of one; `row` has been transformed
            nearest = replace(spec, **UNTURNED, rounding=Rounding.RNE, block=format.row)
            divisor = divisor * float(quantize(row[None], nearest).tensor_scale[0])
        factor = format.element.prescale if spec.prescale else 1.0
        grid = np.array(format.element.magnitudes)
        scaled = np.minimum(np.abs(row / divisor) * factor, grid[-1])
        below = np.minimum(np.searchsorted(grid, scaled, side="right") - 1, len(grid) - 2)
        gap = grid[below + 1] - grid[below]
        step = 2.0**-spec.sr_bits
        probability = np.floor((scaled - grid[below]) / gap / step) * step
        return cls(np.abs(format.element.values), grid[below], gap, probability, step)

    @property
    def fair(self) -> NDArray[np.bool_]:
        """Elements that are rounded up about as often as down: these show their random bits."""
        return (self.probability > 0.2) & (self.probability < 0.8)

    def draws(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return for each fair element whether it was rounded up, with mean 0 and variance 1: [copies, fair]."""
        p = self.probability[self.fair]
        up = (self.magnitudes[codes] - self.lower)[:, self.fair] / self.gap[self.fair]
        found: NDArray[np.float64] = (up - p) / np.sqrt(p * (1 - p))
        return found

    def problem(self, codes: NDArray[np.uint8]) -> str:
        """Return what is wrong with the codes of many copies of the row, or an empty string."""
        p = self.probability
        mean, variance = self.lower + self.gap * p, self.gap**2 * p * (1 - p)
        magnitudes = self.magnitudes[codes]
        spread = magnitudes.var(axis=0).sum() / variance.sum()
        if not 0.9 < spread < 1.1:
            return f"has {spread:.2f} times the spread that it should have"
        error = magnitudes.mean(axis=0) - mean
        copies = len(codes)
        allowed = 6 * (np.sqrt(variance / copies) + self.gap / copies) + self.gap * self.step
        if (np.abs(error) > allowed).any():
            worst = int((np.abs(error) / allowed).argmax())
            return f"is biased: {mean[worst]:.4f} becomes {mean[worst] + error[worst]:.4f} on average"
        draws = self.draws(codes)
        between = draws.T @ draws / copies
        np.fill_diagonal(between, 0)
        if np.abs(between).max() > _SIGMAS / np.sqrt(copies):
            i, j = (
                int(self.fair.nonzero()[0][n])
                for n in np.unravel_index(np.abs(between).argmax(), between.shape)
            )
            return f"does not round elements {min(i, j)} and {max(i, j)} of a row independently"
        power = np.abs(np.fft.fft(draws, axis=0)) ** 2
        rows = np.fft.ifft(power.sum(axis=1)).real / draws.size  # correlation by distance of rows
        if np.abs(rows[1:]).max() > _SIGMAS / np.sqrt(draws.size):
            distance = int(np.abs(rows[1 : copies // 2 + 1]).argmax()) + 1
            return f"does not round rows at distance {distance} independently"
        return ""
