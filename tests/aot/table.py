"""The table of compiled operations: as training calls them, on shapes of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from mxref.formats import (
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
    BlockShape,
)
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from mxref_triton.backend import TritonBackend
from mxref_triton.lane.gfx950 import NEAREST, STOCHASTIC, Conversion, is_gfx950
from mxref_triton.products.bounded import BoundedWay
from mxref_triton.products.matrix_cores import SIX_TILES, multiply, multiply_onto
from mxref_triton.quantizer.native import launch_conversion, together

SIDE = 16384
"""Rows and columns of every matrix but those whose edges are odd."""
_ODD = (SIDE - 24, SIDE - 32)
_WIDTH = 8192
"""M, N and K of the GEMMs of formats other than MXFP4."""
_PLACEMENT = Placement(Stream(1))


@dataclass(frozen=True)
class CompiledCase:
    """One operation whose launches are compiled."""

    name: str
    run: Callable[[TritonBackend], object]
    elements: int
    """Elements that the operation reads, or for a GEMM writes."""
    native: frozenset[Conversion] = frozenset()
    """What gfx950's own conversions make."""
    gfx950_only: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the machines that the case is compiled for."""
        return ("gfx950",) if self.native or self.gfx950_only else ("gfx950", "sm_90")

    def launch(self) -> None:
        """Let the backend launch the case's kernels."""
        # `auto` would first test the scale bytes and the conversions of the device.
        bounded = BoundedWay.MFMA if is_gfx950(torch.device("cuda")) else "auto"
        backend = TritonBackend(bounded, conversions="portable")
        backend.native = self.native
        self.run(backend)


def _input(dtype: str, shape: tuple[int, int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")


def _quantize(
    spec: OperandSpec, axis: int, dtype: str, shape: tuple[int, int], pad: bool, backend: TritonBackend
) -> object:
    return backend.quantize(_input(dtype, shape), spec, axis=axis, placement=_PLACEMENT, pad=pad)


def _four_over_six(backend: TritonBackend) -> None:
    """Choose by every error, of blocks and of tiles."""
    squared = OperandSpec(NVFP4, four_over_six=FourOverSix.SQUARED)
    largest = replace(squared, four_over_six=FourOverSix.LARGEST, block=NVFP4.tile)
    absolute = replace(largest, four_over_six=FourOverSix.ABSOLUTE)
    for spec, axis in ((squared, 1), (largest, 1), (absolute, 0)):
        _quantize(spec, axis, "bfloat16", (SIDE, SIDE), False, backend)


def _fake(spec: OperandSpec, axis: int, backend: TritonBackend) -> object:
    return backend.fake_quantize(
        _input("bfloat16", (SIDE, SIDE)), spec, axis=axis, dtype="bfloat16", placement=_PLACEMENT
    )


def _dual(specs: tuple[OperandSpec, OperandSpec], shape: tuple[int, int], backend: TritonBackend) -> object:
    return backend.quantize_dual(_input("bfloat16", shape), specs, placements=(_PLACEMENT, _PLACEMENT))


def _hadamard(n: int, axis: int, backend: TritonBackend) -> object:
    return backend.hadamard(_input("bfloat16", (SIDE, SIDE)), n, axis=axis)


def operand(rows: int, length: int, prescale: bool = False, made: BlockFormat = MXFP4) -> MXArray:
    """Return an operand of a GEMM, [rows, length], without data."""
    codes = torch.empty((rows, made.code_bytes(length)), dtype=torch.uint8, device="cuda")
    scales = torch.empty((rows, length // made.k), dtype=torch.uint8, device="cuda")
    tensor = torch.empty(1, dtype=torch.float32, device="cuda") if made.tensor_scale else None
    return MXArray(codes, scales, (rows, length), 1, prescale=prescale, format=made, tensor_scale=tensor)


def _dequantize(dtype: str, made: BlockFormat, backend: TritonBackend) -> object:
    return backend.dequantize(operand(SIDE, SIDE, made=made), dtype)


def _onto(rows: int, columns: int, length: int, made: BlockFormat, backend: TritonBackend) -> None:
    gradient = torch.empty((rows, columns), dtype=torch.float32, device="cuda")
    multiply_onto(operand(rows, length, made=made), operand(columns, length, made=made), gradient)


def _product(formats: tuple[BlockFormat, BlockFormat], out_dtype: str, backend: TritonBackend) -> object:
    a, b = (operand(_WIDTH, _WIDTH, made=made) for made in formats)
    return backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED, out_dtype=out_dtype)


def _ordered(formats: tuple[BlockFormat, BlockFormat], backend: TritonBackend) -> object:
    a, b = (operand(_WIDTH, _WIDTH, made=made) for made in formats)
    return backend.scaled_gemm(a, b, profile=GemmProfile.ORDERED)


def _sixes(formats: tuple[BlockFormat, BlockFormat], number: int, backend: TritonBackend) -> object:
    a, b = (operand(_WIDTH, _WIDTH, made=made) for made in formats)
    return multiply(a, b, "float32", SIX_TILES[number])


def _every_profile(formats: tuple[BlockFormat, BlockFormat], backend: TritonBackend) -> None:
    a, b = (operand(_WIDTH, _WIDTH, made=made) for made in formats)
    for profile in sorted(backend.capabilities.profiles(*formats)):
        backend.scaled_gemm(a, b, profile=profile)


def _by_block(formats: tuple[BlockFormat, BlockFormat], backend: TritonBackend) -> object:
    with backend.widened():
        return _product(formats, "float32", backend)


def _check(conversions: Iterable[Conversion], elements: int, backend: TritonBackend) -> None:
    for made in conversions:
        group = together(made[0])
        n = elements // group
        shapes = (n, group), (n, 4), (n, group * made[0].bits // 32)
        words = [torch.empty(shape, dtype=torch.int32, device="cuda") for shape in shapes]
        factors = torch.empty(n, dtype=torch.float32, device="cuda")
        launch_conversion(words[0], factors, words[1], words[2], made)


def _gemm(
    shape: tuple[int, int, int], profile: GemmProfile, out_dtype: str, prescale: bool, backend: TritonBackend
) -> object:
    m, n, k = shape
    return backend.scaled_gemm(operand(m, k, prescale), operand(n, k), profile=profile, out_dtype=out_dtype)


_BASE = OperandSpec(scale_rule=ScaleRule.EVEN)
_H16 = replace(_BASE, hadamard=16)
_SR16 = replace(_BASE, rounding=Rounding.SR, sr_bits=16)
_RNE = {
    "rne": _BASE,
    "rne.h16": _H16,
    "rne.h16.signs": replace(_H16, signs=SignPolicy.PER_STEP),
    "rne.h32": replace(_BASE, hadamard=32),
    "rne.h64": replace(_BASE, hadamard=64),
    "rne.floor": replace(_BASE, scale_rule=ScaleRule.FLOOR),
    "rne.tile": replace(_BASE, block=BlockShape.TILE),
}
_SR = {
    "sr16": _SR16,
    "sr16.h16": replace(_SR16, hadamard=16),
    "sr16.h16.prescale": replace(_SR16, hadamard=16, signs=SignPolicy.PER_STEP, prescale=True),
    "sr22": replace(_SR16, sr_bits=22),
}


def _cases() -> Iterator[CompiledCase]:
    whole = (SIDE, SIDE)
    area = SIDE * SIDE
    for name, spec in {**_RNE, **_SR}.items():
        for axis, orientation in ((1, "row"), (0, "column")):
            yield CompiledCase(
                f"{orientation}.{name}", partial(_quantize, spec, axis, "bfloat16", whole, False), area
            )
    for dtype in ("float16", "float32"):
        for name in ("rne", "rne.h16"):
            yield CompiledCase(
                f"row.{name}.{dtype}", partial(_quantize, _RNE[name], 1, dtype, whole, False), area
            )
    yield CompiledCase(
        "column.rne.float32", partial(_quantize, _RNE["rne"], 0, "float32", whole, False), area
    )
    for name in ("rne", "sr16.h16"):
        spec = {**_RNE, **_SR}[name]
        yield CompiledCase(
            f"row.{name}.odd", partial(_quantize, spec, 1, "bfloat16", _ODD, False), _ODD[0] * _ODD[1]
        )
    # 16360 rows are no whole number of blocks: the last one is padded.
    yield CompiledCase(
        "column.rne.odd", partial(_quantize, _RNE["rne"], 0, "bfloat16", _ODD, True), _ODD[0] * _ODD[1]
    )
    yield CompiledCase("row.rne.values", partial(_fake, _RNE["rne"], 1), area)
    for left, right in (("rne", "rne"), ("rne.h16", "rne.h16"), ("rne", "rne.h16"), ("rne", "sr16.h16")):
        specs = ({**_RNE, **_SR}[left], {**_RNE, **_SR}[right])
        yield CompiledCase(f"dual.{left}+{right}", partial(_dual, specs, whole), area)
    for n in (16, 64):
        yield CompiledCase(f"hadamard.{n}", partial(_hadamard, n, 1), area)
    for dtype in ("bfloat16", "float32"):
        yield CompiledCase(f"dequantize.{dtype}", partial(_dequantize, dtype, MXFP4), area)
    for name in ("rne", "rne.h16"):
        for axis, orientation in ((1, "row"), (0, "column")):
            run = partial(_quantize, _RNE[name], axis, "bfloat16", whole, False)
            yield CompiledCase(f"native.{orientation}.{name}", run, area, frozenset(NEAREST))
    yield CompiledCase(
        "native.dual.rne+rne.h16", partial(_dual, (_RNE["rne"], _RNE["rne.h16"]), whole), area,
        frozenset(NEAREST),
    )  # fmt: skip
    run = partial(_quantize, _SR["sr16.h16"], 1, "bfloat16", whole, False)
    yield CompiledCase("native.row.sr16.h16", run, area, frozenset({STOCHASTIC}))
    for name, made in (("rne", NEAREST[0]), ("sr", STOCHASTIC)):
        run = partial(_check, (made,), 1 << 19)
        yield CompiledCase(f"native.check.{name}", run, 1 << 19, frozenset({made}))
    for profile in (GemmProfile.ORDERED, GemmProfile.BOUNDED):
        for out_dtype in ("float32", "bfloat16"):
            yield _gemm_case(f"{profile}.{out_dtype}", (8192, 8192, 8192), profile, out_dtype)
    yield _gemm_case("ordered.float32.1024", (1024, 1024, 1024), GemmProfile.ORDERED, "float32")
    # Too little work for folding to pay off.
    yield _gemm_case("ordered.float32.512", (512, 512, 512), GemmProfile.ORDERED, "float32")
    yield _gemm_case("ordered.odd", (8168, 8152, 8160), GemmProfile.ORDERED, "float32", prescale=True)
    for side in (2048, 1024):
        yield _gemm_case(f"bounded.float32.{side}", (side, side, 8192), GemmProfile.BOUNDED, "float32")
    for name, shape in (("onto", (8192, 8192, 8192)), ("onto.odd", (8168, 8152, 8160))):
        yield CompiledCase(
            f"gemm.bounded.{name}", partial(_onto, *shape, MXFP4), shape[0] * shape[1], gfx950_only=True
        )
    yield _gemm_case("bounded.odd", (8168, 8152, 8160), GemmProfile.BOUNDED, "float32", prescale=True)
    yield from _mxfp8_cases(area)
    yield from _short_cases(area)
    yield from _quotient_cases(area)


def _mxfp8_cases(area: int) -> Iterator[CompiledCase]:
    """Yield the cases of MXFP8, which are few: the kernels are those of MXFP4 with another element."""
    whole = (SIDE, SIDE)
    e4m3, e5m2 = OperandSpec(MXFP8_E4M3, ScaleRule.RCEIL), OperandSpec(MXFP8_E5M2, ScaleRule.RCEIL)
    for orientation, axis in (("row", 1), ("column", 0)):
        yield CompiledCase(
            f"mxfp8.{orientation}.rne.e4m3", partial(_quantize, e4m3, axis, "bfloat16", whole, False), area
        )
    sr = replace(e5m2, rounding=Rounding.SR, hadamard=16)
    yield CompiledCase("mxfp8.row.sr16.h16.e5m2", partial(_quantize, sr, 1, "bfloat16", whole, False), area)
    yield CompiledCase("mxfp8.dual.rne.e4m3", partial(_dual, (e4m3, e4m3), whole), area)
    yield CompiledCase("mxfp8.row.rne.e4m3.values", partial(_fake, e4m3, 1), area)
    yield CompiledCase("mxfp8.dequantize.e4m3", partial(_dequantize, "bfloat16", MXFP8_E4M3), area)
    pairs = {
        "e4m3": (MXFP8_E4M3, MXFP8_E4M3),
        "e5m2.e4m3": (MXFP8_E5M2, MXFP8_E4M3),
        "e4m3.mxfp4": (MXFP8_E4M3, MXFP4),
    }
    for name, formats in pairs.items():
        yield CompiledCase(f"gemm.mxfp8.{name}", partial(_product, formats, "float32"), _WIDTH * _WIDTH)
    shape = (_WIDTH, _WIDTH, _WIDTH)
    yield CompiledCase(
        "gemm.mxfp8.e4m3.onto", partial(_onto, *shape, MXFP8_E4M3), _WIDTH * _WIDTH, gfx950_only=True
    )  # fmt: skip
    for name in ("e5m2.e4m3", "e4m3.mxfp4"):
        yield CompiledCase(f"gemm.mxfp8.{name}.widened", partial(_by_block, pairs[name]), _WIDTH * _WIDTH)
    for name in ("e4m3", "e5m2.e4m3"):
        yield CompiledCase(f"gemm.mxfp8.{name}.ordered", partial(_ordered, pairs[name]), _WIDTH * _WIDTH)
    for name, made in (("nvfp4", NVFP4), ("mxint8", MXINT8)):
        yield CompiledCase(f"gemm.{name}", partial(_every_profile, (made, made)), _WIDTH * _WIDTH)


def _short_cases(area: int) -> Iterator[CompiledCase]:
    """Yield the cases of the other formats of 4 and 6 bits."""
    whole = (SIDE, SIDE)
    e2m3, e3m2, e1m2 = (OperandSpec(made, ScaleRule.EVEN) for made in (MXFP6_E2M3, MXFP6_E3M2, MXFP4_E1M2))
    sr = replace(e3m2, rounding=Rounding.SR, hadamard=16)
    yield CompiledCase("short.row.rne.e1m2", partial(_quantize, e1m2, 1, "bfloat16", whole, False), area)
    yield CompiledCase(
        "short.column.sr16.h16.e3m2", partial(_quantize, sr, 0, "bfloat16", whole, False), area
    )
    h16 = replace(e2m3, hadamard=16)
    yield CompiledCase("short.dual.rne+rne.h16.e2m3", partial(_dual, (e2m3, h16), whole), area)
    native = frozenset(NEAREST)
    sixes = {"row.rne.e2m3": (e2m3, 1), "row.rne.h16.e2m3": (h16, 1), "column.rne.e3m2": (e3m2, 0)}
    for name, (spec, axis) in sixes.items():
        run = partial(_quantize, spec, axis, "bfloat16", whole, False)
        yield CompiledCase(f"short.native.{name}", run, area, native)
        if axis:
            yield CompiledCase(f"short.{name}", run, area, gfx950_only=True)
    run = partial(_dual, (e2m3, h16), whole)
    yield CompiledCase("short.native.dual.rne+rne.h16.e2m3", run, area, native)
    yield CompiledCase("short.native.check", partial(_check, NEAREST[1:], 1 << 19), 1 << 19, native)
    run = partial(_every_profile, (MXFP6_E3M2, MXFP6_E2M3))
    yield CompiledCase("gemm.short.e3m2.e2m3", run, _WIDTH * _WIDTH)
    for name, formats, number in (
        ("e3m2.e2m3", (MXFP6_E3M2, MXFP6_E2M3), 0),
        ("e2m3.mxfp4", (MXFP6_E2M3, MXFP4), 1),
    ):
        run = partial(_sixes, formats, number)
        yield CompiledCase(f"gemm.sixes.{name}", run, _WIDTH * _WIDTH, gfx950_only=True)


def _quotient_cases(area: int) -> Iterator[CompiledCase]:
    """Yield the cases of NVFP4, each with the kernels that find the scale of the tensor, and one of MXINT8."""
    whole = (SIDE, SIDE)
    rne = OperandSpec(NVFP4)
    specs = {
        "rne": rne,
        "rne.h16": replace(rne, hadamard=16),
        "rne.tile": replace(rne, block=NVFP4.tile),
        "sr16": replace(rne, rounding=Rounding.SR),
    }
    for name, spec in specs.items():
        for axis, orientation in ((1, "row"), (0, "column")):
            run = partial(_quantize, spec, axis, "bfloat16", whole, False)
            if (name, axis) != ("rne.tile", 0):  # `four_over_six` has tiles of columns
                yield CompiledCase(f"nvfp4.{orientation}.{name}", run, area)
    yield CompiledCase("nvfp4.four_over_six", _four_over_six, area)
    yield CompiledCase("nvfp4.dual.rne+rne.h16", partial(_dual, (rne, specs["rne.h16"]), whole), area)
    yield CompiledCase("nvfp4.row.rne.values", partial(_fake, rne, 1), area)
    yield CompiledCase("nvfp4.dequantize", partial(_dequantize, "bfloat16", NVFP4), area)
    run = partial(_quantize, OperandSpec(MXINT8), 1, "bfloat16", whole, False)
    yield CompiledCase("mxint8.row.rne", run, area)


def _gemm_case(
    name: str, shape: tuple[int, int, int], profile: GemmProfile, out_dtype: str, prescale: bool = False
) -> CompiledCase:
    run = partial(_gemm, shape, profile, out_dtype, prescale)
    return CompiledCase(f"gemm.{name}", run, shape[0] * shape[1])


def cases() -> dict[str, CompiledCase]:
    """Return the table by name."""
    return {case.name: case for case in _cases()}
