"""Quantizers to MXFP6 by gfx950's own conversions, as compiled, executed in the model, against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.bench import f32, machine
from gfx950.compare import (
    NATIVE,
    SHAPE,
    STREAM,
    Conversion,
    as_in_training,
    differences,
    more,
    quantized,
    same_bits,
    start_up,
)
from gfx950.driver import on_model
from gfx950.errors import Gfx950Error
from gfx950.inputs import corners, matrix
from mxref.formats import E2M1, E2M3, E3M2, MXFP6_E2M3, MXFP6_E3M2, BlockFormat
from mxref.layouts.packed import unpack
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.reference import backend as reference
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

NAMES = {"fp6": "float6_e2m3fn", "bf6": "float6_e3m2fn"}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("exponent", [-127, 0, 100])
def test_the_instruction(kind: str, exponent: int) -> None:
    """Each code in its place, and values beside every tie, against ml_dtypes; only the divisor's exponent counts."""
    grid = np.arange(64, dtype=np.uint8).view(NAMES[kind]).astype(np.float32)
    points = np.sort(grid[:32])
    ties = (points[:-1] + points[1:]) / 2
    near = [np.nextafter(ties, np.float32(s)) for s in (0, np.inf)]
    values = np.concatenate([grid, ties, -ties, *near, [40, -40, 1e-9, -1e-9]]).astype(np.float32)
    values = np.resize(values, (-(-len(values) // 32), 32))
    lanes = len(values)
    m = machine([f"v_cvt_scalef32_2xpk16_{kind}_f32 v[50:55], v[0:15], v[16:31], v40"])
    with np.errstate(under="ignore"):
        sources = np.ldexp(values, exponent)
    for i in range(32):
        m.state.vgpr[i // 2 + i % 2 * 16, 0] = f32(1)
        m.state.vgpr[i // 2 + i % 2 * 16, 0, :lanes] = sources[:, i].view(np.uint32)
    m.state.vgpr[40] = (exponent + 127) << 23 | 0x5A5A5A
    m.run(10)
    words = np.ascontiguousarray(m.state.vgpr[50:56, 0, :lanes].T)
    got = unpack(words.view(np.uint8), E2M3)
    exact = np.ldexp(sources.astype(np.float64), -exponent)
    want = np.clip(exact, -points[-1], points[-1]).astype(np.float32).astype(NAMES[kind]).view(np.uint8)
    assert (got == want).all()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("v_cvt_scalef32_2xpk16_fp6_f32 v[14:19], v[0:15], v[16:31], v40", "lies over a source"),
        ("v_cvt_scalef32_2xpk16_fp6_f32 v[50:55], v[0:15], v[16:31], v52", "lies over a source"),
        ("v_cvt_scalef32_2xpk16_fp6_f32 v[50:57], v[0:15], v[16:31], v40", "gives 6"),
    ],
)
def test_the_instruction_refuses(line: str, said: str) -> None:
    m = machine([line])
    m.state.vgpr[:] = f32(1)
    with pytest.raises(Gfx950Error, match=said):
        m.run(10)


def inputs(made: BlockFormat, rule: str, kind: str) -> np.ndarray:
    """Return elements at every border of a format, beside the corners of MXFP4."""
    x = matrix(*SHAPE, kind, 5)
    blocks = corners(made, ScaleRule(rule), (0, 1, 9, 120, 254)).reshape(-1, 32)
    rows = np.resize(np.random.default_rng(0).permutation(blocks), (SHAPE[0] // 2, SHAPE[1]))
    with np.errstate(over="ignore", under="ignore"):
        x[: SHAPE[0] // 2] = rows.astype(x.dtype)
    return x


E2M3_EVEN = OperandSpec(MXFP6_E2M3, "even")
CASES = [
    (E2M3_EVEN, "bfloat16", -1),
    (OperandSpec(MXFP6_E3M2, "floor", hadamard=16, signs="per_step"), "bfloat16", 0),
]
MORE_CASES = [
    (OperandSpec(MXFP6_E3M2, "rceil"), "float32", -1),
    (OperandSpec(MXFP6_E2M3, "ceil", hadamard=64), "bfloat16", -1),
    (OperandSpec(MXFP6_E2M3, "ceil", hadamard=4), "float16", -1),
    (OperandSpec(MXFP6_E3M2, "even", block="32x32"), "bfloat16", -1),
    (OperandSpec(MXFP6_E2M3, "floor", zero_scale=127), "bfloat16", 0),
    (replace(E2M3_EVEN, hadamard=16), "bfloat16", -1),
    (OperandSpec(MXFP6_E3M2, "even"), "bfloat16", 0),
    (OperandSpec(MXFP6_E3M2, "even"), "bfloat16", -1),
]


@pytest.mark.parametrize(("spec", "kind", "axis"), [*CASES, *more(MORE_CASES)])
def test_quantization_by_native_conversions(backend: Any, spec: OperandSpec, kind: str, axis: int) -> None:
    x = inputs(spec.format, spec.scale_rule, kind)
    wrong, launched = quantized(backend, x, spec, axis, native=NATIVE)
    assert (wrong, launched) == (0, ["quantize_rows" if axis else "quantize_columns"])


@pytest.mark.study
@pytest.mark.parametrize("shape", [SHAPE, (128, 4096)])
def test_both_orientations(package: dict[str, ModuleType], backend: Any, shape: tuple[int, int]) -> None:
    """The second shape by a kernel of aot.table."""
    x, specs = matrix(*shape, "bfloat16", 2), [E2M3_EVEN, replace(E2M3_EVEN, hadamard=16)]
    with as_in_training(package), on_model() as launched, patch.object(backend, "native", NATIVE):
        both = backend.quantize_dual(backend.from_numpy(x), specs)
    assert launched == ["quantize_both"]
    for got, spec, axis in zip(both, specs, (-1, 0), strict=True):
        assert differences(got, reference.quantize(x, spec, axis=axis, placement=Placement(STREAM))) == 0


@pytest.mark.study
@pytest.mark.parametrize(
    "spec", [E2M3_EVEN, replace(E2M3_EVEN, rounding="sr"), replace(E2M3_EVEN, prescale=True)]
)
def test_what_stays_portable(backend: Any, spec: OperandSpec) -> None:
    """Values instead of codes, SR and a prescale."""
    x = matrix(*SHAPE, "bfloat16", 3)
    how = {"axis": -1, "dtype": "bfloat16", "placement": Placement(STREAM)}
    with on_model(), patch.object(backend, "native", NATIVE):
        got = backend.fake_quantize(backend.from_numpy(x), spec, **how)
    assert same_bits(backend.to_numpy(got), reference.fake_quantize(x, spec, **how))
    if spec is not E2M3_EVEN:
        assert quantized(backend, x, spec, -1, native=NATIVE)[0] == 0


@pytest.mark.parametrize("wrong", [(E2M3,), *more([((E3M2,),), ((E2M1, E3M2),), ((E2M1, E2M3, E3M2),)])])
def test_only_conversions_with_the_reference_s_bits_are_used(
    package: dict[str, ModuleType], wrong: tuple[Any, ...]
) -> None:
    """Each is tested by itself: here some have a wrong bit."""
    conversions = package["native"]
    own = conversions.on_device

    def spoiled(device: torch.device, made: Conversion) -> Any:
        convert = own(torch.device("cpu"), made)
        return lambda values, factors: convert(values, factors) ^ np.uint32(made[0] in wrong)

    with start_up(package), patch.object(conversions, "on_device", spoiled):
        backend = package["backend"].TritonBackend(bounded="mfma")
        with pytest.raises(
            package["backend"].BackendError, match=f"of {wrong[0].name}, not .*take 'portable'"
        ):
            package["backend"].TritonBackend(bounded="mfma", conversions="native")
    right = [element for element in (E2M1, E2M3, E3M2) if element not in wrong]
    assert backend.native == frozenset((element, Rounding.RNE) for element in right)
    if right:
        assert f"to {', '.join(element.name for element in right)} only: 0x" in backend.details()
    else:
        assert "portable conversions: those of this gfx950" in backend.details()
