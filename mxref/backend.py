"""The backend protocol.

A backend implements four operations, and may implement four more that save reading or writing data
twice. The public ones below check the request against the declared capabilities and resolve it; the
underscored ones compute, and are all that a backend writes. Backends outside this project implement this protocol: an
operation may be added with a default made of the others, but no signature may change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

import numpy as np

from mxref.arguments import (
    as_spec,
    check_bool,
    check_integer,
    check_mxarray,
    check_name,
    check_placement,
)
from mxref.arrays import as_array, as_sum, described
from mxref.capabilities import Capabilities
from mxref.dialects import Dialect
from mxref.errors import BackendError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import BlockFormat, Nonfinite
from mxref.gemm import check_gemm, check_sum, gemm_profile
from mxref.mxarray import MXArray, PreparedArray
from mxref.placement import Placement
from mxref.plan import QuantPlan, check_input, dtype_name, plan_quantize
from mxref.quantization import plan_tensor_scale
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import Rotation
from mxref.steps.rounding import Rounding


class Backend(ABC):
    """Four operations on the backend's own arrays, held to the reference bit for bit.

    Implements: conformance.protocol, conformance.public
    """

    name: str
    capabilities: Capabilities
    reads_left_layouts: bool = False
    """Whether GEMMs gain by a prepared left operand: `mxref_torch` then prepares an activation that layers share."""

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        """Make a backend; BackendError names the methods that its class lacks."""
        if missing := sorted(cls.__abstractmethods__):
            raise BackendError(
                f"backend class {cls.__name__} lacks {', '.join(missing)}: all four methods must exist; "
                "one for which nothing is declared is never called and may raise NotImplementedError"
            )
        return super().__new__(cls)

    def quantize(
        self,
        x: Any,
        spec: OperandSpec | Dialect | str,
        *,
        axis: int = -1,
        placement: Placement = Placement(),
        pad: bool = False,
    ) -> MXArray:
        """Return `x` in a block format; arguments and errors as in `mxref.quantize`, and UnsupportedError."""
        x = self._array(x)
        plan = self.plan(x, spec, axis=axis, placement=placement, pad=pad)
        return plan.array(*self._quantize(x, plan))

    def _array(self, x: Any) -> Any:
        """Return an input as an array of this backend; DtypeError for one that has to be moved or converted."""
        return as_array(x, self.capabilities.arrays)

    def _operand(self, operation: str, q: Any) -> MXArray:
        """Return an MXArray of arrays of this backend; DtypeError for anything else."""
        return check_mxarray(operation, q, self.capabilities.arrays)

    def plan(
        self,
        x: Any,
        spec: OperandSpec | Dialect | str | None,
        *,
        axis: int,
        placement: Placement = Placement(),
        pad: bool = False,
    ) -> QuantPlan:
        """Return the plan of a quantization, checked against the declared capabilities.

        Implements: conformance.unsupported, conformance.plan
        """
        check_input(x)
        spec, caps = as_spec(spec), self.capabilities
        check_placement("placement", placement)
        pad = check_bool("pad", pad)
        caps.require(self.name, "in_dtypes", dtype_name(x))
        if placement.step is not None:
            caps.require_device_steps(self.name)
        if isinstance(spec.format, BlockFormat):  # the plan refuses any other
            caps.require(self.name, "formats", spec.format)
        caps.require(self.name, "scale_rules", spec.scale_rule)
        caps.require(self.name, "roundings", spec.rounding)
        caps.require(self.name, "blocks", spec.block)
        if spec.hadamard:
            caps.require(self.name, "hadamard_sizes", spec.hadamard)
        if spec.prescale:
            caps.require_prescale(self.name)
        caps.require(self.name, "arithmetics", spec.arithmetic)
        caps.require(self.name, "four_over_six", spec.four_over_six)
        if spec.rounding is Rounding.SR and spec.sr_bits > caps.max_sr_bits:
            raise UnsupportedError(
                f"backend {self.name!r} declares max_sr_bits = {caps.max_sr_bits}, asked for {spec.sr_bits}"
            )
        plan = plan_quantize(tuple(x.shape), spec, axis, placement, pad)
        if plan.format.tensor_scale:
            amax, scale = self._tensor_scale(x, plan, placement)
            plan = replace(plan, tensor_amax=amax, tensor_scale=scale)
        return plan

    def dequantize(self, q: MXArray, dtype: str = "float32") -> Any:
        """Return the values of `q` in its original axis order; see `mxref.dequantize`."""
        q = self._operand("dequantize", q)
        self.capabilities.require(self.name, "formats", q.format)
        self.capabilities.require(self.name, "dequantize_dtypes", check_name("dtype", dtype))
        return self._dequantize(q, dtype)

    def hadamard(self, x: Any, n: int, signs: int = 0, *, axis: int = -1) -> Any:
        """Return `x` transformed along an axis in groups of n, in float32; bit i of `signs` set means d_i = -1."""
        x = self._array(x)
        check_input(x)
        n, signs, axis = (
            check_integer(name, value) for name, value in (("n", n), ("signs", signs), ("axis", axis))
        )
        self.capabilities.require(self.name, "in_dtypes", dtype_name(x))
        self.capabilities.require(self.name, "hadamard_sizes", n)
        if not -len(x.shape) <= axis < len(x.shape):
            raise ShapeError(f"axis {axis} is out of range for shape {tuple(x.shape)}")
        if x.shape[axis] % n:
            raise ShapeError(
                f"Hadamard: axis {axis} has length {x.shape[axis]}, not a multiple of the size {n}"
            )
        return self._hadamard(x, Rotation(n, signs), axis % len(x.shape))

    def scaled_gemm(
        self,
        a: MXArray,
        b: MXArray,
        *,
        profile: GemmProfile = GemmProfile.ORDERED,
        out_dtype: str = "float32",
    ) -> Any:
        """Return A B^T [M, N] from A [M, K] and B [N, K], both quantized along K; see `mxref.scaled_gemm`.

        A layout of an operand that `prepare` of another backend or for another profile made is not used.

        Implements: conformance.dual
        """
        profile, a, b = self._product(a, b, profile, out_dtype)
        return self._scaled_gemm(a, b, profile, out_dtype)

    def add_product(
        self, a: MXArray, b: MXArray, onto: Any, *, profile: GemmProfile = GemmProfile.ORDERED
    ) -> None:
        """Add A B^T to a float32 array in place: a weight's gradient, to which every micro-batch adds.

        Each element becomes fl32(onto + p), p the product that `scaled_gemm` may give in float32; NaN where
        either is. On an error `onto` is as it was; where `range_exceeded` answers yes it is spoiled.

        Args:
            a: [M, K], quantized along K.
            b: [N, K], likewise, perhaps prepared.
            onto: float32 [M, N] in C order, a NumPy array or a tensor on the CPU; for a backend on tensors a tensor.
            profile: of the product.

        Raises:
            ShapeError, DtypeError: operands that do not fit together, or an `onto` that is not as above.
            UnsupportedError: a profile, float32, or the prescale, that is not declared.

        Implements: conformance.dual
        """
        profile, a, b = self._product(a, b, profile, "float32")
        onto = as_sum(onto, self.capabilities.arrays)
        check_sum(onto, a, b)
        self._add_product(a, b, onto, profile)

    def _product(
        self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str
    ) -> tuple[GemmProfile, MXArray, MXArray]:
        """Return the profile and operands of a declared request; a layout of B that is not for this backend and
        profile is not used.
        """
        profile = gemm_profile(profile)
        a, b = self._operand("scaled_gemm", a), self._operand("scaled_gemm", b)
        self.capabilities.require(self.name, "gemms", (profile, a.format, b.format))
        self.capabilities.require(self.name, "gemm_dtypes", check_name("out_dtype", out_dtype))
        check_gemm(a, b, out_dtype)
        if a.prescale or b.prescale:
            self.capabilities.require_prescale(self.name)
        if isinstance(b, PreparedArray) and not b.layout_for(self.name, profile):
            b = b.plain()
        return profile, a, b

    def prepare(self, q: MXArray, *, profile: GemmProfile = GemmProfile.ORDERED) -> MXArray:
        """Return an operand that `scaled_gemm` reads faster as its right one: a weight that many GEMMs share.

        Codes, scales and every result stay the same; a backend that reads codes anyway returns `q` itself.
        Some backends read a prepared left operand faster too: an activation that several weights multiply.
        What is prepared must not be changed in place afterwards.

        Args:
            q: [N, K], quantized along its contraction axis.
            profile: of the GEMMs to come; under any other the codes are read.

        Raises:
            ShapeError: not a matrix.
            UnsupportedError: a profile, or the prescale, that is not declared.

        Implements: conformance.dual
        """
        q = self._operand("prepare", q)
        profile = gemm_profile(profile)
        self.capabilities.require_prepared(self.name, profile, q.format)
        if len(q.shape) != 2:
            raise ShapeError(
                f"prepare takes an operand of a GEMM, which has two axes, got shape {q.shape}; quantize it as a matrix"
            )
        if q.prescale:
            self.capabilities.require_prescale(self.name)
        layout = self._prepare(q, profile)
        return PreparedArray.of(q, self.name, profile, layout) if layout else q

    def quantize_dual(
        self,
        x: Any,
        specs: tuple[OperandSpec | Dialect | str, OperandSpec | Dialect | str],
        *,
        placements: tuple[Placement, Placement] = (Placement(), Placement()),
        pads: tuple[bool, bool] = (False, False),
    ) -> tuple[MXArray, MXArray]:
        """Return a matrix quantized along axis 1 and along axis 0; a backend may do it in one read.

        Args:
            x: [M, N].
            specs: the treatments along axis 1 and along axis 0; so are `placements` and `pads` ordered.
            placements: random streams, and where `x` lies in the global tensor.
            pads: whether the block axis of each is filled up with zeros.

        Raises:
            ShapeError: not a matrix; the rest as `quantize`.

        Implements: conformance.dual
        """
        x = self._array(x)
        check_input(x)
        for name, pair in (("specs", specs), ("placements", placements), ("pads", pads)):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise RecipeError(
                    f"quantize_dual: {name} must be a pair, one for axis 1 and one for axis 0, got {described(pair)}"
                )
        if len(x.shape) != 2:
            raise ShapeError(
                f"quantize_dual takes a matrix, got shape {tuple(x.shape)}; reshape it to two axes"
            )
        row, column = (
            self.plan(x, spec, axis=axis, placement=placement, pad=pad)
            for axis, spec, placement, pad in zip((1, 0), specs, placements, pads, strict=True)
        )
        by_row, by_column = self._quantize_dual(x, row, column)
        return row.array(*by_row), column.array(*by_column)

    def fake_quantize(
        self,
        x: Any,
        spec: OperandSpec | Dialect | str,
        *,
        axis: int = -1,
        dtype: str = "float32",
        placement: Placement = Placement(),
        pad: bool = False,
    ) -> Any:
        """Return the values that `x` has after quantization, in its own shape.

        Args:
            x: as in `quantize`.
            spec: its treatment.
            axis: the block axis.
            dtype: of the values, as in `dequantize`.
            placement: as in `quantize`; so is `pad`.
            pad: fill the block axis up with zeros.

        Raises:
            MxrefError: as `quantize` and `dequantize`.

        Implements: conformance.dual
        """
        self.capabilities.require(self.name, "dequantize_dtypes", check_name("dtype", dtype))
        x, spec = self._array(x), as_spec(spec)
        plan = self.plan(x, spec, axis=axis, placement=placement, pad=pad)
        if spec.nonfinite is Nonfinite.RAISE:
            # The scales, which show a NaN block, are seen only when the two steps are taken one by one.
            return self._dequantize(plan.array(*self._quantize(x, plan)), dtype)
        return self._fake_quantize(x, plan, dtype)

    def range_exceeded(self) -> bool:
        """Return whether a result since the last call lies outside what its profile promises, and forget it.

        A backend whose fast GEMM holds a narrower range than E8M0 keeps the answer on its device, so that
        GEMMs never wait; asking waits. If true, repeat everything since the last call inside `widened()`.
        """
        return False

    def range_words(self) -> tuple[Any, ...]:
        """Return the arrays on the device that are nonzero where `range_exceeded()` would return True.

        A step that must not wait reads and clears them on the device in its place.
        """
        return ()

    def widened(self) -> AbstractContextManager[None]:
        """Return a context within which GEMMs take the widest range that the backend has, at its own speed."""
        return nullcontext()

    def details(self) -> str:
        """Return what runs here, in a line for people: kernels, threads, where compiled code is kept."""
        return ""

    def chosen_by_time(self) -> str:
        """Return the setting by which kernels are chosen by their measured time; empty if none is.

        Such a choice may differ between processes, and with it the bits of `bounded`.
        """
        return ""

    def warm_up(self) -> Iterator[tuple[str, float]]:
        """Compile ahead whatever the declared capabilities can ask for.

        Yields:
            An operation that is ready, and the seconds that it took; nothing where nothing is ever compiled.
        """
        yield from ()

    def from_numpy(self, array: Any) -> Any:
        """Return a NumPy array as the backend's own kind of array.

        Implements: conformance.arrays
        """
        return array

    def to_numpy(self, array: Any) -> Any:
        """Return one of the backend's arrays as a NumPy array (bfloat16 as ml_dtypes.bfloat16).

        Implements: conformance.arrays
        """
        return array

    @abstractmethod
    def _quantize(self, x: Any, plan: QuantPlan) -> tuple[Any, Any]:
        """Return packed codes [rows..., length * bits / 8] and scale codes [rows..., length / k], block axis last."""

    @abstractmethod
    def _dequantize(self, q: MXArray, dtype: str) -> Any:
        """Return values in the shape `q.shape`."""

    @abstractmethod
    def _hadamard(self, x: Any, rotation: Rotation, axis: int) -> Any:
        """Return float32 in the shape of `x`."""

    @abstractmethod
    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> Any:
        """Return [M, N] of `out_dtype`; `b` is a PreparedArray only with this backend's layout for the profile."""

    def _tensor_scale(self, x: Any, plan: QuantPlan, placement: Placement) -> tuple[Any, Any]:
        """Return the largest finite magnitude of a tensor and its scale, float32 [1] each, as arrays of this backend.

        The default is for backends on NumPy arrays.
        """
        return plan_tensor_scale(x, plan, placement)

    def _quantize_dual(
        self, x: Any, row: QuantPlan, column: QuantPlan
    ) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Return what `_quantize` returns for both plans of a matrix, along axis 1 and along axis 0."""
        return self._quantize(x, row), self._quantize(x, column)

    def _fake_quantize(self, x: Any, plan: QuantPlan, dtype: str) -> Any:
        """Return the values of the quantized `x`, in its shape; never asked under `nonfinite = "raise"`."""
        return self._dequantize(plan.array(*self._quantize(x, plan)), dtype)

    def _add_product(self, a: MXArray, b: MXArray, onto: Any, profile: GemmProfile) -> None:
        """Add to `onto`, float32 [M, N] in C order, what `_scaled_gemm` gives in float32."""
        product = self._scaled_gemm(a, b, profile, "float32")
        with np.errstate(over="ignore", invalid="ignore"):
            onto += product

    def _prepare(self, q: MXArray, profile: GemmProfile) -> tuple[Any, ...]:
        """Return arrays of this backend that its GEMM reads in place of those of `q`; none if it reads codes."""
        return ()


def within_range(backend: Backend, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, repeated inside `widened()` if it left the backend's range.

    Implements: gemm.bounded
    """
    result = work()
    if backend.range_exceeded():
        with backend.widened():
            result = work()
    return result
