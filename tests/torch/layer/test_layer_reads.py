"""How often the linear layer quantizes and prepares each operand."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from layer_setup import IN, OUT, TABLES, TOKENS, Laying, build, formats, recipe_of, recorder, tensors
from mxref import get_backend
from mxref_torch import advance, weights_held


def test_a_weight_draws_other_bits_at_another_step():
    watched = recorder("reference")
    model, context = build(recipe_of(TABLES["SR everywhere"]), watched)
    x, dy = tensors()
    for context.step in (0, 1):
        model(x).backward(dy)
    advance(model)
    model(x).backward(dy)
    first, second, third = (q.codes for q in watched.seen[1])
    assert not np.array_equal(first, second)
    assert np.array_equal(second, third)


def reads_of(recipe, change=lambda model, x: None, micro_batches=1):
    watched = recorder("reference")
    model, _ = build(recipe, watched)
    x, dy = tensors()
    change(model, x)
    for _ in range(micro_batches):
        model(x).backward(dy)
    return watched.reads


def test_what_two_gemms_read_at_once_in_mxfp4_is_read_once():
    assert reads_of(recipe_of({})) == [(0, 5), (1,), (2, 4), (3,)]
    assert reads_of(recipe_of({}), micro_batches=2) == [(0, 5), (1,), (2, 4), (3,)] * 2
    assert reads_of(formats("mxfp4", "bf16", "mxfp4")) == [(0, 5), (1,), (4,)]
    assert reads_of(formats("fp8", "mxfp4", "mxfp4")) == [(5,), (2, 4), (3,)]
    assert reads_of(recipe_of({}), lambda model, x: x.requires_grad_(False)) == [(0, 5), (1,), (4,)]
    assert reads_of(recipe_of({}), lambda model, x: model.requires_grad_(False)) == [(0,), (1,), (2,), (3,)]


def test_evaluation_makes_only_what_fprop_reads():
    watched = recorder("reference")
    model, _ = build(recipe_of({}), watched)
    x, _ = tensors()
    with torch.no_grad():
        model(x)
        model(x)
    assert watched.reads == [(0,), (1,)] * 2


@pytest.mark.clause("conformance.dual")
def test_a_weight_is_prepared_once_for_all_gemms_of_an_opened_step():
    recipe = recipe_of(TABLES["SR everywhere"])
    results = []
    for backend in (Laying(), get_backend("reference")):
        model, context = build(recipe, backend)
        context.global_tokens = 3 * TOKENS
        for context.step in range(2):
            x, dy = tensors(seed=context.step)
            with weights_held(model):
                for context.token_origin in range(0, 3 * TOKENS, TOKENS):
                    y = model(x)
                    y.backward(dy)
                with torch.no_grad():
                    model(x)
            if context.step == 0:
                advance(model)
        results.append((y, x.grad, model.layer.weight.grad))
        if isinstance(backend, Laying):
            assert backend.prepared == [(OUT, IN), (IN, OUT)] * 2
            # Fprop and Dgrad; what Wgrad reads is of one micro-batch alone.
            assert backend.read == 2 * (3 + 3)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
