"""How often the linear layer quantizes and prepares each operand."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from layer_setup import IN, OUT, TABLES, TOKENS, Laying, build, formats, recipe_of, recorder, tensors
from mxref import get_backend
from mxref_torch import advance


def test_weights_are_quantized_once_per_step_and_version():
    watched = recorder("reference")
    model, context = build(recipe_of({}), watched)
    x, dy = tensors()

    def weights():
        return [len(watched.seen.get(i, [])) for i in (1, 3)]

    def step():
        for _ in range(2):
            model(x).backward(dy)
        with torch.no_grad():
            model(x)

    step()
    assert weights() == [1, 1]
    with torch.no_grad():
        model.layer.weight.add_(0.01)
    with pytest.warns(UserWarning, match="was never called"):
        step()
    assert weights() == [2, 2]
    model.layer.weight.data = model.layer.weight.detach() + 0.01
    step()
    assert weights() == [3, 3]
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    step()
    assert weights() == [4, 4]
    context.step += 1
    step()
    assert weights() == [5, 5]
    advance(model)
    assert model.layer._weights == {}
    step()
    assert weights() == [6, 6]


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


def test_what_two_gemms_read_in_mxfp4_is_read_once():
    assert reads_of(recipe_of({})) == [(0, 5), (1, 3), (2, 4)]
    assert reads_of(recipe_of({}), micro_batches=2) == [(0, 5), (1, 3), (2, 4), (0, 5), (2, 4)]
    assert reads_of(formats("mxfp4", "bf16", "mxfp4")) == [(0, 5), (1,), (4,)]
    assert reads_of(formats("fp8", "mxfp4", "mxfp4")) == [(5,), (2, 4), (3,)]
    assert reads_of(recipe_of({}), lambda model, x: x.requires_grad_(False)) == [(0, 5), (1,), (4,)]
    assert reads_of(recipe_of({}), lambda model, x: model.requires_grad_(False)) == [(0,), (1, 3), (2,)]


def test_evaluation_makes_only_what_fprop_reads():
    watched = recorder("reference")
    model, _ = build(recipe_of({}), watched)
    x, dy = tensors()
    with torch.no_grad():
        model(x)
        model(x)
    assert watched.reads == [(0,), (1,), (0,)]
    model(x).backward(dy)
    # What evaluation made of W is not for training: averaged weights may have been in its place.
    assert watched.reads[3:] == [(0, 5), (1, 3), (2, 4)]


@pytest.mark.clause("conformance.dual")
def test_a_weight_is_prepared_once_for_all_gemms_of_a_step():
    recipe = recipe_of(TABLES["SR everywhere"])
    results = []
    for backend in (Laying(), get_backend("reference")):
        model, context = build(recipe, backend)
        context.global_tokens = 3 * TOKENS
        for context.step in range(2):
            x, dy = tensors(seed=context.step)
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
            assert backend.read == 2 * (3 + 1 + 3)
            assert [len(kept.layout) for _, kept in model.layer._weights.values()] == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_weight_that_one_gemm_reads_is_not_prepared_for_it():
    backend = Laying()
    model, context = build(recipe_of({}), backend)
    x, dy = tensors()
    for total in (None, TOKENS):
        context.global_tokens = total
        model(x).backward(dy)
    assert backend.prepared == []
    advance(model)
    with torch.no_grad():
        for _ in range(2):
            model(x)
    assert (backend.prepared, backend.read) == ([(OUT, IN)], 2)
