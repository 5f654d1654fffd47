"""`mxref compare`: the bytes that a kernel wrote, and what they are instead where they are wrong."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxref
from conform_command import explained, run
from mxref import DIALECTS, OperandSpec
from mxref.check import compare
from mxref.errors import ConformanceError, DtypeError, RecipeError, ShapeError
from mxref.layouts.foreign import LAYOUTS, fitting
from mxref.layouts.packed import unpack

ROWS, LENGTH = 160, 320
AMD = DIALECTS["amd"].spec


def values() -> Any:
    x = np.random.default_rng(0).standard_normal((ROWS, LENGTH)).astype(np.float32)
    x *= np.exp2(np.arange(ROWS) % 7)[:, None]
    x[3, 5], x[9, 64:96] = 5.0, 0.0
    return x.astype(np.float32)


def scattered(s: Any, size: int, place: Callable[[int, int], int]) -> Any:
    """Scales stored by a formula, written as the source has it."""
    out = np.full(size, 0x5A, np.uint8)
    for r in range(s.shape[0]):
        for c in range(s.shape[1]):
            out[place(r, c)] = s[r, c]
    return out


def padded(s: Any, multiple: int) -> int:
    """The columns of scales, filled up."""
    return -(-s.shape[1] // multiple) * multiple


def nvidia(s: Any) -> Any:
    width = padded(s, 4)
    return scattered(
        s, 256 * width,
        lambda r, c: (r // 128 * (width // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4,
    )  # fmt: skip


def gfx950(rows: int) -> Callable[[Any], Any]:
    def stored(s: Any) -> Any:
        width = padded(s, 8)
        return scattered(
            s, rows * width,
            lambda r, c: r // 32 * 32 * width + c // 8 * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16,
        )  # fmt: skip

    return stored


def gfx1250(s: Any) -> Any:
    width = padded(s, 4)
    return scattered(
        s, 160 * width, lambda r, c: r // 32 * 32 * width + c // 4 * 128 + r % 32 * 4 + c % 4
    )  # fmt: skip


def halves(codes: Any) -> Any:
    blocks = unpack(codes, mxref.E2M1).reshape(ROWS, -1, 32)
    return (blocks[..., :16] | blocks[..., 16:] << 4).reshape(ROWS, -1)


def shuffled(codes: Any) -> Any:
    out = np.empty(codes.size, np.uint8)
    width = codes.shape[1]
    for n in range(codes.shape[0]):
        for b in range(width):
            out[n // 16 * 16 * width + b // 16 * 256 + n % 16 * 16 + b % 16] = codes[n, b]
    return out


STORED: dict[str, Callable[[Any], Any]] = {
    "packed": lambda c: c, "high_first": lambda c: c << 4 | c >> 4, "halves": halves,
    "unpacked": lambda c: unpack(c, mxref.E2M1), "weights_16x16": shuffled,
    "packed.T": lambda c: np.ascontiguousarray(c.T), "high_first.T": lambda c: (c << 4 | c >> 4).T.copy(),
    "unpacked.T": lambda c: unpack(c, mxref.E2M1).T.copy(),
    "rows": lambda s: s, "rows.T": lambda s: s.T.copy(), "nvidia_128x4": nvidia, "gfx950_32x8": gfx950(160),
    "gfx950_256x8": gfx950(256), "gfx1250_32x4": gfx1250, "exponents": lambda s: (s - np.uint8(127)).view(np.int8),
    "bias_125": lambda s: s - np.uint8(2),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_and_found(name: str) -> None:
    x, part = values(), LAYOUTS[name].part
    q = mxref.quantize(x, "amd")
    arrays = {"codes": q.codes, "scales": q.scales}
    arrays[part] = STORED[name](arrays[part])
    assert compare(x, **arrays, spec="amd", layout=name)
    tried = compare(x, **arrays, spec="amd", layout="any")
    assert tried
    assert name in tried.layout
    if name in ("packed", "rows"):
        return
    try:
        report = compare(x, **arrays, spec="amd")
    except ShapeError as err:
        assert name in str(err)  # noqa: PT017 - some layouts have another size
        return
    assert not report
    assert f"all {part} are equal under --layout {name}" in str(report)
    assert report.failure is not None
    assert report.failure.clause == ("packing.nibbles" if part == "codes" else "packing.scales")


NVFP4_SCALES = ("rows", "rows.T", "nvidia_128x4", "gfx950_32x8", "gfx950_256x8", "gfx1250_32x4")


@pytest.mark.parametrize("name", NVFP4_SCALES)
def test_layouts_hold_e4m3_scale_bytes_too(name: str) -> None:
    x = values()
    q = mxref.quantize(x, "te_nvfp4")
    scales = np.asarray(STORED[name](q.scales))
    assert compare(x, q.codes, scales, "te_nvfp4", layout=name)
    tried = compare(x, q.codes, scales, "te_nvfp4", layout="any")
    assert tried
    assert name in tried.layout


@pytest.mark.parametrize("name", ["exponents", "bias_125"])
def test_layouts_of_e8m0_codes_are_refused_for_scales_with_a_mantissa(name: str) -> None:
    x = values()
    q = mxref.quantize(x, mxref.OperandSpec("nvfp4"))
    with pytest.raises(
        RecipeError, match=f"layout {name} is of E8M0 codes, and the scales of NVFP4 are UE4M3"
    ):
        compare(x, q.codes, q.scales, mxref.OperandSpec("nvfp4"), layout=name)


def test_the_tiles_of_torchao_hold_e4m3_scale_bytes() -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    x = values()
    q = mxref.quantize(x, "torchao_nvfp4")
    blocked = utils.to_blocked(torch.from_numpy(q.scales).view(torch.float8_e4m3fn))
    stored = blocked.view(torch.uint8).numpy()
    assert compare(x, q.codes, stored, "torchao_nvfp4", layout="nvidia_128x4")


def test_the_dialect_of_another_implementation_is_recognised() -> None:
    x = values()
    q = mxref.quantize(x, "ggml_nvfp4")
    report = compare(x, q.codes, q.scales, "te_nvfp4")
    assert not report
    assert "all bytes are those of the dialect ggml_nvfp4" in str(report)


TREATMENTS = {
    "nvidia": ("nvidia", "all bytes are those of the dialect nvidia", "scale.rule.even"),
    "ties away": (replace(AMD, rounding="rna"), "all bytes are those of rounding = rna", "rounding.rne"),
    "two": (
        replace(AMD, scale_rule="ceil", rounding="rtz"),
        "all bytes are those of scale_rule = ceil, rounding = rtz", "scale.rule.even",
    ),
    "H16": (replace(AMD, hadamard=16), "all bytes are those of hadamard = 16", ""),
    "prescale": (replace(AMD, prescale=True), "all bytes are those of prescale = True", "rounding.rne"),
}  # fmt: skip


@pytest.mark.parametrize("name", TREATMENTS)
def test_another_treatment_is_recognised(name: str) -> None:
    spec, message, clause = TREATMENTS[name]
    x = values()
    q = mxref.quantize(x, spec)
    report = compare(x, q.codes, q.scales, "amd")
    text = str(report)
    assert text.index(message) < text.index("the kernel's bytes"), "before the block that differs"
    assert report.failure is not None
    assert not clause or report.failure.clause == clause


def test_one_wrong_block_is_shown_alone_with_the_command_that_explains_it() -> None:
    x = values()
    q = mxref.quantize(x, "amd")
    codes = q.codes.copy()
    codes[140, 100] ^= 0x10
    report = compare(x, codes, q.scales, "amd")
    assert (report.blocks, report.wrong, report.wrong_scales) == (ROWS * 10, 1, 0)
    failure = report.failure
    assert failure is not None
    assert "block 6 of row 140" in failure.message
    assert failure.command
    assert explained(failure.command) == failure.expected
    assert failure.differing == (9,)
    with pytest.raises(ConformanceError, match="1 of 1,600 blocks differ"):
        report.require()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_axis_and_padding(axis: int) -> None:
    x = np.random.default_rng(1).standard_normal((40, 64, 33)).astype(np.float16)
    q = mxref.quantize(x, "nvidia", axis=axis, pad=True)
    assert compare(x, q.codes, q.scales, "nvidia", axis=axis, pad=True)
    wrong = compare(x, q.codes, q.scales ^ 1, "nvidia", axis=axis, pad=True)
    assert wrong.wrong_scales == wrong.wrong == q.scales.size


def test_a_matrix_without_rows_is_equal() -> None:
    """A layer that received no token, as an expert of a mixture does."""
    x = np.zeros((0, LENGTH), np.float32)
    found = mxref.quantize(x, AMD)
    assert str(compare(x, found.codes, found.scales, AMD)).startswith(
        "equal: the codes and scales of 0 blocks"
    )


def test_random_bits_and_tiles() -> None:
    x, stream = values(), mxref.Stream(3, 4, 5, 2)
    spec = OperandSpec(rounding="sr", hadamard=16, signs="per_step")
    q = mxref.quantize(x, spec, placement=mxref.Placement(stream))
    assert compare(x, q.codes, q.scales, spec, stream=stream)
    other = compare(x, q.codes, q.scales, spec, stream=mxref.Stream(3, 4, 5, 3))
    assert other.failure is not None
    assert other.failure.clause == "rounding.sr"
    tiles = mxref.quantize(x, OperandSpec(block="32x32"))
    report = compare(x, tiles.codes, tiles.scales)
    assert "all bytes are those of block = 32x32" in str(report)


def test_arrays_that_do_not_fit() -> None:
    x = values()
    q = mxref.quantize(x, "amd")
    with pytest.raises(ShapeError, match=r"codes do not fit x of shape \(160, 320\).* no known layout fits"):
        compare(x, q.codes[:-1], q.scales)
    with pytest.raises(ShapeError, match="codes do not fit .* the layouts that fit are unpacked"):
        compare(x, unpack(q.codes, mxref.E2M1), q.scales)
    with pytest.raises(ShapeError, match="got int32"):
        compare(x, q.codes.astype(np.int32), q.scales)
    with pytest.raises(DtypeError, match="float64"):
        compare(x.astype(np.float64), q.codes, q.scales)
    with pytest.raises(RecipeError, match="any tries every layout; leave out rows"):
        compare(x, q.codes, q.scales, layout=("any", "rows"))
    with pytest.raises(ShapeError, match="pass pad=True"):
        compare(x[:, :33], q.codes, q.scales)
    assert {name for name, _ in fitting("codes", q.codes, ROWS, LENGTH, q.format)} == {
        "packed", "high_first", "halves", "weights_16x16", "packed.T", "high_first.T",
    }  # fmt: skip


def test_the_command_reads_npy_npz_and_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    x = values()
    q = mxref.quantize(x, "amd")
    arrays = {"x": x, "codes": q.codes, "scales": q.scales}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "all.npz", **arrays)
    save_file(arrays, tmp_path / "all.safetensors")
    three = [str(tmp_path / f"{name}.npy") for name in arrays]
    for files in (three, [str(tmp_path / "all.npz")], [str(tmp_path / "all.safetensors")]):
        good = run("compare", *files, "--dialect", "amd")
        assert good.exit_code == 0, good.output
        assert "equal: the codes and scales of 1,600 blocks (layout packed, rows)" in good.output
    bad = run("compare", *three, "--dialect", "nvidia")
    assert bad.exit_code == 1
    (command,) = [
        line.split("explain", 1)[1] for line in bad.output.splitlines() if line.startswith("  explain")
    ]
    assert run(*shlex.split(command)[1:]).exit_code == 0
    for arguments, message in (
        ((three[0], three[1]), "got 2 files"), ((*three, "--layout", "rowz"), "unknown layout 'rowz'"),
        ((*three, "--dialect", "amdd"), "unknown dialect"), ((str(tmp_path / "no.npy"),) * 3, "cannot read"),
        ((str(tmp_path / "x.bin"),) * 3, "suffix must be"), ((*three, "--axis", "0"), "do not fit"),
    ):  # fmt: skip
        refused = run("compare", *arguments)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output


def saved(folder: Path, suffix: str, arrays: dict[str, Any]) -> str:
    """Write arrays into one file, and return its path."""
    path = folder / f"dump{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)
    elif suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(arrays, path)
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_arrays_of_other_names_are_chosen_by_key(suffix: str, tmp_path: Path) -> None:
    x = values()
    q = mxref.quantize(x, "amd")
    file = saved(tmp_path, suffix, {"act": x, "fp4": q.codes, "sf": q.scales, "codes": q.codes ^ 1})
    keys = ("--key", "act", "--key", "fp4", "--key", "sf")
    for files in ((file,), (file,) * 3):
        good = run("compare", *files, "--dialect", "amd", *keys)
        assert good.exit_code == 0, good.output
    refused = run("compare", file, "--dialect", "amd")
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert (
        "has no array 'x', but act, codes, fp4, sf: name x, codes and scales by --key NAME, three times"
        in said
    )
    for arguments, message in (
        ((file, *keys[:4]), "--key is given 2 times"),
        ((file, "--key", "actt", *keys[2:]), "has no array 'actt', but act, codes, fp4, sf"),
    ):
        refused = run("compare", *arguments)
        assert refused.exit_code == 2, refused.output
        assert message in " ".join(refused.output.split())


def test_a_file_with_one_array_is_not_all_three(tmp_path: Path) -> None:
    x = values()
    q = mxref.quantize(x, "amd")
    files = [str(tmp_path / f"{name}.npz") for name in ("first", "second", "third")]
    for file, array in zip(files, (x, q.codes, q.scales), strict=True):
        np.savez(file, whatever=array)
    assert run("compare", *files, "--dialect", "amd").exit_code == 0
    refused = run("compare", files[0], "--dialect", "amd")
    assert refused.exit_code == 2
    assert "has no array 'x', but whatever" in " ".join(refused.output.split())
    np.save(tmp_path / "x.npy", x)
    refused = run("compare", str(tmp_path / "x.npy"))
    assert "x.npy holds one array: give x, codes and scales as three files" in " ".join(
        refused.output.split()
    )
    for command in (
        ("compare", *[str(tmp_path / "x.npy")] * 3, *["--key", "a"] * 3),
        ("explain", "--key", "a", "--file", str(tmp_path / "x.npy")),
    ):
        refused = run(*command)
        assert refused.exit_code == 2, refused.output
        assert "x.npy holds one array, which has no name: leave out --key" in " ".join(refused.output.split())


def test_types_that_only_torch_reads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    x = torch.from_numpy(values()).to(torch.bfloat16)
    q = mxref.quantize(x, "amd")
    held = {
        "x": x, "codes": torch.from_numpy(q.codes), "scales": torch.from_numpy(q.scales).view(torch.float8_e8m0fnu),
    }  # fmt: skip
    save_file(held, tmp_path / "all.safetensors")
    torch.save(held, tmp_path / "all.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "code.pt")
    for name in ("all.safetensors", "all.pt"):
        good = run("compare", str(tmp_path / name), "--dialect", "amd")
        assert good.exit_code == 0, good.output
    refused = run("compare", str(tmp_path / "code.pt"))
    assert refused.exit_code == 2
    assert "cannot read" in refused.output
