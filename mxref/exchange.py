"""Quantized arrays in the files of other libraries: other layouts, other names, other types of the same bytes.

`mxref.layouts.conventions` has the names of layouts. Nothing is guessed: the caller says what a file does not record.
An array of several matrices, as the experts of a layer, is stored matrix by matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref import array_file
from mxref.errors import DtypeError, FileFormatError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import BLOCK_FORMATS, MXFP4, BlockFormat
from mxref.layouts.conventions import OWN, WeightStorage, named
from mxref.layouts.foreign import Bytes, Layout, fitting, layouts_of, stored_bytes
from mxref.mxarray import MXArray

_PARTS = ("codes", "scales")
_TENSOR_SCALE = "tensor_scale"
_NAN = 255
_NUMBERS = ("exponents", "bias_125")
"""The layouts of scales whose bytes are no codes of the scale format."""

_TYPES = {
    "float4_e2m1fn": ("float4_e2m1fn_x2", "F4"),
    "float8_e4m3fn": ("float8_e4m3fn", "F8_E4M3"),
    "float8_e5m2": ("float8_e5m2", "F8_E5M2"),
    "float8_e8m0fnu": ("float8_e8m0fnu", "F8_E8M0"),
}
"""The types of ml_dtypes that safetensors has, with the names of its library and of its files."""


@dataclass(frozen=True)
class Read:
    """An array that a file holds, and what its bytes do not say."""

    array: MXArray
    recorded: bool
    """Whether the file names its layouts."""
    padding: int
    """Bytes of scales that belong to no block."""
    nonzero: int
    """How many of them are not 0."""
    fitting: tuple[str, ...]
    """The other layouts of scales that have this size."""


def load(
    path: str | Path,
    layout: str = OWN,
    *,
    key: str | Sequence[str] = (),
    format: BlockFormat | str | None = None,
    shape: Sequence[int] | None = None,
) -> MXArray:
    """Return the quantized array that a file holds.

    Args:
        path: a .npz or .safetensors file.
        layout: how codes and scales are stored.
        key: the name of the layer in a file of a convention; or the names of codes and scales, if they are not
            `codes` and `scales`.
        format: the block format, by default MXFP4. A file of mxref records it.
        shape: the shape of the array, block axis last; needed if the codes are stored flat.

    Raises:
        FileFormatError, ShapeError, DtypeError, RecipeError: a file or arguments that do not fit together.
    """
    return read(path, layout, key=key, format=format, shape=shape).array


def read(
    path: str | Path,
    layout: str = OWN,
    *,
    key: str | Sequence[str] = (),
    format: BlockFormat | str | None = None,
    shape: Sequence[int] | None = None,
) -> Read:
    """Return the array, and what the bytes of the file do not say; arguments and errors as in `load`."""
    path = array_file.checked_path(path)
    convention, layouts = named(layout)
    asked = _format(format)
    names, facts, arrays, types = _held(
        path, convention, asked or MXFP4, (key,) if isinstance(key, str) else key
    )
    made = asked or MXFP4
    if facts is not None:
        made = _recorded_format(path, facts, asked)
        _require_recorded(path, facts, layout, layouts)
    for name, dtype in zip(names, (made.element.dtype, made.scale.dtype), strict=True):
        _require_type(path, name, types[name], dtype, made)
    stored = [stored_bytes(arrays[name]) for name in dict.fromkeys(names)]
    if convention:
        stored = convention.by_row(f"{names[0]} of {path}", stored, made)
    if facts is None:
        rows, length = _logical(path, stored[0], layouts[0], made, shape)
        facts = {
            "shape": (*rows, length), "axis": len(rows), "block": str(made.row), "prescale": False, "rotation": None,
            "block_format": made.name,
        }  # fmt: skip
        recorded = False
    else:
        whole, axis = tuple(facts["shape"]), facts["axis"]
        rows, recorded = (*whole[:axis], *whole[axis + 1 :]), True
        length = facts.get("length", stored[0].shape[-1] * 8 // made.element.bits)
    _require_elements(rows, length)
    if made.tensor_scale and getattr(arrays.get(_TENSOR_SCALE), "shape", None) != (1,):
        raise FileFormatError(
            f"{path} has no array {_TENSOR_SCALE} of shape [1], the float32 scale of the tensor that {made.title} has; "
            "add it, by which codes and scales are multiplied and not divided"
        )
    ours = [
        _matrices(path, part, one, each, rows, length, made)
        for part, one, each in zip(_PARTS, layouts, stored, strict=True)
    ]
    again = stored_bytes(_stored(ours[1], layouts[1], rows, length, made))
    fit = () if recorded or convention else _other_fitting(layouts[1], stored[1], rows, length, made)
    array = MXArray.of_file(facts, {**arrays, **dict(zip(_PARTS, ours, strict=True))})
    padding, nonzero = again.size - ours[1].size, int((again.reshape(-1) != stored[1].reshape(-1)).sum())
    return Read(array, recorded, padding, nonzero, fit)


def save(
    array: MXArray, path: str | Path, layout: str = OWN, *, key: str = "weight", typed: bool = False
) -> dict[str, NDArray[Any]]:
    """Write an array in a layout, and return the arrays of the file by name.

    Args:
        array: what is written.
        path: a .npz or .safetensors file.
        layout: how codes and scales are stored.
        key: the name of the layer, under a convention.
        typed: give codes and scales the types of safetensors, as F4 and F8_E8M0, instead of U8.

    Raises:
        ShapeError, DtypeError, UnsupportedError, RecipeError: an array that the layout cannot hold.
        FileFormatError: another suffix.
    """
    path = array_file.checked_path(path)
    arrays, types = stored(array, layout, key), {}
    if typed:
        dtypes, (codes, scales) = (array.format.element.dtype, array.format.scale.dtype), named(layout)[1]
        for name, dtype in zip(arrays, dtypes, strict=False):
            other = codes.per_element or scales.name in _NUMBERS or len(arrays) < len(dtypes)
            if other or dtype not in _TYPES:
                raise DtypeError(
                    f"safetensors has no type for {name} of {array.format.title} in the layout {layout}; leave out "
                    "--typed"
                )
            types[name] = _TYPES[dtype][0]
    array_file.write(path, _facts(array, layout), arrays, types)
    return arrays


def stored(array: MXArray, layout: str = OWN, key: str = "weight") -> dict[str, NDArray[Any]]:
    """Return what `save` writes: the arrays by name, codes first."""
    convention, layouts = named(layout)
    made, rows, held = array.format, array.rows_shape, array.arrays()
    _require_elements(rows, array.length)
    if convention:
        _require_expressible(array, convention)
    codes, scales = (
        _stored(held[part], one, rows, array.length, made) for part, one in zip(_PARTS, layouts, strict=True)
    )
    if not convention:
        return {**held, "codes": codes, "scales": scales}
    return convention.tensors(key, codes, scales, made)


def _held(
    path: Path, convention: WeightStorage | None, made: BlockFormat, keys: Sequence[str]
) -> tuple[tuple[str, str], dict[str, Any] | None, dict[str, NDArray[Any]], dict[str, str]]:
    """Return the names of codes and scales, what the file records, its arrays and their types."""
    if path.suffix not in (".npz", ".safetensors"):
        raise FileFormatError(f"cannot read {path}: the suffix must be .npz or .safetensors")
    names = _PARTS

    def choose(held: list[str]) -> Iterable[str]:
        nonlocal names
        names = _names(path, held, convention, made, keys)
        more = [_TENSOR_SCALE] if not convention and _TENSOR_SCALE in held else []
        return [*dict.fromkeys(names), *more]

    with array_file.explained(path):
        meta, arrays, types = array_file.chosen(path, choose)
    return names, meta if names == _PARTS else None, arrays, types


def _names(
    path: Path, held: list[str], convention: WeightStorage | None, made: BlockFormat, keys: Sequence[str]
) -> tuple[str, str]:
    """Return the names of codes and scales in a file."""
    pairs: tuple[tuple[str, str], ...] = (_PARTS,)
    if len(keys) == 2:
        pairs = ((keys[0], keys[1]),)
    elif len(keys) > 2 or (keys and not convention):
        raise RecipeError(f"{len(keys)} names, {', '.join(keys)}: name codes and scales, in this order")
    elif convention:
        if made not in convention.endings:
            raise UnsupportedError(_not_held(convention, made))
        endings = convention.endings[made]
        bases = keys or [
            name.removesuffix(first) for first, _ in endings for name in held if name.endswith(first)
        ]
        pairs = tuple((base + first, base + second) for base in bases for first, second in endings)
    found = [pair for pair in pairs if set(pair) <= set(held)]
    if len(found) == 1:
        return found[0]
    some = ", ".join(sorted(held)[:8]) + (", ..." if len(held) > 8 else "")
    if found:
        layers = ", ".join(pair[0] for pair in found[:8]) + (", ..." if len(found) > 8 else "")
        raise FileFormatError(f"{path} holds {len(found)} layers, choose one with --key: {layers}")
    what = convention.title if convention else "codes and scales"
    asked = f" of {' and '.join(keys)}" if keys else ""
    raise FileFormatError(f"{path} has no {what}{asked}, but {some or 'nothing'}; name the arrays with --key")


def _require_elements(rows: tuple[int, ...], length: int) -> None:
    if not math.prod((*rows, length)):
        raise ShapeError(f"an array of shape {(*rows, length)} has no elements, so nothing can be converted")


def _format(format: BlockFormat | str | None) -> BlockFormat | None:
    if format is None or isinstance(format, BlockFormat):
        return format
    if format not in BLOCK_FORMATS:
        raise RecipeError(f"unknown block format {format!r}; known: {', '.join(BLOCK_FORMATS)}")
    return BLOCK_FORMATS[format]


def _recorded_format(path: Path, facts: Mapping[str, Any], asked: BlockFormat | None) -> BlockFormat:
    made = BLOCK_FORMATS.get(facts.get("block_format", MXFP4.name))
    if made is None:
        raise FileFormatError(f"{path} records the unknown format {facts['block_format']!r}")
    if asked not in (None, made):
        raise RecipeError(f"{path} records the format {made.name}, not {asked}: leave out --format")
    return made


def _require_recorded(
    path: Path, facts: Mapping[str, Any], layout: str, layouts: tuple[Layout, Layout]
) -> None:
    """Raise FileFormatError unless the layouts are those that the file records: none is read twice."""
    recorded = facts.get("layout", ["packed", "rows"])
    for part, one, name in zip(_PARTS, layouts, recorded, strict=True):
        if one.name != name:
            own = OWN if recorded == ["packed", "rows"] else ",".join(recorded)
            raise FileFormatError(
                f"{path} records that its {part} are in the layout {name}, and {layout} says {one.name}: convert from "
                f"{own}, so that nothing is converted twice"
            )


def _require_type(path: Path, name: str, found: str, dtype: str | None, made: BlockFormat) -> None:
    """Raise DtypeError if a file gives bytes the type of another format."""
    expected = _TYPES.get(dtype or "", ("", ""))[1]
    if found.startswith("F") and found != expected:
        raise DtypeError(
            f"{name} of {path} is {found}, and {made.title} stores {expected or 'U8'} or U8 there; name the format "
            "with --format"
        )


def _logical(
    path: Path, codes: Bytes, layout: Layout, made: BlockFormat, shape: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    """Return the shape of the rows and the length of the block axis, from the shape of the codes or a given one."""
    if shape is not None:
        *rows, length = shape
        if min(shape, default=0) < 1 or not rows:
            raise ShapeError(f"shape {tuple(shape)} must be two or more positive numbers, block axis last")
    else:
        if codes.ndim < 2:
            raise ShapeError(
                f"the codes of {path} are flat, {codes.shape}, and a number of bytes does not tell rows from columns; "
                "give --shape, as in --shape 128,4096"
            )
        order = (
            [*range(codes.ndim - 2), codes.ndim - 1, codes.ndim - 2]
            if layout.transposed
            else range(codes.ndim)
        )
        *rows, last = (codes.shape[axis] for axis in order)
        length = last if layout.per_element else last * 8 // made.element.bits
    if length % made.k:
        raise ShapeError(
            f"{path}: {length} elements along the block axis are no multiple of the {made.k} of a block of "
            f"{made.title}; quantize with pad=True, which fills the last block up, or name the format with --format"
        )
    return tuple(rows), length


def _split_matrices(array: Bytes, rows: tuple[int, ...]) -> Bytes:
    """Return the matrices that an array of rows holds, one after the other; ShapeError if they have no equal size."""
    count = math.prod(rows[:-1])
    if array.size % count:
        raise ShapeError(f"{array.size} bytes are not divisible among {count} matrices")
    shape = array.shape[-2:] if array.ndim == len(rows) + 1 and array.ndim > 1 else (-1,)
    return array.reshape(count, *shape)


def _matrices(
    path: Path,
    part: str,
    layout: Layout,
    stored: Bytes,
    rows: tuple[int, ...],
    length: int,
    made: BlockFormat,
) -> Bytes:
    """Return codes or scales as mxref stores them."""
    width = made.code_bytes(length) if part == _PARTS[0] else length // made.k
    height = rows[-1] if rows else 1
    out = np.empty((math.prod(rows[:-1]), height, width), np.uint8)
    try:
        for i, matrix in enumerate(_split_matrices(stored, rows)):
            out[i] = layout.read(matrix, height, length, made)
    except ShapeError as err:
        fit = [name for name, _ in fitting(part, stored, height, length, made)] if len(out) == 1 else []
        way_out = f"the layouts of this size are {', '.join(fit)}" if fit else "no known layout has this size"
        raise ShapeError(
            f"{path}: the {part} are not {layout.name} of {' x '.join(map(str, (*rows, length)))} elements: {err}; "
            f"{way_out}; check the layout, --format and --shape"
        ) from err
    return out.reshape(*rows, width)


def _stored(ours: Bytes, layout: Layout, rows: tuple[int, ...], length: int, made: BlockFormat) -> Bytes:
    """Return codes or scales of mxref as a layout stores them."""
    height = rows[-1] if rows else 1
    matrices = [
        layout.write(matrix, height, length, made)
        for matrix in ours.reshape(math.prod(rows[:-1]), height, -1)
    ]
    return np.stack(matrices).reshape(*rows[:-1], *(matrices[0].shape if rows else (-1,)))


def _other_fitting(
    layout: Layout, stored: Bytes, rows: tuple[int, ...], length: int, made: BlockFormat
) -> tuple[str, ...]:
    """Return the other layouts of scales of this size."""
    matrices = _split_matrices(stored, rows)
    fit = fitting(layout.part, matrices[0], rows[-1] if rows else 1, length, made)
    return tuple(name for name, _ in fit if name != layout.name)


def _require_expressible(array: MXArray, convention: WeightStorage) -> None:
    """Raise an error if a convention has no place for something without which the bytes mean other numbers."""
    made = array.format
    way_out = f"write it in the layout {OWN}, which records it"
    if made not in convention.endings:
        raise UnsupportedError(_not_held(convention, made))
    if len(array.shape) < 2:
        raise ShapeError(
            f"an array of shape {array.shape} is no weight [..., N, K] of {convention.name}; {way_out}"
        )
    if array.length != array.shape[array.axis]:
        raise ShapeError(
            f"{array.shape[array.axis]} elements along the block axis are filled up to {array.length}, and "
            f"{convention.name} has no place for the true length; {way_out}"
        )
    for what, there in (("a Hadamard transform", array.rotation), ("a prescale", array.prescale)):
        if there:
            raise UnsupportedError(
                f"the array has {what}, which no reader of {convention.name} undoes; {way_out}"
            )
    if not convention.nan and (array.arrays()["scales"] == _NAN).any():
        raise DtypeError(
            f"a block is NaN, and readers of {convention.name} take its scale byte {_NAN} as 2^128; {way_out}"
        )


def _not_held(convention: WeightStorage, made: BlockFormat) -> str:
    known = ", ".join(one.name for one in convention.endings)
    return (
        f"{convention.name} is known for {known}, not for {made.name}; take the layout {OWN}, or one of codes"
    )


def _facts(array: MXArray, layout: str) -> dict[str, Any] | None:
    """Return what a file records; one of a convention has nothing of mxref's."""
    convention, layouts = named(layout)
    if convention:
        return None
    if layouts == layouts_of(()):
        return array.facts()
    names = [one.name for one in layouts]
    return array.facts() | {"format": array_file.OTHER_LAYOUT, "layout": names, "length": array.length}
