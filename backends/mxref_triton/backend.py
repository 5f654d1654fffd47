"""The backend: what it declares, and the kernels behind the operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from mxref.arrays import as_array
from mxref.backend import Backend
from mxref.capabilities import Capabilities, every_gemm
from mxref.errors import BackendError
from mxref.formats import (
    BLOCK_FORMATS,
    E8M0,
    UE4M3,
    UE5M3,
    BlockFormat,
    Nonfinite,
    Specials,
)
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.plan import QuantPlan
from mxref.recipe import GemmProfile
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import Rotation
from mxref.steps.scale import ScaleRule
from mxref_triton.lane.treatment import Output
from mxref_triton.launch import DEVICE, INTERPRETED
from mxref_triton.products.bounded import (
    BOUNDED,
    CLASSES,
    MAX_SCALES,
    BoundedWay,
    RangeFlag,
    add_product,
    bounded_way,
    check_same_device,
    prepared_layout,
    scaled_gemm,
)
from mxref_triton.products.matrix_cores import TUNES
from mxref_triton.products.ordered import multiplies, sums_in_float32
from mxref_triton.quantizer.decode import dequantize
from mxref_triton.quantizer.dispatch import plan_tensor_scale, quantize, quantize_dual
from mxref_triton.quantizer.native import native_conversions
from mxref_triton.quantizer.transform import hadamard


def _quantizes(made: BlockFormat) -> bool:
    """Return whether there are kernels that quantize to a format.

    Under a scale with a mantissa, a quotient in float32 holds all that SR looks at if the element has one mantissa bit,
    or if a scale of the tensor limits the random bits; and an infinity would need care where the scale is 0.
    """
    by_quotient = made.element.specials is not Specials.IEEE and (
        made.tensor_scale or made.element.precision == 1
    )
    return made.k in (16, 32) and (made.scale is E8M0 or (made.scale in (UE4M3, UE5M3) and by_quotient))


FORMATS = frozenset(filter(_quantizes, BLOCK_FORMATS.values()))


class TritonBackend(Backend):
    """Quantization on torch tensors of one device: a GPU's, or the CPU's under Triton's interpreter.

    ROCm's torch calls its device "cuda" too.
    """

    name = "triton"
    capabilities = Capabilities(
        formats=FORMATS,
        scale_rules=frozenset(ScaleRule),
        scale_thresholds=True,
        four_over_six=frozenset(FourOverSix),
        blocks=frozenset(shape for made in FORMATS for shape in (made.row, made.tile)),
        gemms=frozenset(
            gemm
            for gemm in every_gemm({GemmProfile.ORDERED, GemmProfile.BOUNDED}, BLOCK_FORMATS.values())
            if multiplies(*gemm[1:])
        ),
        devices=frozenset({DEVICE}),
        arrays="torch",
        device_steps=True,
    )
    reads_left_layouts = True

    def __init__(self, bounded: str = "auto", conversions: str = "auto") -> None:
        """Choose how `bounded` GEMMs are computed, and whether the hardware rounds.

        Args:
            bounded: see `mxref_triton.products.bounded.bounded_way`.
            conversions: see `mxref_triton.quantizer.native.native_conversions`.
        """
        self.native, self._conversions = native_conversions(conversions)
        self._way, self._bounded = bounded_way(bounded)
        self._flag = RangeFlag()
        self._widened = 0
        caps = replace(
            type(self).capabilities, bounded_class=CLASSES[self._way], bounded_max_scale=MAX_SCALES[self._way]
        )
        self.capabilities = caps

    @property
    def way(self) -> BoundedWay:
        """How `bounded` GEMMs are computed."""
        return self._way

    def details(self) -> str:
        """Return which kernels are used here."""
        return f"on {DEVICE}, {self._conversions}; bounded GEMMs by {self._bounded}"

    def chosen_by_time(self) -> str:
        """Return the variable that turns on the timing of gfx950's tiles, if it is set."""
        return "MXREF_TRITON_TUNE=1" if TUNES and self._way is BoundedWay.MFMA else ""

    def range_exceeded(self) -> bool:
        """Return whether an operand of a `bounded` GEMM since the last call was out of range; waits for the GPU."""
        return self._flag.take()

    def range_words(self) -> tuple[torch.Tensor, ...]:
        """Return the words that kernels set, int32 [1], one for each device used so far."""
        return self._flag.words()

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Return a context in which `bounded` uses kernels that take any scale; their results belong to every class."""
        self._widened += 1
        try:
            yield
        finally:
            self._widened -= 1

    def from_numpy(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a NumPy array as a tensor of this backend's device."""
        array = np.array(as_array(array))  # torch needs writable memory
        if array.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor.to(DEVICE)

    def to_numpy(self, array: torch.Tensor) -> NDArray[Any]:
        """Return a tensor as a NumPy array, bfloat16 as ml_dtypes.bfloat16."""
        host: NDArray[Any] = as_array(array.detach().cpu())
        return host

    def _tensor_scale(
        self, x: torch.Tensor, plan: QuantPlan, placement: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return plan_tensor_scale(x, plan, placement)

    def _quantize(self, x: torch.Tensor, plan: QuantPlan) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(x, plan, native=self.native).codes_and_scales()

    def _quantize_dual(
        self, x: torch.Tensor, row: QuantPlan, column: QuantPlan
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        by_row, by_column = quantize_dual(x, row, column, native=self.native)
        return by_row.codes_and_scales(), by_column.codes_and_scales()

    def _fake_quantize(self, x: torch.Tensor, plan: QuantPlan, dtype: str) -> Any:
        if dtype != "bfloat16" or plan.spec.nonfinite is Nonfinite.RAISE:
            return super()._fake_quantize(x, plan, dtype)
        return quantize(x, plan, Output.VALUES, self.native).values()

    def _dequantize(self, q: MXArray, dtype: str) -> torch.Tensor:
        return dequantize(q, dtype)

    def _hadamard(self, x: torch.Tensor, rotation: Rotation, axis: int) -> torch.Tensor:
        return hadamard(x, rotation, axis)

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> torch.Tensor:
        way = self._way
        if self._widened:
            profile, way = (
                (GemmProfile.ORDERED, way) if sums_in_float32(a, b) else (profile, BoundedWay.ORDERED)
            )
        return scaled_gemm(a, b, profile, out_dtype, way, self._flag, self.name)

    def _add_product(self, a: MXArray, b: MXArray, onto: torch.Tensor, profile: GemmProfile) -> None:
        check_same_device(onto, a)
        in_place = profile is GemmProfile.BOUNDED and not self._widened
        if not (in_place and add_product(a, b, onto, self._way, self._flag, self.name)):
            super()._add_product(a, b, onto, profile)

    def _prepare(self, q: MXArray, profile: GemmProfile) -> tuple[torch.Tensor, ...]:
        return prepared_layout(q, profile, self._way)


def backend() -> TritonBackend:
    """Return the backend.

    Raises:
        BackendError: there is neither a GPU nor TRITON_INTERPRET=1.
    """
    if not INTERPRETED and not torch.cuda.is_available():
        raise BackendError(
            "backend 'triton' needs a GPU that torch sees, and there is none; "
            "TRITON_INTERPRET=1 runs it on the CPU, slowly, for tests"
        )
    return TritonBackend(BOUNDED)
