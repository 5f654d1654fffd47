"""The check of stochastic rounding, which looks at its mean and spread before the first step of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.formats import BlockFormat
from mxref.layouts.packed import unpack
from mxref.recipe import UNTURNED, OperandSpec, Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import draw_rotation, hadamard
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import scale_exponent
from mxref_torch import operators
from mxref_torch.conversion.convert import require_backend
from mxref_torch.errors import LayerError
from mxref_torch.layer.reads import READERS

_SR_COPIES = 4096
"""Copies of one block that are rounded. The spread is then known to about 2 %."""
_FEW_COPIES = 128
"""Copies that are rounded under each of many streams."""
_STREAM_BITS = {
    "step": (*range(8), 10, 12, 16, 20, 24, 31), "layer": (0, 1, 2, 4, 8, 16, 23), "seed": (0, 1, 8, 31, 32, 63),
}  # fmt: skip
"""Bits of a stream's fields that are flipped one by one."""
_SIGMAS = 7
"""Limit of correlations, in standard errors; independent draws stay below it."""


def check_stochastic_rounding(backend: Backend | str, recipe: Recipe | str | Path) -> None:
    """Round a known block many times for each SR operand of the recipe, through the operator that training uses.

    A recipe with layers or a schedule is checked for all of its treatments. Five properties are checked: the mean is
    unbiased to 6 standard errors; the spread is right; elements and rows are rounded independently; another seed,
    step, layer or operand gives independent bits; and a micro-batch draws the bits of its place in the step. Each is
    checked for the operand alone, and again beside the operand that training makes in the same read, if there is one.

    Raises:
        LayerError: an SR that does not round stochastically, or not as a function of its stream and place.
        UnsupportedError: the backend does not declare what the recipe asks for.
    """
    recipe, backend = load_recipe(recipe), require_backend(backend)
    for treatment in recipe.treatments():
        _check_treatment(backend, treatment)


def _check_treatment(backend: Backend, recipe: Recipe) -> None:
    for role in GemmRole:
        for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True):
            if not isinstance(spec.format, BlockFormat) or spec.rounding is not Rounding.SR:
                continue
            stream, beside = Stream(0, 1, 2, operand.id), _beside(recipe, role, operand.tensor)
            problem = _sr_problem(backend, spec, operand.axis, stream, None)
            if beside and not problem:
                check = _sr_problem if backend.capabilities.native_sr else _dual_problem
                problem = check(backend, spec, operand.axis, stream, beside)
            if problem:
                raise LayerError(
                    f"stochastic rounding of {role.value}.{operand.tensor} by backend {backend.name!r} {problem}; "
                    "choose another backend or rounding = 'rne'"
                )


def _beside(recipe: Recipe, role: GemmRole, tensor: str) -> tuple[OperandSpec, int] | None:
    """Return treatment and stream id of the operand that is made in one read with a role's, if there is one."""
    for other, which in READERS[tensor]:
        if other is not role and recipe.kind(other) == "block":
            return recipe.operands(other)[which], OPERANDS[other][which].id
    return None


def _sr_problem(
    backend: Backend, spec: OperandSpec, axis: int, stream: Stream, beside: tuple[OperandSpec, int] | None
) -> str:
    """Return what is wrong with a backend's SR of an operand, or an empty string."""
    format = operators.block_format(spec)
    length = 2 * math.lcm(format.k, spec.hadamard or 1)
    row = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    device = min(backend.capabilities.devices, key=lambda name: (name != "cpu", name))
    copies = torch.from_numpy(np.tile(row, (_SR_COPIES, 1))).to(device)  # [copies, K]
    x = copies if axis == 1 else copies.t()
    codes, scales = _round(backend, x, spec, axis, stream, beside)  # [copies, K], [copies, K / k]

    expected = _Expected.of(row, scales[0], spec, stream)
    problem = expected.problem(codes)
    if problem:
        return problem

    # Signs that change with the step would change the codes even under an SR that does not.
    if (unturned := replace(spec, **UNTURNED)) != spec:
        spec = unturned
        codes, scales = _round(backend, x, spec, axis, stream, beside)
        expected = _Expected.of(row, scales[0], spec, stream)
    few = x[:_FEW_COPIES] if axis == 1 else x[:, :_FEW_COPIES]
    own = _round(backend, few, spec, axis, stream, beside)[0]
    for name, other in _other_streams(stream):
        found = _round(backend, few, spec, axis, other, beside)[0]
        if np.array_equal(found, own):
            return f"draws the same bits for another {name}"
        both = (expected.draws(own) * expected.draws(found)).mean()
        if abs(both) > _SIGMAS / np.sqrt(own[:, expected.fair].size):
            return f"draws bits for another {name} that are not independent (correlation {both:.2f})"
    first = x.shape[0] // 2
    part, _ = _round(backend, x, spec, axis, stream, beside, first)
    whole = codes[first:] if axis == 1 else codes[:, first:]
    if not backend.capabilities.native_sr and not np.array_equal(part, whole):
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

    grid: NDArray[np.float64]
    """Magnitudes by code."""
    lower: NDArray[np.float64]
    """The grid point below each element."""
    gap: NDArray[np.float64]
    """The distance to the next one."""
    probability: NDArray[np.float64]
    """That the element is rounded up."""
    sr_bits: int
    sign: int
    """The sign bit of a code."""

    @classmethod
    def of(
        cls, row: NDArray[np.float32], scales: NDArray[np.uint8], spec: OperandSpec, stream: Stream
    ) -> _Expected:
        """Return the possible results for a row [K] under its scale codes [K / k]."""
        format = operators.block_format(spec)
        if spec.hadamard:
            row = hadamard(row, draw_rotation(spec.hadamard, spec.signs, stream, spec.sign_vector))
        exponent = np.repeat(scale_exponent(scales), format.k)
        factor = format.element.prescale if spec.prescale else 1.0
        grid = np.array(format.element.magnitudes)
        scaled = np.minimum(np.abs(np.ldexp(row.astype(np.float64), -exponent)) * factor, grid[-1])
        below = np.minimum(np.searchsorted(grid, scaled, side="right") - 1, len(grid) - 2)
        gap = grid[below + 1] - grid[below]
        step = 2.0**-spec.sr_bits
        probability = np.floor((scaled - grid[below]) / gap / step) * step
        return cls(grid, grid[below], gap, probability, spec.sr_bits, format.element.sign)

    @property
    def fair(self) -> NDArray[np.bool_]:
        """Elements that are rounded up about as often as down: these show their random bits."""
        return (self.probability > 0.2) & (self.probability < 0.8)

    def magnitudes(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return the magnitudes of codes [copies, K]."""
        found: NDArray[np.float64] = self.grid[codes & ~np.uint8(self.sign)]
        return found

    def draws(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return for each fair element whether it was rounded up, with mean 0 and variance 1: [copies, fair]."""
        p = self.probability[self.fair]
        up = (self.magnitudes(codes) - self.lower)[:, self.fair] / self.gap[self.fair]
        found: NDArray[np.float64] = (up - p) / np.sqrt(p * (1 - p))
        return found

    def problem(self, codes: NDArray[np.uint8]) -> str:
        """Return what is wrong with the codes of many copies of the row, or an empty string."""
        p = self.probability
        mean, variance = self.lower + self.gap * p, self.gap**2 * p * (1 - p)
        magnitudes = self.magnitudes(codes)
        spread = magnitudes.var(axis=0).sum() / variance.sum()
        if not 0.9 < spread < 1.1:
            return f"has {spread:.2f} times the spread that it should have"
        error = magnitudes.mean(axis=0) - mean
        copies = len(codes)
        allowed = 6 * (np.sqrt(variance / copies) + self.gap / copies) + self.gap * 2.0**-self.sr_bits
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


def _dual_problem(
    backend: Backend, spec: OperandSpec, axis: int, stream: Stream, beside: tuple[OperandSpec, int]
) -> str:
    """Return that SR differs where a second operand is made in the same read, or an empty string."""
    device = min(backend.capabilities.devices, key=lambda name: (name != "cpu", name))
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)).to(device)
    alone, both = (_round(backend, x, spec, axis, stream, other, first=256) for other in (None, beside))
    if all(np.array_equal(a, b) for a, b in zip(alone, both, strict=True)):
        return ""
    return "draws other bits where both orientations of a tensor are made at once"


def _round(
    backend: Backend,
    x: torch.Tensor,
    spec: OperandSpec,
    axis: int,
    stream: Stream,
    beside: tuple[OperandSpec, int] | None,
    first: int = 0,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the codes, one per byte, and scale codes of `x` from token `first` on, as that part of `x`."""
    words = operators.stream_words(stream.seed, stream.layer, stream.operand)
    given = (
        x[first:],
        operators.step_place(stream.step, first, x.shape[0]),
        operators.register_backend(backend),
    )
    if beside is None:
        codes, scales = operators.quantize(
            *given, operators.spec_text(spec), axis, words, operators.WHOLE, True
        )
    else:
        other = operators.stream_words(stream.seed, stream.layer, beside[1])
        texts, streams = (operators.spec_text(spec), operators.spec_text(beside[0])), (words, other)
        order = 1 if axis == 1 else -1  # the one along axis 1 goes first
        both = operators.quantize_dual(*given, *texts[::order], *streams[::order], operators.WHOLE, True)
        codes, scales = both[:2] if axis == 1 else both[2:]
    return unpack(codes.cpu().numpy(), operators.block_format(spec).element), scales.cpu().numpy()
