"""Compiled layers that read one X quantize it once, and prepare it once where the backend reads such a layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from compiled_gradients import Block, Model, recipe_of
from mxref import PreparedArray, get_backend
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import CapturedStep, convert
from mxref_torch.operators import blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

WIDTH, TOKENS = 64, 32
FIXED = {"all": {"format": "mxfp4", "hadamard": 32, "signs": "per_step"}}
SR = {"all": {"format": "mxfp4", "rounding": "sr"}}


class LeftLaying(ReferenceBackend):
    """Its GEMM reads layouts of both operands, which it counts: made, and read as the left operand."""

    name = "left-laying"
    reads_left_layouts = True

    def __init__(self) -> None:
        self.made: Counter[bytes] = Counter()
        self.read = 0

    def _prepare(self, q: Any, profile: Any) -> tuple[Any, ...]:
        if q.codes.any():  # a compiler asks for the layout of zeros
            self.made[q.codes.tobytes()] += 1
        return q.codes.copy(), q.scales.copy()

    def _scaled_gemm(self, a: Any, b: Any, profile: Any, out_dtype: str) -> Any:
        layouts = [q.layout_for(self.name, profile) if isinstance(q, PreparedArray) else None for q in (a, b)]
        self.read += bool(layouts[0])
        a, b = (
            replace(q, codes=layout[0], scales=layout[1]) if layout else q
            for q, layout in zip((a, b), layouts, strict=True)
        )
        return super()._scaled_gemm(a, b, profile, out_dtype)


def trained(recipe: Any, backend: Any, compiled: bool = True) -> dict[str, bytes]:
    """Return the outputs and gradients of two steps of a block: `up` and `gate` read one X, `down` another."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    block: Any = nn.ModuleDict({"block": Block(WIDTH)})
    context = convert(block, recipe, backend=backend, seed=5).context
    run = torch.compile(block.block, backend="aot_eager", fullgraph=True) if compiled else block.block
    found = {}
    for context.step in range(2):
        x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(context.step))
        y = run(x.bfloat16().requires_grad_())
        y.float().square().sum().backward()
        tensors = {"y": y, **{n: p.grad for n, p in block.named_parameters()}}
        found |= {f"{n} of {context.step}": t.detach().float().numpy().tobytes() for n, t in tensors.items()}
    return found


def test_a_compiler_finds_the_common_call() -> None:
    graphs: list[Counter[str]] = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=counting,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    block: Any = nn.ModuleDict({"block": Block(64)})
    convert(block, recipe_of("mxfp4_h16"), backend="reference", seed=5)
    run = torch.compile(block.block, backend=compiler, fullgraph=True)
    run(torch.randn(1, 32, 64).bfloat16().requires_grad_()).float().sum().backward()
    # X of up and gate, that of down, and three weights.
    assert graphs[0][str(blocks.quantize)] == 2 + 3


def test_a_shared_x_is_prepared_once_and_read_by_each_layer() -> None:
    for recipe in (recipe_of("mxfp4"), recipe_from_table(FIXED)):
        backend = LeftLaying()
        assert trained(recipe, backend) == trained(recipe, get_backend("reference"), compiled=False)
        # In each of two steps the X of up and gate, and that of down.
        assert list(backend.made.values()) == [1] * 4
        assert backend.read == 2 * 3


def test_an_x_of_which_each_layer_draws_its_own_is_not_prepared() -> None:
    backend = LeftLaying()
    assert trained(recipe_from_table(SR), backend) == trained(recipe_from_table(SR), get_backend("reference"))
    assert (backend.made, backend.read) == (Counter(), 0)


def test_layers_of_another_profile_prepare_their_own() -> None:
    table = {"layers": [{"match": ["block.gate"], "recipe": {"gemm": "exact"}}]}
    backend = LeftLaying()
    recipe = recipe_from_table(table)
    assert trained(recipe, backend) == trained(recipe, get_backend("reference"))
    assert sorted(backend.made.values()) == [1, 1, 2, 2]


def test_a_backend_whose_gemm_reads_codes_on_the_left_is_not_asked() -> None:
    backend = LeftLaying()
    backend.reads_left_layouts = False
    trained(recipe_of("mxfp4"), backend)
    assert (backend.made, backend.read) == (Counter(), 0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_step_prepares_each_x_once_in_a_micro_batch(compiled: bool) -> None:
    def losses(backend: Any) -> list[float]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model: Any = Model(WIDTH, 1)
        handle = convert(model, recipe_of("mxfp4"), backend=backend, seed=5)
        if compiled:
            model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-8, fused=True)
        take = CapturedStep(
            model, handle, lambda model, ids: model(ids).square().mean(), optimizer,
            tokens=2 * TOKENS, micro_batches=2, capture=False,
        )  # fmt: skip
        outcomes = [
            take(torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(step)))
            for step in range(2)
        ]
        outcomes.append(take.finish())
        return [outcome.loss for outcome in outcomes if outcome is not None]

    backend = LeftLaying()
    assert losses(backend) == losses(get_backend("reference"))
    # In each of two steps: four weights for Fprop and Dgrad. The compiled block adds the X of up and gate, and of
    # down, in two micro-batches.
    assert list(backend.made.values()) == [1] * (2 * (4 * 2 + compiled * 2 * 2))
    assert backend.read == compiled * 2 * 2 * 3


def test_a_model_compiled_for_any_number_of_tokens_does_without() -> None:
    backend = LeftLaying()
    model: Any = nn.ModuleDict({"block": Block(WIDTH)})
    convert(model, recipe_of("mxfp4"), backend=backend, seed=5)
    torch._dynamo.reset()
    run = torch.compile(model.block, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for tokens in (32, 64, 96):
            x = torch.randn(1, tokens, WIDTH).bfloat16()
            assert torch.equal(run(x), model.block(x))
