"""Linear layers by recipe: convert a model, and make sure that what ran is what was asked for.

Two checks guard a run, because nothing else shows the faults that they find: the census counts the GEMMs
that ran, and the check of stochastic rounding looks at its mean and spread before the first step.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mxref.backend import Backend
from mxref.discovery import get_backend
from mxref.errors import BackendError
from mxref.formats import E2M1, MXFP4, BlockShape
from mxref.hadamard import SignPolicy, draw_rotation, hadamard
from mxref.packing import unpack
from mxref.philox import Stream
from mxref.placement import Placement
from mxref.recipe import OperandSpec, Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.rounding import Rounding
from mxref.scale import scale_exponent
from mxref_training import ops
from mxref_training.census import check_census, expected_census, is_kept, never_ran, some
from mxref_training.context import StepContext
from mxref_training.errors import ConfigError
from mxref_training.gradient import sole_uses
from mxref_training.layer import BF16_RECIPE, READERS, MXLinear
from mxref_training.names import named_linears, named_parameters, require_module
from mxref_training.replaceable import check_replaceable

__all__ = [
    "MXLinear",
    "StepContext",
    "advance",
    "check_census",
    "check_stochastic_rounding",
    "convert",
    "expected_census",
    "restart",
    "sole_uses",
]

_SR_COPIES = 4096
"""Copies of one block that the check of stochastic rounding rounds: spread is then known to about 2 %."""


def convert(
    model: nn.Module, recipe: Recipe | str | Path, *, backend: Backend | str | None = None, seed: int = 0
) -> StepContext:
    """Replace every `nn.Linear` of a model by an MXLinear that holds the same Parameters, in place.

    A layer whose qualified name matches a glob of `recipe.keep_bf16` gets BF16 GEMMs. A layer's index in
    the random streams is its index among all linear modules in definition order, kept or not. A converted
    model can be converted again to another recipe (FP8's history starts anew); copy a model before
    converting it, not after, since the layers of a copy would listen to the copied context. Convert before
    `fully_shard`; names are those without the wrappers of compilation, data parallelism and checkpointing.
    Call `advance` after each optimizer step: it alone reports layers that never ran, and in a compiled or
    sharded model, or where weights change through `.data`, it alone sees that `step` was not moved on.

    Args:
        model: holds float32 parameters.
        recipe: the treatment of the three GEMMs; or the name of a shipped recipe, or a file.
        backend: runs the MXFP4 operations; or its name; default that of `mxref.get_backend()`.
        seed: of the random bits, 0 to 2^64 - 1.

    Returns:
        The context to set before each forward, shared by all layers.

    Raises:
        ConfigError: a parameter that is not float32, an axis that MXFP4 blocks do not divide, a glob that
            matches nothing, or a layer that would not run as converted; the model is then unchanged.
        UnsupportedError: the recipe asks for what the backend does not declare.
    """
    recipe = load_recipe(recipe)
    backend = get_backend() if backend is None else require_backend(backend)
    linears = named_linears(model)
    if not linears or isinstance(model, nn.Linear):
        raise ConfigError(
            "convert replaces the linear layers inside a module, and this model has none inside"
        )
    for name, parameter in named_parameters(model):
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ConfigError(
                f"{name} is {parameter.dtype}: master weights must be float32, or small updates are lost; "
                "call model.float() before convert"
            )
    for glob in recipe.keep_bf16:
        if glob not in Recipe.keep_bf16 and not any(fnmatchcase(name, glob) for name in linears):
            raise ConfigError(
                f"keep_bf16: {glob!r} matches no linear layer; the first is named {next(iter(linears))!r}"
            )
    check_replaceable(model)
    for name, linear in linears.items():
        if not is_kept(name, recipe):
            _check_layer(name, linear, recipe, backend, seed)
    context = StepContext(backend, seed)
    replacements = {
        linear: MXLinear(linear, BF16_RECIPE if is_kept(name, recipe) else recipe, context, index)
        for index, (name, linear) in enumerate(linears.items())
    }
    for parent in list(model.modules()):
        # Not named_children, which gives a module that has two names only once.
        for child_name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear):
                setattr(parent, child_name, replacements[child])
    return context


def require_backend(backend: Any) -> Backend:
    """Return a backend, or that of a name; BackendError for anything else."""
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise BackendError(f"expected a backend or its name, got {type(backend).__name__}")
    return get_backend(backend)


def _check_layer(name: str, linear: nn.Linear, recipe: Recipe, backend: Backend, seed: int) -> None:
    """Raise unless the layer's axes hold whole blocks and the backend declares what the recipe asks for."""
    lengths = {"in_features": linear.in_features, "out_features": linear.out_features}
    for role in GemmRole:
        if recipe.formats(role)[0] is not MXFP4:
            continue
        backend.capabilities.require(backend.name, "gemms", (recipe.gemm, *recipe.formats(role)))
        contraction = {GemmRole.FPROP: "in_features", GemmRole.DGRAD: "out_features"}.get(role)
        for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True):
            unit = math.lcm(MXFP4.k, spec.hadamard or 1)
            source = torch.empty((unit, unit), device="meta")
            rng = Stream(seed, 0, 0, operand.id)
            backend.plan(source, spec, axis=operand.axis, placement=Placement(rng))
            needs = {contraction: unit} if contraction else {}
            if spec.block is BlockShape.TILE:
                across = {"w": set(lengths), "x": {"in_features"}, "dy": {"out_features"}}[operand.tensor]
                needs = dict.fromkeys(across, MXFP4.k) | needs
            for axis, multiple in needs.items():
                if lengths[axis] % multiple:
                    raise ConfigError(
                        f"{name}: {axis} = {lengths[axis]} is not a multiple of {multiple}, which {role.value} needs "
                        f"(k = {MXFP4.k}, Hadamard size {spec.hadamard or 'none'}, block {spec.block.value}); "
                        f"add {name!r} to keep_bf16 or change the width"
                    )


def advance(model: nn.Module) -> None:
    """Close an optimizer step of a converted model: next FP8 scales, quantized weights dropped.

    Call it once after each optimizer step; the context's `step` is set by the caller. The first call warns
    of layers that never ran. After an update that was skipped call `restart` in its place.

    Raises:
        StepError: the recipe draws random bits, and the training step before this one had the same number.
    """
    layers = [module for module in require_module(model).modules() if isinstance(module, MXLinear)]
    for context in {id(layer.context): layer.context for layer in layers}.values():
        first = context.close_step(any(layer.draws for layer in layers if layer.context is context))
        if first and (names := never_ran(model)):
            warnings.warn(
                f"converted layers that never ran in the first step: {some(names)}; a module that reads their weights "
                "past them computes in its own precision (check_census raises an error instead)",
                stacklevel=2,
            )
    for layer in layers:
        layer.advance()


def restart(model: nn.Module) -> None:
    """Forget what the step has left in a converted model so far, so that it can be done over.

    Call it too before a forward with weights that were changed other than by an optimizer step and
    `load_state_dict`, under a step number that was trained before.
    """
    for module in require_module(model).modules():
        if isinstance(module, MXLinear):
            module.context.reopen_step()
            module.restart()


def check_stochastic_rounding(backend: Backend | str, recipe: Recipe | str | Path) -> None:
    """Round a known block many times for each SR operand of the recipe, through the operator that training uses.

    Checked are the mean (unbiased to 6 standard errors), the spread, that other steps and operands draw
    other bits, and that a micro-batch draws the bits of its place in the step: for an operand by itself,
    and beside the one that training makes in the same read, if there is one.

    Raises:
        ConfigError: an SR that does not round stochastically, or not as a function of its stream and place.
        UnsupportedError: the backend does not declare what the recipe asks for.
    """
    recipe, backend = load_recipe(recipe), require_backend(backend)
    for role in GemmRole:
        if recipe.formats(role)[0] is not MXFP4:
            continue
        for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True):
            if spec.rounding is not Rounding.SR:
                continue
            stream, beside = Stream(0, 1, 2, operand.id), _beside(recipe, role, operand.tensor)
            problem = _sr_problem(backend, spec, operand.axis, stream, None)
            if beside and not problem:
                check = _sr_problem if backend.capabilities.native_sr else _dual_problem
                problem = check(backend, spec, operand.axis, stream, beside)
            if problem:
                raise ConfigError(
                    f"stochastic rounding of {role.value}.{operand.tensor} by backend {backend.name!r} {problem}; "
                    "choose another backend or rounding = 'rne'"
                )


def _beside(recipe: Recipe, role: GemmRole, tensor: str) -> tuple[OperandSpec, int] | None:
    """Return treatment and stream id of the operand that is made in one read with a role's, if there is one."""
    for other, which in READERS[tensor]:
        if other is not role and recipe.formats(other)[0] is MXFP4:
            return recipe.operands(other)[which], OPERANDS[other][which].id
    return None


def _sr_problem(
    backend: Backend, spec: OperandSpec, axis: int, stream: Stream, beside: tuple[OperandSpec, int] | None
) -> str:
    """Return what is wrong with a backend's SR of an operand, or an empty string."""
    length = 2 * math.lcm(MXFP4.k, spec.hadamard or 1)
    row = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    device = min(backend.capabilities.devices, key=lambda name: (name != "cpu", name))
    copies = torch.from_numpy(np.tile(row, (_SR_COPIES, 1))).to(device)  # [copies, K]
    x = copies if axis == 1 else copies.t()
    codes, scales = _round(backend, x, spec, axis, stream, beside)  # [copies, K], [copies, K / 32]

    values = hadamard(row, draw_rotation(spec.hadamard, spec.signs, stream)) if spec.hadamard else row
    exponent = np.repeat(scale_exponent(scales[0]), MXFP4.k)
    scaled = np.abs(np.ldexp(values.astype(np.float64), -exponent)) * (0.75 if spec.prescale else 1.0)
    grid = np.array(E2M1.magnitudes)
    scaled = np.minimum(scaled, grid[-1])
    lower = np.minimum(np.searchsorted(grid, scaled, side="right") - 1, len(grid) - 2)
    gap = grid[lower + 1] - grid[lower]
    step = 2.0**-spec.sr_bits
    probability = np.floor((scaled - grid[lower]) / gap / step) * step
    mean, variance = grid[lower] + gap * probability, gap**2 * probability * (1 - probability)

    magnitudes = grid[codes & ~np.uint8(E2M1.sign)]
    spread = magnitudes.var(axis=0).sum() / variance.sum()
    if not 0.9 < spread < 1.1:
        return f"has {spread:.2f} times the spread that it should have"
    error = magnitudes.mean(axis=0) - mean
    allowed = 6 * (np.sqrt(variance / _SR_COPIES) + gap / _SR_COPIES) + gap * step
    if (np.abs(error) > allowed).any():
        worst = int((np.abs(error) / allowed).argmax())
        return f"is biased: {mean[worst]:.4f} becomes {mean[worst] + error[worst]:.4f} on average"

    # Signs that change with the step would change the codes even under an SR that does not.
    spec = replace(spec, hadamard=0, signs=SignPolicy.NONE)
    codes, _ = _round(backend, x, spec, axis, stream, beside)
    for name in ("seed", "step", "layer", "operand"):
        other = replace(stream, **{name: (getattr(stream, name) + 1) % 6})
        if np.array_equal(_round(backend, x, spec, axis, other, beside)[0], codes):
            return f"draws the same bits for another {name}"
    first = x.shape[0] // 2
    part, _ = _round(backend, x, spec, axis, stream, beside, first)
    whole = codes[first:] if axis == 1 else codes[:, first:]
    if not backend.capabilities.native_sr and not np.array_equal(part, whole):
        return "draws other bits for a micro-batch than for the same tokens of the whole batch"
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
    words = ops.stream_words(stream.seed, stream.layer, stream.operand)
    given = x[first:], ops.step_place(stream.step, first, x.shape[0]), ops.register_backend(backend)
    if beside is None:
        codes, scales = ops.quantize(*given, ops.spec_text(spec), axis, words, True)
    else:
        other = ops.stream_words(stream.seed, stream.layer, beside[1])
        texts, streams = (ops.spec_text(spec), ops.spec_text(beside[0])), (words, other)
        order = 1 if axis == 1 else -1  # the one along axis 1 goes first
        both = ops.quantize_dual(*given, *texts[::order], *streams[::order], True)
        codes, scales = both[:2] if axis == 1 else both[2:]
    return unpack(codes.cpu().numpy(), E2M1), scales.cpu().numpy()
