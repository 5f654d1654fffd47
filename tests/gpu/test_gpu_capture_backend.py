"""The operations of the backend inside a captured CUDA graph: replays with other data and steps give eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref import MXArray, OperandSpec, PreparedArray, Stream
from mxref.errors import BackendError
from mxref.placement import Placement
from mxref_triton import TritonBackend

SEED = Stream(1, layer=3, operand=4)
SPECS = {
    "rne": OperandSpec(),
    "H16, signs": OperandSpec(hadamard=16, signs="per_step"),
    "SR, H64, signs": OperandSpec(rounding="sr", hadamard=64, signs="per_step_layer", prescale=True),
    "SR, H256, signs": OperandSpec(rounding="sr", hadamard=256, signs="per_step"),
}
M, N, K = 512, 256, 1024


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return heavy-tailed values; every fifth row has a block far above the others, which E4M3 cannot hold."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=generator)
    x = x * torch.exp(torch.randn(rows, columns, device="cuda", generator=generator))
    if seed % 2:
        x[::5, :32] *= 1e6
    return x.to(torch.bfloat16)


def tensors(*results: MXArray | torch.Tensor) -> list[torch.Tensor]:
    """Return the memory of results, layouts included."""
    out = []
    for q in results:
        if isinstance(q, MXArray):
            out += [q.codes, q.scales, *(q.layout if isinstance(q, PreparedArray) else ())]
        else:
            out.append(q)
    return out


Place = Callable[[int], Placement]


def placed(number: int, step: torch.Tensor | None, operand: int) -> Placement:
    return Placement(replace(SEED, step=number, operand=operand), step=step)


def everything(
    backend: TritonBackend, spec: OperandSpec, profile: str, x: torch.Tensor, w: torch.Tensor, place: Place
) -> list[torch.Tensor]:
    """Do what a linear layer asks of a backend; `place` makes the placement of an operand."""
    a, across = backend.quantize_dual(x, (spec, spec), placements=(place(2), place(4)))
    b = backend.quantize(w, spec, placement=place(3))
    b = backend.prepare(b, profile=profile)
    out = backend.scaled_gemm(a, b, profile=profile, out_dtype="bfloat16")
    plain = backend.scaled_gemm(a, b.plain() if isinstance(b, PreparedArray) else b, profile=profile)
    onto = x.float().mean() + torch.zeros(M, N, device="cuda")
    backend.add_product(a, b, onto, profile=profile)
    values = backend.fake_quantize(x, spec, axis=0, dtype="bfloat16", placement=place(4))
    # The list of misfit rows is in no order.
    codes = [t for t in tensors(a, across, b) if t.dtype in (torch.uint8, torch.float32)]
    return [*codes, out, plain, onto, values, backend.dequantize(across, "bfloat16")]


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("way", ["auto", "bf16"])
@pytest.mark.parametrize("profile", ["ordered", "bounded"])
@pytest.mark.parametrize("name", SPECS)
def test_replays_with_other_data_and_steps_give_eager_bits(name, profile, way, cases):
    if way == "bf16" and profile == "ordered":
        pytest.skip("`ordered` is the same under every way of `bounded`")
    spec, backend = SPECS[name], TritonBackend(way)
    x, w, step = drawn(M, K, 0), drawn(N, K, 1), torch.zeros(1, dtype=torch.int64, device="cuda")
    # Kernels are compiled, and loaded, before a capture.
    everything(backend, spec, profile, x, w, partial(placed, 0, step))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(backend, spec, profile, x, w, partial(placed, 0, step))
    for number, seeds in ((0, (0, 1)), (7, (3, 2)), (70_000, (4, 4)), (7, (3, 2))):
        x.copy_(drawn(M, K, seeds[0]))
        w.copy_(drawn(N, K, seeds[1]))
        step.fill_(number)
        for t in captured:
            t.zero_()
        graph.replay()
        want = everything(
            backend,
            spec,
            profile,
            x,
            w,
            partial(placed, number, None),
        )
        assert len(want) == len(captured)
        for got, expected in zip(captured, want, strict=True):
            assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (got, expected)))
        cases(sum(t.numel() for t in want))


@pytest.mark.clause("conformance.capabilities", "scale.tensor.amax")
def test_a_replay_finds_the_scale_of_its_tensor(cases):
    """Its largest magnitude is its own, after signs that the device draws; or it is given."""
    spec, backend = OperandSpec("nvfp4", hadamard=16, signs="per_step", rounding="sr"), TritonBackend()
    x, step = drawn(M, K, 0), torch.zeros(1, dtype=torch.int64, device="cuda")
    amax = torch.ones(1, device="cuda")

    def quantized(place: Placement) -> list[torch.Tensor]:
        both = backend.quantize_dual(x, (spec, spec), placements=(place, replace(place, amax=amax)))
        return [t for q in both for t in (q.codes, q.scales, q.tensor_scale)]

    quantized(placed(0, step, 4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized(placed(0, step, 4))
    for number, seed in ((0, 0), (7, 3), (70_000, 4)):
        x.copy_(drawn(M, K, seed) * 2.0**seed)
        amax.fill_(3.5 + seed)
        step.fill_(number)
        for t in captured:
            t.zero_()
        graph.replay()
        want = quantized(placed(number, None, 4))
        for got, expected in zip(captured, want, strict=True):
            assert torch.equal(got, expected)
        cases(sum(t.numel() for t in want))


def test_a_range_exceeded_in_a_replay_is_seen_after_it():
    backend = TritonBackend("bf16")
    x = torch.ones(64, 512, device="cuda")
    spec = OperandSpec(scale_rule="rceil")

    def multiply() -> torch.Tensor:
        return backend.scaled_gemm(backend.quantize(x, spec), backend.quantize(x, spec), profile="bounded")

    multiply()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    graph.replay()
    assert not backend.range_exceeded()
    x.fill_(3e38)
    graph.replay()
    x.fill_(1)
    graph.replay()
    assert backend.range_exceeded()  # the replay after it does not forget
    assert not backend.range_exceeded()


def test_a_capture_before_any_product_is_refused_in_words():
    backend = TritonBackend("bf16")
    x = torch.ones(64, 512, device="cuda")
    backend.quantize(x, OperandSpec())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = backend.quantize(x, OperandSpec())
        with pytest.raises(BackendError, match="run the step once before it"):
            backend.scaled_gemm(q, q, profile="bounded")
