"""What the Triton backend chooses and declares for a GPU, without one: no kernel runs."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref.formats import E2M1
from mxref.recipe import OperandSpec
from mxref.recipe_files import load_recipe
from mxref.reference import ReferenceBackend
from mxref.steps.scale import bump_above
from mxref_torch.conversion.convert import require_supported
from mxref_training.config_files import RECIPES, names
from mxref_triton.backend import TritonBackend
from mxref_triton.lane.treatment import Output, treatment


@pytest.mark.parametrize("name", names(RECIPES))
def test_every_shipped_recipe_works_as_it_is(name):
    backend = ReferenceBackend()
    backend.capabilities = TritonBackend.capabilities
    for own in load_recipe(name).treatments():
        require_supported(backend, own)


@pytest.mark.clause("scale.rule.threshold")
def test_an_amax_that_is_rounded_to_odd_stays_on_its_side_of_the_bound():
    """Packed arithmetic compares amax in bfloat16, so it is used only where this changes no comparison."""
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    odd = (mantissas & 0xFFFF0000) | ((mantissas & 0xFFFF) != 0).astype(np.uint32) << 16
    rules = [
        "floor",
        "ceil",
        "rceil",
        "even",
        ">1.5",
        ">=1.75",
        ">=1.3",
        ">1.3",
        ">=1.0078125",
        ">1.0078125",
        ">=1.015625",
    ]
    used = []
    for name in rules:
        for kind in ("float32", "bfloat16"):
            spec = OperandSpec(scale_rule=name)
            how = treatment(spec, kind, 0, False, Output.CODES, packed=True)
            bound = bump_above(spec.scale_rule, E2M1)
            same = bool(((mantissas > bound) == (odd > bound)).all()) if bound >= 0 else True
            assert how.packed is (kind == "bfloat16" or same), (name, kind)
            used.append(how.packed)
    assert 0 < used.count(False) < len(used)
    rotated = OperandSpec(scale_rule=">=1.3", hadamard=16)
    assert not treatment(rotated, "bfloat16", 16, False, Output.CODES, packed=True).packed
