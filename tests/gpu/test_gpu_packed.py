"""Packed bfloat16 arithmetic: every pattern under every block maximum, and the rest against the portable kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu import oracle_torch as oracle
from mxref import OperandSpec, Stream
from mxref.placement import Placement
from mxref_triton import TritonBackend
from mxref_triton.lane.hopper import packs_bfloat16
from mxref_triton.quantizer import dispatch as module
from mxref_triton.quantizer.inputs import Matrix

if not (torch.cuda.is_available() and packs_bfloat16(torch.device("cuda"))):
    pytest.skip("the GPU has no packed bfloat16 arithmetic", allow_module_level=True)

RULES = ("floor", "ceil", "rceil", "even")
PATTERNS = 1 << 16
RNG = Stream(1, step=2, layer=3, operand=4)
KINDS = [("bfloat16", n) for n in (0, 2, 16, 32, 64)] + [
    ("float16", 0),
    ("float16", 16),
    ("float32", 0),
    ("float32", 32),
]


def every_pattern(mantissa: int) -> torch.Tensor:
    """Blocks [N, 32] of bfloat16: all 65,536 patterns, 31 to a block, under a pin of each of the 255 exponents."""
    patterns = torch.arange(31 * -(-PATTERNS // 31), device="cuda").remainder(PATTERNS).view(1, -1, 31)
    pins = (torch.arange(255, device="cuda") << 7 | mantissa).view(-1, 1, 1)
    blocks = torch.cat(
        [patterns.expand(255, -1, -1), pins.expand(-1, patterns.shape[1], 1)], dim=2
    )  # fmt: skip
    return blocks.reshape(-1, 32).to(torch.int16).view(torch.bfloat16)


def even_rows(x: torch.Tensor) -> torch.Tensor:
    """Return rows of an even number, the last one repeated if need be."""
    return torch.cat([x, x[-1:]]) if x.shape[0] % 2 else x


@pytest.mark.clause("rounding.rne", "rounding.sign", "scale.nonfinite", "scale.clamp")
@pytest.mark.parametrize("mantissa", [0, 0x40, 0x60, 0x7F])
@pytest.mark.parametrize("rule", RULES)
def test_every_pattern_under_every_maximum(rule, mantissa, cases):
    backend, spec = TritonBackend(), OperandSpec(scale_rule=rule)
    x = even_rows(every_pattern(mantissa))
    bits = x.view(torch.int16).long() << 16 & 0xFFFFFFFF
    scale = oracle.scale_codes(bits, rule)
    want = oracle.packed(oracle.element_codes(bits, scale, "rne"))
    across = x.t().contiguous()
    assert Matrix(across.T, 0).reads_words_across()
    for q in (backend.quantize(x, spec), backend.quantize(across, spec, axis=0)):
        assert torch.equal(q.scales[:, 0].long(), scale)
        assert torch.equal(q.codes, want)
        cases(x.numel())


def hostile(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of every exponent, ties, zeros of both signs and blocks that are not finite, in any type."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator)

    bits = integers(-(1 << 31), 1 << 31, rows, columns)
    bits = torch.where(
        integers(0, 2, rows, columns) == 0, bits & ~0xFFFF | integers(0, 2, rows, columns), bits
    )
    middle = integers(0, 255, rows, 1)
    exponent = (middle + integers(-8, 5, rows, columns)).clamp(0, 254) << 23
    near = (bits & ~0x7F800000) | exponent
    near = torch.where(integers(0, 9, rows, columns) == 0, bits & -(1 << 31), near)
    x = torch.where(integers(0, 16, rows, 1) == 0, bits, near).to(torch.int32).view(torch.float32)
    if dtype is torch.float16:
        return x.view(torch.int32).bitwise_right_shift(16).to(torch.int16).view(torch.float16)
    return x.to(dtype)


@pytest.mark.clause("hadamard.order", "hadamard.factor", "hadamard.nonfinite", "scale.block.tile")
@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_the_portable_kernels_give_the_same(kind, n, monkeypatch, cases):
    backend = TritonBackend()
    specs = [
        OperandSpec(hadamard=n),
        OperandSpec(hadamard=n, scale_rule="rceil", zero_scale=127),
        OperandSpec(hadamard=n, scale_rule="even", block="32x32"),
    ]
    if n:
        specs.append(OperandSpec(hadamard=n, scale_rule="ceil", signs="per_step"))
    for seed, spec in enumerate(specs):
        x = hostile(1024, 2048, getattr(torch, kind), seed)
        with monkeypatch.context() as patch:
            patch.setattr(module, "packs_bfloat16", lambda device: False)
            want = [backend.quantize(x, spec, axis=axis, placement=Placement(RNG)) for axis in (1, 0)]
        got = [backend.quantize(x, spec, axis=axis, placement=Placement(RNG)) for axis in (1, 0)]
        for pair in (
            got,
            backend.quantize_dual(x, (spec, spec), placements=(Placement(RNG), Placement(RNG))),
        ):
            for q, w in zip(pair, want, strict=True):
                assert torch.equal(q.scales, w.scales)
                assert torch.equal(q.codes, w.codes)
                cases(x.numel())


@pytest.mark.clause("scale.nonfinite")
@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_is_not_finite_leaves_its_neighbour_alone(rule, cases):
    """Two lines share words: no value in one line changes the codes of the other."""
    backend, spec = TritonBackend(), OperandSpec(scale_rule=rule)
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -float("nan")], device="cuda")
    x = hostile(32 * 32, 256, torch.float32, 1).nan_to_num(1.0).bfloat16().clamp(-1e38, 1e38)
    want = backend.quantize(x.t().contiguous(), spec)
    place = 33 * torch.arange(32, device="cuda")  # another of its places in each block
    for side in (0, 1):
        y = x.clone()
        y[place, side::2] = values.repeat(32).bfloat16()
        for q in (backend.quantize(y, spec, axis=0), backend.quantize_dual(y, (spec, spec))[1]):
            assert (q.scales[side::2] == 255).all()
            assert not q.codes[side::2].any()
            assert torch.equal(q.scales[1 - side :: 2], want.scales[1 - side :: 2])
            assert torch.equal(q.codes[1 - side :: 2], want.codes[1 - side :: 2])
            cases(y.numel())


def _views() -> dict[str, tuple[torch.Tensor, bool]]:
    """Matrices, and whether lines across axis 0 can be read two at a time."""
    base = hostile(640, 1026, torch.bfloat16, 1)
    flat = base.view(-1)
    return {
        "even": (base[:, :1024], True),
        "odd lines": (base[:, :1023], False),
        "odd offset": (base[:, 1:1025], False),
        "odd storage offset": (flat[1:].as_strided((640, 1024), (1026, 1), 1), False),
        "odd step": (flat.as_strided((640, 1024), (1025, 1)), False),
        "lines apart": (base[:, ::2], False),
        "rows apart": (base[::2, :1024], True),
        "transposed": (base[:640].t()[:1024], False),
        "two lines": (base[:, :2], True),
        "one line": (base[:, :1], False),
    }


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("name", list(_views()))
@pytest.mark.parametrize("n", [0, 16])
def test_what_cannot_be_read_as_words_is_read_alone(n, name, cases):
    backend, spec = TritonBackend(), OperandSpec(hadamard=n)
    view, together = _views()[name]
    assert Matrix(view.T, 0).reads_words_across() is together
    for axis in (0, 1):
        got = backend.quantize(view, spec, axis=axis, pad=True)
        want = backend.quantize(view.t().contiguous(), spec, axis=1 - axis, pad=True)
        assert torch.equal(got.scales, want.scales)
        assert torch.equal(got.codes, want.codes)
        cases(view.numel())
