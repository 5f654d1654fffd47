"""MXArray: what it refuses, how it looks, and that saving loses nothing."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from mxref import MXArray, OperandSpec, PreparedArray, Stream, quantize
from mxref.errors import FileFormatError, ShapeError
from mxref.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.placement import Placement


def _array():
    x = np.random.default_rng(0).standard_normal((3, 70, 64)).astype(np.float32)
    spec = OperandSpec(hadamard=64, signs="fixed", prescale=True)
    return quantize(x, spec, axis=1, placement=Placement(Stream(1)), pad=True)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_save_and_load(tmp_path, suffix):
    q = _array()
    q.save(tmp_path / f"q{suffix}")
    loaded = MXArray.load(tmp_path / f"q{suffix}")
    assert loaded == q
    assert loaded.rotation == q.rotation
    assert [p.name for p in tmp_path.iterdir()] == [f"q{suffix}"]
    (tmp_path / "new").touch()
    assert (tmp_path / f"q{suffix}").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "q.npz"
    _array().save(path)
    before = path.read_bytes()

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match="No space"):
        _array().save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["q.npz"]


@pytest.mark.parametrize("name", ["missing.npz", "text.npz", "text.safetensors", "other.npz"])
def test_files_that_hold_no_mxarray(tmp_path, name):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(FileFormatError, match="cannot load an MXArray from"):
        MXArray.load(tmp_path / name)


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="suffix must be"):
        _array().save(tmp_path / "q.pt")


def test_equality_sees_every_part():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    q = quantize(x)
    assert q == quantize(x)
    assert q != quantize(x, axis=0)
    assert q != quantize(x, OperandSpec(hadamard=16))
    assert q != quantize(x, OperandSpec(block="32x32"))
    assert q != quantize(x, OperandSpec(prescale=True))
    codes = q.codes.copy()
    codes[5, 7] ^= 8
    assert q != MXArray(codes, q.scales, q.shape, q.axis)
    scales = q.scales.copy()
    scales[0, 0] += 1
    assert q != MXArray(q.codes, scales, q.shape, q.axis)
    assert q != "q"


@pytest.mark.clause("conformance.dual", evidence="known answer")
def test_a_layout_goes_with_the_array_that_it_was_made_of_and_no_other(tmp_path):
    q = _array()
    prepared = PreparedArray.of(q, "mine", "ordered", (np.arange(3),))
    assert prepared == q
    assert repr(prepared) == repr(q)
    assert [len(prepared.layout_for(*who)) for who in (("mine", "ordered"), ("mine", "exact"), ("its", "ordered"))] == [
        1, 0, 0,
    ]  # fmt: skip
    assert replace(prepared, scales=q.scales.copy()).layout_for("mine", "ordered") == ()
    assert type(prepared.plain()) is MXArray
    assert prepared.plain().codes is q.codes
    prepared.save(tmp_path / "q.npz")
    assert type(MXArray.load(tmp_path / "q.npz")) is MXArray
    assert MXArray.load(tmp_path / "q.npz") == q


def test_copies_keep_the_layout():
    """A model that is copied goes on as fast as before."""
    q = _array()
    prepared = PreparedArray.of(q, "mine", "ordered", (np.arange(3), q.codes))
    shallow, deep = copy.copy(prepared), copy.deepcopy(prepared)
    for other in (shallow, deep):
        assert type(other) is PreparedArray
        assert other == prepared
        assert other.format is q.format
        assert list(other.layout_for("mine", "ordered")[0]) == [0, 1, 2]
        assert other.layout[1] is other.codes
    assert shallow.codes is q.codes
    assert not np.shares_memory(deep.codes, q.codes)
    assert not np.shares_memory(deep.scales, q.scales)
    assert not np.shares_memory(deep.layout[0], prepared.layout[0])


def test_repr_is_short_and_readable():
    x = np.zeros((4, 64), np.float32)
    x[0, :8] = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    text = repr(quantize(x))
    assert text.splitlines() == [
        "MXArray(MXFP4 (4, 64), axis=1, block=1x32,",
        "  7F: 01234567000000000000000000000000",
        "  00: 00000000000000000000000000000000",
        "  00: 00000000000000000000000000000000",
        "  ... 5 more blocks)",
    ]
    assert "padded to 128, prescaled 3/4, H64 signs=0x" in repr(_array())


@pytest.mark.clause("packing.nibbles", "packing.scales", evidence="known answer")
@pytest.mark.parametrize(
    ("codes", "scales", "shape", "axis", "message"),
    [
        ((4, 16), (4, 1), (4, 32), 2, "axis 2 is out of range"),
        ((4, 16), (4, 2), (4, 32), 1, r"scales have shape \(4, 2\), expected \(4, 1\)"),
        ((4, 16), (4, 1), (4, 33), 1, "hold 32 elements along the block axis"),
        ((4, 15), (4, 1), (4, 30), 1, "multiple of 32"),
        ((3, 16), (4, 1), (4, 32), 1, r"codes have shape \(3, 16\), expected \(4, 16\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(codes, scales, shape, axis, message):
    with pytest.raises(ShapeError, match=message):
        MXArray(np.zeros(codes, np.uint8), np.zeros(scales, np.uint8), shape, axis)


def test_only_uint8_is_taken():
    with pytest.raises(ShapeError, match="codes must be uint8"):
        MXArray(np.zeros((4, 16), np.int64), np.zeros((4, 1), np.uint8), (4, 32), 1)


@pytest.mark.clause("formats.mxfp8", "packing.bytes", evidence="known answer")
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("block_format", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
def test_save_and_load_mxfp8(tmp_path, suffix, block_format):
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    q = quantize(x, OperandSpec(block_format, prescale=True), pad=True)
    q.save(tmp_path / f"q{suffix}")
    loaded = MXArray.load(tmp_path / f"q{suffix}")
    assert loaded == q
    assert loaded.format is block_format
    assert loaded.length == 96


def test_files_of_mxfp4_do_not_name_their_format_and_others_do(tmp_path):
    for block_format in (MXFP4, MXFP8_E5M2):
        quantize(np.ones((1, 32), np.float32), OperandSpec(block_format)).save(tmp_path / "q.npz")
        with np.load(tmp_path / "q.npz") as file:
            meta = json.loads(str(file["meta"]))
        named = {} if block_format is MXFP4 else {"block_format": "mxfp8_e5m2"}
        assert {key: meta.pop(key) for key in ("format", *named)} == {"format": "mxref.mxarray.1", **named}
        assert list(meta) == ["shape", "axis", "block", "prescale", "rotation"]
    meta |= {"format": "mxref.mxarray.1", "block_format": "mxfp5"}
    np.savez(tmp_path / "other.npz", meta=json.dumps(meta), codes=np.zeros((1, 32)), scales=np.zeros((1, 1)))
    with pytest.raises(FileFormatError, match="cannot load an MXArray from .*mxfp5"):
        MXArray.load(tmp_path / "other.npz")


def test_the_format_of_an_array_decides_its_shapes_and_its_look():
    x = np.array([[1.0] * 31 + [-448.0]], np.float32)
    q = quantize(x, OperandSpec(MXFP8_E4M3, prescale=True))
    assert repr(q) == (
        "MXArray(MXFP8 E4M3 (1, 32), axis=1, block=1x32, prescaled 7/8,\n  7F: " + "36" * 31 + "fc)"
    )
    with pytest.raises(ShapeError, match=r"hold 64 elements|codes have shape|scales have shape"):
        replace(q, format=MXFP4)
    with pytest.raises(ShapeError, match="format must be a BlockFormat, as mxref.MXFP4, got 'mxfp4'"):
        replace(q, format="mxfp4")
    assert q != replace(q, format=MXFP8_E5M2)
