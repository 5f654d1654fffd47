"""The end of an optimizer step of a converted model."""

from __future__ import annotations

import warnings

from torch import nn

from mxref_torch.census import never_ran, some
from mxref_torch.layer import MXLinear
from mxref_torch.names import require_module


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
