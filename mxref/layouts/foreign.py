"""How other libraries store codes and scales, as the bytes that `mxref` stores: packed rows, one scale byte per block.

A layout is a name and two functions, which read and write it. Names of layouts of codes and of scales are distinct, so
a list of names says both. Letters: R rows, K elements along the block axis (padded), C = K / k blocks per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.formats import E8M0, BlockFormat
from mxref.layouts.packed import pack, unpack

Bytes = NDArray[np.uint8]
_Convert = Callable[[Bytes, int, int, BlockFormat], Bytes]
_Place = Callable[[NDArray[np.int64], NDArray[np.int64], int], NDArray[np.int64]]


@dataclass(frozen=True)
class Layout:
    """A way to store the codes or the scales of a quantized matrix."""

    name: str
    part: str
    """`codes` or `scales`."""
    title: str
    """What it is, in a few words."""
    read: _Convert
    """Returns what `mxref` stores, from the stored bytes, R, K and the format.

    ShapeError if the size does not fit; RecipeError if the layout is of another scale format.
    """
    write: _Convert
    """Returns the stored bytes from what `mxref` stores, with zeros where a layout fills up; errors as `read`."""
    multiple: tuple[int, int] = (1, 1)
    """What rows and columns of scales are filled up to multiples of."""

    @property
    def transposed(self) -> bool:
        """Whether the block axis is stored first."""
        return self.name.endswith(".T")

    @property
    def per_element(self) -> bool:
        """Whether each code has a byte of its own."""
        return self.name.startswith("unpacked")


def layout(name: str) -> Layout:
    """Return a layout by name; RecipeError lists the known ones."""
    if name not in LAYOUTS:
        raise RecipeError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def layouts_of(names: tuple[str, ...]) -> tuple[Layout, Layout]:
    """Return the layout of codes and that of scales from names of either; what is not named is mxref's own.

    Raises:
        RecipeError: an unknown name, or two for one part.
    """
    found = {"codes": LAYOUTS["packed"], "scales": LAYOUTS["rows"]}
    named: dict[str, str] = {}
    for name in names:
        one = layout(name)
        if one.part in named:
            raise RecipeError(
                f"layouts {named[one.part]} and {name} are both of {one.part}; give one of codes and one of scales"
            )
        named[one.part] = name
        found[one.part] = one
    return found["codes"], found["scales"]


def _sized(stored: Bytes, size: int, what: str) -> Bytes:
    flat = stored.reshape(-1)
    if flat.size != size:
        raise ShapeError(f"{what} take {size} bytes here, got {flat.size} (shape {stored.shape})")
    return flat


def _matrix(stored: Bytes, rows: int, width: int, what: str) -> Bytes:
    """Return bytes as a matrix; of another shape only one axis is taken, or leading axes that make up the rows."""
    flat = _sized(stored, rows * width, what)
    if stored.ndim > 1 and stored.shape[-1] != width:
        raise ShapeError(f"{what} have {width} bytes in a row, got shape {stored.shape}")
    return flat.reshape(rows, width)


def _packed(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    return _matrix(stored, rows, made.code_bytes(length), "packed codes")


def _nibbles(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    if made.element.bits != 4:
        raise ShapeError(
            f"only 4-bit codes have nibbles, {made.title} has {made.element.bits} bits: take the layout packed"
        )
    return _packed(stored, rows, length, made)


def _high_first(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    codes = _nibbles(stored, rows, length, made)
    return (codes << 4 | codes >> 4).astype(np.uint8)


def _halves(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    codes = _nibbles(stored, rows, length, made)
    blocks = codes.reshape(rows, length // made.k, made.k // 2)
    nibbles = np.concatenate([blocks & 0xF, blocks >> 4], axis=-1)  # [R, C, k]
    return pack(nibbles.reshape(rows, length), made.element)


def _to_halves(codes: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    flat = unpack(_nibbles(codes, rows, length, made), made.element)
    halves = flat.reshape(rows, length // made.k, 2, made.k // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).astype(np.uint8).reshape(rows, length // 2)


def _unpacked(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    codes = _matrix(stored, rows, length, "codes of one byte each")
    if codes.size and codes.max() >> made.element.bits:
        raise ShapeError(f"code {codes.max()} does not fit in {made.element.bits} bits")
    return pack(codes, made.element)


def _to_unpacked(codes: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    return unpack(_packed(codes, rows, length, made), made.element)


def _weights_16x16(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    width = _tiled_width(rows, length, made)
    tiles = _sized(stored, rows * width, "packed codes").reshape(rows // 16, width // 16, 16, 16)
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).reshape(rows, width)


def _to_weights_16x16(codes: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    width = _tiled_width(rows, length, made)
    tiles = _packed(codes, rows, length, made).reshape(rows // 16, 16, width // 16, 16)
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).reshape(rows, width)


def _tiled_width(rows: int, length: int, made: BlockFormat) -> int:
    """Return the bytes of a row; ShapeError unless tiles of 16 x 16 bytes fill the matrix."""
    width = made.code_bytes(length)
    if rows % 16 or width % 16:
        raise ShapeError(
            f"tiles of 16 x 16 bytes do not fit {rows} rows of {width} bytes: both must be multiples of 16; quantize "
            "an array that is filled up with zeros, or take the layout packed"
        )
    return width


def _transposed_codes(read: _Convert, per_element: bool = False) -> _Convert:
    def transposed(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
        width = length if per_element else made.code_bytes(length)
        columns = _matrix(stored, width, rows, "transposed codes")
        return read(np.ascontiguousarray(columns.T), rows, length, made)

    return transposed


def _to_transposed(write: _Convert) -> _Convert:
    def transposed(ours: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
        return np.ascontiguousarray(write(ours, rows, length, made).T)

    return transposed


def _scale_rows(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    return _matrix(stored, rows, length // made.k, "scales")


def _scale_columns(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    return np.ascontiguousarray(_matrix(stored, length // made.k, rows, "transposed scales").T)


def _exponents(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    _require_e8m0("exponents", made)
    return _scale_rows(stored, rows, length, made) + np.uint8(127)  # modulo 256, as two's complement


def _to_exponents(scales: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    _require_e8m0("exponents", made)
    return (_scale_rows(scales, rows, length, made) - np.uint8(127)).view(np.int8)


def _bias_125(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    _require_e8m0("bias_125", made)
    return _scale_rows(stored, rows, length, made) + np.uint8(2)


def _to_bias_125(scales: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
    _require_e8m0("bias_125", made)
    found = _scale_rows(scales, rows, length, made)
    lost = found[(found < 2) | (found == 255)]  # 2^-127, 2^-126 and NaN
    if lost.size:
        raise DtypeError(
            f"scale byte {lost[0]} has no code of bias 125, which begins at the byte 2 and has no NaN; "
            "take the layout rows"
        )
    return found - np.uint8(2)


def _require_e8m0(name: str, made: BlockFormat) -> None:
    if made.scale != E8M0:
        raise RecipeError(
            f"layout {name} is of E8M0 codes, and the scales of {made.title} are {made.scale.name}; name another "
            "layout of scales, or any"
        )


_TILES = {"nvidia_128x4": (128, 4), "gfx950_32x8": (32, 8), "gfx950_256x8": (256, 8), "gfx1250_32x4": (32, 4)}
"""What layouts of scales in tiles fill rows and columns up to multiples of."""


def _tiled(name: str, place: _Place) -> tuple[_Convert, _Convert]:
    """Return reader and writer of scales in tiles; `place` gives the byte of row r and column c of a padded width."""
    multiple = _TILES[name]

    def padded(rows: int, length: int, made: BlockFormat) -> tuple[int, int]:
        height, width = (-(-n // m) * m for n, m in zip((rows, length // made.k), multiple, strict=True))
        return height, width

    def places(rows: int, length: int, made: BlockFormat) -> NDArray[np.int64]:
        r, c = np.ogrid[:rows, : length // made.k]
        return place(r.astype(np.int64), c.astype(np.int64), padded(rows, length, made)[1])

    def read(stored: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
        height, width = padded(rows, length, made)
        what = (
            f"{rows} x {length // made.k} scales in tiles of {multiple[0]} x {multiple[1]}, filled up to "
            f"{height} x {width},"
        )
        return _sized(stored, height * width, what)[places(rows, length, made)]

    def write(scales: Bytes, rows: int, length: int, made: BlockFormat) -> Bytes:
        height, width = padded(rows, length, made)
        stored = np.zeros(height * width, np.uint8)
        stored[places(rows, length, made)] = _scale_rows(scales, rows, length, made)
        return stored.reshape(height, width)

    return read, write


def _nvidia(r: NDArray[np.int64], c: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    return (r // 128 * (width // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def _gfx950(r: NDArray[np.int64], c: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    within = c // 8 * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16
    return r // 32 * (32 * width) + within


def _gfx1250(r: NDArray[np.int64], c: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    return r // 32 * (32 * width) + c // 4 * 128 + r % 32 * 4 + c % 4


LAYOUTS = {
    name: Layout(name, part, title, read, write, _TILES.get(name, (1, 1)))
    for name, part, title, read, write in (
        ("packed", "codes", "mxref's own: [R, K / 2], the first element in the low bits", _packed, _packed),
        ("high_first", "codes", "nibbles swapped: the first element in the high bits", _high_first, _high_first),
        ("halves", "codes", "ggml: byte j of a block holds the elements j and j + k / 2", _halves, _to_halves),
        ("unpacked", "codes", "one code per byte, [R, K]", _unpacked, _to_unpacked),
        (
            "weights_16x16", "codes", "AITER's shuffled weights: tiles of 16 rows x 16 bytes",
            _weights_16x16, _to_weights_16x16,
        ),
        ("packed.T", "codes", "transposed: [K / 2, R]", _transposed_codes(_packed), _to_transposed(_packed)),
        (
            "high_first.T", "codes", "transposed, nibbles swapped: [K / 2, R]",
            _transposed_codes(_high_first), _to_transposed(_high_first),
        ),
        (
            "unpacked.T", "codes", "transposed, one code per byte: [K, R]",
            _transposed_codes(_unpacked, True), _to_transposed(_to_unpacked),
        ),
        ("rows", "scales", "mxref's own: [R, C]", _scale_rows, _scale_rows),
        ("rows.T", "scales", "transposed: [C, R]", _scale_columns, _to_transposed(_scale_rows)),
        ("nvidia_128x4", "scales", "cuBLAS, CUTLASS: tiles of 128 x 4", *_tiled("nvidia_128x4", _nvidia)),
        (
            "gfx950_32x8", "scales", "AITER's e8m0_shuffle, hipBLASLt: tiles of 32 x 8",
            *_tiled("gfx950_32x8", _gfx950),
        ),
        (
            "gfx950_256x8", "scales", "the same with rows padded to 256, as AITER does",
            *_tiled("gfx950_256x8", _gfx950),
        ),
        ("gfx1250_32x4", "scales", "AITER's n32k4: tiles of 32 x 4", *_tiled("gfx1250_32x4", _gfx1250)),
        ("exponents", "scales", "exponents as int8 instead of E8M0 codes", _exponents, _to_exponents),
        ("bias_125", "scales", "E8M0 codes with a bias of 125", _bias_125, _to_bias_125),
    )
}  # fmt: skip
"""Every known layout by its name; the first of either part is mxref's own.

Sources: TransformerEngine, torchao `to_blocked`, CUTLASS `SfKMajorAtom`, AITER `e8m0_shuffle`, triton_kernels
`layout_details`, ggml `block_mxfp4`, compressed-tensors, Quark `Pack_mxfp4`.
"""


def fitting(part: str, stored: Bytes, rows: int, length: int, made: BlockFormat) -> list[tuple[str, Bytes]]:
    """Read stored bytes under every layout of their size; return the names of these layouts with the results."""
    found = []
    for one in LAYOUTS.values():
        if one.part != part:
            continue
        try:
            found.append((one.name, one.read(stored, rows, length, made)))
        except (RecipeError, ShapeError):
            continue
    return found


def elements(codes: Bytes, made: BlockFormat) -> Bytes:
    """Return packed codes [R, K * bits / 8] by block, [R, C, k]."""
    flat = unpack(codes, made.element)
    return flat.reshape(len(codes), flat.shape[1] // made.k, made.k)


def stored_bytes(array: NDArray[np.generic]) -> Bytes:
    """Return the bytes of an array of one-byte codes of whatever type.

    Raises:
        ShapeError: elements of more than one byte.
    """
    if array.dtype.itemsize != 1:
        raise ShapeError(
            f"codes and scales are bytes, got {array.dtype} of shape {array.shape}; store them as uint8 "
            "(an int32 that holds several codes is viewed as uint8 first)"
        )
    flat = np.ascontiguousarray(array)
    return flat.view(np.uint8).reshape(array.shape) if math.prod(array.shape) else flat.astype(np.uint8)
