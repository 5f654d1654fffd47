"""Limits of a traced layer: the compiler of torch 2.11 loses gradients if a function returns its own argument."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.overrides import TorchFunctionMode

from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import convert
from mxref_torch.layer.linear import LinearFunction

MIXED = {"all": {"format": "fp8"}, "dgrad": {"format": "mxfp4"}, "wgrad": {"format": "bf16"}}
RECIPES = {
    "bf16": lambda: load_recipe("bf16"),
    "fp8": lambda: load_recipe("fp8"),
    "mxfp4_h16": lambda: load_recipe("mxfp4_h16"),
    "mixed": lambda: recipe_from_table(MIXED),
}


class Names(TorchFunctionMode):
    """Counts how many calls returned each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.returned.append(result)
        return result

    def names(self, tensor: Any) -> int:
        return sum(each is tensor for each in self.returned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_result_has_one_name_and_an_operand_none(name, dtype, monkeypatch):
    """A cast to the same type, or an operation in place, gives a tensor a second name in the traced graph."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    convert(model, RECIPES[name](), backend=ReferenceBackend(), seed=1)
    seen = {}
    for which in ("forward", "backward"):
        original = getattr(LinearFunction, which)

        def watched(ctx, *args, original=original, which=which):
            operands = [*args, *(getattr(ctx, "saved_tensors", ()) if which == "backward" else ())]
            with Names() as mode:
                result = original(ctx, *args)
            results = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
            seen[which] = [mode.names(t) for t in results], [mode.names(t) for t in operands]
            return result

        monkeypatch.setattr(LinearFunction, which, staticmethod(watched))
    x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).to(dtype).requires_grad_()
    model(x).float().sum().backward()
    for which, results in (("forward", 1), ("backward", 2)):
        # The operator that makes a result is called past the mode; what follows it is not.
        assert len(seen[which][0]) == results
        assert max(seen[which][0]) <= 1, f"a result of {which} has several names"
        assert max(seen[which][1]) == 0, f"an operand of {which} was returned by a function"
