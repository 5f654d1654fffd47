"""Where a value stopped being finite: the first layer, and which of its six tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxref_torch.names import model_of, named_linears, named_modules, named_parameters


@dataclass
class NonfiniteSearch:
    """Checks every module and linear layer while it runs, and keeps the first tensor that is not finite."""

    found: str | None = None
    """The first tensor with NaN or infinity, as in `dY of layers.0.q_proj`; None while all are finite."""
    looks: bool = True
    """Whether the block is still running: hooks of its tensors outlive it."""

    def look(self, tensor: Any, name: str) -> None:
        """Check a tensor, unless one was found before; other objects count as finite."""
        if self.looks and self.found is None and not is_finite(tensor):
            self.found = name


def is_finite(value: Any) -> bool:
    """Return whether a tensor holds neither NaN nor infinity; integers, empty tensors and other objects do not."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return True
    low, high = torch.aminmax(value.detach())  # reads the tensor once and makes no mask
    return bool(torch.isfinite(low) & torch.isfinite(high))


@contextmanager
def find_nonfinite(model: Any) -> Iterator[NonfiniteSearch]:
    """Find the first tensor that is not finite in the forward and backward passes of the block.

    Every linear layer's X, W, Y, dY, dX and dW are looked at, and the outputs and parameters of all other modules,
    in the order in which they are computed: weights first, dW when the block ends. Reading each tensor waits for the
    device: repeat a step within the block once its loss or gradient norm is not finite. Compiled modules are compiled
    anew, so use the model as it is before `torch.compile`.

    Args:
        model: a model, converted or not, or what `convert` returned.

    Yields:
        The search; its `found` names tensor and module, and is None where all is finite.
    """
    module = model_of(model)
    linears = named_linears(module)
    search = NonfiniteSearch()
    for name, parameter in named_parameters(module):
        search.look(parameter, _weight(name, linears, "W of {}", "the weight {}"))
    handles = [h for name, each in named_modules(module) for h in _watch(search, name, each, name in linears)]
    try:
        yield search
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in reversed(list(named_parameters(module))):
        search.look(parameter.grad, _weight(name, linears, "dW of {}", "the gradient of {}"))
    search.looks = False


def _weight(name: str, linears: Collection[str], of_linear: str, of_other: str) -> str:
    owner, _, own = name.rpartition(".")
    return of_linear.format(owner) if owner in linears and own == "weight" else of_other.format(name)


def _watch(search: NonfiniteSearch, name: str, module: nn.Module, linear: bool) -> Iterator[Any]:
    title = name or "the model"

    def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        for value in (*args, *named.values()):
            search.look(value, f"X of {title}")
        return tuple(map(listened, args)), {key: listened(value) for key, value in named.items()}

    def listened(value: Any) -> Any:
        # A view, because the hook of a tensor that several layers read would see the sum of their gradients.
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        view = value.view_as(value)
        view.register_hook(lambda dx: search.look(dx, f"dX of {title}"))  # type: ignore[no-untyped-call]
        return view

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple | list) else (output,):
            search.look(value, f"Y of {title}" if linear else f"the output of {title}")
            if linear and isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda dy: search.look(dy, f"dY of {title}"))  # type: ignore[no-untyped-call]

    if linear:
        yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after)
