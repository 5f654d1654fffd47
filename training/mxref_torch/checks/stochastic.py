"""The check of stochastic rounding before the first step of a run, through the operators that training uses.

What is wrong with a rounding is told by `mxref.conformance.sr_statistics`. Here is how training rounds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.conformance.sr_statistics import stochastic_problem
from mxref.formats import BlockFormat
from mxref.layouts.packed import unpack
from mxref.recipe import OperandSpec, Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.conversion.convert import require_backend
from mxref_torch.errors import LayerError
from mxref_torch.layer.operands import READERS
from mxref_torch.operators import blocks


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
        for role in GemmRole:
            for operand, spec in zip(OPERANDS[role], treatment.operands(role), strict=True):
                if not isinstance(spec.format, BlockFormat) or spec.rounding is not Rounding.SR:
                    continue
                beside = next(
                    (
                        (treatment.operands(other)[which], OPERANDS[other][which].id)
                        for other, which in READERS[operand.tensor]
                        if other is not role and treatment.kind(other) == "block"
                    ),
                    None,
                )
                if problem := _problem(backend, spec, operand.axis, operand.id, beside):
                    raise LayerError(
                        f"stochastic rounding of {role.value}.{operand.tensor} by backend {backend.name!r} {problem}; "
                        "choose another backend or rounding = 'rne'"
                    )


def _problem(
    backend: Backend, spec: OperandSpec, axis: int, operand: int, beside: tuple[OperandSpec, int] | None
) -> str:
    """Return what is wrong with a backend's SR of an operand, or an empty string.

    `beside` has treatment and stream id of the operand that is made in one read with it, if there is one.
    """
    native, stream = backend.capabilities.native_sr, Stream(0, 1, 2, operand)
    alone, both = (partial(_rounded, backend, axis, other) for other in (None, beside))
    problem = stochastic_problem(alone, spec, axis, stream, native=native)
    if problem or beside is None:
        return problem
    if native:
        return stochastic_problem(both, spec, axis, stream, native=True)
    x = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)
    pairs = zip(alone(x, spec, stream, 256), both(x, spec, stream, 256), strict=True)
    if all(np.array_equal(one, other) for one, other in pairs):
        return ""
    return "draws other bits where both orientations of a tensor are made at once"


def _rounded(
    backend: Backend,
    axis: int,
    beside: tuple[OperandSpec, int] | None,
    x: NDArray[np.float32],
    spec: OperandSpec,
    stream: Stream,
    first: int,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Round as `mxref.conformance.sr_statistics.Rounder` says, beside another operand if one is given."""
    device = min(backend.capabilities.devices, key=lambda name: (name != "cpu", name))
    batch_place = operators.batch_place(stream.step, first, len(x))
    given = torch.from_numpy(x[first:]).to(device), batch_place, operators.register_backend(backend)
    words = operators.stream_words(stream.seed, stream.layer, stream.operand)
    if beside is None:
        codes, scales = blocks.quantize(*given, operators.spec_text(spec), axis, words, operators.WHOLE, True)
    else:
        texts = operators.spec_text(spec), operators.spec_text(beside[0])
        streams = words, operators.stream_words(stream.seed, stream.layer, beside[1])
        order = 1 if axis == 1 else -1  # the one along axis 1 goes first
        both = blocks.quantize_dual(*given, *texts[::order], *streams[::order], operators.WHOLE, True)
        codes, scales = both[:2] if axis == 1 else both[2:]
    return unpack(codes.cpu().numpy(), operators.block_format(spec).element), scales.cpu().numpy()
