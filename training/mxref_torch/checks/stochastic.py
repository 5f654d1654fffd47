"""The check of stochastic rounding before the first step of a run, through the operator that training uses.

What is wrong with a rounding is told by `mxref.conformance.sr_statistics`. Here is how training rounds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.conformance.sr_statistics import stochastic_problem
from mxref.layouts.packed import unpack
from mxref.recipe import UNTURNED, OperandSpec, Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS
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
    step, layer or operand gives independent bits; and a micro-batch draws the bits of its place in the step. Operands
    that training makes in one read of a tensor are made in one read here.

    Raises:
        LayerError: an SR that does not round stochastically, or not as a function of its stream and place.
        UnsupportedError: the backend does not declare what the recipe asks for.
    """
    recipe, backend = load_recipe(recipe), require_backend(backend)
    for treatment in recipe.treatments():
        for tensor, readers in READERS.items():
            specs = {
                role: treatment.operands(role)[which]
                for role, which in readers
                if treatment.kind(role) == "block"
            }
            for role, spec in specs.items():
                if spec.rounding is not Rounding.SR:
                    continue
                beside = next((other for reader, other in specs.items() if reader is not role), None)
                operand, native = OPERANDS[role][dict(readers)[role]], backend.capabilities.native_sr
                rounded, stream = (
                    partial(_rounded, backend, operand.axis, beside),
                    Stream(0, 1, 2, operand.id),
                )
                if problem := stochastic_problem(rounded, spec, operand.axis, stream, native=native):
                    raise LayerError(
                        f"stochastic rounding of {role.value}.{tensor} by backend {backend.name!r} {problem}; "
                        "choose another backend or rounding = 'rne'"
                    )


def _rounded(
    backend: Backend,
    axis: int,
    beside: OperandSpec | None,
    x: NDArray[np.float32],
    spec: OperandSpec,
    stream: Stream,
    first: int,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Round as `mxref.conformance.sr_statistics.Rounder` says, beside an operand along the other axis if it has one."""
    device = min(backend.capabilities.devices, key=lambda name: (name != "cpu", name))
    tokens, batch_place = torch.from_numpy(x).to(device), operators.batch_place(stream.step, first, len(x))
    words = operators.stream_words(stream.seed, stream.layer, stream.operand)
    # The other operand is not looked at. Without a Hadamard transform it takes any number of copies.
    other = "" if beside is None else operators.spec_text(replace(beside, **UNTURNED))
    texts, streams = (operators.spec_text(spec), other), (words, words if beside else None)
    order = 1 if axis == 1 else -1  # the one along axis 1 goes first
    request = (
        batch_place, operators.register_backend(backend), *texts[::order], *streams[::order], operators.WHOLE, True
    )  # fmt: skip
    # A scale of the tensor is that of all tokens: under another one the same bits round to other codes.
    made = blocks.quantize(tokens[first:], *request, blocks.tensor_amax(tokens, *request))
    codes, scales = (made if axis == 1 else made[-2 - operators.block_format(spec).tensor_scale :])[:2]
    return unpack(codes.cpu().numpy(), operators.block_format(spec).element), scales.cpu().numpy()
