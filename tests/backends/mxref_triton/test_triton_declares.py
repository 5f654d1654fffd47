"""What the shipped recipes ask of the Triton backend on a GPU, by its declaration; no kernel runs."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref.reference import ReferenceBackend
from mxref_torch.conversion.convert import require_supported
from mxref_training.config import RECIPES, find_recipe, names
from mxref_triton.backend import TritonBackend


@pytest.mark.parametrize("name", names(RECIPES))
def test_every_shipped_recipe_works_as_it_is(name):
    backend = ReferenceBackend()
    backend.capabilities = TritonBackend.capabilities
    for treatment in find_recipe(name).treatments():
        require_supported(backend, treatment)
