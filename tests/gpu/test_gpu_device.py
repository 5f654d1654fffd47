"""Faults that only a GPU can show: graphs, streams, order of execution, memory, and tensors on another device."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.operands_torch import drawn
from mxref import MXArray, OperandSpec, Stream
from mxref.errors import MxrefError, UnsupportedError
from mxref.placement import Placement
from mxref_triton import TritonBackend
from mxref_triton.memory import DeviceMemoryError

STREAM = Stream(1, step=2, layer=3, operand=4)
SPECS = {
    "rne": OperandSpec(),
    "H16 and SR": OperandSpec(hadamard=16, rounding="sr"),
    "tseng": OperandSpec(hadamard=64, signs="per_step_layer", rounding="sr", prescale=True),
}


def tailed(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=generator)
    return (x * torch.exp(torch.randn(rows, columns, device="cuda", generator=generator))).to(dtype)


def step(
    backend: TritonBackend, x: torch.Tensor, w: torch.Tensor, spec: OperandSpec, profile: str
) -> tuple[torch.Tensor, ...]:
    """Quantize both ways, multiply, decode: a linear layer's work."""
    q, by_column = backend.quantize_dual(x, (spec, spec), placements=(Placement(STREAM), Placement(STREAM)))
    qw = backend.quantize(w, spec, placement=Placement(STREAM))
    product = backend.scaled_gemm(q, qw, profile=profile, out_dtype="bfloat16")
    return product, by_column.codes, by_column.scales, backend.dequantize(q, "bfloat16")


@pytest.mark.parametrize("profile", ["ordered", "bounded"])
@pytest.mark.parametrize("name", SPECS)
def test_a_captured_graph_replays_to_the_same_bits(name, profile):
    backend = TritonBackend()
    x, w = tailed(1024, 2048), tailed(512, 2048, seed=1)
    want = [step(backend, source, w, SPECS[name], profile) for source in (x, tailed(1024, 2048, seed=2))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(backend, x, w, SPECS[name], profile)
    for source, expected in zip((x.clone(), tailed(1024, 2048, seed=2)), want, strict=True):
        x.copy_(source)
        for t in out:
            t.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_two_streams_at_once_do_not_disturb_each_other():
    backend = TritonBackend()
    inputs = [(tailed(2048, 2048, seed=i), tailed(2048, 2048, seed=i + 10)) for i in range(2)]
    want = [step(backend, *pair, SPECS["H16 and SR"], "ordered") for pair in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(20):
        for stream, pair, found in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(backend, *pair, SPECS["H16 and SR"], "ordered"))
    torch.cuda.synchronize()
    for found, expected in zip(results, want, strict=True):
        assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))


@pytest.mark.parametrize("profile", ["ordered", "bounded"])
def test_a_hundred_runs_give_the_same_bits(profile, cases):
    backend = TritonBackend()
    x, w = tailed(1024, 4096), tailed(1024, 4096, seed=1)
    w[::97] *= 1e-6  # with rows that do not fit E4M3 beside rows that do
    w[::97, :32] *= 1e6
    first = step(backend, x, w, SPECS["H16 and SR"], profile)
    for _ in range(100):
        again = step(backend, x, w, SPECS["H16 and SR"], profile)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    cases(100 * sum(t.numel() for t in first))


def test_tensors_on_the_cpu_are_refused_in_words():
    backend = TritonBackend()
    x = torch.ones(32, 64)
    q = drawn(32, 64)
    away = replace(q, codes=q.codes.cpu(), scales=q.scales.cpu())
    for call in (
        lambda: backend.quantize(x, OperandSpec()),
        lambda: backend.hadamard(x, 16),
        lambda: backend.dequantize(away),
        lambda: backend.scaled_gemm(q, away),
        lambda: backend.scaled_gemm(q, away, profile="bounded"),
    ):
        with pytest.raises(UnsupportedError, match="cpu"):
            call()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_operands_on_two_gpus_are_refused_and_the_second_gpu_works():
    backend = TritonBackend()
    x, w = tailed(256, 512), tailed(256, 512, seed=1)
    want = step(backend, x, w, SPECS["rne"], "ordered")
    got = step(backend, x.to("cuda:1"), w.to("cuda:1"), SPECS["rne"], "ordered")
    assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(got, want, strict=True))
    q = drawn(32, 64)
    with pytest.raises(UnsupportedError, match="cuda:0 and cuda:1"):
        backend.scaled_gemm(q, replace(q, codes=q.codes.to("cuda:1"), scales=q.scales.to("cuda:1")))


def test_out_of_memory_names_the_bytes_and_the_way_out():
    backend = TritonBackend()
    rows = 1 << 17
    q = drawn(rows, 32)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (8 << 30) / total))
    try:
        for profile in ("ordered", "bounded"):
            with pytest.raises(
                DeviceMemoryError, match=r"68,719,476,736 bytes asked for, [0-9,]+ of [0-9,]+ free"
            ):
                backend.scaled_gemm(q, q, profile=profile)
        assert issubclass(DeviceMemoryError, MxrefError)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    small = drawn(64, 32)
    assert backend.scaled_gemm(small, small).shape == (64, 64)  # and the backend works as before


def test_more_than_two_to_the_31_elements(cases):
    """A product of 2^31 + 2^17 results and an operand of 2^32 elements: the last rows are right."""
    backend = TritonBackend()
    a, b = drawn((1 << 14) + 1, 64, seed=1), drawn(1 << 17, 64, seed=2)
    out = backend.scaled_gemm(a, b, out_dtype="bfloat16")
    assert out.numel() > 1 << 31
    part = slice((1 << 14) - 3, None)
    last = replace(a, codes=a.codes[part], scales=a.scales[part], shape=(4, 64))
    assert torch.equal(backend.scaled_gemm(last, b, out_dtype="bfloat16"), out[part])
    cases(out.numel())
    del out
    x = torch.randn(1 << 10, 1 << 22, device="cuda", dtype=torch.bfloat16)
    for axis in (1, 0):
        q = backend.quantize(x, OperandSpec(rounding="sr"), axis=axis, placement=Placement(STREAM))
        piece = x[-32:] if axis == 1 else x[:, -32:]
        origin = (x.shape[0] - 32, 0) if axis == 1 else (0, x.shape[1] - 32)
        alone = backend.quantize(
            piece,
            OperandSpec(rounding="sr"),
            axis=axis,
            placement=Placement(STREAM, origin=origin, global_shape=tuple(x.shape)),
        )
        assert torch.equal(q.codes[-32:], alone.codes)
        assert torch.equal(q.scales[-32:], alone.scales)
        values = backend.dequantize(q, "bfloat16")
        assert torch.equal(
            values[-32:] if axis == 1 else values[:, -32:], backend.dequantize(alone, "bfloat16")
        )
        cases(x.numel())
        del q, values


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", SPECS)
def test_strides_change_no_bit(name, axis, cases):
    backend = TritonBackend()
    base = tailed(512, 768)
    views = [base.t(), base[::2, ::2], base[64:448, 128:640], base[:, 64:].t(), base[::2].t()]
    for view in views:
        got, want = (
            backend.quantize(x, SPECS[name], axis=axis, placement=Placement(STREAM))
            for x in (view, view.contiguous())
        )
        assert not view.is_contiguous()
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
        cases(view.numel())


@pytest.mark.clause("gemm.operands")
def test_operands_of_any_strides_multiply_alike():
    backend = TritonBackend()
    a, b = drawn(256, 1024, seed=1), drawn(128, 1024, seed=2)
    wide = MXArray(
        a.codes.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
        a.scales.t().contiguous().t(),
        a.shape,
        1,
    )
    for profile in ("ordered", "bounded"):
        assert torch.equal(
            backend.scaled_gemm(wide, b, profile=profile), backend.scaled_gemm(a, b, profile=profile)
        )
