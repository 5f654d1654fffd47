"""Gradients of every recipe, compiled and eager: the same GEMMs, and the same values.

Inductor compiles C++ for minutes, so its tests run only in `make test-compiled`, and on a GPU in tests/gpu.
"""

from __future__ import annotations

import os

import pytest

from usual import usual

torch = pytest.importorskip("torch")

from compiled_gradients import COMPILERS, PARTS, RECIPES, check_gradients
from mxref import get_backend

# Torch's own: its tracer, the modules that inductor imports, and dynamo's look at the inputs of a part of a model.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


EVERYTHING = bool(os.environ.get("MXREF_COMPILE_ALL"))
ALIKE = ("bf16", "mixed", "mxfp4")
"""Recipes of which another one has every kind of operand; `make test-compiled` compiles them too."""
DIFFERENT = [name for name in RECIPES if name not in ALIKE]
WHOLE = ("keys", "mixed reversed")
"""Recipes with every kind of GEMM, with which the whole model is compiled too; test_one_graph.py compiles it twice."""


@pytest.mark.parametrize("compiler", COMPILERS if EVERYTHING else COMPILERS[:1])
@pytest.mark.parametrize(
    "recipe", RECIPES if EVERYTHING else usual([name for name in RECIPES if name not in ALIKE], "fp8", "keys")
)
def test_gradients_are_those_of_the_eager_model(recipe: str, compiler: str) -> None:
    for part in PARTS if EVERYTHING or recipe in WHOLE else PARTS[:1]:
        check_gradients(
            recipe, compiler, part, backend=get_backend("reference"), device="cpu", width=64, tokens=64
        )


def test_a_gradient_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: zeros in place of one gradient fail it."""
    import compiled_gradients

    whole = compiled_gradients.gradients

    def dropping(*arguments: object, compiled: bool, **named: object) -> object:
        found = whole(*arguments, compiled=compiled, **named)
        if compiled:
            found["blocks.1.up.weight of step 1"].zero_()
        return found

    monkeypatch.setattr(compiled_gradients, "gradients", dropping)
    with pytest.raises(AssertionError, match="blocks.1.up.weight"):
        check_gradients(
            "bf16", "aot_eager", "block", backend=get_backend("reference"), device="cpu", width=64, tokens=64
        )
