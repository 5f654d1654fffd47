"""The end of an optimizer step of a converted model."""

from __future__ import annotations

import warnings

from torch import nn

from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_linears, require_module, some
from mxref_torch.optimizer_step.masters import check_master_weights


def advance(model: nn.Module) -> None:
    """Close an optimizer step of a converted model: compute the next FP8 scales and drop the quantized weights.

    Call it once after each optimizer step. The caller sets the context's `step`. The first call warns of layers that
    never ran. After a skipped update, call `restart` instead.

    Raises:
        LayerError: a Parameter that is trained or converted is not float32 any more.
        StepError: the recipe draws random bits or has a schedule, and the training step before this one had the same
            number.
    """
    layers = [module for module in require_module(model).modules() if isinstance(module, MXLinear)]
    check_master_weights(model, layers)
    for context in {id(layer.context): layer.context for layer in layers}.values():
        first = context.close_step(any(layer.draws for layer in layers if layer.context is context))
        if first and (names := _never_ran(model)):
            warnings.warn(
                f"converted layers that never ran in the first step: {some(names)}; a module that reads "
                "their weights directly computes in its own precision (check_census raises an error instead)",
                stacklevel=2,
            )
    for layer in layers:
        layer.advance()


def restart(model: nn.Module) -> None:
    """Discard what the current step has left in a converted model, so that the step can be repeated.

    Call it too when weights were changed by something other than an optimizer step or `load_state_dict`, before a
    forward pass under a step number that was trained before.
    """
    for module in require_module(model).modules():
        if isinstance(module, MXLinear):
            module.context.reopen_step()
            module.restart()


def _never_ran(model: nn.Module) -> list[str]:
    """Return the names of the low-precision layers none of whose GEMMs ever ran."""
    return [
        name
        for name, linear in named_linears(model).items()
        if isinstance(linear, MXLinear) and linear.low_precision and not linear.census.ran
    ]
