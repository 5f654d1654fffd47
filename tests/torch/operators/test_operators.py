"""The torch operators: their contracts with torch, their errors, one compiled graph, and the bridge to arrays."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import library, nn

from layer_setup import NVFP4, SEED, TABLES, Laying, build, quantize_calls, recipe_of, tensors
from mxref import get_backend
from mxref.errors import UnsupportedError
from mxref.reference import ReferenceBackend
from mxref_torch import advance, check_census, operators
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.errors import LayerError
from mxref_torch.operators import blocks, dense


def test_bridge_shares_memory_and_refuses_other_devices():
    backend = get_backend("reference")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = torch.randn(4, 6).to(dtype).t()
        array = to_backend(t, backend)
        assert array.shape == (6, 4)
        np.testing.assert_array_equal(array.astype(np.float32), t.float().numpy())
        array[0, 0] = 7
        assert t[0, 0] == 7
        back = from_backend(array, backend)
        assert back.dtype == dtype
        assert torch.equal(back, t)
    negated = (
        torch.randn(4, 6, dtype=torch.complex64).conj().imag
    )  # memory holds the values before the negation
    np.testing.assert_array_equal(to_backend(negated, backend), negated.clone().numpy())
    with pytest.raises(LayerError, match="works on cpu, got a tensor on meta"):
        to_backend(torch.empty(2, device="meta"), backend)


def samples():
    key = operators.register_backend(get_backend("reference"))
    place, stream = operators.batch_place(1, 32, 128), operators.stream_words(SEED, 2, 0)
    spec, rotated = (
        operators.spec_text(recipe_of({"all": {"rounding": "sr", "hadamard": h}}).fprop.x) for h in (0, 64)
    )
    x = torch.randn(64, 64)
    yield from quantize_calls(x, key)
    a = blocks.quantize(x, place, key, spec, "", stream, None, operators.WHOLE, True)
    b = blocks.quantize(x[:32], place, key, spec, "", stream, None, operators.WHOLE, False)
    other = operators.stream_words(SEED, 2, 5)
    yield (
        blocks.quantize,
        (x[:, :41].t(), operators.batch_place(0), key, spec, rotated, stream, other, operators.WHOLE, True),
    )
    laying = operators.register_backend(Laying())
    for name in (key, laying):
        yield blocks.prepare, (b, name, spec, 64, "ordered")
        layout = blocks.prepare(b, name, spec, 64, "ordered")
        assert len(layout) == 3 * (name == laying)
        for out in ("float32", "bfloat16"):
            treatment = name, spec, spec, 64, "ordered", out, "fprop", None
            yield blocks.scaled_gemm, (list(a), [*b, *layout], *treatment)
        yield (
            blocks.add_product,
            (torch.randn(64, 32), list(a), [*b, *layout], name, spec, spec, 64, "ordered", "wgrad", None),
        )
    nvfp4 = operators.spec_text(recipe_of(NVFP4).wgrad.dy)
    both = x, place, key, nvfp4, rotated, stream, other, operators.WHOLE, False
    yield blocks.tensor_amax, both
    yield blocks.quantize, (*both, 2 * blocks.tensor_amax(*both))
    q = blocks.quantize(x, place, laying, nvfp4, "", stream, None, operators.WHOLE, True)
    yield blocks.dequantize, (q, laying, nvfp4)
    yield blocks.prepare, (q, laying, nvfp4, 64, "ordered")
    layout = blocks.prepare(q, laying, nvfp4, 64, "ordered")
    treatment = laying, nvfp4, nvfp4, 64, "ordered", "float32", "fprop", None
    yield blocks.scaled_gemm, (q, [*q, *layout], *treatment)
    yield dense.dense_gemm, (x.bfloat16().t(), x.bfloat16().t(), "wgrad", None)


def test_an_operator_refuses_to_be_differentiated():
    x, w = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(16, 64).bfloat16()
    with pytest.raises(
        UnsupportedError, match="mxref::dense_gemm has no gradient, and an argument requires one"
    ):
        dense.dense_gemm(x, w, "fprop")
    with torch.no_grad():
        assert not dense.dense_gemm(x, w, "fprop").requires_grad


def test_opcheck():
    for op, arguments in samples():
        library.opcheck(op, arguments)
    x = torch.randn(64, 64)
    arguments = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2), "dgrad", None
    # The schema check compares the arguments before and after, which torch cannot do for FP8.
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    library.opcheck(dense.dense_gemm, arguments, test_utils=checks)


def test_a_backend_of_a_known_name_gets_a_key_of_its_own():
    key, other = operators.register_backend(get_backend("reference")), Laying()
    other.name = "reference"
    assert operators.register_backend(other) not in ("reference", key)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does
@pytest.mark.parametrize(
    ("table", "backend"),
    [
        (TABLES["SR everywhere"], ReferenceBackend),
        ({}, Laying),
        ({"all": {"format": "fp8"}}, ReferenceBackend),
    ],
    ids=["mxfp4", "mxfp4 with a layout", "fp8"],
)
def test_compiled_in_one_graph_for_all_steps(table, backend):
    recipe = recipe_of(table)
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model, context = build(recipe, backend())
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        steps = []
        for step in range(4):
            context.step, context.token_origin, context.global_tokens = step, 64 * step, 64 * (step + 1)
            x, dy = tensors(seed=step)
            model.zero_grad()
            with torch.compiler.set_stance("fail_on_recompile" if compiled and step else "default"):
                y = run(x)
            y.backward(dy)
            steps.append([y.detach(), x.grad, model.layer.weight.grad, *(b.clone() for b in model.buffers())])
            advance(model)
        check_census(context, nn.ModuleDict({"layer": model.layer}), recipe_of({**table, "keep_bf16": []}), 4)
        results.append(steps)
    for eager, graph in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))
