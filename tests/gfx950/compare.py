"""The backend's operations in the model beside the reference's: what the tests of compiled kernels are written with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gfx950.driver import on_model
from gfx950.inputs import random_operand
from mxref.formats import E2M1, E2M3, E3M2, ElementFormat
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.reference import backend as reference
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding

BACKENDS = Path(__file__).parents[2] / "backends"
SHAPE = (96, 256)
"""Of most inputs: two programs of the row-wise kernel, the second one masked."""
WIDTH = 16384
"""Elements between the rows of the widest matrices of aot.table, a constant of kernels."""
STREAM = Stream(seed=0x123456789ABCDEF0, step=3, layer=2, operand=4)
Conversion = tuple[ElementFormat, Rounding]
PORTABLE: frozenset[Conversion] = frozenset()
NATIVE = frozenset((element, Rounding.RNE) for element in (E2M1, E2M3, E3M2))

RECIPES = {
    "plain": OperandSpec(scale_rule="even"),
    "hadamard": OperandSpec(scale_rule="even", hadamard=16, signs="per_step"),
    "stochastic": OperandSpec(rounding="sr", sr_bits=16, hadamard=16, signs="per_step", prescale=True),
    "floor": OperandSpec(scale_rule="floor", hadamard=32),
}


def more(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases of a parametrized test that only `make test-model` runs: kernels that differ little from others."""
    return [pytest.param(*case, marks=pytest.mark.study) for case in cases]


@contextmanager
def as_in_training(package: dict[str, ModuleType]) -> Iterator[None]:
    """Launch kernels as on the matrices of aot.table: `WIDTH` elements lie between rows, a constant.

    A matrix itself is a part of such a one, and may have any size.
    """
    backend = package["backend"].TritonBackend
    copied = backend.from_numpy

    def apart(self: Any, x: np.ndarray) -> torch.Tensor:
        own = copied(self, x)
        whole = own.new_zeros(len(own), WIDTH)
        whole[:, : own.shape[1]] = own
        return whole[:, : own.shape[1]]

    with patch.object(package["launches"], "_LARGE", 1), patch.object(backend, "from_numpy", apart):
        yield


def differences(got: Any, want: MXArray) -> int:
    """Return the number of bytes of codes and scales that differ."""
    pairs = ((got.codes, want.codes), (got.scales, want.scales))
    return sum(int((np.asarray(g) != w).sum()) for g, w in pairs)


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether float arrays have the same bits, every NaN being alike."""
    words = [np.asarray(a).view(f"u{a.itemsize}") for a in (got, want)]
    nan = [np.isnan(a.astype(np.float32)) for a in (got, want)]
    return bool(((words[0] == words[1]) | (nan[0] & nan[1])).all())


def quantized(
    backend: Any, x: np.ndarray, spec: OperandSpec, axis: int, *,
    pad: bool = False, native: frozenset[Conversion] = PORTABLE, **how: Any,
) -> tuple[int, list[str]]:  # fmt: skip
    """Quantize in the model; return the number of bytes that differ from the reference's, and what was executed."""
    with on_model(**how) as launched, patch.object(backend, "native", native):
        got = backend.quantize(backend.from_numpy(x), spec, axis=axis, placement=Placement(STREAM), pad=pad)
    return differences(
        got, reference.quantize(x, spec, axis=axis, placement=Placement(STREAM), pad=pad)
    ), launched


@contextmanager
def start_up(package: dict[str, ModuleType], **how: Any) -> Iterator[list[str]]:
    """Make the model the device, also for the checks that a backend makes first; yield the kernels executed."""
    conversions, gemm = package["native"], package["bounded"]
    convert, multiply = conversions.on_device, gemm.on_device
    # They ask for a "cuda" device, as ROCm's torch calls it; the model's tensors are the CPU's.
    with (
        on_model(**how) as launched,
        patch.object(conversions, "on_device", lambda device, made: convert(torch.device("cpu"), made)),
        patch.object(gemm, "on_device", lambda device, *tile: multiply(torch.device("cpu"), *tile)),
    ):
        yield launched


def on_tensors(
    operand: tuple[np.ndarray, np.ndarray], axis: int = 1, prescale: bool = False
) -> tuple[MXArray, MXArray]:
    """Return an operand [rows, K], or its transpose for axis 0, for the reference and for the backend."""
    codes, scales = operand
    shape = (len(codes), 2 * codes.shape[1])[:: 1 if axis else -1]
    tensors = torch.from_numpy(codes), torch.from_numpy(scales)
    return MXArray(codes, scales, shape, axis, prescale=prescale), MXArray(
        *tensors, shape, axis, prescale=prescale
    )


def drawn(rows: int, blocks: int, seed: int, hostile: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return an operand with blocks of zeros; if hostile, of NaN too, and rows that E4M3 does not hold."""
    rng = np.random.default_rng(seed)
    codes, scales = random_operand(rows, 32 * blocks, 118, 126, seed)
    if hostile:
        scales[rng.random(scales.shape) < 0.01] = 255
        for row in rng.integers(0, rows, 3):
            scales[row] = rng.integers(0, 255, blocks)
    whole = codes.reshape(rows, blocks, 16)
    whole[rng.random(scales.shape) < 0.1] &= 0x88
    return codes, scales


FOLDED_LAUNCHES = ["_fold", "_fold", "_ordered_by_block", "_ordered_misfits"]


def folded_product(
    package: dict[str, ModuleType], m: int, n: int, blocks: int, out: str = "float32", hostile: bool = True,
    prescale: bool = False, **how: Any,
) -> tuple[np.ndarray, np.ndarray, list[str]]:  # fmt: skip
    """Return what the model gives for A B^T under `ordered`, what is right, and the kernels that were executed.

    Of rows with NaN, and of rows that do not fit, the FP8 product is anything: nothing of it may be kept.
    """
    own_a, a = on_tensors(drawn(m, blocks, m, hostile), prescale=prescale)
    own_b, b = on_tensors(drawn(n, blocks, n, hostile))
    with (
        on_model(unknown_sums=np.nan if hostile else None, **how) as launched,
        patch.object(package["bounded"], "LEAST_FOLDED_WORK", 1),
        patch.object(package["ordered"], "_MISFIT_PROGRAMS", 3),
    ):
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        made = backend.prepare(b, profile=GemmProfile.ORDERED)
        got = backend.scaled_gemm(a, made, profile=GemmProfile.ORDERED, out_dtype=out)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.ORDERED, out_dtype=out)
    return backend.to_numpy(got), want, list(launched)
