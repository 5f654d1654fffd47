"""Every float32 bit pattern on the GPU, at every place of the grid, against integers that share nothing with it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import oracle_torch as oracle
from mxref import OperandSpec, get_backend

CHUNK = 1 << 24
PATTERNS = 1 << 32


def blocks(first: int, gap: int, mantissa: int) -> torch.Tensor:
    """Blocks of 16 neighbouring patterns, 15 of them negated too, and a pin `gap` binades above, int64 [N, 32]."""
    x = torch.arange(first, first + CHUNK, device="cuda").view(-1, 16)
    exponent = (x[:, :1] >> 23) & 0xFF
    # A pattern that is no number is its own pin.
    pin = torch.where(exponent == 255, x[:, :1], (exponent + gap).clamp(max=254) << 23 | mantissa)
    pin = torch.maximum(pin, (x & 0x7FFFFFFF).amax(dim=1, keepdim=True))
    return torch.cat([x, x[:, :15] ^ 0x80000000, pin], dim=1)


def sweep(rule: str, rounding: str, gap: int, mantissa: int, stride: int = 1) -> int:
    """Compare every `stride`-th chunk of all patterns; return how many elements that were."""
    backend = get_backend("triton")
    spec = OperandSpec(scale_rule=rule, rounding=rounding)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    compared = 0
    for first in range(0, PATTERNS, CHUNK * stride):
        bits = blocks(first, gap, mantissa)
        q = backend.quantize(bits.to(torch.int32).view(torch.float32), spec)
        scale = oracle.scale_codes(bits, rule)
        want = oracle.packed(oracle.element_codes(bits, scale, rounding))
        wrong += (q.scales[:, 0] != scale).sum() + (q.codes != want).sum()
        compared += bits.numel()
    assert wrong.item() == 0, f"{wrong.item()} of {compared} differ"
    return compared


@pytest.mark.clause("scale.rule.floor", "rounding.rne", "rounding.sign", "scale.nonfinite", "scale.clamp")
@pytest.mark.parametrize(
    ("gap", "mantissa"), [(0, 0x7FFFFF), (1, 0), (2, 0x7FFFFF), (3, 0), (4, 0x7FFFFF), (5, 0)]
)
def test_all_patterns_under_floor(gap, mantissa, cases):
    cases(sweep("floor", "rne", gap, mantissa))


@pytest.mark.clause("scale.rule.ceil", "scale.rule.rceil", "scale.rule.even", "scale.nonfinite")
@pytest.mark.parametrize("rule", ["ceil", "rceil", "even"])
def test_all_patterns_set_the_scale(rule, cases):
    """At no gap, with a mantissa of zero, the largest of 16 neighbours is the block's amax."""
    cases(sweep(rule, "rne", 0, 0))


@pytest.mark.clause("rounding.rna", "rounding.rtz")
@pytest.mark.parametrize(("rounding", "gap"), [("rna", 0), ("rtz", 1), ("rna", 3), ("rtz", 4)])
def test_all_patterns_under_other_roundings(rounding, gap, cases):
    cases(sweep("even", rounding, gap, 0x7FFFFF))


def test_the_sweep_notices_a_fault(monkeypatch):
    """One threshold of the oracle moved: the comparison must fail."""
    moved = tuple((t, not up) if t == 10 else (t, up) for t, up in oracle.THRESHOLDS["rne"])
    monkeypatch.setitem(oracle.THRESHOLDS, "rne", moved)
    with pytest.raises(AssertionError, match="differ"):
        sweep("floor", "rne", 1, 0)  # elements in [2, 4), where 2.5 is
