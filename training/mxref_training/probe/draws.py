"""The spread of products and operands over draws of the random bits: other steps of the same streams.

Products are measured on a corner of `CORNER` rows of both operands, along their whole contraction axis.

Beside the variance by contraction length stand bounds. Tseng et al. (arXiv 2502.20586, theorem 3.2) state, for vectors
of length b and the largest gap D between representable values, O(b D^4 |A|inf |B|inf) without a transform. With a
random Hadamard transform they state, with probability (1 - eps)^2, O(D^4 |A| |B| log(2b/eps)). The bounds here grow
with b in the same way. Their norms are squared, as a variance is, and the functions have their constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mxref.backend import Backend
from mxref.formats import MXFP4, ElementFormat
from mxref.recipe import GemmProfile, OperandSpec, Recipe
from mxref.recipe_files import recipe_from_table
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import draw_rotation, hadamard
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.checks.measures import as_rounded
from mxref_torch.layer.operands import LayerGemm, Operand
from mxref_training.probe.errors import exact_product, over
from mxref_training.probe.layer import Captured, treatment
from mxref_training.probe.results import Row

CORNER = 64
"""Rows of each operand."""
SHORTEST = 64
"""Shortest contraction length of the growth, and the size of its Hadamard transform."""


EPSILON = 0.05
"""The probability with which a vector's largest transformed element may be above its bound."""


class Spread:
    """Mean and variance of a tensor over draws, element by element, in float64."""

    def __init__(self) -> None:
        self.draws = 0
        self.mean = self._squares = torch.zeros(())

    def add(self, values: Tensor) -> None:
        """Add a draw (Welford 1962)."""
        values = values.double()
        self.draws += 1
        if self.draws == 1:
            self.mean, self._squares = values, torch.zeros_like(values)
            return
        step = values - self.mean
        self.mean = self.mean + step / self.draws
        self._squares = self._squares + step * (values - self.mean)

    @property
    def variance(self) -> Tensor:
        """The unbiased estimate for each element."""
        return self._squares / (self.draws - 1)


class LayerDraws:
    """Measures the effect of random bits on the products and operands of one layer.

    Args:
        captured: the layer.
        draws: at least 2.
    """

    def __init__(self, captured: Captured, draws: int) -> None:
        self.captured, self.draws = captured, draws

    def variances(self, recipes: Mapping[str, Recipe]) -> Iterator[Row]:
        """Yield a row for each recipe and GEMM with random bits."""
        known: dict[object, Row] = {}
        for name, _, gemm in self._random(recipes):
            keys = gemm.role, treatment(gemm, 0), treatment(gemm, 1), gemm.profile
            if keys not in known:
                known[keys] = self._variance(gemm)
            yield self._head(name, gemm.role) | known[keys]

    def unbiased(self, recipes: Mapping[str, Recipe]) -> Iterator[Row]:
        """Yield a row for each recipe and operand that is rounded stochastically."""
        known: dict[object, Row] = {}
        for name, recipe, gemm in self._random(recipes):
            for which, operand in enumerate(OPERANDS[gemm.role]):
                spec = recipe.operands(gemm.role)[which]
                if spec.rounding is not Rounding.SR:
                    continue
                keys = gemm.role, which, treatment(gemm, which)
                if keys not in known:
                    known[keys] = self._unbiased(gemm, which, spec)
                yield self._head(name, gemm.role) | {"operand": operand.tensor} | known[keys]

    def growth(self) -> Iterator[Row]:
        """Yield for each GEMM and contraction length the variance of SR, without and with RHT, and its bounds.

        Both are MXFP4 with FLOOR and the prescale, as in Tseng et al.; the transform has 64 elements.
        """
        plain = {"format": MXFP4.name, "rounding": "sr", "prescale": True}
        rotated = plain | {"hadamard": SHORTEST, "signs": "per_step_layer"}
        backend = self.captured.layer.context.backend
        profile = _profile(backend)
        gemms = [
            self.captured.gemms(recipe_from_table({"all": table, "gemm": profile.value}))
            for table in (plain, rotated)
        ]
        for role in GemmRole:
            for length in lengths(self.captured.length(role)):
                a, b = (self._corner(role, which, length) for which in (0, 1))
                measured = [self._spread(each[role], (a, b), length).variance.mean().item() for each in gemms]
                bounds = _bounds(*(_rows(role, which, t) for which, t in enumerate((a, b))))
                yield {"layer": self.captured.name, "role": role.value, "length": length} | dict(
                    zip(
                        ("plain", "rotated", "plain_bound", "rotated_bound"),
                        (*measured, *bounds),
                        strict=True,
                    )
                )

    def _random(self, recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, Recipe, LayerGemm]]:
        backend = self.captured.layer.context.backend
        for name, recipe in recipes.items():
            for role, gemm in self.captured.gemms(recipe).items():
                if any(gemm.kind.draws(spec, backend) for spec in recipe.operands(role)):
                    yield name, recipe, gemm

    def _head(self, recipe: str, role: GemmRole) -> Row:
        return {"recipe": recipe, "layer": self.captured.name, "role": role.value}

    def _corner(self, role: GemmRole, which: int, length: int | None = None) -> Tensor:
        """Return the first rows of an operand, and the first `length` elements of its contraction axis."""
        operand = OPERANDS[role][which]
        values = self.captured.values(operand.tensor)
        return values[:CORNER, :length] if operand.axis == 1 else values[:length, :CORNER]

    def _made(self, gemm: LayerGemm, which: int, values: Tensor, draw: int) -> Operand:
        tensor, layer = OPERANDS[gemm.role][which].tensor, self.captured.layer
        tokens = None if tensor == "w" else values.shape[0]
        batch_place = operators.batch_place(self.captured.step + draw, 0, tokens)
        return layer.operands(tensor, values, batch_place, (gemm,))[gemm.role]

    def _spread(self, gemm: LayerGemm, sides: tuple[Tensor, Tensor], length: int) -> Spread:
        found = Spread()
        for draw in range(self.draws):
            a, b = (self._made(gemm, which, values, draw) for which, values in enumerate(sides))
            found.add(a.product(b, gemm, length, torch.float32))
        return found

    def _variance(self, gemm: LayerGemm) -> Row:
        sides = self._corner(gemm.role, 0), self._corner(gemm.role, 1)
        found = self._spread(gemm, sides, self.captured.length(gemm.role))
        exact = exact_product(gemm.role, *sides)
        signal = exact.square().sum().item()
        error = found.mean - exact
        variance = found.variance.sum().item()
        return {
            "draws": self.draws,
            "variance": over(variance, signal),
            # The expected error of a mean over this many unbiased draws is subtracted.
            "bias_energy": over(error.square().sum().item() - variance / self.draws, signal),
            "mean_bias": over((error * exact).sum().item(), signal),
        }

    def _unbiased(self, gemm: LayerGemm, which: int, spec: OperandSpec) -> Row:
        captured, values = self.captured, self._corner(gemm.role, which)
        found, source = Spread(), torch.zeros(())
        for draw in range(self.draws):
            operand, step = self._made(gemm, which, values, draw), captured.step + draw
            seen = as_rounded(operand, spec, captured.layer, gemm.role, which, values, step)
            slabs = [(q - v, v) for v, q, _, _ in seen.slabs()]
            error, source = (torch.cat(parts) for parts in zip(*slabs, strict=True))
            if spec.hadamard:
                stream = Stream(
                    captured.layer.context.seed, step, captured.layer.index, OPERANDS[gemm.role][which].id
                )
                error, source = (_turned_back(t, spec, stream) for t in (error, source))
            found.add(error)
        expected = (found.variance.sum() / self.draws).item()
        return {
            "draws": self.draws,
            "excess": over(found.mean.square().sum().item(), expected),
            "bias": over((found.mean * source).sum().item(), source.square().sum().item()),
        }


def _turned_back(t: Tensor, spec: OperandSpec, stream: Stream) -> Tensor:
    """Return rows in the rotated domain as they were before the rotation, float64."""
    rotation = draw_rotation(spec.hadamard, spec.signs, stream, spec.sign_vector)
    matrix = torch.from_numpy(hadamard(torch.eye(rotation.n).numpy(), rotation)).to(t.device, torch.float64)
    # Rows of the identity become rows d_i h_i of R^T; x R^T = y gives x = y R.
    return (t.reshape(-1, rotation.n) @ matrix.t()).reshape(t.shape)


def lengths(longest: int) -> list[int]:
    """Return the contraction lengths of the growth: doubled from the shortest, all of them multiples of it."""
    found = [SHORTEST]
    while found[-1] * 2 <= longest:
        found.append(found[-1] * 2)
    return found if longest >= SHORTEST else []


def _rows(role: GemmRole, which: int, values: Tensor) -> Tensor:
    """Return an operand with its contraction axis last, float64."""
    return values.double() if OPERANDS[role][which].axis == 1 else values.double().t()


def _bounds(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return both bounds for the rows of two operands, averaged over all pairs."""
    gap, length = relative_gap(MXFP4.element), a.shape[1]
    peaks = (t.abs().amax(dim=1).square().mean().item() for t in (a, b))
    groups = [t.reshape(len(t), -1, SHORTEST).square().sum(dim=2).mean(dim=0) for t in (a, b)]
    norms = (groups[0] * groups[1]).sum().item()
    return plain_bound(gap, length, *peaks), rotated_bound(gap, length, SHORTEST, norms)


def relative_gap(element: ElementFormat) -> float:
    """Return the largest gap between two results over the block's amax, under FLOOR and the prescale.

    An element v in units of X is at most 2^(emax + 1) f, with f the prescale: the largest magnitude M. The gap below M
    is 2^(emax - m) in units of X / f, and amax is at least 2^emax X.
    """
    gap = math.ldexp(1.0, element.max_exponent - element.mantissa_bits)
    return gap / element.prescale / math.ldexp(1.0, element.max_exponent)


def plain_bound(gap: float, length: int, a_peak: float, b_peak: float) -> float:
    """Return the bound without a transform: b |A|inf^2 |B|inf^2 (g^2 / 2 + g^4 / 16).

    Args:
        gap: g, of `relative_gap`.
        length: b.
        a_peak: the square of A's largest magnitude, or its mean over vectors.
        b_peak: that of B.
    """
    return length * a_peak * b_peak * (gap**2 / 2 + gap**4 / 16)


def rotated_bound(gap: float, length: int, group: int, norms: float, epsilon: float = EPSILON) -> float:
    """Return the bound with random signs and a Hadamard transform of groups: S (g^2 L + g^4 L^2 / 4) / n.

    Args:
        gap: g, of `relative_gap`.
        length: b; L = log(2 b / epsilon).
        group: n.
        norms: S, the sum over the groups of |A|^2 |B|^2, or its mean over pairs of vectors.
        epsilon: the bound holds with probability (1 - epsilon)^2 over the signs.
    """
    grown = math.log(2 * length / epsilon)
    return norms * (gap**2 * grown + gap**4 * grown**2 / 4) / group


def _profile(backend: Backend) -> GemmProfile:
    """Return a profile that a backend has for MXFP4: one answer where it has one."""
    profiles = backend.capabilities.profiles(MXFP4, MXFP4)
    return next(
        profile
        for profile in (GemmProfile.ORDERED, GemmProfile.EXACT, GemmProfile.BOUNDED)
        if profile in profiles
    )
