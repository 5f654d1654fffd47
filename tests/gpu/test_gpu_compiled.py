"""Compiled and eager gradients on the GPU, at widths from which its matrix kernels take other code paths."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compiled_gradients import COMPILERS, PARTS, RECIPES, check_gradients
from mxref import get_backend

WIDTHS = (256, 1024, 2048)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_the_eager_model(recipe, compiler, part, cases):
    for width in WIDTHS:
        given = {"backend": get_backend("triton"), "device": "cuda", "width": width, "tokens": 512}
        check_gradients(recipe, compiler, part, **given)
    cases(len(WIDTHS))
