"""MXArray: packed element codes and scale codes, and what is needed to read them.

The block axis is stored last, so an array quantized along axis 0 is stored transposed, as GEMMs read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref import array_file
from mxref.errors import FileFormatError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import BLOCK_FORMATS, MXFP4, BlockFormat, BlockShape
from mxref.layouts.packed import unpack
from mxref.steps.hadamard import LateRotation, Rotation

_FORMAT = "mxref.mxarray.1"
_OF_FORMAT: Any = None
# Tuples: to join types anew takes longer than to look at all else of a small array.
_ROTATIONS = (Rotation, LateRotation, type(None))
_BOOLS = (bool, np.bool_)


def on_host(array: Any) -> NDArray[Any]:
    """Return an array of any library as a NumPy array, copied if it lies in the memory of a GPU."""
    host: NDArray[Any] = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
    return host


@lru_cache(maxsize=64)
def _holds_codes(dtype: Any) -> bool:
    return str(dtype).endswith("uint8")


@dataclass(frozen=True, eq=False)
class MXArray:
    """A tensor in a block format, MXFP4 unless `format` says otherwise.

    Raises ShapeError when codes, scales, shape and axis do not fit together.

    Implements: packing.nibbles, packing.scales, quantize.axis
    """

    codes: Any
    """Packed element codes, uint8 [..., K * bits / 8], block axis last, the first element in the lowest bits."""
    scales: Any
    """Scale codes, uint8 [..., K / k]."""
    shape: tuple[int, ...]
    """Shape of the tensor that was quantized, in its own axis order and without padding."""
    axis: int
    """The block axis in `shape`."""
    block: BlockShape = _OF_FORMAT
    """What shares a scale; None is a block of the format."""
    prescale: bool = False
    """Whether elements carry the factor `format.element.prescale`, 3/4 for MXFP4."""
    rotation: Rotation | LateRotation | None = None
    """The Hadamard transform that the elements carry."""
    format: BlockFormat = MXFP4
    tensor_scale: Any = None
    """float32 [1], the scale of the whole tensor, for a format that has one; else None."""

    def __post_init__(self) -> None:
        self._check_types()
        shape, axis = self.shape, self.axis
        if not -len(shape) <= axis < len(shape):
            raise ShapeError(f"MXArray: axis {axis} is out of range for shape {shape}")
        if axis < 0:
            axis += len(shape)
            object.__setattr__(self, "axis", axis)
        codes, scales = tuple(self.codes.shape), tuple(self.scales.shape)
        for name, dtype in (("codes", self.codes.dtype), ("scales", self.scales.dtype)):
            if not _holds_codes(dtype):
                raise ShapeError(f"MXArray: {name} must be uint8 codes, got {dtype}")
        rows, length, k = self.rows_shape, self.length, self.format.k
        if length % k or length < shape[axis]:
            raise ShapeError(
                f"MXArray: codes {codes} hold {length} elements along the block axis, "
                f"which must be a multiple of {k} and cover the {shape[axis]} of axis {axis} of shape {shape}"
            )
        for name, found, expected in (
            ("codes", codes, (*rows, self.format.code_bytes(length))),
            ("scales", scales, (*rows, length // k)),
        ):
            if found != expected:
                raise ShapeError(
                    f"MXArray: {name} have shape {found}, expected {expected} for shape {shape} "
                    f"with block axis {axis} stored last"
                )

    def _check_types(self) -> None:
        """Raise ShapeError unless every field has a type that can be looked at; lists and names are converted."""
        for name, array in (("codes", self.codes), ("scales", self.scales)):
            if not hasattr(array, "dtype") or not getattr(array, "shape", ()):
                raise ShapeError(
                    f"MXArray: {name} must be an array of uint8 codes, got {type(array).__name__}"
                )
        try:
            object.__setattr__(self, "shape", tuple(map(index, self.shape)))
            object.__setattr__(self, "axis", index(self.axis))
        except (TypeError, ValueError) as err:
            raise ShapeError(
                f"MXArray: shape {self.shape!r} must hold integers, and axis {self.axis!r} be one"
            ) from err
        if not isinstance(self.rotation, _ROTATIONS):
            raise ShapeError(
                f"MXArray: rotation must be a Rotation or None, got {type(self.rotation).__name__}"
            )
        if not isinstance(self.format, BlockFormat):
            raise ShapeError(f"MXArray: format must be a BlockFormat, as mxref.MXFP4, got {self.format!r}")
        if not isinstance(self.prescale, _BOOLS):
            raise ShapeError(f"MXArray: prescale must be True or False, got {self.prescale!r}")
        try:
            shape = self.format.row if self.block is None else BlockShape(self.block)
        except RecipeError as err:
            raise ShapeError(f"MXArray: block {err}") from err
        if shape.columns != self.format.k:
            raise ShapeError(
                f"MXArray: block {shape} has not the {self.format.k} columns of {self.format.title}, as "
                f"{self.format.row} or {self.format.tile}"
            )
        object.__setattr__(self, "block", shape)
        self._check_tensor_scale()

    def _check_tensor_scale(self) -> None:
        """Raise ShapeError unless there is a float32 scale [1] of the tensor exactly where the format has one."""
        scale = self.tensor_scale
        if scale is None and not self.format.tensor_scale:
            return
        dtype, shape = str(getattr(scale, "dtype", "")), tuple(getattr(scale, "shape", ()))
        if self.format.tensor_scale and not (dtype.endswith("float32") and shape == (1,)):
            raise ShapeError(
                f"MXArray: {self.format.title} has a scale of the tensor, an array of float32 [1], got {scale!r}"
            )
        if not self.format.tensor_scale:
            raise ShapeError(
                f"MXArray: {self.format.title} has no scale of the tensor: leave tensor_scale out"
            )

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Lengths of the other axes, in order."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def length(self) -> int:
        """Stored length of the block axis, padding included."""
        return int(self.codes.shape[-1]) * 8 // self.format.element.bits

    def __eq__(self, other: object) -> bool:
        """Return whether shapes, every code and every scale code are the same."""
        if not isinstance(other, MXArray):
            return NotImplemented
        same_meaning = self._meaning() == other._meaning()
        return bool(
            same_meaning
            and np.array_equal(on_host(self.codes), on_host(other.codes))
            and np.array_equal(on_host(self.scales), on_host(other.scales))
            and self._tensor_scale_bits() == other._tensor_scale_bits()
        )

    __hash__ = None  # type: ignore[assignment]

    def _meaning(self) -> tuple[Any, ...]:
        return self.shape, self.axis, self.block, self.prescale, self.rotation, self.format

    def _tensor_scale_bits(self) -> bytes:
        return b"" if self.tensor_scale is None else on_host(self.tensor_scale).tobytes()

    def __repr__(self) -> str:
        """Return shape, block axis and the first blocks as hex: scale code, then element codes in order."""
        extra = [f"block={self.block}"]
        if self.tensor_scale is not None:
            extra.append(f"tensor scale {float(on_host(self.tensor_scale)[0]):.9g}")
        if self.length != self.shape[self.axis]:
            extra.append(f"padded to {self.length}")
        if self.prescale:
            extra.append(f"prescaled {Fraction(self.format.element.prescale)}")
        if isinstance(self.rotation, LateRotation):
            extra.append(f"H{self.rotation.n} signs drawn on the device")
        elif self.rotation:
            extra.append(
                f"H{self.rotation.n}" + (f" signs={self.rotation.signs:#x}" if self.rotation.signs else "")
            )
        head = f"MXArray({self.format.title} {self.shape}, axis={self.axis}, {', '.join(extra)}"
        scales = on_host(self.scales).reshape(-1)
        codes = on_host(self.codes).reshape(-1, self.format.code_bytes(self.format.k))
        digits = -(-self.format.element.bits // 4)
        lines = [
            f"  {scales[i]:02X}: " + "".join(f"{c:0{digits}x}" for c in unpack(codes[i], self.format.element))
            for i in range(min(3, len(scales)))
        ]
        if len(scales) > len(lines):
            lines.append(f"  ... {len(scales) - len(lines)} more blocks")
        return "\n".join([head + ("," if lines else ""), *lines]) + ")"

    def save(self, path: str | Path) -> None:
        """Write the array to a `.npz` or `.safetensors` file; an existing file is replaced only when all is written.

        Raises:
            FileFormatError: another suffix.
            UnsupportedError: the device drew the signs of the transform, and a file has no place for its step.
        """
        path = array_file.checked_path(path)
        array_file.write(path, self.facts(), self.arrays())

    def facts(self) -> dict[str, Any]:
        """Return what a file says of the array besides its bytes, as JSON holds it.

        Raises:
            UnsupportedError: the device drew the signs of the transform.
        """
        if isinstance(self.rotation, LateRotation):
            raise UnsupportedError(
                "the signs of this array's Hadamard transform were drawn on the device, at a step that only the "
                "device knows, so a file cannot hold them; quantize with the number as the step of placement.stream"
            )
        rotation = self.rotation and [self.rotation.n, hex(self.rotation.signs)]
        facts = {
            "format": _FORMAT, "shape": list(self.shape), "axis": self.axis, "block": str(self.block),
            "prescale": self.prescale, "rotation": rotation,
        }  # fmt: skip
        if self.format is not MXFP4:  # files of MXFP4 have no such key
            facts["block_format"] = self.format.name
        return facts

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what a file holds by name: codes, scales and, if there is one, the scale of the tensor."""
        held = {"codes": self.codes, "scales": self.scales}
        if self.tensor_scale is not None:
            held["tensor_scale"] = self.tensor_scale
        return {name: on_host(array) for name, array in held.items()}

    @classmethod
    def of_file(cls, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> MXArray:
        """Return the array of what `facts` and `arrays` return; KeyError, TypeError or ValueError if they say less."""
        rotation = facts["rotation"] and Rotation(facts["rotation"][0], int(facts["rotation"][1], 16))
        return cls(
            arrays["codes"],
            arrays["scales"],
            tuple(facts["shape"]),
            facts["axis"],
            BlockShape(facts["block"]),
            facts["prescale"],
            rotation,
            BLOCK_FORMATS[facts.get("block_format", MXFP4.name)],
            arrays.get("tensor_scale"),
        )

    @classmethod
    def load(cls, path: str | Path) -> MXArray:
        """Return the array written by `save`.

        Raises:
            FileFormatError: the file is missing, damaged, or holds something else.
        """
        path = array_file.checked_path(path)
        try:
            meta, arrays = array_file.read(path)
            if meta["format"] == array_file.OTHER_LAYOUT:
                raise FileFormatError(
                    f"{path} holds the layouts {', '.join(meta['layout'])}; convert it with mxref layout "
                    f"{','.join(meta['layout'])} mxref, or read it with mxref.exchange.load"
                )
            if meta["format"] != _FORMAT:
                raise KeyError(meta["format"])
            return cls.of_file(meta, arrays)
        except (FileFormatError, ShapeError):
            raise
        except Exception as err:  # every reader raises its own kind on a damaged file
            raise FileFormatError(f"cannot load an MXArray from {path}: {type(err).__name__}: {err}") from err


@dataclass(frozen=True, eq=False, repr=False)
class PreparedArray(MXArray):
    """An MXArray with the arrays that one backend's GEMM reads in its place; any other reads its codes.

    A copy of which something was changed (`dataclasses.replace`) has no layout: it would be another array's.
    `copy.copy` and `copy.deepcopy` keep it.
    What was pickled has none either: a process may have another version of the backend, or another path of it. There
    the GEMM reads the codes.

    Implements: conformance.dual
    """

    backend: str = field(default="", init=False)
    """Name of the backend that made `layout`."""
    profile: str = field(default="", init=False)
    """GEMM profile for which it made it."""
    layout: tuple[Any, ...] = field(default=(), init=False)
    """Arrays of that backend."""

    @classmethod
    def of(cls, q: MXArray, backend: str, profile: str, layout: tuple[Any, ...]) -> PreparedArray:
        """Return `q` with a layout; codes and scales are shared, not copied."""
        prepared = object.__new__(cls)
        # What `q` was checked for when it was made still holds.
        vars(prepared).update(vars(q), backend=backend, profile=profile, layout=layout)
        return prepared

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: the array without its layout."""
        return vars(self) | {"backend": "", "profile": "", "layout": ()}

    def __copy__(self) -> PreparedArray:
        """Return an array that shares codes, scales and layout."""
        return self.of(self, self.backend, self.profile, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedArray:
        """Return an array with codes, scales and layout of its own."""
        own = replace(self.plain(), codes=deepcopy(self.codes, memo), scales=deepcopy(self.scales, memo))
        return self.of(own, self.backend, self.profile, deepcopy(self.layout, memo))

    def layout_for(self, backend: str, profile: str) -> tuple[Any, ...]:
        """Return the layout if that backend made it for that profile, else nothing."""
        return self.layout if (self.backend, self.profile) == (backend, profile) else ()

    def plain(self) -> MXArray:
        """Return the same array without a layout."""
        return MXArray(**_own_fields(self))


def _own_fields(q: MXArray) -> dict[str, Any]:
    return {each.name: getattr(q, each.name) for each in fields(MXArray)}
