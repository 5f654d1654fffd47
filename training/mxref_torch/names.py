"""The names of a model's modules, whatever wraps the model or its parts.

`torch.compile`, data parallelism and activation checkpointing put a module around another one. Globs over
names, layer indices and messages are about the model inside, so the wrapper's own attribute is left out. Recipes,
saved histories and the layers' random streams depend on these names and their order.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from mxref_torch.errors import LayerError

# Only torch gives a model attributes of these names: compilation, checkpointing and FSDP1.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

# An attribute `module` is a wrapper's only in these classes.
_HOLDS_MODULE = (
    nn.parallel.DistributedDataParallel,
    nn.DataParallel,
    torch.optim.swa_utils.AveragedModel,
)


def model_of(model: Any) -> nn.Module:
    """Return the model of a handle that `convert` returned, and a model itself; LayerError for anything else."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    if not isinstance(module, nn.Module):
        raise LayerError(f"expected a model, which is a torch.nn.Module, got {type(module).__name__}")
    return module


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, by its first name without wrappers, in the order of `nn.Module.named_modules`."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None:
                wraps = child_name == "module" and isinstance(module, _HOLDS_MODULE)
                inner = name if wraps or child_name in _WRAPPED else f"{name}.{child_name}".lstrip(".")
                yield from walk(child, inner)

    yield from walk(model, "")


def plain_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class whose forward computes a linear layer: nn.Linear, or the Conv1D of Transformers; else None."""
    # A model that holds a Conv1D has imported it.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    return next((each for each in (nn.Linear, conv1d) if isinstance(module, each)), None)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return plain_class(module) is not None


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards a part of a model: it frees weights, and fills them again before their use."""
    # A method of its modules alone. Importing their class takes seconds.
    return any(hasattr(module, "set_reshard_after_backward") for module in model.modules())


def named_linears(model: Any) -> dict[str, nn.Linear]:
    """Return every linear module of a model, or of its handle, by its name, converted or not, in definition order.

    A Conv1D of Transformers, as GPT-2 has it, is one too. It has the weight and the bias of an nn.Linear; for its
    widths, ask `widths`.
    """
    return {name: module for name, module in named_modules(model_of(model)) if _is_linear(module)}


def widths(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear module."""
    if isinstance(linear, nn.Linear):
        return linear.out_features, linear.in_features
    inputs, outputs = linear.get_parameter("weight").shape  # of a Conv1D
    return outputs, inputs


def replace_modules(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> None:
    """Put other modules in the places of these in a model."""
    for parent in list(model.modules()):
        # Not named_children, which gives a module that has two names only once.
        for child_name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, child_name, replacements[child])


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every Parameter once, by its first name without wrappers."""
    seen: set[nn.Parameter] = set()
    for prefix, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}".lstrip("."), parameter


def some(names: Collection[str], shown: int = 8) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(list(names)[:shown]) + more
