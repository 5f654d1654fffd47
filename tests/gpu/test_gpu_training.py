"""Training on the GPU: its operators under torch's own checks, compiled, and the same losses as the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from layer_setup import quantize_calls
from mxref import MXArray, get_backend
from mxref.backend import Backend
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import (
    advance,
    check_stochastic_rounding,
    convert,
    operators,
)
from mxref_torch.operators import blocks
from mxref_triton import TritonBackend
from training_setup import CONFIG, change, metrics, run

TABLES = {
    "rne": {"dialect": "amd"},
    "h16": {"dialect": "amd", "all": {"hadamard": 16}},
    "SR, signs": {"all": {"rounding": "sr", "hadamard": 32, "signs": "per_step_layer"}},
    "from Fprop": {
        "all": {"scale_rule": ">=1.3"},
        "dgrad": {"source": "fprop", "rounding": "sr"},
        "wgrad": {"source": "fprop", "gain": 1.25, "out": "bf16"},
    },
    "tseng backward": {"dialect": "tseng", "fprop": {"format": "bf16", "hadamard": 0, "signs": "none"}},
}


def recipe_of(table: dict[str, Any]) -> Any:
    return recipe_from_table({"gemm": "ordered", **table})


class Bridge(ReferenceBackend):
    """The reference on GPU tensors, through the CPU: what torch itself computes stays on the GPU."""

    name = "bridge"
    capabilities = replace(ReferenceBackend.capabilities, arrays="torch", devices=frozenset({"cuda"}))
    from_numpy = TritonBackend.from_numpy
    to_numpy = TritonBackend.to_numpy

    def _host(self, q: MXArray) -> MXArray:
        return MXArray(
            self.to_numpy(q.codes), self.to_numpy(q.scales), q.shape, q.axis, q.block, q.prescale, q.rotation
        )

    def _quantize(self, x: Any, plan: Any) -> Any:
        return tuple(self.from_numpy(t) for t in super()._quantize(self.to_numpy(x), plan))

    def _dequantize(self, q: MXArray, dtype: str) -> Any:
        return self.from_numpy(super()._dequantize(self._host(q), dtype))

    def _hadamard(self, x: Any, rotation: Any, axis: int) -> Any:
        return self.from_numpy(super()._hadamard(self.to_numpy(x), rotation, axis))

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: Any, out_dtype: str) -> Any:
        return self.from_numpy(super()._scaled_gemm(self._host(a), self._host(b), profile, out_dtype))


@pytest.mark.clause("gemm.ordered")
@pytest.mark.parametrize("name", TABLES)
def test_losses_are_the_references(name, tmp_path, cases):
    """Three steps: every loss and gradient norm as with the reference in place of the kernels."""
    recipe = recipe_of(TABLES[name])
    logs = []
    backends: list[Backend] = [Bridge(), get_backend("triton")]
    for backend in backends:
        run(tmp_path / backend.name, recipe, change(CONFIG, steps=3, eval_every=3), backend=backend)
        logs.append(metrics(tmp_path / backend.name))
    assert logs[0] == logs[1]
    assert logs[0].count(b"grad_norm") == 3
    cases(3)


@pytest.mark.parametrize("profile", ["ordered", "bounded"])
def test_operators_pass_torchs_own_checks(profile):
    key = operators.register_backend(get_backend("triton"))
    x = torch.randn(64, 512, device="cuda")
    calls = quantize_calls(x, key)
    (_, rows), *_ = calls
    spec = rows[3]
    a, b = blocks.quantize(*rows), blocks.quantize(x[:32], *rows[1:-1], False)
    calls.append((blocks.prepare, (b, key, spec, 512, profile)))
    layouts = [blocks.prepare(q, key, spec, 512, profile) for q in (a, b)]
    calls += [
        (
            blocks.scaled_gemm,
            ([*a, *first], [*b, *second], key, spec, spec, 512, profile, out, "fprop", None),
        )
        for out in ("float32", "bfloat16")
        for first, second in (([], []), ([], layouts[1]), layouts)
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch 2.11 itself
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("profile", ["ordered", "bounded"])
def test_compiled_in_one_graph(profile, compiler):
    recipe = recipe_of({"dialect": "amd", "gemm": profile, "all": {"hadamard": 16}})
    results = []
    torch._dynamo.reset()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layer": nn.Linear(512, 256, bias=False)}).cuda()
        context = convert(model, recipe, backend=get_backend("triton"), seed=5).context
        layer = model["layer"]
        forward = torch.compile(layer, fullgraph=True, backend=compiler) if compiled else layer
        found = []
        for i in range(3):
            context.step = i
            x = torch.randn(256, 512, generator=torch.Generator().manual_seed(i)).bfloat16().cuda()
            x.requires_grad_()
            model.zero_grad()
            with torch.compiler.set_stance("fail_on_recompile" if compiled and i else "default"):
                y = forward(x)
            y.float().square().sum().backward()
            found.append((y.detach(), x.grad, layer.weight.grad))
            advance(model)
        results.append(found)
    for eager, graph in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


def test_stochastic_rounding_passes_the_check_before_a_run():
    check_stochastic_rounding(get_backend("triton"), recipe_of(TABLES["SR, signs"]))
