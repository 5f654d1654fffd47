"""The whole specification on the GPU: the conformance suite, and the fast CPU backend as a second witness."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxref import OperandSpec, Stream, get_backend
from mxref.conformance import checks_of
from mxref.conformance.checking import Subject
from mxref.conformance.suite import result_of, together
from mxref.errors import MxrefError
from mxref.placement import Placement

LEVEL = os.environ.get("MXREF_GPU_LEVEL", "quick")
"""`full` asks for every combination, each of which is a kernel to compile: minutes."""

pytestmark = pytest.mark.timeout(1200)


SHARES = 64
"""Into how many tests the suite is cut, so that processes side by side compile its kernels."""


@pytest.mark.clause(
    "conformance.capabilities", "conformance.arrays", "conformance.protocol", "conformance.dual"
)
@pytest.mark.parametrize("share", range(SHARES))
def test_conformance(share, cases):
    backend = get_backend("triton")
    subject = Subject(backend)
    checks = checks_of(backend.capabilities, level=LEVEL)
    declared = [i for i, each in enumerate(checks) if each.undeclared(backend.capabilities) is None]
    assert len(declared) > 2000
    mine = together(checks, declared)[share::SHARES]
    verdicts = [result_of(checks[i], subject) for group in mine for i in group]
    assert verdicts
    failures = [failure for verdict in verdicts for failure in verdict.failures]
    assert not failures, "\n\n".join(map(str, failures))
    cases(sum(verdict.compared for verdict in verdicts))


SPECS = {
    "rne": OperandSpec(),
    "even": OperandSpec(scale_rule="even", zero_scale=127),
    "H16": OperandSpec(hadamard=16),
    "H32, signs": OperandSpec(hadamard=32, signs="per_step_layer"),
    "SR": OperandSpec(rounding="sr"),
    "SR, 20 bits": OperandSpec(rounding="sr", sr_bits=20),
    "tseng": OperandSpec(rounding="sr", prescale=True, hadamard=64, signs="per_step_layer"),
    "tiles": OperandSpec(block="32x32"),
    "E4M3": OperandSpec("mxfp8_e4m3", "rceil"),
    "E4M3, EVEN, prescaled, away": OperandSpec("mxfp8_e4m3", "even", rounding="rna", prescale=True),
    "E5M2, H16": OperandSpec("mxfp8_e5m2", hadamard=16),
    "E5M2, SR, 22 bits": OperandSpec("mxfp8_e5m2", "ceil", rounding="sr", sr_bits=22),
    "INT8": OperandSpec("mxint8", "even"),
    "INT8, SR": OperandSpec("mxint8", rounding="sr"),
    "NVFP4": OperandSpec("nvfp4"),
    "NVFP4, tiles": OperandSpec("nvfp4", block="16x16", zero_scale=56),
    "NVFP4, H16": OperandSpec("nvfp4", hadamard=16, signs="fixed"),
    "NVFP4, SR": OperandSpec("nvfp4", rounding="sr"),
    "NVFP4, SR, 22 bits, H64": OperandSpec("nvfp4", rounding="sr", sr_bits=22, hadamard=64),
}
STREAM = Stream(seed=0x0123456789ABCDEF, step=70_000, layer=300, operand=4)


def heavy_tailed(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Student-t(3), magnitudes of many binades, some zeros and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (rows, columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 30, (rows, 1))).astype(np.float32)
    x[rng.random(x.shape) < 1e-5] = np.nan
    x[rows // 2, : columns // 2] = 0
    return torch.from_numpy(x).to(dtype)


@pytest.mark.clause("random.index", "random.elements", "quantize.axis", "quantize.strides")
@pytest.mark.parametrize(("name", "axis"), list(product(SPECS, (-1, 0))))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_matrices_are_those_of_the_cpu_kernels(name, axis, dtype, cases):
    """Eight million elements, many times over: as many as no reference could give."""
    try:
        numba = get_backend("numba")
    except MxrefError as err:
        pytest.skip(str(err))
    triton = get_backend("triton")
    x = heavy_tailed(2048, 4096 + 64, dtype)
    amax = np.array(
        [3e9], np.float32
    )  # read if the format has a scale of the tensor; some blocks are above it

    def place(given):
        return {"axis": axis, "placement": Placement(STREAM, (64, 0), (4096, 4160), amax=given)}

    want = numba.quantize(triton.to_numpy(x), SPECS[name], **place(amax))
    got = triton.quantize(x.cuda(), SPECS[name], **place(torch.from_numpy(amax).cuda()))
    assert np.array_equal(got.scales.cpu().numpy(), want.scales)
    assert np.array_equal(got.codes.cpu().numpy(), want.codes)
    cases(x.numel())


@pytest.mark.clause("scale.tensor", "scale.tensor.amax")
@pytest.mark.parametrize("how", [{}, {"hadamard": 16}, {"hadamard": 256, "signs": "per_step"}], ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
def test_the_scale_of_a_tensor_is_that_of_the_cpu_kernels(how, axis, cases):
    """The whole tensor's own, NaN and infinities left out, subnormal scales among them."""
    numba, triton = get_backend("numba"), get_backend("triton")
    spec = OperandSpec("nvfp4", **how)
    for power in (-140, -126, -30, 0, 60):
        x = np.ldexp(heavy_tailed(512, 768, torch.float32, power + 140).numpy(), power)
        x[np.isnan(x)] = np.inf
        want = numba.quantize(x, spec, axis=axis, placement=Placement(STREAM))
        got = triton.quantize(torch.from_numpy(x).cuda(), spec, axis=axis, placement=Placement(STREAM))
        assert got.tensor_scale.cpu().numpy().view(np.uint32) == want.tensor_scale.view(np.uint32)
        assert np.array_equal(got.scales.cpu().numpy(), want.scales)
        assert np.array_equal(got.codes.cpu().numpy(), want.codes)
        values = triton.to_numpy(triton.dequantize(got)), numba.dequantize(want)
        assert np.array_equal(*(each.view(np.uint32) for each in values))
        cases(x.size)


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("name", SPECS)
def test_both_orientations_at_once_are_the_two_alone(name, cases):
    triton = get_backend("triton")
    x = heavy_tailed(1024, 2048, torch.bfloat16).cuda()
    pair = triton.quantize_dual(
        x, (SPECS[name], SPECS[name]), placements=(Placement(STREAM), Placement(STREAM))
    )
    for q, axis in zip(pair, (1, 0), strict=True):
        alone = triton.quantize(x, SPECS[name], axis=axis, placement=Placement(STREAM))
        assert torch.equal(q.codes, alone.codes)
        assert torch.equal(q.scales, alone.scales)
        cases(x.numel())
