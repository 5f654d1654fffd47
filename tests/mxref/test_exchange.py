"""Layouts of other libraries in files: every byte against the formula of its source, and against the libraries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxref
from mxref import MXArray, exchange
from mxref.errors import DtypeError, FileFormatError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import MXFP6_E2M3, MXFP8_E4M3
from mxref.layouts.conventions import CONVENTIONS
from mxref.layouts.foreign import LAYOUTS
from mxref.layouts.packed import unpack

ROWS, LENGTH = 160, 320
SUFFIXES = [".npz", ".safetensors"]


def quantized(*shape: int, spec: Any = "ocp", axis: int = -1, **options: Any) -> MXArray:
    """An array whose scales and codes all differ from their neighbours."""
    g = np.random.default_rng(sum(shape))
    x = g.standard_normal(shape or (ROWS, LENGTH)) * np.exp2(g.integers(-9, 9, shape or (ROWS, LENGTH)))
    return mxref.quantize(x.astype(np.float32), spec, axis=axis, **options)


def shuffled(s: Any, r: int, i: int) -> int:
    """Element i of row r in tiles of 16 rows x 16 bytes."""
    b, width = i // 2, LENGTH // 2
    return int(s.reshape(-1)[r // 16 * 16 * width + b // 16 * 256 + r % 16 * 16 + b % 16]) >> 4 * (i % 2) & 15


CODE: dict[str, Callable[[Any, int, int], int]] = {
    "packed": lambda s, r, i: s[r, i // 2] >> 4 * (i % 2) & 15,
    "high_first": lambda s, r, i: s[r, i // 2] >> 4 * (1 - i % 2) & 15,
    "halves": lambda s, r, i: s[r, i // 32 * 16 + i % 16] >> i % 32 // 16 * 4 & 15,
    "unpacked": lambda s, r, i: s[r, i],
    "weights_16x16": shuffled,
    "packed.T": lambda s, r, i: s[i // 2, r] >> 4 * (i % 2) & 15,
    "high_first.T": lambda s, r, i: s[i // 2, r] >> 4 * (1 - i % 2) & 15,
    "unpacked.T": lambda s, r, i: s[i, r],
}
"""The code of element i of row r, by the definition of each layout, from the stored array."""

# C, the scales of a row, is 10: 12 in tiles of 4, 16 in tiles of 8.
SCALE: dict[str, Callable[[Any, int, int], int]] = {
    "rows": lambda s, r, c: s[r, c],
    "rows.T": lambda s, r, c: s[c, r],
    "nvidia_128x4": lambda s, r, c: s.reshape(-1)[
        (r // 128 * 3 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    ],
    "gfx950_32x8": lambda s, r, c: s.reshape(-1)[
        r // 32 * 32 * 16 + c // 8 * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16
    ],
    "gfx950_256x8": lambda s, r, c: s.reshape(-1)[
        r // 32 * 32 * 16 + c // 8 * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16
    ],
    "gfx1250_32x4": lambda s, r, c: s.reshape(-1)[r // 32 * 32 * 12 + c // 4 * 128 + r % 32 * 4 + c % 4],
    "exponents": lambda s, r, c: s[r, c] + 127,
    "bias_125": lambda s, r, c: s[r, c] + 2,
}
PADDED = {
    "nvidia_128x4": 256 * 12,
    "gfx950_32x8": 160 * 16,
    "gfx950_256x8": 256 * 16,
    "gfx1250_32x4": 160 * 12,
}
"""Bytes of scales in tiles."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_lies_where_the_formula_of_the_layout_says(name: str, tmp_path: Path) -> None:
    q, path = quantized(), tmp_path / "w.npz"
    arrays = exchange.save(q, path, name)
    if name in CODE:
        codes, stored = unpack(q.codes, mxref.E2M1), arrays["codes"].astype(int)
        assert all(CODE[name](stored, r, i) == codes[r, i] for r in range(ROWS) for i in range(LENGTH))
    else:
        stored = arrays["scales"].astype(int)
        assert all(
            SCALE[name](stored, r, c) == q.scales[r, c] for r in range(ROWS) for c in range(LENGTH // 32)
        )
        assert stored.size == PADDED.get(name, q.scales.size)
    assert exchange.load(path, name) == q


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["mxref", *CONVENTIONS, "high_first,rows.T", "halves,gfx950_256x8"])
def test_there_and_back_is_the_same_file(name: str, suffix: str, tmp_path: Path) -> None:
    q = quantized()
    first, second, third = (tmp_path / f"{n}{suffix}" for n in "abc")
    q.save(first)
    exchange.save(MXArray.load(first), second, name)
    exchange.save(exchange.load(second, name), third)
    assert third.read_bytes() == first.read_bytes() or suffix == ".npz"  # a .npz file holds times
    assert MXArray.load(third) == q
    again = tmp_path / f"d{suffix}"
    exchange.save(exchange.load(second, name), again, name)
    assert exchange.load(again, name) == q


@pytest.mark.parametrize("made", mxref.formats.BLOCK_FORMATS.values(), ids=str)
@pytest.mark.parametrize(("axis", "rotated"), [(0, False), (1, True), (2, False)])
def test_every_format_and_axis_with_padding_comes_back(
    made: Any, axis: int, rotated: bool, tmp_path: Path
) -> None:
    spec = mxref.OperandSpec(made, hadamard=16 if rotated else 0)
    q = quantized(33, 65, 34, spec=spec, axis=axis, pad=True)
    for name in ("nvidia_128x4", "packed.T,gfx950_32x8", "unpacked,rows.T"):
        exchange.save(q, tmp_path / "w.safetensors", name)
        found = exchange.read(tmp_path / "w.safetensors", name)
        assert found.array == q
        assert found.recorded
        assert (found.nonzero, found.fitting) == (0, ())


def test_matrices_of_experts_are_tiled_one_by_one(tmp_path: Path) -> None:
    q = quantized(3, 40, 64)
    arrays = exchange.save(q, tmp_path / "w.npz", "nvidia_128x4")
    assert arrays["scales"].shape == (3, 128, 4)
    for e, r, c in itertools.product(range(3), range(40), range(2)):
        assert arrays["scales"][e].reshape(-1)[r % 32 * 16 + r // 32 * 4 + c] == q.scales[e, r, c]
    np.savez(tmp_path / "plain.npz", codes=arrays["codes"], scales=arrays["scales"])
    assert exchange.load(tmp_path / "plain.npz", "nvidia_128x4") == q
    np.savez(tmp_path / "flat.npz", codes=arrays["codes"].reshape(-1), scales=arrays["scales"].reshape(-1))
    assert exchange.load(tmp_path / "flat.npz", "nvidia_128x4", shape=(3, 40, 64)) == q
    np.savez(tmp_path / "one.npz", codes=arrays["codes"], scales=arrays["scales"][0])
    with pytest.raises(ShapeError, match="512 bytes are not divisible among 3 matrices"):
        exchange.load(tmp_path / "one.npz", "nvidia_128x4")
    with pytest.raises(ShapeError, match=r"does not tell rows from columns; give --shape"):
        exchange.load(tmp_path / "flat.npz", "nvidia_128x4")


def test_typed_files_hold_f4_and_e8m0(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "w.safetensors"
    expected = {"mxfp4": ("F4", "F8_E8M0"), "mxfp8_e4m3": ("F8_E4M3", "F8_E8M0"), "nvfp4": ("F4", "F8_E4M3")}
    for name, types in expected.items():
        q = quantized(spec=mxref.OperandSpec(mxref.formats.BLOCK_FORMATS[name]))
        exchange.save(q, path, typed=True)
        with safe_open(path, framework="numpy") as f:
            slices = [f.get_slice(part) for part in ("codes", "scales")]
            assert tuple(s.get_dtype() for s in slices) == types
            assert slices[0].get_shape() == [ROWS, LENGTH]  # elements, not bytes
        assert MXArray.load(path) == q == exchange.load(path)
    with pytest.raises(DtypeError, match="only .safetensors files have them"):
        exchange.save(q, tmp_path / "w.npz", typed=True)
    for layout in ("unpacked", "exponents", "ggml"):
        with pytest.raises(DtypeError, match=f"in the layout {layout}; leave out --typed"):
            exchange.save(quantized(), path, layout, typed=True)
    with pytest.raises(DtypeError, match="safetensors has no type for codes of MXFP6 E2M3"):
        exchange.save(quantized(spec=mxref.OperandSpec(MXFP6_E2M3)), path, typed=True)


def test_typed_codes_are_of_no_other_format(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    exchange.save(quantized(spec=mxref.OperandSpec(MXFP8_E4M3)), path, "compressed-tensors", typed=True)
    assert exchange.load(path, "compressed-tensors", format="mxfp8_e4m3").format is MXFP8_E4M3
    with pytest.raises(DtypeError, match="weight.weight of .* is F8_E4M3, and MXFP4 stores F4 or U8 there"):
        exchange.load(path, "compressed-tensors", key=("weight.weight", "weight.weight_scale"))


def test_nothing_is_converted_twice(tmp_path: Path) -> None:
    q, path = quantized(), tmp_path / "w.npz"
    exchange.save(q, path, "nvidia_128x4")
    with pytest.raises(
        FileFormatError, match="records that its scales are in the layout nvidia_128x4, and mxref says"
    ):
        exchange.load(path)
    with pytest.raises(FileFormatError, match=r"mxref layout packed,nvidia_128x4 mxref"):
        MXArray.load(path)
    q.save(path)
    with pytest.raises(FileFormatError, match="convert from mxref, so that nothing is converted twice"):
        exchange.load(path, "gfx950_32x8")


def test_scales_that_were_swizzled_twice_show_in_the_padding(tmp_path: Path) -> None:
    q, path = quantized(), tmp_path / "w.npz"
    once = exchange.stored(q, "nvidia_128x4")["scales"]
    np.savez(path, codes=q.codes, scales=once)
    found = exchange.read(path, "nvidia_128x4")
    assert (found.recorded, found.padding, found.nonzero) == (False, 256 * 12 - ROWS * 10, 0)
    twice = LAYOUTS["nvidia_128x4"].write(once, 256, 12 * 32, mxref.MXFP4)
    np.savez(path, codes=q.codes, scales=twice)
    assert exchange.read(path, "nvidia_128x4").nonzero > 0
    # Without padding a size fits several layouts, and nothing is said for sure.
    full = quantized(256, 256)
    np.savez(path, codes=full.codes, scales=full.scales)
    assert {"nvidia_128x4", "gfx950_32x8", "rows.T"} - set(exchange.read(path).fitting) == {"rows.T"}


def test_layers_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    a, b, path = quantized(2, 32, 64), quantized(2, 64, 32), tmp_path / "model.safetensors"
    from safetensors.numpy import save_file

    held = exchange.stored(a, "gpt-oss", "layers.0.mlp.experts.gate_up_proj")
    held |= exchange.stored(b, "gpt-oss", "layers.0.mlp.experts.down_proj")
    assert [array.shape for array in held.values()] == [
        (2, 32, 2, 16),
        (2, 32, 2),
        (2, 64, 1, 16),
        (2, 64, 1),
    ]
    save_file(held | {"norm": np.ones(3, np.float32)}, path)
    assert exchange.load(path, "gpt-oss", key="layers.0.mlp.experts.down_proj") == b
    with pytest.raises(
        FileFormatError, match="holds 2 layers, choose one with --key: layers.0.mlp.experts.down_proj"
    ):
        exchange.load(path, "gpt-oss")
    with pytest.raises(
        FileFormatError, match=r"has no NAME_blocks .* of down, but layers\.0.*name the arrays with"
    ):
        exchange.load(path, "gpt-oss", key="down")
    # The names of OpenAI's own files.
    original = {
        "block.0.mlp.mlp2_weight.blocks": a.codes.reshape(2, 32, 2, 16),
        "block.0.mlp.mlp2_weight.scales": a.scales,
    }
    save_file(original, path)
    assert exchange.load(path, "gpt-oss") == a


REFUSED: dict[str, tuple[Callable[[], MXArray], str, type[Exception], str]] = {
    "rows of tiles": (
        lambda: quantized(40, 64), "weights_16x16", ShapeError,
        "tiles of 16 x 16 bytes do not fit 40 rows of 32 bytes: both must be multiples of 16",
    ),
    "filled up": (
        lambda: quantized(32, 33, pad=True), "gpt-oss", ShapeError,
        "33 elements along the block axis are filled up to 64, and gpt-oss has no place",
    ),
    "transform": (
        lambda: quantized(spec=mxref.OperandSpec(hadamard=16)), "quark", UnsupportedError,
        "a Hadamard transform, which no reader of quark undoes; write it in the layout mxref",
    ),
    "prescale": (
        lambda: quantized(spec=mxref.OperandSpec(prescale=True)), "ggml", UnsupportedError, "the array has a prescale"
    ),
    "format": (
        lambda: quantized(spec=mxref.OperandSpec(mxref.NVFP4)), "gpt-oss", UnsupportedError,
        "gpt-oss is known for mxfp4, not for nvfp4",
    ),
    "nan": (
        lambda: mxref.quantize(np.full((1, 32), np.nan, np.float32)), "gpt-oss", DtypeError,
        r"a block is NaN, and readers of gpt-oss take its scale byte 255 as 2\^128",
    ),
    "vector": (lambda: quantized(64), "quark", ShapeError, r"shape \(64,\) is no weight \[..., N, K\] of quark"),
    "empty": (lambda: quantized(0, 64), "nvidia_128x4", ShapeError, r"an array of shape \(0, 64\) has no elements"),
    "nibbles": (
        lambda: quantized(spec=mxref.OperandSpec(MXFP8_E4M3)), "high_first", ShapeError,
        "only 4-bit codes have nibbles, MXFP8 E4M3 has 8 bits: take the layout packed",
    ),
    "exponents": (
        lambda: quantized(spec=mxref.OperandSpec(mxref.NVFP4)), "exponents", RecipeError,
        "layout exponents is of E8M0 codes",
    ),
    "bias": (
        lambda: mxref.quantize(np.zeros((1, 32), np.float32)), "bias_125", DtypeError,
        "scale byte 0 has no code of bias 125, which begins at the byte 2 and has no NaN; take the layout rows",
    ),
    "suffix": (quantized, "mxref", FileFormatError, "the suffix must be .npz or .safetensors"),
    "unknown": (quantized, "nvidia_128x44", RecipeError, r"unknown layout .* \(did you mean 'nvidia_128x4'\?\)"),
    "two": (quantized, "rows,rows.T", RecipeError, "rows and rows.T are both of scales"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    make, layout, error, message = REFUSED[name]
    path = tmp_path / ("w.bin" if name == "suffix" else "w.npz")
    with pytest.raises(error, match=message):
        exchange.save(make(), path, layout)
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    q, path = quantized(), tmp_path / "w.npz"

    def refused(error: type[Exception], message: str, layout: str = "mxref", **arrays: Any) -> None:
        options = arrays.pop("options", {})
        np.savez(path, **arrays)
        with pytest.raises(error, match=message):
            exchange.load(path, layout, **options)

    refused(
        ShapeError,
        "48 elements along the block axis are no multiple of the 32 of a block of MXFP4; quantize with pad=True",
        codes=np.zeros((4, 24), np.uint8), scales=np.zeros((4, 2), np.uint8),
    )  # fmt: skip
    refused(
        ShapeError,
        r"the scales are not nvidia_128x4 of 160 x 320 elements: 160 x 10 scales in tiles of 128 x 4, filled up to "
        r"256 x 12, take 3072 bytes here, got 1600 .*; the layouts of this size are rows",
        "nvidia_128x4", codes=q.codes, scales=q.scales,
    )  # fmt: skip
    refused(
        ShapeError,
        r"got shape \(10, 160\).*the layouts of this size are rows.T",
        codes=q.codes,
        scales=q.scales.T,
    )
    refused(ShapeError, "no known layout has this size", codes=q.codes, scales=q.scales[:-1])
    refused(ShapeError, "got int32", codes=q.codes.astype(np.int32), scales=q.scales)
    refused(FileFormatError, "has no codes and scales, but act, codes", codes=q.codes, act=q.scales)
    refused(
        RecipeError,
        "unknown block format 'mxfp5'",
        options={"format": "mxfp5"},
        codes=q.codes,
        scales=q.scales,
    )
    refused(
        ShapeError, "two or more positive numbers", options={"shape": (160,)}, codes=q.codes, scales=q.scales
    )
    nvfp4 = quantized(spec=mxref.OperandSpec(mxref.NVFP4))
    refused(
        FileFormatError, r"has no array tensor_scale of shape \[1\], .* NVFP4",
        options={"format": "nvfp4"}, codes=nvfp4.codes, scales=nvfp4.scales,
    )  # fmt: skip
    blocks = q.codes.reshape(ROWS, 10, 16)
    refused(
        ShapeError,
        r"\[..., N, K / 32, 16\]; codes by row are",
        "gpt-oss",
        w_blocks=q.codes,
        w_scales=q.scales,
    )
    refused(ShapeError, "a multiple of 17 bytes", "ggml", w=blocks)
    refused(
        UnsupportedError,
        "ggml is known for mxfp4, not for nvfp4",
        "ggml",
        options={"format": "nvfp4"},
        w=blocks,
    )
    refused(
        RecipeError, "1 names, w: name codes and scales", options={"key": "w"}, codes=q.codes, scales=q.scales
    )
    q.save(path)
    with pytest.raises(RecipeError, match="records the format mxfp4, not nvfp4: leave out --format"):
        exchange.load(path, format="nvfp4")
    for other in ("no.npz", "w.bin"):
        with pytest.raises(FileFormatError, match="cannot read"):
            exchange.load(tmp_path / other)
    path.write_bytes(b"no archive")
    with pytest.raises(FileFormatError, match="cannot read"):
        exchange.load(path)


def test_mxfp6_of_quark(tmp_path: Path) -> None:
    q = quantized(spec=mxref.OperandSpec(MXFP6_E2M3))
    arrays = exchange.save(q, tmp_path / "w.npz", "quark", key="q_proj")
    assert {name: array.shape for name, array in arrays.items()} == {
        "q_proj.weight": (ROWS, LENGTH * 3 // 4), "q_proj.weight_scale": (ROWS, LENGTH // 32),
    }  # fmt: skip
    assert exchange.load(tmp_path / "w.npz", "quark", format=MXFP6_E2M3) == q


def test_transformers_reads_blocks_of_gpt_oss() -> None:
    q = quantized(2, 48, 64)
    values = mxref.dequantize(q)
    torch = pytest.importorskip("torch")
    gpt = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = exchange.stored(q, "gpt-oss").values()
    read = gpt.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(read.numpy().transpose(0, 2, 1), values)


def test_torchao_tiles_scales_so() -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    q = quantized()
    expected = utils.to_blocked(torch.from_numpy(q.scales)).numpy()
    np.testing.assert_array_equal(exchange.stored(q, "nvidia_128x4")["scales"].reshape(-1), expected)


def test_gguf_reads_its_blocks() -> None:
    gguf = pytest.importorskip("gguf")
    q = quantized()
    (records,) = exchange.stored(q, "ggml").values()
    read = gguf.dequantize(records, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(read, mxref.dequantize(q))


def test_aiter_shuffles_so() -> None:
    """The permutations of `e8m0_shuffle` and `shuffle_weight` as AITER writes them."""
    q = quantized()
    filled = np.zeros((256, 16), np.uint8)
    filled[:ROWS, : LENGTH // 32] = q.scales
    scales = filled.reshape(8, 2, 16, 2, 2, 4).transpose(0, 3, 5, 2, 4, 1)
    np.testing.assert_array_equal(exchange.stored(q, "gfx950_256x8")["scales"], scales.reshape(256, 16))
    codes = q.codes.reshape(ROWS // 16, 16, LENGTH // 64, 2, 16).transpose(0, 2, 3, 1, 4)
    np.testing.assert_array_equal(
        exchange.stored(q, "weights_16x16")["codes"], codes.reshape(ROWS, LENGTH // 2)
    )
